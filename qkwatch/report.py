"""Readings and alerts -> Rich. Every function returns a renderable; only `say` prints."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from io import StringIO
from typing import TYPE_CHECKING, Any, Protocol

from rich import get_console
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from qkwatch.rules import ALL_SITES, Alert, Level

if TYPE_CHECKING:
    from torch import Tensor

    from qkwatch.stats import Reading

NOT_MEASURED = "not measured"
STYLES = {
    Level.INFO: "cyan",
    Level.WARN: "yellow",
    Level.CRITICAL: "bold red",
    Level.FATAL: "bold white on red",
}

_TQDM_BARS = ("train_progress_bar", "val_progress_bar", "test_progress_bar", "predict_progress_bar")
_COLUMNS: tuple[tuple[str, str, Callable[[Sequence[float]], float], str], ...] = (
    ("max logit", "max_logit", max, "{:,.4g}"),
    ("margin", "margin", max, "{:,.4g}"),
    ("entropy", "entropy", min, "{:.2f}"),
    ("saturated", "saturated", max, "{:.0%}"),
    ("grad signal", "grad_signal", min, "{:.2g}"),
)
_TIGHT = (0, 1, 0, 0)  # the table fits 80 columns
_RMS = (("q_rms", max, "{:.3g}"), ("k_rms", max, "{:.3g}"))


class Report(Protocol):
    """What `retrofit_text` reads of a `RetrofitReport`."""

    @property
    def applied(self) -> Sequence[str]: ...
    @property
    def refused(self) -> Mapping[str, str]: ...
    @property
    def drift(self) -> Any: ...


def alert_text(alert: Alert) -> Text:
    """One alert: level and step, then its message. Module names are plain text, never read as markup.

    >>> from qkwatch.rules import Alert, Level
    >>> alert_text(Alert(Level.WARN, 30, "h[0]", (1,), "early", "h[0]: head 1: max logit above 50")).plain
    'qkwatch WARN step 30: h[0]: head 1: max logit above 50'
    """
    text = Text("qkwatch ", style="bold")
    text.append(alert.level.name, style=STYLES[alert.level])
    return text.append(f" step {alert.step:,}: {alert.message}", style="not bold")


def reading_table(readings: Sequence[Reading], *, title: str = "attention", most: int = 24) -> Table:
    """A row per reading in model order: the worst head's value with that head in parentheses.

    Worst is the lowest for entropy and gradient signal, the highest elsewhere; RMS q stands over RMS k. Of
    more than `most` readings those with the largest logits are shown, and the caption counts the rest.
    "~" marks a sampled reading.
    """
    shown = sorted(sorted(range(len(readings)), key=lambda i: -_severity(readings[i]))[:most])
    rows = [readings[i] for i in shown]
    notes = []
    if len(rows) < len(readings):
        notes.append(f"the {len(rows)} largest of {len(readings)} by max logit; {len(readings) - len(rows)} left out")
    if any(not r.exact for r in rows):
        notes.append("~ from a sample of the query rows")
    caption = Text("; ".join(notes)) if notes else None
    table = Table(title=Text(title), caption=caption, box=SIMPLE_HEAD, show_edge=False, padding=_TIGHT)
    table.add_column("site", overflow="fold", min_width=8)
    table.add_column("heads", justify="right", no_wrap=True)
    cells = [[_worst(getattr(r, attribute), pick, form) for r in rows] for _, attribute, pick, form in _COLUMNS]
    cells.append([Text("\n").join(_worst(getattr(r, a), pick, form) for a, pick, form in _RMS) for r in rows])
    for name in (*(column[0] for column in _COLUMNS), "rms q, k"):
        table.add_column(name.replace(" ", "\n", 1), justify="right")
    for i, r in enumerate(rows):
        site = Text(("" if r.exact else "~") + _site(r.site))
        table.add_row(site, str(r.heads), *(column[i] for column in cells))
    return table


def retrofit_text(report: Report) -> Text:
    """What a retrofit did: sites patched, the drift that was measured, and each refusal with its reason."""
    text = Text("qkwatch retrofit: ", style="bold")
    text.append(f"{_count(len(report.applied), 'site')} patched", style="green" if report.applied else "yellow")
    text.append(f", {len(report.refused)} refused; drift {_drift(report.drift)}", style="not bold")
    if report.applied:
        text.append(f"\n  patched: {_few([_site(name) for name in report.applied])}", style="not bold")
    for name, reason in report.refused.items():
        text.append(f"\n  refused: {_site(name)}: {reason}", style="yellow not bold")
    return text


def summary(
    *,
    sites: int,
    readings: int,
    alerts: Sequence[Alert],
    retrofits: Sequence[Report] = (),
    last: Sequence[Reading] = (),
    worst: int = 5,
) -> Group:
    """The end of a fit: what was watched, alerts by level, retrofits, and the layers with the largest logits.

    Args:
        sites: sites watched.
        readings: steps on which readings were taken.
        alerts: all alerts of the run.
        retrofits: reports in the order they were applied.
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
    parts += [retrofit_text(report) for report in retrofits]
    if last:
        parts.append(reading_table(last, title="last reading", most=worst))
    return Group(*parts)


def say(renderable: RenderableType, progress_bar: object | None = None) -> None:
    """Print above a live progress bar without breaking it.

    A bar that draws with tqdm gets the rendered text through its own `print`, which drops text while none of
    its bars is open. So then, and with a Rich bar or none, Rich's shared console prints: it knows the live
    display, and a second console would strand half a bar.
    """
    console = get_console()
    if not _tqdm_is_open(progress_bar):
        console.print(renderable)
        return
    page = Console(
        file=StringIO(),
        width=console.width,
        force_terminal=console.is_terminal,
        color_system=console.color_system or None,  # type: ignore[arg-type]
        no_color=console.no_color,
    )
    page.print(renderable)
    progress_bar.print(page.file.getvalue().rstrip("\n"))  # type: ignore[union-attr, attr-defined]


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


def _site(name: str) -> str:
    return name or "(the model itself)"


def _count(n: int, noun: str) -> str:
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def _few(names: Sequence[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _severity(reading: Reading) -> float:
    return max((v for v in reading.max_logit.tolist() if not math.isnan(v)), default=-1.0)


def _worst(values: Tensor, pick: Callable[[Sequence[float]], float], form: str) -> Text:
    """The worst head's value and, where there are several heads, which one it is."""
    numbers = [v for v in values.tolist() if not math.isnan(v)]
    if not numbers:
        return Text(NOT_MEASURED, style="dim")
    value = pick(numbers)
    head = f" ({values.tolist().index(value)})" if len(values) > 1 else ""
    return Text(form.format(value) + head)


def _drift(drift: Any) -> str:
    """A number, or named numbers, or nothing: in words."""
    if drift is None or (isinstance(drift, Mapping) and not drift):
        return NOT_MEASURED
    if isinstance(drift, Mapping):
        return ", ".join(f"{name} {_drift(value)}" for name, value in drift.items())
    if isinstance(drift, (int, float)):
        return NOT_MEASURED if math.isnan(drift) else f"{drift:.3g}"
    return str(drift)


def _level_line(level: Level, alerts: Sequence[Alert]) -> Text:
    first = min(alerts, key=lambda a: a.step)
    where = "all sites" if first.site == ALL_SITES else _site(first.site)
    sites = len({a.site for a in alerts if a.site != ALL_SITES})
    text = Text("  ").append(level.name, style=STYLES[level])
    across = f" at {_count(sites, 'site')}" if sites else ""
    return text.append(f" {len(alerts)}{across}, first at step {first.step:,} ({where}: {first.rule})")
