"""The demonstration: a tiny run of it for its form, the quick one (slow) for what it shows."""

from __future__ import annotations

import json
import logging
import math

import pytest
import torch

pytest.importorskip("lightning.pytorch")

from qkwatch import demo, demo_model
from qkwatch.alerts import Thresholds
from qkwatch.demo import Outcome, free_place, recovered, run
from qkwatch.demo_model import GPT, Setup, corpus, rotate, windows
from qkwatch.errors import QKWatchError

TINY = Setup(steps=12, batch=2, length=16, layers=1, width=16, heads=2, every_n_steps=2, val_batches=1, warmup=2)


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A small library of its own, so that the demo reads the same everywhere."""
    root = tmp_path / "library"
    root.mkdir()
    for i in range(20):
        (root / f"m{i:02}.py").write_text(f"value_{i} = [{i}, 'text']\n" * 700)
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(root)})
    return root


def test_tiny_run_has_the_promised_form(source, tmp_path, monkeypatch, capsys):
    """Thresholds that any logit passes make the tiny run warn and patch."""
    eager = Thresholds(info_logit=0.0, early_logit=0.0, early_margin=0.0, broad_norms=0.0)
    seen: dict[str, list[torch.Tensor]] = {}
    inits: dict[str, torch.Tensor] = {}
    current = []
    build, step = demo.train_arm, demo_model.Lesson.training_step

    def train_arm(arm, *args):
        current.append(arm)
        return build(arm, *args)

    def training_step(self, batch, batch_idx):
        seen.setdefault(current[-1], []).append(batch[0].clone())
        inits.setdefault(current[-1], self.gpt.blocks[0].attn.qkv.weight.detach().clone())
        return step(self, batch, batch_idx)

    class Eager(demo.WatchedPatch):
        def __init__(self, *args, **options):
            super().__init__(*args, thresholds=eager, **options)

    monkeypatch.setattr(demo, "train_arm", train_arm)
    monkeypatch.setattr(demo, "WatchedPatch", Eager)
    monkeypatch.setattr(demo_model.Lesson, "training_step", training_step)
    file = tmp_path / "out.json"
    result = run(TINY, tmp_path / "logs", str(file), progress=False)

    assert json.loads(file.read_text()) == result
    arms = result["arms"]
    assert set(arms) == {"none", "auto", "from_start"} == set(seen)
    assert set(arms["none"]) == set(arms["from_start"]) >= {"val_loss", "max_logit"}
    assert set(arms["auto"]) >= {"val_loss", "max_logit", "alert_step", "retrofit_step", "loss_before", "loss_after"}
    assert arms["auto"]["alert_step"] <= arms["auto"]["retrofit_step"] < TINY.steps
    assert all(math.isfinite(value) for value in arms["auto"].values())
    assert all((tmp_path / "logs" / arm).is_dir() for arm in arms)
    # same weights, same data, same order
    for arm in ("auto", "from_start"):
        assert torch.equal(inits[arm], inits["none"])
        assert len(seen[arm]) == TINY.steps
        assert all(torch.equal(a, b) for a, b in zip(seen[arm], seen["none"], strict=True))
    shown = capsys.readouterr().out
    assert "tensorboard --logdir" in shown
    assert "QK-norm from the start" in shown


def test_the_loss_around_the_patch_is_that_of_the_same_held_out_batches(source, tmp_path, monkeypatch):
    calls: list[float] = []
    real = demo.held_out_loss
    monkeypatch.setattr(demo, "held_out_loss", lambda *args: calls.append(real(*args)) or calls[-1])
    make = demo.WatchedPatch.__init__

    def now(self, held_out, **options):
        make(
            self, held_out, **{**options, "thresholds": Thresholds(early_logit=0.0, early_margin=0.0, broad_norms=0.0)}
        )

    monkeypatch.setattr(demo.WatchedPatch, "__init__", now)
    outcome = demo.train_arm("auto", TINY, corpus(), tmp_path, progress=False)
    assert outcome.retrofit_step is not None
    assert outcome.loss_before in calls
    assert outcome.loss_after in calls
    assert outcome.val_loss == calls[-1]


def test_held_out_loss_leaves_mode_and_weights(source):
    lesson = demo_model.Lesson(TINY).train()
    before = [p.clone() for p in lesson.parameters()]
    batch = windows(corpus()[1], 4, 16, seed=3)
    loss = demo_model.held_out_loss(lesson, [[batch[:2]], [batch[2:]]])
    with torch.no_grad():
        assert loss == pytest.approx(float(lesson.loss([batch])), rel=1e-5)
    assert lesson.training
    assert all(torch.equal(a, b) for a, b in zip(before, lesson.parameters(), strict=True))


def test_corpus_is_split_by_file_and_windows_repeat_with_their_seed(source):
    train, held_out = corpus()
    assert b"value_0 " in bytes(train.tolist())
    assert b"value_9 " not in bytes(train.tolist())
    assert bytes(held_out.tolist()) == (source / "m09.py").read_bytes() + (source / "m19.py").read_bytes()
    assert torch.equal(windows(train, 5, 8, seed=1), windows(train, 5, 8, seed=1))
    assert not torch.equal(windows(train, 5, 8, seed=1), windows(train, 5, 8, seed=2))
    text = windows(train, 50, 8, seed=1)
    assert all(bytes(row.tolist()) in bytes(train.tolist()) for row in text)


def test_rotation_keeps_lengths_and_depends_on_distance_only():
    q, k = torch.randn(1, 1, 1, 8).expand(1, 1, 9, 8), torch.randn(1, 1, 1, 8).expand(1, 1, 9, 8)
    torch.testing.assert_close(rotate(q).norm(dim=-1), q.norm(dim=-1))
    products = (rotate(q) @ rotate(k).mT)[0, 0]
    for offset in range(-4, 5):
        diagonal = products.diagonal(offset)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), atol=1e-5, rtol=1e-5)


def test_the_model_is_causal():
    model = GPT(2, 16, 2).eval()
    ids = torch.randint(256, (1, 12))
    other = ids.clone()
    other[0, 7:] = (other[0, 7:] + 1) % 256
    with torch.no_grad():
        torch.testing.assert_close(model(ids)[:, :7], model(other)[:, :7])
        assert not torch.allclose(model(ids)[:, 7:], model(other)[:, 7:])


@pytest.mark.parametrize(
    ("none", "auto", "from_start", "share"), [(2.3, 2.15, 2.1, 0.75), (2.3, 2.0, 2.1, 1.5), (2.1, 2.0, 2.2, None)]
)
def test_recovered_share(none, auto, from_start, share):
    losses = {"none": none, "auto": auto, "from_start": from_start}
    result = recovered({arm: Outcome(loss, 1.0, 1.0) for arm, loss in losses.items()})
    assert result == pytest.approx(share) if share is not None else result is None


def test_logs_never_go_over_older_ones(tmp_path):
    place = tmp_path / "a" / "b"
    for expected in (place, place / "run-2", place / "run-3"):
        assert free_place(place) == expected
        (expected / "auto").mkdir()


def test_places_that_cannot_be_written_are_named_before_training(source, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(QKWatchError, match=r"cannot write logs to .*file.*--logdir"):
        run(TINY, file / "logs", progress=False)
    with pytest.raises(QKWatchError, match=r"cannot write .*missing.*its folder"):
        run(TINY, tmp_path / "logs", str(tmp_path / "missing" / "out.json"), progress=False)
    for module in source.iterdir():
        module.unlink()
    with pytest.raises(QKWatchError, match=r"Python's own source.*0 \.py files"):
        run(TINY, tmp_path / "logs", progress=False)


def test_quiet_gives_the_loggers_back():
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level

    def fail():
        with demo.quiet():
            assert logger.level == logging.ERROR
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert logger.level == level


@pytest.mark.slow
def test_quick_demo_shows_the_effect(tmp_path):
    """The command itself, as a user types it. Takes a minute on a free machine."""
    import subprocess
    import sys

    file = tmp_path / "out.json"
    command = [sys.executable, "-m", "qkwatch", "demo", "--quick", "--logdir", str(tmp_path / "logs")]
    subprocess.run([*command, "--json", str(file)], check=True, timeout=600)
    result = json.loads(file.read_text())
    arms = result["arms"]
    assert arms["none"]["val_loss"] > arms["from_start"]["val_loss"] + 0.03
    assert arms["none"]["max_logit"] > 100 > 5 * arms["from_start"]["max_logit"]
    assert result["recovered"] >= 0.5
    assert arms["auto"]["loss_after"] - arms["auto"]["loss_before"] <= 0.05
