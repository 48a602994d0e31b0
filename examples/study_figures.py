"""Would one figure and one limit do better than the rules? For `study.py report`.

Each figure of a reading, over all heads of the model (its largest value, quartiles, smallest), rising or falling, gets
the strictest limit with which every harmful run of the tuning seeds crosses it before harm. How many healthy runs
cross it too, and what does it do on the held-out seeds?
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter

import torch
from rich.console import Console
from rich.table import Table
from study_runs import EVERY, Row
from torch import Tensor

FIGURES: dict[str, Callable[[Row], list[float]]] = {
    **{
        name: itemgetter(name)
        for name in ("max_logit", "margin", "entropy", "entropy_corrected", "saturated", "grad_signal", "over_100")
    },
    "q_rms · k_rms": lambda r: [q * k for q, k in zip(r["q_rms"], r["k_rms"], strict=True)],
}
OVER_HEADS = {"all heads": 0.0, "3/4 of the heads": 0.25, "half of the heads": 0.5, "a quarter": 0.75, "one head": 1.0}
Path = list[tuple[int, float]]  # (step, the figure so far at its worst), with the sign that makes harm large


def paths(row: Row, figure: Callable[[Row], list[float]]) -> dict[tuple[str, int], Path]:
    """Per way over the heads, and sign: how far the figure has come by each step."""
    found: dict[tuple[str, int], Path] = {(over, sign): [] for over in OVER_HEADS for sign in (1, -1)}
    for readings in row["readings"]:
        if readings[0]["step"] % EVERY:
            continue
        values = torch.tensor([math.nan if v is None else v for r in readings for v in figure(r)])
        for sign in (1, -1):
            spread = torch.nanquantile(sign * values, torch.tensor(list(OVER_HEADS.values())))
            for over, value in zip(OVER_HEADS, worst(spread), strict=True):
                path = found[over, sign]
                path.append((readings[0]["step"], max(value, path[-1][1] if path else -math.inf)))
    return found


def worst(values: Tensor) -> list[float]:
    return [-math.inf if math.isnan(v) else v for v in values.tolist()]


def limit_of(rows: Sequence[tuple[Row, Path]]) -> float:
    """The strictest limit that all harmful runs cross before harm."""
    return min(
        max((value for step, value in path if step < row["harm"]), default=-math.inf)
        for row, path in rows
        if row["harm"] is not None
    )


def outcome(rows: Sequence[tuple[Row, Path]], limit: float) -> tuple[int, int, int]:
    """Harmful runs that cross it before harm; those that don't; healthy runs that cross it."""
    before = missed = false = 0
    for row, path in rows:
        at = next((step for step, value in path if value >= limit), None)
        if row["harm"] is None:
            false += at is not None
        else:
            before, missed = before + (at is not None and at < row["harm"]), missed + (at is None or at >= row["harm"])
    return before, missed, false


def candidates(rows: Sequence[Row]) -> Iterator[tuple[str, tuple[int, int, int], tuple[int, int, int]]]:
    """What is asked, and the outcomes on the tuning and on the held-out seeds."""
    runs = [row for row in rows if row["kind"] == "run"]
    for name, figure in FIGURES.items():
        each = [paths(row, figure) for row in runs]
        for over, sign in each[0]:
            halves = [
                [(row, p[over, sign]) for row, p in zip(runs, each, strict=True) if row["half"] == half]
                for half in ("tune", "held-out")
            ]
            limit = limit_of(halves[0])
            if math.isfinite(limit):
                asked = f"{name} {'above' if sign > 0 else 'below'} {sign * limit:.3g} in {over}"
                yield asked, outcome(halves[0], limit), outcome(halves[1], limit)


def figure_table(rows: Sequence[Row], console: Console, most: int = 8) -> None:
    if {row["half"] for row in rows if row["kind"] == "run" and row["harm"] is not None} != {"tune", "held-out"}:
        return
    table = Table(
        "asked of one reading", "tune: before harm", "missed", "false", "held-out: before harm", "missed", "false"
    )
    table.title = "one figure, one limit: the best of all on the tuning seeds"
    for asked, tune, held_out in sorted(candidates(rows), key=lambda c: c[1][2])[:most]:
        table.add_row(asked, *map(str, tune), *map(str, held_out))
    console.print(table)
