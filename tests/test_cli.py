"""The command line: help without torch, reports on logs and checkpoints, errors that say what to do."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys

import pytest
import torch
from rich.console import Console
from torch import nn

from qkwatch import bench, cli, find_sites, inspection, logs, retrofit_, timing
from qkwatch.alerts import Alert, Forecast, Level
from qkwatch.panels import Panels, escape
from qkwatch.reading import reading_from
from qkwatch.stats import qk_stats


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    """Printed text is not wrapped, so that a test can look for sentences."""
    monkeypatch.setattr("rich._console", Console(width=200))


def call(capsys, *arguments: object) -> tuple[int, str, str]:
    status = cli.main([str(a) for a in arguments])
    shown = capsys.readouterr()
    return status, shown.out, shown.err


# -- help ---------------------------------------------------------------------------------------------------

HEAVY = ("torch", "numpy", "lightning", "pytorch_lightning", "tensorboard", "rich")


@pytest.mark.parametrize(
    "arguments", [["--help"], ["demo", "--help"], ["bench", "--help"], ["--version"], ["nonsense"]]
)
def test_help_imports_nothing_heavy(arguments):
    code = (
        "import sys\nfrom qkwatch.cli import main\n"
        f"try:\n    main({arguments!r})\nexcept SystemExit as end:\n    status = end.code\n"
        f"print(status, [name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == ("2 []" if arguments == ["nonsense"] else "0 []")
    if arguments == ["--help"]:
        assert all(command in done.stdout for command in ("demo", "report", "inspect", "bench"))


def test_python_m_qkwatch_is_the_same_program():
    done = subprocess.run([sys.executable, "-m", "qkwatch", "inspect", "/nowhere"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "qkwatch inspect: no file /nowhere\n"


def test_the_names_of_the_benches_are_those_that_exist():
    assert set(cli.BENCHES) == set(bench.BENCHES)
    for run in bench.BENCHES.values():
        assert inspect.signature(run).parameters["rounds"].default > 0  # runs without being told how often


def test_ctrl_c_is_no_traceback(capsys, monkeypatch):
    def stop(options):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_run", stop)
    assert call(capsys, "demo") == (130, "", "interrupted\n")


# -- report -------------------------------------------------------------------------------------------------


def reading(site: str, size: float):
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 2, 20, 8, generator=generator) * size for _ in range(2))
    return reading_from(qk_stats(q, k, scale=8**-0.5, is_causal=True), site)


@pytest.fixture
def log(tmp_path):
    """Two runs as the callback writes them, one of them with a logger's prefix, and one without qkwatch."""
    loggers = pytest.importorskip("lightning.pytorch.loggers")
    for name, prefix in (("calm", ""), ("loud", "exp")):
        logger = loggers.TensorBoardLogger(tmp_path, name=None, version=name, prefix=prefix)
        panels = Panels([logger])
        for step, size in ((0, 1.0), (10, 9.0), (20, 2.0)):
            panels.readings([reading(f"net.h.{i}.attn", size + i) for i in range(2)], step)
        if name == "loud":
            ahead = Forecast(1, {1000.0: (81.0, 118.0, 204.0)})
            message = "net.h.1.attn: head 1: max | logit [bold]above[/bold] 100 & rising <fast>"
            panels.alerts([Alert(Level.WARN, 10, "net.h.1.attn", (1,), "rising", message, ahead)], 10)
            panels.retrofit("qkwatch retrofit: 2 sites patched, 0 refused\n  patched: net.h.0-1.attn", 11)
        panels.close()
        logger.finalize("success")
    other = loggers.TensorBoardLogger(tmp_path, name=None, version="other")
    other.log_metrics({"loss": 1.0}, step=0)
    other.finalize("success")
    return tmp_path


def test_report_shows_last_and_worst_alerts_and_retrofits(log, capsys):
    status, out, err = call(capsys, "report", log)
    assert (status, err) == (0, "")
    assert out.index("run calm") < out.index("no alerts") < out.index("run loud") < out.index("WARN")
    assert "run other" not in out
    assert "step 10 WARN net.h.1.attn: head 1: max | logit [bold]above[/bold] 100 & rising <fast>" in out
    assert "at this rate 1,000 in ~118 steps (81-204)" in out
    assert "step 11: qkwatch retrofit: 2 sites patched, 0 refused" in out
    assert "  patched: net.h.0-1.attn" in out
    for i in range(2):
        last, worst = (float(reading(f"h{i}", size + i).max_logit.max()) for size in (2.0, 9.0))
        assert f"{last:,.4g} ({worst:,.4g})" in next(line for line in out.splitlines() if line.startswith(f"h.{i} "))


def test_report_reads_back_exactly_what_was_written(log):
    calm, loud = logs.read(log)
    assert calm.sites == loud.sites == ["net.h.0.attn", "net.h.1.attn"]
    points = loud.scalars["qkwatch_max_logit"]["net.h.1.attn"]
    assert [step for step, _ in points] == [0, 10, 20]
    assert points[1][1] == pytest.approx(float(reading("", 10.0).max_logit.max()))
    assert [alert[:5] for alert in loud.alerts] == [(10, "WARN", "net.h.1.attn", "1", "rising")]


@pytest.mark.parametrize("text", ["a|b", r"back\slash", "*_`[x](y)_*", "<b> & &lt;", "plain"])
def test_unescape_undoes_escape(text):
    assert logs.unescape(escape(text)) == text


def test_report_fits_80_columns(log, capsys, monkeypatch):
    monkeypatch.setattr("rich._console", Console(width=80))
    table = [line for line in call(capsys, "report", log)[1].splitlines() if line.startswith(("layer", "h."))]
    assert len(table) == 6
    assert all(len(line.rstrip()) <= 80 and "…" not in line for line in table)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda root: root / "none", "no folder"),
        (lambda root: root / "file", "not a folder of TensorBoard logs"),
        (lambda root: root / "empty", "no TensorBoard event files under"),
        (lambda root: root / "other", "nothing of qkwatch in the 1 run(s)"),
    ],
)
def test_report_without_anything_to_report_says_so(make, message, log, capsys):
    (log / "file").write_text("")
    (log / "empty").mkdir()
    status, out, err = call(capsys, "report", make(log))
    assert (status, out) == (1, "")
    assert message in err
    assert err.startswith("qkwatch report: ")


# -- inspect ------------------------------------------------------------------------------------------------


def patched(variant: str = "l2") -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.ModuleDict({"enc": nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)})
    x = torch.randn(2, 5, 16)
    report = retrofit_(model, find_sites(model["enc"], x) and _sites(model, x), variant=variant)
    assert len(report.applied) == 2, report.refused
    return model


def _sites(model, x):
    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            return self.inner["enc"](x)

    sites = find_sites(Whole(), x)
    for site in sites:
        site.name = site.name.removeprefix("inner.")
    return sites


def test_inspect_shows_gains_under_their_ceiling(tmp_path, capsys):
    model = patched()
    with torch.no_grad():
        model.get_submodule("enc.layers.0.self_attn").qk_norm.q.gain.copy_(torch.tensor([250.0, 4.0]))
    torch.save(model.state_dict(), tmp_path / "w.pt")
    status, out, err = call(capsys, "inspect", tmp_path / "w.pt")
    assert (status, err) == (0, "")
    assert "2 sites patched: enc.layers.0-1.self_attn" in out
    first = next(line for line in out.splitlines() if line.startswith("layers.0"))
    assert "l2" in first
    assert "4 / 52 / 100" in first
    assert "2 / 2" in first
    assert first.split()[-1] == "100"


@pytest.mark.parametrize("variant", ["swinv2", "gemma3", "llama4", "qwen3"])
def test_inspect_knows_how_each_variant_stores_its_gain(variant):
    model = patched(variant)
    for found, name in zip(inspection.patches(model.state_dict()), ("0", "1"), strict=True):
        norm = model.get_submodule(f"enc.layers.{name}.self_attn").qk_norm
        for gain, side in ((found.q, norm.q), (found.k, norm.k)):
            expected = side.effective_gain()
            assert (gain is None) == (expected is None)
            if expected is not None:
                torch.testing.assert_close(gain, expected.detach())


def test_inspect_of_a_lightning_checkpoint(tmp_path, capsys):
    pl = pytest.importorskip("lightning.pytorch")
    from qkwatch import QKWatch

    class Lesson(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)

        def training_step(self, batch, batch_idx):
            return self.layer(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.1)

    watch = QKWatch(retrofit="now", console=False, on_error="raise")
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(max_steps=3, callbacks=[watch], accelerator="cpu", enable_model_summary=False, **options)
    trainer.fit(Lesson(), torch.utils.data.DataLoader(torch.randn(12, 5, 16), batch_size=4))
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    status, out, err = call(capsys, "inspect", tmp_path / "x.ckpt")
    assert (status, err) == (0, "")
    assert "Lightning checkpoint" in out
    assert "step 3" in out
    assert "1 site patched: layer.self_attn" in out
    assert "optimizer 0, group 0: 12 parameters, lr 0.01, weight_decay 0.1" in out
    assert "weight_decay 0, qkwatch's gains beside group 0" in out
    assert "no alerts so far" in out


def test_inspect_tells_the_alert_history(capsys, tmp_path):
    run = {"alerts": [[2, 30, "h.0", [1], "early", "h.0: head 1: max logit [50] and rising", None]]}
    state = {"state_dict": {"w": torch.zeros(2)}, "callbacks": {"QKWatch": {"run": run}}, "global_step": 40}
    torch.save(state, tmp_path / "x.ckpt")
    out = call(capsys, "inspect", tmp_path / "x.ckpt")[1]
    assert "step 30 WARN h.0: head 1: max logit [50] and rising" in out
    assert "no qkwatch patch" in out


class Code:
    def __reduce__(self):
        return (print, ("run",))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"w": torch.zeros(2)}, None),
        ([1, 2], "holds a list"),
        (Code(), "weights_only=True"),
        (b"no checkpoint", "is not a checkpoint"),
        (b"", "is not a checkpoint"),
    ],
    ids=["plain", "list", "code", "text", "empty"],
)
def test_inspect_of_other_files(content, message, tmp_path, capsys):
    file = tmp_path / "x.pt"
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        torch.save(content, file)
    status, out, err = call(capsys, "inspect", file)
    if message is None:
        assert (status, err) == (0, "")
        assert "no qkwatch patch" in out
    else:
        assert (status, out) == (1, "")
        assert message in err
        assert len(err.splitlines()) == 1


def test_inspect_of_a_folder(tmp_path, capsys):
    from safetensors.torch import save_file

    assert "neither a sharded checkpoint nor" in call(capsys, "inspect", tmp_path)[2]
    assert "no file" in call(capsys, "inspect", tmp_path / "none.safetensors")[2]
    layer, x = nn.MultiheadAttention(32, 4, batch_first=True), torch.randn(2, 7, 32)
    retrofit_(layer, find_sites(layer, x, x, x))
    save_file(layer.state_dict(), tmp_path / "model.safetensors")
    for path in (tmp_path, tmp_path / "model.safetensors"):
        out = call(capsys, "inspect", path)[1]
        assert "state_dict of 6 tensors" in out and "1 site patched" in out and "l2" in out


# -- bench --------------------------------------------------------------------------------------------------


def test_bench_writes_what_it_shows(tmp_path, capsys, monkeypatch):
    small = {"reading": lambda rounds: bench.bench_reading(rounds, length=64, heads=2)}
    monkeypatch.setattr(bench, "BENCHES", small)
    file = tmp_path / "out.json"
    status, out, err = call(capsys, "bench", "--only", "reading", "--rounds", "2", "--json", file)
    assert (status, err) == (0, "")
    ratios = json.loads(file.read_text())["reading"]["ratios"]
    assert len(ratios) == 2
    assert all(value > 0 for value in ratios.values())
    assert all(name in out for name in ratios)


def test_the_plain_figures_are_those_of_a_reading():
    """Or the comparison would be with less work than a reading does."""
    q, k = torch.randn(1, 3, 40, 8) * 2, torch.randn(1, 3, 40, 8) * 2
    expected = reading_from(qk_stats(q, k, scale=0.5, is_causal=True), "")
    for name, value in bench.dense_figures(q, k, 0.5).items():
        torch.testing.assert_close(value, getattr(expected, name), rtol=1e-3, atol=1e-4, msg=name)


def test_contenders_take_turns_and_the_first_round_does_not_count():
    calls: list[str] = []
    times = timing.timed({name: lambda name=name: calls.append(name) for name in "abc"}, rounds=3)
    assert {name: len(seconds) for name, seconds in times.items()} == {"a": 3, "b": 3, "c": 3}
    assert [sorted(calls[i : i + 3]) for i in range(0, 12, 3)] == [list("abc")] * 4
    assert len({calls[i] for i in range(3, 12, 3)}) == 3


def test_training_steps_take_turns():
    pytest.importorskip("lightning.pytorch")
    from qkwatch.bench_training import TURNS, step_times

    times = step_times(length=16, batch=2, rounds=2, layers=1, width=12)
    assert set(times) == set(TURNS)
    assert all(len(seconds) == 2 and min(seconds) > 0 for seconds in times.values())


@pytest.mark.parametrize("kept", [True, False])
def test_patched_and_find_benches_run(kept, monkeypatch):
    monkeypatch.setattr(bench, "_keep_memory", lambda: kept)  # it would change the process that runs the tests
    assert bench.bench_find(1, layers=1, width=12, length=8, batch=1)["ratios"]
    result = bench.bench_patched(1, length=8, batch=1)
    a_layer = 3 if kept else 2
    assert len(result["ratios"]) + a_layer * len(result["notes"]) == 2 * a_layer


def test_bench_refuses_no_rounds(capsys):
    status, _, err = call(capsys, "bench", "--rounds", "0")
    assert status == 1
    assert "--rounds must be at least 1" in err
