"""Readings and alerts -> Rich. Every function returns a renderable; only `say` prints."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from io import StringIO
from statistics import median
from typing import TYPE_CHECKING, NamedTuple, Protocol

from rich import get_console
from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from qkwatch.alerts import ALL_SITES, Alert, Level
from qkwatch.names import abbreviate, few, short_sites, site_label

if TYPE_CHECKING:
    from torch import Tensor

    from qkwatch.reading import Reading

NOT_MEASURED = "not measured"
STYLES = {
    Level.INFO: "cyan",
    Level.WARN: "yellow",
    Level.CRITICAL: "bold red",
    Level.FATAL: "bold white on red",
}

_TQDM_BARS = ("train_progress_bar", "val_progress_bar", "test_progress_bar", "predict_progress_bar")
_TIGHT = (0, 1, 0, 0)


class _Column(NamedTuple):
    name: str
    field: str
    pick: Callable[[Sequence[float]], float]
    form: str


_COLUMNS = (
    _Column("max logit", "max_logit", max, "{:,.4g}"),
    _Column("margin", "margin", max, "{:,.4g}"),
    _Column("entropy", "entropy", min, "{:.2f}"),
    _Column("saturated", "saturated", max, "{:.0%}"),
    _Column("grad signal", "grad_signal", min, "{:.2g}"),
)
_ORDER = ("heads", "max logit", "margin", "entropy", "saturated", "grad signal", "rms q, k")
_DROP = (
    "margin",
    "heads",
    "rms q, k",
    "saturated",
    "grad signal",
    "entropy",
)  # in this order, where the terminal is narrow


class Report(Protocol):
    """What `retrofit_text` reads of a `RetrofitReport`."""

    @property
    def applied(self) -> Sequence[str]: ...
    @property
    def refused(self) -> Mapping[str, str]: ...
    @property
    def drift(self) -> Mapping[str, float]: ...
    @property
    def clip(self) -> bool: ...
    @property
    def notes(self) -> Mapping[str, str]: ...


def alert_text(alert: Alert) -> Text:
    """One alert: level and step, then its message. Module names are plain text, never read as markup.

    >>> from qkwatch.rules import Alert, Level
    >>> alert_text(Alert(Level.WARN, 30, "h[0]", (1,), "early", "h[0]: head 1: max logit above 50")).plain
    'qkwatch WARN step 30: h[0]: head 1: max logit above 50'
    """
    text = Text("qkwatch ", style="bold")
    text.append(alert.level.name, style=STYLES[alert.level])
    return text.append(f" step {alert.step:,}: {alert.message}", style="not bold")


def alert_texts(alerts: Sequence[Alert]) -> list[Text]:
    """A step's alerts, those of one rule in one text: the first in full, of the others the layers.

    >>> from qkwatch.rules import Alert, Level
    >>> one = [Alert(Level.WARN, 30, f"h.{i}", (1,), "early", f"h.{i}: head 1: max logit above 50") for i in range(4)]
    >>> [text.plain for text in alert_texts(one)]
    ['qkwatch WARN step 30: h.0: head 1: max logit above 50; likewise at 3 more layers: h.1-3']
    """
    rules: dict[tuple[Level, str], list[Alert]] = {}
    for alert in alerts:
        rules.setdefault((alert.level, alert.rule), []).append(alert)
    texts = []
    for first, *others in rules.values():
        text = alert_text(first)
        if others:
            names = few(abbreviate([site_label(alert.site) for alert in others]))
            text.append(f"; likewise at {len(others)} more layer{'s' if len(others) > 1 else ''}: {names}", "not bold")
        texts.append(text)
    return texts


def reading_table(readings: Sequence[Reading], *, title: str = "attention", most: int = 24) -> RenderableType:
    """A row per reading in model order: the worst head's value with that head in parentheses.

    Worst is the lowest for entropy and gradient signal, the highest elsewhere. Of more than `most` readings those
    with the largest logits are shown, and the caption counts the rest. "~" marks a sampled reading, "-" what was
    not measured. Names lose what all of them share, and columns are left out where the terminal is narrow.
    """
    return _ReadingTable(readings, title, most)


class _ReadingTable:
    """Chooses its columns when it is drawn, because only then the width is known."""

    def __init__(self, readings: Sequence[Reading], title: str, most: int):
        shown = sorted(sorted(range(len(readings)), key=lambda i: -_severity(readings[i]))[:most])
        self.title, self.rows, self.left_out = title, [readings[i] for i in shown], len(readings) - len(shown)
        names, self.note = short_sites([r.site for r in readings])
        self.names = [("" if readings[i].exact else "~") + names[i] for i in shown]
        self.cells = {c.name: [_worst(getattr(r, c.field), c.pick, c.form) for r in self.rows] for c in _COLUMNS}
        self.cells["rms q, k"] = [Text(f"{_largest(r.q_rms)}, {_largest(r.k_rms)}") for r in self.rows]
        self.cells["heads"] = [Text(str(r.heads)) for r in self.rows]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for dropped in range(len(_DROP) + 1):
            table = self._table([name for name in _ORDER if name not in _DROP[:dropped]])
            if console.measure(table, options=options.update(width=10_000)).maximum <= options.max_width:
                break
        yield table

    def _table(self, columns: Sequence[str]) -> Table:
        caption = Text("; ".join(self._notes(columns)))
        table = Table(title=Text(self.title), box=SIMPLE_HEAD, show_edge=False, padding=_TIGHT)
        table.caption = caption if caption else None
        table.add_column("site", no_wrap=True)
        for name in columns:
            heading = name if name == "rms q, k" else name.replace(" ", "\n", 1)
            table.add_column(heading, justify="right", no_wrap=True)
        for i, name in enumerate(self.names):
            table.add_row(Text(name), *(self.cells[column][i] for column in columns))
        return table

    def _notes(self, columns: Sequence[str]) -> list[str]:
        notes = [self.note] if self.note else []
        if self.left_out:
            total = len(self.rows) + self.left_out
            notes.append(f"the {len(self.rows)} largest of {total} by max logit; {self.left_out} left out")
        if any(not r.exact for r in self.rows):
            notes.append("~ from a sample of the query rows")
        if any("-" in self.cells[column][i].plain.split(", ") for column in columns for i in range(len(self.rows))):
            notes.append(f"- {NOT_MEASURED}")
        if any(r.heads > 1 for r in self.rows):
            notes.append("(n) the head")
        return notes


def retrofit_text(report: Report, *, after: int | None = None, ramp_steps: int = 0) -> Text:
    """What a retrofit did: sites patched, how far their outputs changed, what stays unbounded, and each refusal.

    Args:
        report: of `retrofit_`, or of a callback's retrofits.
        after: the step after which it was made.
        ramp_steps: over so many steps the change comes about.
    """
    text = Text(f"qkwatch retrofit{'' if after is None else f' after step {after:,}'}: ", style="bold")
    done = "under QK-clip" if report.clip else "patched"
    with_ = f" with {' and '.join(variants)}" if (variants := _variants(report)) else ""
    text.append(f"{_count(len(report.applied), 'site')} {done}{with_}", style="green" if report.applied else "yellow")
    ramp = f", over {ramp_steps:,} steps" if ramp_steps and report.applied else ""
    text.append(f", {len(report.refused)} refused{_drift(report.drift)}{ramp}", style="not bold")
    if report.applied:
        text.append(f"\n  {done}: {few(abbreviate([site_label(name) for name in report.applied]))}", style="not bold")
    for what, told, style in (("note", report.notes, "not bold"), ("refused", report.refused, "yellow not bold")):
        by_reason: dict[str, list[str]] = {}
        for name, reason in told.items():
            by_reason.setdefault(reason, []).append(site_label(name))
        for reason, names in by_reason.items():
            text.append(f"\n  {what}: {few(abbreviate(names))}: {reason}", style=style)
    return text


def summary(
    *,
    sites: int,
    readings: int,
    alerts: Sequence[Alert],
    retrofits: Sequence[Text] = (),
    last: Sequence[Reading] = (),
    worst: int = 5,
) -> Group:
    """The end of a fit: what was watched, alerts by level, retrofits, and the layers with the largest logits.

    Args:
        sites: sites watched.
        readings: steps on which readings were taken.
        alerts: all alerts of the run.
        retrofits: what was done and when, in words.
        last: the last step's readings; the `worst` of them are tabled.
        worst: rows of that table.
    """
    parts: list[RenderableType] = [
        Text(f"qkwatch watched {_count(sites, 'site')} on {_count(readings, 'step')}", style="bold")
    ]
    if not alerts:
        parts.append(Text("  no alerts"))
    for level in sorted(Level, reverse=True):
        if of_level := [a for a in alerts if a.level == level]:
            parts.append(_level_line(level, of_level))
    parts += retrofits
    if last:
        parts.append(reading_table(last, title="last reading", most=worst))
    return Group(*parts)


def say(renderable: RenderableType, progress_bar: object | None = None) -> None:
    """Print above a live progress bar without breaking it.

    A bar that draws with tqdm gets the rendered text through its own `print`, which drops text while none of
    its bars is open. So then, and with a Rich bar or none, Rich's shared console prints: it knows the live
    display, and a second console would strand half a bar. What the output's encoding lacks becomes "?".
    """
    console = get_console()
    if _tqdm_is_open(progress_bar):
        progress_bar.print(_page(console, renderable).rstrip("\n"))  # type: ignore[union-attr]
    elif console.encoding.startswith("utf"):
        console.print(renderable)
    else:  # it would raise in the middle, and again with whatever is printed next
        console.print(Text.from_ansi(_page(console, renderable)))


def _page(console: Console, renderable: RenderableType) -> str:
    """What a console would print, in characters that it can."""
    encoding, paper = console.encoding, _Paper(console.encoding)
    page = Console(
        file=paper,
        width=console.width,
        force_terminal=console.is_terminal,
        color_system=console.color_system or None,  # type: ignore[arg-type]
        no_color=console.no_color,
    )
    page.print(renderable)
    return paper.getvalue().encode(encoding, "replace").decode(encoding)


class _Paper(StringIO):
    """Rich draws with what the encoding of its file has."""

    encoding = ""

    def __init__(self, encoding: str) -> None:
        super().__init__()
        self.encoding = encoding


def _tqdm_is_open(bar: object | None) -> bool:
    """Whether one of the bar's tqdm bars is on screen. Lightning's properties raise before there is one."""
    for name in _TQDM_BARS if bar is not None else ():
        try:
            inner = getattr(bar, name)
        except (AttributeError, TypeError, AssertionError):
            continue
        if getattr(inner, "disable", None) is False:
            return True
    return False


def _count(n: int, noun: str) -> str:
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def _severity(reading: Reading) -> float:
    return max((v for v in reading.max_logit.tolist() if not math.isnan(v)), default=-1.0)


def _worst(values: Tensor, pick: Callable[[Sequence[float]], float], form: str) -> Text:
    """The worst head's value and, where there are several heads, which one it is."""
    numbers = [v for v in values.tolist() if not math.isnan(v)]
    if not numbers:
        return Text("-", style="dim")
    value = pick(numbers)
    head = f" ({values.tolist().index(value)})" if len(values) > 1 else ""
    return Text(form.format(value) + head)


def _largest(values: Tensor) -> str:
    return f"{max(numbers):.3g}" if (numbers := [v for v in values.tolist() if not math.isnan(v)]) else "-"


def _variants(report: Report) -> list[str]:
    """The variants of the plan, each once."""
    plan = getattr(report, "plan", None)
    return list(dict.fromkeys(site.variant.name for site in plan.sites)) if plan is not None else []


def _drift(drift: Mapping[str, float]) -> str:
    """How far the outputs of the patched layers changed, where that was measured."""
    known = {name: value for name, value in drift.items() if not math.isnan(value)}
    if not known:
        return ""
    worst = max(known, key=lambda name: known[name])
    if len(known) == 1:
        return f"; its output changes by {known[worst]:.2g} of its size"
    middle = median(known.values())
    return f"; their outputs change by {middle:.2g} of their size (median), {known[worst]:.2g} at {site_label(worst)}"


def _level_line(level: Level, alerts: Sequence[Alert]) -> Text:
    first = min(alerts, key=lambda a: a.step)
    where = "all sites" if first.site == ALL_SITES else site_label(first.site)
    sites = len({a.site for a in alerts if a.site != ALL_SITES})
    text = Text("  ").append(level.name, style=STYLES[level])
    across = f" at {_count(sites, 'site')}" if sites else ""
    return text.append(f" {len(alerts)}{across}, first at step {first.step:,} ({where}: {first.rule})")
