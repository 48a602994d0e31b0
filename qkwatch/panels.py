"""Readings and alerts -> TensorBoard, and any other logger that has `log_metrics`.

Loggers are recognised by what they can do, so Lightning is not imported: every logger gets the scalars; one
whose `.experiment` is a `SummaryWriter` also gets heat maps, alert texts and a Custom Scalars page.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

if TYPE_CHECKING:
    from .rules import Alert
    from .stats import Reading

Floats = NDArray[np.float64]
Pixels = NDArray[np.uint8]  # (height, width, 3)
Figures = dict[str, list[float]]  # field -> one value a head, without those that were not measured

FIELDS = ("max_logit", "margin", "entropy", "entropy_corrected", "saturated", "grad_signal", "q_rms", "k_rms")
# tag, field, over heads; the most telling come first, because a tight tag budget cuts from the end
PER_SITE: tuple[tuple[str, str, Callable[[list[float]], float]], ...] = (
    ("max_logit", "max_logit", max),
    ("entropy_min", "entropy", min),
    ("qk_rms", "qk_rms", max),
    ("grad_signal_min", "grad_signal", min),
    ("saturated", "saturated", max),
    ("max_logit_mean", "max_logit", fmean),
    ("entropy_mean", "entropy", fmean),
    ("margin", "margin", max),
    ("q_rms", "q_rms", max),
    ("k_rms", "k_rms", max),
    ("margin_mean", "margin", fmean),
    ("grad_signal_mean", "grad_signal", fmean),
    ("saturated_mean", "saturated", fmean),
)
MODEL: tuple[tuple[str, str, Callable[[list[float]], float]], ...] = (
    ("max_logit", "max_logit", max),
    ("margin", "margin", max),
    ("min_entropy", "entropy", min),
    ("mean_entropy", "entropy", fmean),
    ("grad_signal", "grad_signal", min),
    ("saturated_heads", "saturated", lambda values: sum(v > 0.5 for v in values)),
    ("collapsed_heads", "entropy_corrected", lambda values: sum(v < 0.1 for v in values)),
    ("q_rms", "q_rms", max),
    ("k_rms", "k_rms", max),
)
OTHER_TAGS = 7  # four images, two texts, one layout
COLUMNS = 256  # of a map over time, at most
MARKS = {"WARN": 100.0, "CRITICAL": 1e3, "FATAL": 1e4}
ABSENT = -math.inf  # in a grid: the model has no such head
UNKNOWN = (math.nan, math.nan)


class Panels:
    """Writes readings, alerts and retrofit reports to loggers. Meant for rank zero only.

    At most `max_tags` tags in all (scalars, images, texts, layout) whatever the model. Nine scalars are for
    the whole model (`qkwatch/max_logit`, ...; `saturated_heads` counts the heads with more than half of their
    rows at p > .99, `collapsed_heads` those with sink-corrected entropy < .1). Each site gets the scalars of
    `PER_SITE` (`qkwatch_max_logit/<site>`, ...) from the top of that list as far as the budget goes: 256 tags
    give 5 to each of 48 sites, all 13 to each of 18, none to 241. A site keeps the tags it got first. Figures
    per head are in the heat maps, which are four tags. A figure that was not measured (nan) or is infinite
    writes no point; for the infinite ones a text says where.

    Args:
        loggers: objects with `log_metrics(dict, step=int)`; None is skipped.
        max_tags: the budget, at least 16.
        images_every: readings between heat maps. It doubles after every 32 of them, so that a long run's log
            stays small: 10,000 readings make about 160 (four PNGs of 10-40 kB each).
        layout: write a Custom Scalars layout. A run holds one layout only: False keeps your own.
        marks: names of logit levels, for the chart's title.

    Every method serves all loggers, then raises the first error that one of them raised.
    """

    def __init__(
        self,
        loggers: Sequence[Any] | None,
        max_tags: int = 256,
        images_every: int = 10,
        layout: bool = True,
        marks: Mapping[str, float] = MARKS,
    ) -> None:
        self.loggers = [logger for logger in loggers or () if logger is not None]
        self.max_tags, self.images_every, self.marks = max_tags, images_every, dict(marks)
        self._without_layout = list(self.loggers) if layout else []
        self._tags: dict[str, int] = {}  # site -> how many entries of PER_SITE it got
        self._history = History(COLUMNS)
        self._seen = self._drawn = self._next_image = 0
        self._undrawn: tuple[dict[str, Reading], int] | None = None
        self._infinite: list[str] = []

    def readings(self, readings: Sequence[Reading], step: int) -> None:
        """Write one step's readings: the scalars, and heat maps when due."""
        if not self.loggers or not readings:
            return
        named = _by_name(readings)
        figures = {name: _figures(reading) for name, reading in named.items()}
        self._history.add(
            step, {n: (_over(max, f["max_logit"]), _over(min, f["entropy"])) for n, f in figures.items()}
        )
        self._undrawn = (named, step)
        notes = self._allot(figures) + self._infinities(figures)
        metrics = self._metrics(figures)
        writes: list[Callable[[Any], None]] = [
            lambda logger: logger.log_metrics(dict(metrics), step=step),
            self._lay_out,
        ]
        if notes:
            writes.append(
                lambda logger: _write(logger, "add_text", "qkwatch/alerts", "\n\n".join(notes), step)
            )
        if self._seen >= self._next_image:
            writes.append(self._image_writer())
        self._seen += 1
        self._each(*writes)

    def alerts(self, alerts: Sequence[Alert], step: int) -> None:
        """Write alerts as one markdown table."""
        rows = ["| level | layer | heads | rule | message | forecast |", "|---|---|---|---|---|---|"]
        for alert in alerts:
            forecast = "" if alert.forecast is None else alert.forecast.text()
            site = {"": "model", "*": "all layers"}.get(alert.site, alert.site)
            cells = (site, _ranges(alert.heads), alert.rule, alert.message, forecast)
            rows.append(f"| **{alert.level.name}** | " + " | ".join(map(escape, cells)) + " |")
        if alerts:
            self._each(lambda logger: _write(logger, "add_text", "qkwatch/alerts", "\n".join(rows), step))

    def retrofit(self, report_text: str, step: int) -> None:
        """Write a retrofit's report verbatim: as an indented block, as its own text could close a fence."""
        text = "\n".join(f"    {line}" for line in report_text.splitlines())
        self._each(lambda logger: _write(logger, "add_text", "qkwatch/retrofits", text, step))

    def flush(self) -> None:
        """Ask the writers to put on disk what they hold."""
        self._each(lambda logger: _write(logger, "flush"))

    def close(self) -> None:
        """Draw the last reading if its turn had not come, and flush. The loggers stay open."""
        draw = [self._image_writer()] if self._undrawn is not None else []
        self._each(*draw, lambda logger: _write(logger, "flush"))

    def _each(self, *writes: Callable[[Any], None]) -> None:
        errors: list[Exception] = []
        for logger in self.loggers:
            for write in writes:
                try:
                    write(logger)
                except Exception as error:
                    errors.append(error)
        if errors:
            raise errors[0]

    def _lay_out(self, logger: Any) -> None:
        if any(logger is one for one in self._without_layout):
            self._without_layout = [one for one in self._without_layout if one is not logger]
            _write(logger, "add_custom_scalars", custom_layout(self.marks))

    def _allot(self, sites: Iterable[str]) -> list[str]:
        """Give new sites their share of the tags that are left; a note where that is less than five."""
        new = [site for site in sites if site not in self._tags]
        if not new:
            return []
        left = self.max_tags - OTHER_TAGS - len(MODEL) - sum(self._tags.values())
        each = min(len(PER_SITE), max(left, 0) // len(new))
        self._tags.update(dict.fromkeys(new, each))
        if each >= 5:
            return []
        kept = ", ".join(tag for tag, _, _ in PER_SITE[:each]) or "none"
        note = f"Tag budget of {self.max_tags}: {len(new)} layers log {kept}; the heat maps show every layer."
        return [escape(note)]

    def _infinities(self, figures: Mapping[str, Figures]) -> list[str]:
        sites = [site for site, f in figures.items() if any(math.inf in values for values in f.values())]
        changed, self._infinite = sites != self._infinite, sites
        return ["**Non-finite logits** in " + escape(", ".join(sites))] if sites and changed else []

    def _metrics(self, figures: Mapping[str, Figures]) -> dict[str, float]:
        merged = {field: [v for f in figures.values() for v in f[field]] for field in FIELDS}
        metrics = {f"qkwatch/{tag}": _over(how, merged[field]) for tag, field, how in MODEL}
        for site, by_field in figures.items():
            for tag, field, how in PER_SITE[: self._tags[site]]:
                metrics[f"qkwatch_{tag}/{site}"] = _over(how, by_field[field])
        return {tag: value for tag, value in metrics.items() if math.isfinite(value)}

    def _image_writer(self) -> Callable[[Any], None]:
        """A write that draws on the first logger that can show images, and reuses that for the others."""
        assert self._undrawn is not None
        (named, step), self._undrawn = self._undrawn, None
        self._next_image = self._seen + self.images_every * 2 ** (self._drawn // 32)
        self._drawn += 1
        draw = lru_cache(maxsize=1)(lambda: self._draw(named, step))

        def write(logger: Any) -> None:
            if hasattr(logger, "experiment") and hasattr(logger.experiment, "add_image"):
                for tag, image in draw().items():
                    logger.experiment.add_image(tag, image, step, dataformats="HWC")

        return write

    def _draw(self, named: Mapping[str, Reading], step: int) -> dict[str, Pixels]:
        """The four maps: layers x heads now, layers x time."""
        heads = [str(i) for i in range(max(reading.heads for reading in named.values()))]
        steps = [f"{at:,}" for at, _ in self._history.columns]
        sites = list(self._history.sites)
        images = {}
        for index, (field, scale, what) in enumerate(
            (("max_logit", LOGITS, "max |logit|"), ("entropy", ENTROPY, "entropy"))
        ):
            now = np.full((len(named), len(heads)), ABSENT)
            for row, reading in zip(now, named.values(), strict=True):
                row[: reading.heads] = getattr(reading, field).numpy()
            past = np.array(
                [[worst.get(s, UNKNOWN)[index] for _, worst in self._history.columns] for s in sites]
            )
            title = f"{what} per head, step {step:,}"
            images[f"qkwatch/{field}_by_head"] = heat_map(
                now, scale, title, short_names(list(named)), heads, "head"
            )
            title = f"{what} of each layer's worst head, to step {step:,}"
            images[f"qkwatch/{field}_over_time"] = heat_map(
                past, scale, title, short_names(sites), steps, "step"
            )
        return images


Column = tuple[int, dict[str, tuple[float, float]]]  # first step, {site: (max logit, min entropy)}


class History:
    """Each site's worst figures over time in at most `limit` (even) columns: when full, pairs are merged."""

    def __init__(self, limit: int) -> None:
        self.limit, self.per_column, self.in_last = limit, 1, 0
        self.columns: list[tuple[int, dict[str, tuple[float, float]]]] = []
        self.sites: dict[str, None] = {}  # ordered set

    def add(self, step: int, worst: dict[str, tuple[float, float]]) -> None:
        """Append one reading's `{site: (largest logit, lowest entropy)}`; nan for not measured."""
        self.sites.update(dict.fromkeys(worst))
        if self.columns and self.in_last < self.per_column:
            self.columns[-1] = _merge(self.columns[-1], (step, worst))
            self.in_last += 1
            return
        if len(self.columns) >= self.limit:
            pairs = zip(self.columns[::2], self.columns[1::2], strict=True)
            self.columns = [_merge(a, b) for a, b in pairs]
            self.per_column *= 2
        self.columns.append((step, worst))
        self.in_last = 1


def _merge(a: Column, b: Column) -> Column:
    worst = dict(a[1])
    for site, (logit, entropy) in b[1].items():
        old = worst.get(site, UNKNOWN)
        worst[site] = (float(np.fmax(old[0], logit)), float(np.fmin(old[1], entropy)))
    return a[0], worst


def custom_layout(marks: Mapping[str, float]) -> dict[str, dict[str, list[Any]]]:
    """The Custom Scalars page. Its charts match tags by prefix, so it fits whatever sites there will be.

    >>> import re
    >>> (_, (pattern,)) = custom_layout({"WARN": 100.0})["qkwatch"]["max |logit| per layer (WARN 100)"]
    >>> bool(re.match(pattern, "qkwatch_max_logit/blocks[0].attn"))
    True
    """
    levels = ", ".join(f"{name} {value:,.0f}" for name, value in marks.items())
    charts = {
        f"max |logit| per layer ({levels})": "qkwatch_max_logit/",
        "lowest entropy per layer (0: one key, 1: even)": "qkwatch_entropy_min/",
        "RMS(q) x RMS(k) per layer": "qkwatch_qk_rms/",
        "lowest gradient signal per layer": "qkwatch_grad_signal_min/",
        "largest RMS of q, of k": "qkwatch/[qk]_rms$",
        "heads saturated, collapsed": "qkwatch/(saturated|collapsed)_heads$",
    }
    # a logger may put "prefix-" in front of every tag
    return {"qkwatch": {title: ["Multiline", [f"(.*-)?{tag}"]] for title, tag in charts.items()}}


def escape(text: str) -> str:
    """Text that markdown (as TensorBoard reads it, inside a table too) shows as it is, on one line.

    >>> escape("a_b|c")
    'a\\\\_b\\\\|c'
    """
    text = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"([\\`*_{}\[\]()>#+\-.!|])", r"\\\1", text)


def short_names(names: Sequence[str]) -> list[str]:
    """Names without the dotted parts that all of them begin or end with.

    >>> short_names(["model.layers.0.attn", "model.layers.1.attn"])
    ['0', '1']
    """
    parts = [name.split(".") for name in names]
    while len(parts) > 1 and all(len(p) > 1 and p[0] == parts[0][0] for p in parts):
        parts = [p[1:] for p in parts]
    while len(parts) > 1 and all(len(p) > 1 and p[-1] == parts[0][-1] for p in parts):
        parts = [p[:-1] for p in parts]
    return [name if len(name) <= 16 else "..." + name[-13:] for name in map(".".join, parts)]


def _by_name(readings: Sequence[Reading]) -> dict[str, Reading]:
    """Readings by site; a site that runs several times in one forward gets `:2`, `:3`, ..."""
    named: dict[str, Reading] = {}
    for reading in readings:
        site, n = reading.site or "model", 1
        while (name := site if n == 1 else f"{site}:{n}") in named:
            n += 1
        named[name] = reading
    return named


def _figures(reading: Reading) -> Figures:
    tensors = {field: getattr(reading, field) for field in FIELDS} | {"qk_rms": reading.q_rms * reading.k_rms}
    return {field: [v for v in tensor.tolist() if not math.isnan(v)] for field, tensor in tensors.items()}


def _over(how: Callable[[list[float]], float], values: list[float]) -> float:
    return float(how(values)) if values else math.nan


def _write(logger: Any, method: str, *args: Any) -> None:
    """Call a method of the logger's writer where there is one: the experiments of other loggers differ."""
    experiment = getattr(logger, "experiment", None)
    if hasattr(experiment, "add_text") and hasattr(experiment, method):
        getattr(experiment, method)(*args)


def _ranges(heads: Iterable[int]) -> str:
    """`0-2, 5` for (0, 1, 2, 5)."""
    runs: list[list[int]] = []
    for head in sorted(heads):
        if runs and head == runs[-1][1] + 1:
            runs[-1][1] = head
        else:
            runs.append([head, head])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


class Scale(NamedTuple):
    """Colours for a figure: the bright end is the worrying one, so both maps read alike.

    `ticks` are the numbers on the colour bar, ascending; what lies beyond the ends gets the end's colour.
    """

    ticks: tuple[float, ...]
    labels: tuple[str, ...]
    log: bool = False
    bright_low: bool = False

    def place(self, values: Floats) -> Floats:
        """Position between the dark end (0) and the bright end (1), any shape; nan stays nan."""
        ends = np.array([self.ticks[0], self.ticks[-1]])
        if self.log:
            values, ends = np.log(np.maximum(values, ends[0])), np.log(ends)
        at: Floats = np.clip((values - ends[0]) / (ends[1] - ends[0]), 0, 1)
        return 1 - at if self.bright_low else at

    def colours(self, values: Floats) -> Pixels:
        """RGB of each value, shape + (3,): grey for nan, magenta for +inf, white for ABSENT."""
        at = np.nan_to_num(self.place(np.where(np.isinf(values), self.ticks[0], values)))
        anchors = np.linspace(0, 1, VIRIDIS.shape[1])
        rgb = np.stack([np.interp(at, anchors, channel) for channel in VIRIDIS], -1)
        for where, colour in (
            (np.isnan(values), GREY),
            (values == math.inf, MAGENTA),
            (values == ABSENT, WHITE),
        ):
            rgb[where] = colour
        return rgb.round().astype(np.uint8)


LOGITS = Scale((1.0, 10.0, 100.0, 1e3, 1e4), ("1", "10", "100", "1,000", "10,000+"), log=True)
ENTROPY = Scale((0.0, 0.25, 0.5, 0.75, 1.0), ("0", "0.25", "0.5", "0.75", "1"), bright_low=True)
# red, green, blue of viridis at nine even places: perceptually uniform, and safe for the colour-blind
VIRIDIS = np.array(
    [
        (68, 71, 59, 44, 33, 40, 94, 173, 253),
        (1, 45, 82, 114, 145, 174, 201, 220, 231),
        (84, 123, 139, 142, 140, 128, 98, 48, 37),
    ],
    dtype=np.float64,
)
WIDTH = 700
WHITE, GREY, MAGENTA, INK = (255, 255, 255), (190, 190, 190), (220, 0, 120), (40, 40, 40)


@lru_cache
def _font(size: int) -> Any:
    try:
        return ImageFont.load_default(size)
    except (TypeError, ImportError):  # Pillow before 10.1, or built without FreeType
        return ImageFont.load_default()


def heat_map(
    grid: Floats, scale: Scale, title: str, rows: Sequence[str], columns: Sequence[str], across: str
) -> Pixels:
    """A labelled heat map, 700 pixels wide: TensorBoard shows it at 350, so every second pixel must suffice.

    Args:
        grid: `(rows, columns)`; nan is shown as not measured, +inf as non-finite, ABSENT as nothing.
        scale: colours and colour bar.
        title: one line.
        rows, columns: labels, thinned out where they would overlap.
        across: name of the horizontal axis.

    Returns:
        `(height, 700, 3)` uint8.
    """
    small, (n_rows, n_columns) = _font(20), grid.shape
    left, top = 24 + int(max(map(small.getlength, ["layer", *rows]))), 84
    room = WIDTH - left - 130  # the colour bar and its numbers
    wide = room // n_columns * n_columns or room
    cell = min(max(540 // n_rows, 4), 44)
    tall = cell * n_rows
    bar_tall = max(tall, 150)
    canvas = Image.new("RGB", (WIDTH, top + bar_tall + 100), WHITE)
    pen = ImageDraw.Draw(canvas)
    cells = Image.fromarray(scale.colours(grid))
    canvas.paste(cells.resize((wide, tall), Image.Resampling.NEAREST), (left, top))
    if across == "head" and min(cell, wide / n_columns) >= 14:
        _gaps(pen, (left, top, wide, tall), grid.shape)
    pen.text((14, 12), title, INK, _font(24))
    pen.text((left - 10, top - 20), "layer", INK, small, "rm")
    pen.text((left + wide / 2, top + tall + 44), across, INK, small, "mm")
    for y in range(0, n_rows, _every(22 / cell)):
        pen.text((left - 10, top + (y + 0.5) * cell), rows[y], INK, small, "rm")
    pitch = wide / n_columns
    for x in range(0, n_columns, _every((max(map(small.getlength, columns)) + 16) / pitch)):
        pen.text((left + (x + 0.5) * pitch, top + tall + 18), columns[x], INK, small, "mm")
    _colour_bar(canvas, pen, scale, (left + room + 16, top, bar_tall))
    _legend(pen, grid, (left, canvas.height - 20))
    return np.asarray(canvas)


def _gaps(pen: ImageDraw.ImageDraw, box: tuple[int, int, int, int], shape: tuple[int, ...]) -> None:
    left, top, wide, tall = box
    for x in range(left, left + wide, wide // shape[1]):
        pen.line((x, top, x, top + tall), WHITE, 2)
    for y in range(top, top + tall, tall // shape[0]):
        pen.line((left, y, left + wide, y), WHITE, 2)


def _colour_bar(
    canvas: Image.Image, pen: ImageDraw.ImageDraw, scale: Scale, at: tuple[int, int, int]
) -> None:
    x, top, tall = at
    low, high = scale.ticks[0], scale.ticks[-1]
    values = np.geomspace(high, low, tall) if scale.log else np.linspace(high, low, tall)
    ramp = Image.fromarray(scale.colours(values[:, None]))
    canvas.paste(ramp.resize((20, tall), Image.Resampling.NEAREST), (x, top))
    heights = scale._replace(bright_low=False).place(np.array(scale.ticks))
    for height, label in zip(heights, scale.labels, strict=True):
        y = top + (1 - float(height)) * (tall - 1)
        pen.line((x + 20, y, x + 26, y), INK, 2)
        pen.text((x + 30, y), label, INK, _font(20), "lm")


def _legend(pen: ImageDraw.ImageDraw, grid: Floats, at: tuple[int, int]) -> None:
    x, y = at
    for present, colour, text in (
        (bool(np.isnan(grid).any()), GREY, "not measured"),
        (bool((grid == math.inf).any()), MAGENTA, "non-finite"),
    ):
        if present:
            pen.rectangle((x, y - 8, x + 16, y + 8), colour)
            pen.text((x + 24, y), text, INK, _font(20), "lm")
            x += 190


def _every(least: float) -> int:
    """The smallest pleasant distance between labels that is at least `least`."""
    pleasant = (n * int(10**k) for k in range(9) for n in (1, 2, 5))
    return next(n for n in pleasant if n >= least)
