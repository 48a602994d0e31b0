"""`qkwatch report`: what qkwatch wrote into TensorBoard logs -> tables. Reads what `panels.py` writes."""

from __future__ import annotations

import html
import math
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich import get_console
from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from qkwatch.alerts import Level
from qkwatch.errors import QKWatchError
from qkwatch.names import short_sites
from qkwatch.report import STYLES

Points = list[tuple[int, float]]  # (step, value), in steps' order

_EVENTS = "*tfevents*"
_TAG = re.compile(r"^(?:.*-)?(qkwatch(?:_\w+)?)/(.+)$")  # a logger may put "prefix-" in front of every tag
_NOT_MEASURED = "-"
# heading, family of tags, which extreme of the run matters, format
_COLUMNS = (
    ("max logit", "qkwatch_max_logit", max, "{:,.4g}"),
    ("entropy", "qkwatch_entropy_min", min, "{:.2f}"),
    ("|q||k|", "qkwatch_qk_rms", max, "{:,.3g}"),
    ("grad signal", "qkwatch_grad_signal_min", min, "{:.2g}"),
    ("saturated", "qkwatch_saturated", max, "{:.0%}"),
)


@dataclass
class Run:
    """What one folder of event files holds of qkwatch.

    Attributes:
        scalars: family of tags ("qkwatch" for the model's own) -> site or figure -> points.
        alerts: (step, level, layer, heads, rule, message) as written.
        notes: other remarks.
        retrofits: (step, text).
    """

    name: str
    scalars: dict[str, dict[str, Points]] = field(default_factory=dict)
    alerts: list[tuple[int, str, str, str, str, str]] = field(default_factory=list)
    notes: list[tuple[int, str]] = field(default_factory=list)
    retrofits: list[tuple[int, str]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.scalars or self.alerts or self.notes or self.retrofits)

    @property
    def sites(self) -> list[str]:
        """Sites in the order in which they were logged first."""
        return list(dict.fromkeys(site for _, tag, _, _ in _COLUMNS for site in self.scalars.get(tag, {})))


def print_report(logdir: str | os.PathLike[str]) -> None:
    """Print every run under `logdir`.

    Raises:
        QKWatchError: there is no such folder, no log in it, or nothing of qkwatch in any of them.
    """
    for i, run in enumerate(read(logdir)):
        get_console().print(*([] if i == 0 else [""]), render(run), sep="\n")


def read(logdir: str | os.PathLike[str]) -> list[Run]:
    """The runs under a folder that hold something of qkwatch, by name. Raises as `print_report`."""
    root = Path(logdir)
    if not root.is_dir():
        raise QKWatchError(f"{logdir} is not a folder of TensorBoard logs" if root.exists() else f"no folder {logdir}")
    folders = sorted({file.parent for file in root.rglob(_EVENTS)})
    if not folders:
        raise QKWatchError(f"no TensorBoard event files under {logdir}; Lightning writes them to lightning_logs/")
    runs = [read_run(folder, str(folder.relative_to(root))) for folder in folders]
    found = [run for run in runs if run]
    if not found:
        raise QKWatchError(
            f"nothing of qkwatch in the {len(runs)} run(s) under {logdir}: was QKWatch() among the Trainer's "
            "callbacks, and did training get past its first step?"
        )
    return found


def read_run(folder: Path, name: str) -> Run:
    """One folder's event files."""
    from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
        EventAccumulator,
    )

    events: Any = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0, "images": 1})
    events.Reload()
    run = Run(name)
    tags = events.Tags()
    for tag in tags["scalars"]:
        if match := _TAG.match(tag):
            family, what = match.groups()
            run.scalars.setdefault(family, {})[what] = [(e.step, e.value) for e in events.Scalars(tag)]
    for tag in tags["tensors"]:
        match = _TAG.match(tag)
        kind = match.group(2).removesuffix("/text_summary") if match else None
        if kind in ("alerts", "retrofits"):
            for event in events.Tensors(tag):
                texts = [value.decode("utf-8", "replace") for value in event.tensor_proto.string_val]
                _take_text(run, str(kind), event.step, "\n".join(texts))
    return run


def _take_text(run: Run, kind: str, step: int, text: str) -> None:
    if kind == "retrofits":
        run.retrofits.append((step, "\n".join(line.removeprefix("    ") for line in text.splitlines())))
        return
    rows = [line for line in text.splitlines() if line.startswith("| **")]
    for row in rows:
        level, site, heads, rule, message, *ahead = [unescape(cell) for cell in re.split(r"(?<!\\)\|", row)[1:-1]]
        message += f"; {ahead[0]}" if ahead and ahead[0] and ahead[0] not in message else ""
        run.alerts.append((step, level.strip("*"), site, heads, rule, message))
    if not rows:
        run.notes.append((step, unescape(text)))


def unescape(text: str) -> str:
    r"""The inverse of `panels.escape`.

    >>> unescape(r" a\_b\|c &lt;x&gt; ")
    'a_b|c <x>'
    """
    return html.unescape(re.sub(r"\\(.)", r"\1", text.strip()))


# -- tables -------------------------------------------------------------------------------------------------


def render(run: Run) -> RenderableType:
    """One run: figures of the model and per layer, alerts, retrofits."""
    parts: list[RenderableType] = [Text(f"run {run.name}", style="bold"), _overall(run)]
    if run.sites:
        parts.append(site_table(run))
    parts += [_alert_line(alert) for alert in run.alerts]
    if not run.alerts:
        parts.append(Text("no alerts"))
    parts += [Text(f"step {step:,}: {note}", style="dim") for step, note in run.notes]
    parts += [Text(f"step {step:,}: {text}") for step, text in run.retrofits]
    return Group(*parts)


def _overall(run: Run) -> Text:
    """The largest logit and the lowest entropy of the model, last and worst."""
    model = run.scalars.get("qkwatch", {})
    parts = []
    for tag, what, pick, form in (
        ("max_logit", "largest logit", max, "{:,.4g}"),
        ("min_entropy", "lowest entropy", min, "{:.2f}"),
    ):
        points = [(step, value) for step, value in model.get(tag, []) if math.isfinite(value)]
        if points:
            step, worst = pick(points, key=lambda point: point[1])
            last = form.format(points[-1][1])
            parts.append(f"{what} {last} at step {points[-1][0]:,} (worst {form.format(worst)} at {step:,})")
    return Text("; ".join(parts) or "no figures of the whole model")


def site_table(run: Run) -> Table:
    """A row per site: the last value, and the worst of the run with its step in a second line."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("layer", no_wrap=True)
    shown = [column for column in _COLUMNS if run.scalars.get(column[1])]
    for heading, *_ in shown:
        table.add_column(f"{heading}\nlast (worst)", justify="right", no_wrap=True)
    names, note = short_sites(run.sites)
    for site, name in zip(run.sites, names, strict=True):
        cells = [_last_and_worst(run.scalars[tag].get(site, []), pick, form) for _, tag, pick, form in shown]
        table.add_row(Text(name), *cells)
    if note:
        table.caption = Text(note)
    return table


def _last_and_worst(points: Points, pick: Any, form: str) -> str:
    values = [value for _, value in points if math.isfinite(value)]
    if not values:
        return _NOT_MEASURED
    last, worst = form.format(values[-1]), form.format(pick(values))
    return f"{last} ({worst})"


def _alert_line(alert: tuple[int, str, str, str, str, str]) -> Text:
    step, level, _, _, _, message = alert
    style = STYLES[Level[level]] if level in Level.__members__ else ""
    return Text(f"step {step:,} ").append(level, style=style).append(f" {message}")
