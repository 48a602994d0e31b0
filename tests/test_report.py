"""Rich output: golden texts at a fixed width, and a real Trainer with each kind of bar."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from io import StringIO

import pytest
import torch
from rich.console import Console

from qkwatch import names as names_of
from qkwatch import report
from qkwatch.alerts import Alert, Level
from qkwatch.reading import Reading
from qkwatch.report import alert_text, reading_table, retrofit_text, say, summary

NAN = math.nan


@dataclass
class FakeReport:
    applied: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    drift: dict[str, float] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    clip: bool = False


def reading(
    site: str = "layers.0.attn", top: tuple[float, ...] = (34.25, 8.0), exact: bool = True, **values
) -> Reading:
    def row(name: str, *calm: float) -> torch.Tensor:
        return torch.tensor(values.get(name, (calm * len(top))[: len(top)]), dtype=torch.float32)

    names = ("entropy_nats", "entropy_corrected", "sink_mass", "over_100", "nonfinite")
    return Reading(
        site=site,
        max_logit=torch.tensor(top),
        product_logit=torch.tensor(top),
        margin=row("margin", 30.0, 7.0),
        entropy=row("entropy", 0.61, 0.12),
        saturated=row("saturated", 0.01, 0.54),
        grad_signal=row("grad_signal", 0.8, 0.031),
        q_rms=row("q_rms", 1.0, 2.5),
        k_rms=row("k_rms", 1.5, 1.0),
        rows=64,
        excluded_rows=0,
        exact=exact,
        **{name: row(name, 0.0) for name in names},
    )


def lines(renderable, width: int = 100) -> list[str]:
    console = Console(file=StringIO(), width=width, record=True, color_system=None)
    console.print(renderable)
    return [line.rstrip() for line in console.export_text().splitlines()]


def test_alert_text_is_markup_safe_and_coloured_by_level():
    message = "enc[0].attn[/bold]: head 3: max logit above 100 and rising"
    text = alert_text(Alert(Level.CRITICAL, 1200, "enc[0].attn[/bold]", (3,), "rising", message))
    assert lines(text) == [f"qkwatch CRITICAL step 1,200: {message}"]
    styles = {text.plain[s.start : s.end]: str(s.style) for s in text.spans}
    assert styles["CRITICAL"] == "bold red"
    assert len({report.STYLES[level] for level in Level}) == 4


def test_alerts_of_one_rule_are_one_text():
    alerts = [Alert(Level.WARN, 50, f"h.{i}.attn", (0,), "rising", f"h.{i}.attn: head 0: rising") for i in (3, 0, 1)]
    alerts += [Alert(Level.WARN, 50, "h.3.attn", (0,), "early", "h.3.attn: head 0: early")]
    alerts += [Alert(Level.FATAL, 50, "h.[7]", (0,), "max_logit", "h.[7]: head 0: above 10,000")]
    assert [text.plain for text in report.alert_texts(alerts)] == [
        "qkwatch WARN step 50: h.3.attn: head 0: rising; likewise at 2 more layers: h.0-1.attn",
        "qkwatch WARN step 50: h.3.attn: head 0: early",
        "qkwatch FATAL step 50: h.[7]: head 0: above 10,000",
    ]
    assert report.alert_texts([]) == []


def test_reading_table_golden():
    rows = [reading(), reading("enc[1].attn", (1234.5, math.inf), exact=False, entropy=(NAN, NAN))]
    assert lines(reading_table(rows, title="step 30"), 80) == [
        "                                   step 30",
        "                       max                                    grad",
        "site      heads      logit  margin   entropy  saturated     signal  rms q, k",
        "─────────────────────────────────────────────────────────────────────────────",
        "layers.0      2  34.25 (0)  30 (0)  0.12 (1)    54% (1)  0.031 (1)  2.5, 1.5",
        "~enc[1]       2    inf (1)  30 (0)         -    54% (1)  0.031 (1)  2.5, 1.5",
        " names without .attn; ~ from a sample of the query rows; - not measured; (n)",
        "                                  the head",
    ]


@pytest.mark.parametrize("width", [40, 60, 80, 100, 200])
@pytest.mark.parametrize(
    "site", ["model.layers.{}.self_attn", "encoder.blocks.{}.attention.self", "x" * 60 + ".{}", "{}"]
)
def test_no_cell_of_a_table_is_wrapped_or_cut(width, site):
    rows = [reading(site.format(i), (1234.5, 1.0), entropy=(NAN, NAN)) for i in range(12)]
    text = lines(reading_table(rows), width)
    assert all(len(line) <= width for line in text)
    body = [line for line in text if "1,234 (0)" in line]
    assert len(body) == 12
    assert len({line.split()[0] for line in body}) == 12
    assert width < 60 or "- not measured" in " ".join(" ".join(text).split())


def test_a_single_head_needs_no_name_and_nothing_is_shown_as_zero():
    text = lines(reading_table([reading(top=(8.0,), entropy=(NAN,), saturated=(NAN,), k_rms=(NAN,))]))
    assert "(0)" not in "".join(text)
    assert text[-2].split() == ["layers.0.attn", "1", "8", "30", "-", "-", "0.8", "1,", "-"]
    assert text[-1].strip() == "- not measured"


@pytest.mark.parametrize("n", [0, 1, 24, 25, 48])
def test_long_tables_keep_the_worst_in_model_order_and_say_what_is_left_out(n):
    tops = torch.randperm(n, generator=torch.Generator().manual_seed(n)).tolist()
    rows = [reading(f"layers.{i}.attn", (float(t), 0.5)) for i, t in enumerate(tops)]
    text = "\n".join(lines(reading_table(rows)))
    shown = [int(i) for i in re.findall(r"layers\.(\d+)", text)]
    assert shown == [i for i, t in enumerate(tops) if t >= n - 24]
    assert (f"{n - 24} left out" in text) == (n > 24)


@pytest.mark.parametrize(
    ("names", "short", "note"),
    [
        (["net.h.0.attn", "net.h.1.attn"], ["h.0", "h.1"], "names without net. and .attn"),
        (["h.0.attn", "h.0.cross"], ["0.attn", "0.cross"], "names without h."),
        (["a.b.0.attn", "a.c.0.attn"], ["a.b", "a.c"], "names without .0.attn"),
        (["net.h.0.attn"], ["net.h.0.attn"], ""),
        (["", "a.b"], ["(the model itself)", "a.b"], ""),
        (["a.0", "a.0.1"], ["a.0", "a.0.1"], ""),
        (["y" * 40], ["…" + "y" * 27], ""),
        ([], [], ""),
    ],
)
def test_short_sites(names, short, note):
    assert names_of.short_sites(names) == (short, note)


@pytest.mark.parametrize(
    ("names", "brief"),
    [
        ([f"h.{i}.attn" for i in range(12)], ["h.0-11.attn"]),
        (["h.0", "h.2", "h.3"], ["h.0,2-3"]),
        ([f"a.{i}.b.{j}" for i in range(2) for j in range(3)] + ["a.2.b.0"], ["a.0-1.b.0-2", "a.2.b.0"]),
        (["h.0.x", "h.1.y", "head"], ["h.0.x", "h.1.y", "head"]),
        ([], []),
    ],
)
def test_abbreviate(names, brief):
    assert names_of.abbreviate(names) == brief


def test_retrofit_text_golden():
    done = FakeReport(["h.0[x]", "h.1"], {"h.2": "no projection owns k"}, {"h.0[x]": 0.0123, "h.1": NAN})
    assert lines(retrofit_text(done)) == [
        "qkwatch retrofit: 2 sites patched, 1 refused; its output changes by 0.012 of its size",
        "  patched: h.0[x], h.1",
        "  refused: h.2: no projection owns k",
    ]
    assert lines(retrofit_text(done, after=1031, ramp_steps=20))[0] == (
        "qkwatch retrofit after step 1,031: 2 sites patched, 1 refused; its output changes by 0.012 of its"
    )
    noted = FakeReport(["h.0", "h.1"], {}, {}, {"h.0": "but not against 'u'", "h.1": "but not against 'u'"})
    assert lines(retrofit_text(noted))[1:] == ["  patched: h.0-1", "  note: h.0-1: but not against 'u'"]
    nothing = "qkwatch retrofit: 0 sites patched, 0 refused"
    assert lines(retrofit_text(FakeReport())) == [nothing]
    names = [f"h.{i}" for i in range(12)]
    many = FakeReport(names, {"g.0": "no k", "g.1": "no k", "c": "x"}, {n: i / 100 for i, n in enumerate(names)})
    assert lines(retrofit_text(many)) == [
        "qkwatch retrofit: 12 sites patched, 3 refused; their outputs change by 0.055 of their size (median),",
        "0.11 at h.11",
        "  patched: h.0-11",
        "  refused: g.0-1: no k",
        "  refused: c: x",
    ]


def test_summary_golden():
    alerts = [
        Alert(Level.WARN, 30, "h.0", (1,), "early", ""),
        Alert(Level.WARN, 20, "h[1]", (1,), "doubling", ""),
        Alert(Level.WARN, 40, "*", (), "collapse", ""),
        Alert(Level.FATAL, 1500, "h.0", (1,), "max_logit", ""),
    ]
    text = lines(
        summary(
            sites=2, readings=150, alerts=alerts, retrofits=[retrofit_text(FakeReport(["h.0"], {}, {"h.0": 0.002}))]
        )
    )
    assert text == [
        "qkwatch watched 2 sites on 150 steps",
        "  FATAL 1 at 1 site, first at step 1,500 (h.0: max_logit)",
        "  WARN 3 at 2 sites, first at step 20 (h[1]: doubling)",
        "qkwatch retrofit: 1 site patched, 0 refused; its output changes by 0.002 of its size",
        "  patched: h.0",
    ]
    calm = lines(summary(sites=1, readings=1, alerts=[], last=[reading()]))
    assert calm[:2] == ["qkwatch watched 1 site on 1 step", "  no alerts"]
    assert any("34.25 (0)" in line for line in calm)


@pytest.mark.parametrize("kind", ["rich", "tqdm", "none"])
def test_text_arrives_whole_above_a_live_bar(kind, tmp_path, monkeypatch):
    """One line and one table, said in mid-epoch and after the bars are closed, in a real fit."""
    pl = pytest.importorskip("lightning.pytorch")
    from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
    from lightning.pytorch.demos.boring_classes import BoringModel

    screen = StringIO()
    monkeypatch.setattr("sys.stdout", screen)
    look = {"file": screen, "width": 100, "force_terminal": kind == "rich", "color_system": None}
    monkeypatch.setattr("rich._console", Console(**look))
    message = "enc[0].attn: head 3: max logit above 100 and rising [/] " + "x" * 20
    texts = [alert_text(Alert(Level.WARN, step, "enc[0].attn", (3,), "rising", message)) for step in (2, 9)]
    table = reading_table([reading()], title="step 2")

    class Speaker(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == 2:
                say(texts[0], trainer.progress_bar_callback)
                say(table, trainer.progress_bar_callback)

        def on_fit_end(self, trainer, pl_module):
            say(texts[1], trainer.progress_bar_callback)

    bars = {"rich": lambda: [RichProgressBar(console_kwargs=look)], "tqdm": lambda: [TQDMProgressBar()]}
    trainer = pl.Trainer(
        callbacks=[Speaker(), *bars.get(kind, list)()],
        enable_progress_bar=kind in bars,
        max_epochs=1,
        limit_train_batches=5,
        limit_val_batches=1,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        accelerator="cpu",
    )
    trainer.fit(BoringModel())
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())
    shown = [line.strip() for line in re.split(r"[\r\n]+", plain)]
    for text in (*(line for t in texts for line in lines(t, 100)), *lines(table, 100)):
        assert not text or shown.count(text.strip()) == 1, text


def test_say_prints_where_a_tqdm_bar_would_drop_the_text(capsys, monkeypatch):
    class Closed:
        def print(self, *args):
            raise AssertionError("dropped")

        @property
        def train_progress_bar(self):
            raise TypeError("not set up yet")

    monkeypatch.setattr("rich._console", Console(width=80))
    for bar in (Closed(), None, object()):
        say(alert_text(Alert(Level.INFO, 1, "a", (0,), "sink", "a[0]: head 0")), bar)
    assert capsys.readouterr().out == "qkwatch INFO step 1: a[0]: head 0\n" * 3
