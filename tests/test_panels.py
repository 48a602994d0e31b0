from __future__ import annotations

import html
import io
import math
import re
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from PIL import Image
from tensorboard import plugin_util
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2

from qkwatch.alerts import Alert, Forecast, Level
from qkwatch.heatmaps import ABSENT, ENTROPY, LOGITS, History, heat_map, short_names
from qkwatch.panels import (
    PER_SITE,
    Panels,
    custom_layout,
    escape,
)
from qkwatch.reading import Reading

NAN, INF = math.nan, math.inf
FIELDS = (
    *("max_logit", "margin", "entropy", "entropy_nats", "saturated", "grad_signal", "q_rms", "k_rms"),
    *("entropy_corrected", "sink_mass", "over_100", "nonfinite"),
)


def reading(site="layers.0.attn", heads=2, seed=0, **fields):
    """A reading with random figures in (0, 1), logits in (10, 20)."""
    rand = torch.Generator().manual_seed(seed)
    values = {field: torch.rand(heads, generator=rand) for field in FIELDS}
    values["max_logit"] = 10 + 10 * values["max_logit"]
    values["product_logit"] = values["max_logit"]
    values |= {field: torch.tensor(value) for field, value in fields.items()}
    return Reading(site=site, **values, rows=64, excluded_rows=0, exact=True)


def alert(**fields):
    default = {"level": Level.WARN, "step": 7, "site": "a", "heads": (0,), "rule": "rising", "message": "m"}
    return Alert(**default | fields)


@dataclass
class Memory:
    """A logger that only keeps scalars, as W&B's or MLflow's look from here."""

    broken: bool = False

    def __post_init__(self):
        self.calls = []
        self.experiment = SimpleNamespace(add_tags=None)

    def log_metrics(self, metrics, step=None):
        if self.broken:
            raise OSError("disk full")
        self.calls.append((step, metrics))


@pytest.fixture
def board(tmp_path):
    """A Lightning logger and a function that reads back what it wrote."""
    logger = TensorBoardLogger(tmp_path, name="", version="run")

    def read():
        logger.experiment.flush()
        sizes = {"images": 0, "scalars": 0, "tensors": 0}
        return EventAccumulator(logger.log_dir, size_guidance=sizes).Reload()

    return logger, read


def texts(events, tag):
    return [e.tensor_proto.string_val[0].decode() for e in events.Tensors(f"{tag}/text_summary")]


def test_scalars_come_back_as_they_were_measured(board):
    logger, read = board
    a = reading("layers.0.attn", seed=1, entropy=[0.5, 0.25], saturated=[0.4, 0.6], entropy_corrected=[0.05, 0.2])
    b = reading("layers.1.attn", heads=4, seed=2)
    Panels([logger]).readings([a, b], 30)
    events = read()
    got = {tag: events.Scalars(tag)[0] for tag in events.Tags()["scalars"]}
    assert {point.step for point in got.values()} == {30}
    want = {
        "qkwatch/max_logit": max(a.max_logit.max(), b.max_logit.max()),
        "qkwatch/mean_entropy": torch.cat([a.entropy, b.entropy]).double().mean(),
        "qkwatch/saturated_heads": (torch.cat([a.saturated, b.saturated]) > 0.5).sum(),
        "qkwatch/collapsed_heads": (torch.cat([a.entropy_corrected, b.entropy_corrected]) < 0.1).sum(),
        "qkwatch_max_logit/layers.0.attn": a.max_logit.max(),
        "qkwatch_max_logit_mean/layers.1.attn": b.max_logit.double().mean(),
        "qkwatch_entropy_min/layers.0.attn": 0.25,
        "qkwatch_entropy_mean/layers.0.attn": 0.375,
        "qkwatch_qk_rms/layers.1.attn": (b.q_rms.double() * b.k_rms.double()).max(),
        "qkwatch_saturated/layers.0.attn": 0.6,
        "qkwatch_grad_signal_min/layers.1.attn": b.grad_signal.min(),
    }
    for tag, value in want.items():
        assert got[tag].value == pytest.approx(float(value), rel=1e-6), tag
    assert len(got) == 9 + 2 * len(PER_SITE)


def test_one_call_per_logger_with_the_same_tags_each_step():
    logger = Memory()
    panels = Panels([None, logger])
    for step in range(0, 50, 10):
        panels.readings([reading(f"layers.{i}.attn", seed=step + i) for i in range(3)], step)
    assert [step for step, _ in logger.calls] == [0, 10, 20, 30, 40]
    assert len({frozenset(metrics) for _, metrics in logger.calls}) == 1


@pytest.mark.parametrize(
    ("sites", "max_tags", "each"),
    [(12, 256, 13), (18, 256, 13), (48, 256, 5), (240, 256, 1), (300, 256, 0), (4, 30, 3)],
)
def test_tag_budget(board, sites, max_tags, each):
    logger, read = board
    panels = Panels([logger], max_tags=max_tags)
    for step in range(3):
        panels.readings([reading(f"model.layers.{i}.self_attn", heads=32, seed=i) for i in range(sites)], step)
    panels.alerts([alert()], 2)
    panels.retrofit("patched", 2)
    panels.close()
    tags = read().Tags()
    assert len(tags["scalars"]) == 9 + each * sites
    assert len(tags["images"]) == 4
    assert len(tags["scalars"]) + len(tags["images"]) + len(tags["tensors"]) <= max_tags
    notes = "".join(texts(read(), "qkwatch/alerts"))
    assert ("Tag budget" in notes) == (each < 5)


def test_late_sites_share_what_is_left_and_keep_it():
    logger = Memory()
    panels = Panels([logger], max_tags=16 + 26)
    early, late = [reading("a"), reading("b")], [reading(f"late.{i}") for i in range(3)]
    for readings in (early[:1], early, [*early, *late], early[1:]):
        panels.readings(readings, 0)
    tags = [{tag for tag in metrics if tag.startswith("qkwatch_")} for _, metrics in logger.calls]
    assert [len(t) for t in tags] == [13, 26, 26, 13]
    assert tags[2] == tags[1]


@pytest.mark.parametrize(
    ("fields", "absent", "present"),
    [
        (
            {"entropy": [NAN, NAN]},
            ["qkwatch_entropy_min/s", "qkwatch/min_entropy"],
            {"qkwatch_margin/s": 1.0},
        ),
        ({"entropy": [NAN, 0.5]}, [], {"qkwatch_entropy_min/s": 0.5, "qkwatch_entropy_mean/s": 0.5}),
        ({"entropy": [0.0, 0.5]}, [], {"qkwatch_entropy_min/s": 0.0, "qkwatch/min_entropy": 0.0}),
        (
            {"max_logit": [INF, 3.0]},
            ["qkwatch_max_logit/s", "qkwatch_max_logit_mean/s", "qkwatch/max_logit"],
            {},
        ),
        ({"entropy_corrected": [NAN, NAN]}, ["qkwatch/collapsed_heads"], {}),
    ],
)
def test_not_measured_or_infinite_writes_no_point(fields, absent, present):
    logger = Memory()
    Panels([logger]).readings([reading("s", **{"margin": [1.0, 0.5]} | fields)], 5)
    ((_, metrics),) = logger.calls
    assert all(math.isfinite(value) for value in metrics.values())
    assert not set(absent) & set(metrics)
    assert {tag: metrics[tag] for tag in present} == present


def test_infinite_logits_are_told_once_in_text(board):
    logger, read = board
    panels = Panels([logger])
    bad, good = reading("layers.0.self_attn", max_logit=[INF, 3.0]), reading("layers.1.self_attn")
    for step, readings in enumerate(([good], [bad, good], [bad, good], [good], [bad, good])):
        panels.readings(readings, step)
    events = read().Tensors("qkwatch/alerts/text_summary")
    assert [event.step for event in events] == [1, 4]
    (text, _) = texts(read(), "qkwatch/alerts")
    assert r"layers\.0\.self\_attn" in text
    assert "layers\\.1" not in text


def test_images_decode_and_come_seldom(board):
    logger, read = board
    panels = Panels([logger], images_every=4)
    for step in range(10):
        panels.readings([reading("layers.0.attn", heads=2), reading("layers.1.attn", heads=5)], step)
    panels.close()
    panels.close()
    events = read()
    names = {f"qkwatch/{f}_{k}" for f in ("max_logit", "entropy") for k in ("by_head", "over_time")}
    assert set(events.Tags()["images"]) == names
    for name in names:
        assert [image.step for image in events.Images(name)] == [0, 4, 8, 9]
        picture = Image.open(io.BytesIO(events.Images(name)[-1].encoded_image_string))
        assert picture.size == (700, 334)
        assert picture.mode == "RGB"


def test_ten_thousand_readings_draw_about_160_times(monkeypatch):
    drawn = []
    monkeypatch.setattr(Panels, "_draw", lambda self, named, step: drawn.append(step) or {})
    panels = Panels([SimpleNamespace(log_metrics=lambda *a, **k: None, experiment=SimpleNamespace(add_image=1))])
    one = [reading(heads=1)]
    for step in range(10_000):
        panels.readings(one, step)
    assert len(drawn) == pytest.approx(160, abs=10)
    assert len(panels._history.columns) <= 256


def colours(pixels):
    return {tuple(pixel) for pixel in np.unique(pixels.reshape(-1, 3), axis=0)}


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (2, 2), (12, 12), (48, 32), (3, 128), (300, 600)])
@pytest.mark.parametrize("scale", [LOGITS, ENTROPY])
def test_heat_map_cells_have_the_colour_of_their_value(rows, columns, scale):
    rand = np.random.default_rng(rows)
    grid = rand.uniform(0, 1, (rows, columns)) if scale is ENTROPY else 10 ** rand.uniform(-1, 5, (rows, columns))
    grid.flat[0] = NAN
    image = heat_map(grid, scale, "title", [str(i) for i in range(rows)], [str(i) for i in range(columns)], "head")
    height, width, _ = image.shape
    assert width == 700
    seen = colours(image)
    assert (190, 190, 190) in seen
    if columns < 500:  # more columns than pixels
        assert colours(scale.colours(grid)) <= seen
    assert height < 3000


def test_colours():
    values = np.array([NAN, INF, ABSENT, 1.0, 0.01, 1e4, 1e9])
    grey, magenta, white, low, below, high, above = map(tuple, LOGITS.colours(values))
    assert (grey, magenta, white) == ((190, 190, 190), (220, 0, 120), (255, 255, 255))
    assert low == below == (68, 1, 84)
    assert high == above == (253, 231, 37)
    # log scale: 100 is half way; bright is the worrying end of both maps
    assert LOGITS.place(np.array([100.0]))[0] == pytest.approx(0.5)
    assert tuple(ENTROPY.colours(np.array(0.0))) == high
    light = LOGITS.colours(np.geomspace(1, 1e4, 200)) @ [0.2126, 0.7152, 0.0722]
    assert (np.diff(light) > -1).all()


def test_viridis_agrees_with_matplotlib():
    colormaps = pytest.importorskip("matplotlib").colormaps
    at = np.linspace(0, 1, 101)
    want = colormaps["viridis"](at)[:, :3] * 255
    assert np.abs(LOGITS.colours(10 ** (4 * at)) - want).max() < 20


@pytest.mark.parametrize("n", [1, 7, 8, 9, 31, 32, 33, 100])
def test_history_is_bounded_and_keeps_the_worst(n):
    rand = np.random.default_rng(n)
    logits, entropies = rand.uniform(1, 100, n), rand.uniform(0, 1, n)
    entropies[n // 2] = NAN
    history = History(8)
    for step in range(n):
        history.add(step, {"a": (logits[step], entropies[step])} | ({"b": (1.0, 1.0)} if step > 5 else {}))
    k, starts = history.per_column, [step for step, _ in history.columns]
    assert len(starts) <= 8
    assert starts == list(range(0, n, k))
    for start, worst in history.columns:
        assert worst["a"][0] == logits[start : start + k].max()
        part = entropies[start : start + k]
        want = part[~np.isnan(part)].min(initial=INF)
        assert worst["a"][1] == want or (math.isnan(worst["a"][1]) and want == INF)


HARD = "blocks[0].attn_q*k|<b>x</b> `1.` # _a_ & &amp; (x) {y} !z \\"


def shown(markdown: str) -> str:
    """What a reader sees, by TensorBoard's own converter."""
    return html.unescape(re.sub(r"<[^>]+>", "\x00", plugin_util.markdown_to_safe_html(markdown)))


def test_texts_are_shown_as_they_are(board):
    logger, read = board
    panels = Panels([logger])
    forecast = Forecast(0, {1000.0: (81.0, 118.0, 204.0)})
    panels.alerts(
        [alert(site=HARD, heads=(0, 1, 2, 7), forecast=forecast), alert(site="*", heads=()), alert(site="")],
        7,
    )
    panels.alerts([], 8)
    panels.retrofit(f"```\n{HARD}\n  two", 9)
    (table,) = texts(read(), "qkwatch/alerts")
    cells = [cell for cell in shown(table).split("\x00") if cell.strip()]
    assert cells[6:12] == ["WARN", HARD, "0-2, 7", "rising", "m", forecast.text()]
    assert cells[12:] == ["WARN", "all layers", "rising", "m", "WARN", "model", "0", "rising", "m"]
    (report,) = texts(read(), "qkwatch/retrofits")
    assert "<code>" in plugin_util.markdown_to_safe_html(report)
    assert f"```\n{HARD}\n  two" in shown(report)
    assert shown(escape(HARD)).strip("\x00\n") == HARD


@pytest.mark.parametrize("prefix", ["", "my/run"])
def test_layout_is_valid_and_matches_our_tags(tmp_path, prefix):
    logger = TensorBoardLogger(tmp_path, name="", version="run", prefix=prefix)
    panels = Panels([logger])
    for step in range(2):
        panels.readings([reading("blocks[0].attn"), reading("blocks[1].attn+x")], step)
    panels.flush()
    events = EventAccumulator(logger.log_dir).Reload()
    (config,) = events.Tensors("custom_scalars__config__")
    layout = layout_pb2.Layout.FromString(config.tensor_proto.string_val[0])
    (category,) = layout.category
    assert category.title == "qkwatch"
    sizes = []
    for chart in category.chart:
        (pattern,) = chart.multiline.tag
        # the dashboard's server keeps tags by re.match
        sizes.append(sum(bool(re.match(pattern, tag)) for tag in events.Tags()["scalars"]))
    assert sizes == [2, 2, 2, 2, 2, 2]
    assert "WARN 100, CRITICAL 1,000, FATAL 10,000" in category.chart[0].title


def test_layout_can_be_left_to_the_user(board):
    logger, read = board
    Panels([logger], layout=False).readings([reading()], 0)
    assert "custom_scalars__config__" not in read().Tags()["tensors"]
    assert list(custom_layout({})) == ["qkwatch"]


def test_a_failing_logger_does_not_stop_the_others(board):
    logger, read = board
    broken, after = Memory(broken=True), Memory()
    panels = Panels([broken, logger, after])
    for step in range(2):
        with pytest.raises(OSError, match="disk full"):
            panels.readings([reading()], step)
    assert len(after.calls) == 2
    assert len(read().Scalars("qkwatch/max_logit")) == 2
    assert len(read().Tags()["images"]) == 4
    panels.alerts([alert()], 2)
    panels.close()


@pytest.mark.parametrize("loggers", [None, [], [None]])
def test_without_loggers_nothing_happens(loggers):
    panels = Panels(loggers)
    panels.readings([reading()], 0)
    panels.alerts([alert()], 0)
    panels.retrofit("x", 0)
    panels.close()


def test_csv_logger(tmp_path):
    logger = CSVLogger(tmp_path, name="", version="run")
    panels = Panels([logger])
    panels.readings([reading("s", entropy=[NAN, NAN])], 0)
    panels.readings([reading("s", entropy=[0.5, 0.25])], 10)
    panels.alerts([alert()], 10)
    panels.close()
    logger.save()
    text = (tmp_path / "run" / "metrics.csv").read_text().splitlines()
    rows = [dict(zip(text[0].split(","), line.split(","), strict=True)) for line in text[1:]]
    assert [row["qkwatch/min_entropy"] for row in rows] == ["", "0.25"]
    assert float(rows[1]["qkwatch_entropy_mean/s"]) == 0.375


def test_a_site_that_runs_twice_has_two_rows():
    logger = Memory()
    Panels([logger]).readings([reading("a", seed=1), reading("a", seed=2), reading("", seed=3)], 0)
    ((_, metrics),) = logger.calls
    assert {tag.split("/")[1] for tag in metrics if tag.startswith("qkwatch_")} == {"a", "a:2", "model"}


@pytest.mark.parametrize(
    ("names", "want"),
    [
        (["attn"], ["attn"]),
        (["a.0.attn", "a.1.attn", "a.10.attn"], ["0", "1", "10"]),
        (["enc.0.attn", "dec.0.attn", "dec.0.cross"], ["enc.0.attn", "dec.0.attn", "dec.0.cross"]),
        (["attn", "attn.inner"], ["attn", "attn.inner"]),
        (["a" * 30 + ".b.0", "c.1"], ["...aaaaaaaaa.b.0", "c.1"]),
    ],
)
def test_short_names(names, want):
    assert short_names(names) == want
