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
from typing import TYPE_CHECKING, Any

import numpy as np

from .heatmaps import ABSENT, ENTROPY, LOGITS, UNKNOWN, History, Pixels, heat_map, short_names
from .names import ranges

if TYPE_CHECKING:
    from .alerts import Alert
    from .reading import Reading

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
        self._history.add(step, {n: (_over(max, f["max_logit"]), _over(min, f["entropy"])) for n, f in figures.items()})
        self._undrawn = (named, step)
        notes = self._allot(figures) + self._infinities(figures)
        metrics = self._metrics(figures)
        writes: list[Callable[[Any], None]] = [
            lambda logger: logger.log_metrics(dict(metrics), step=step),
            self._lay_out,
        ]
        if notes:
            writes.append(lambda logger: _write(logger, "add_text", "qkwatch/alerts", "\n\n".join(notes), step))
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
            cells = (site, ranges(alert.heads), alert.rule, alert.message, forecast)
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
            past = np.array([[worst.get(s, UNKNOWN)[index] for _, worst in self._history.columns] for s in sites])
            title = f"{what} per head, step {step:,}"
            images[f"qkwatch/{field}_by_head"] = heat_map(now, scale, title, short_names(list(named)), heads, "head")
            title = f"{what} of each layer's worst head, to step {step:,}"
            images[f"qkwatch/{field}_over_time"] = heat_map(past, scale, title, short_names(sites), steps, "step")
        return images


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
