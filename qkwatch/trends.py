"""A site's past on a few time scales, and whether a noisy figure in it rises."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from statistics import median
from typing import NamedTuple

from qkwatch.alerts import BLOCK, Forecast, Thresholds

_SCALES = 3  # time scales of a site's history: readings, blocks of readings, blocks of blocks

Values = list["float | None"]  # one per head; None is "not measured"


class Row(NamedTuple):
    """What a site's past keeps of one reading: max logit and RMS(q)·RMS(k) per head."""

    step: int
    top: Values
    rms: Values


@dataclass
class History:
    """A site's past on a few time scales; bounded by `_SCALES` x window rows."""

    count: int = 0
    scales: list[list[Row]] = field(default_factory=lambda: [[] for _ in range(_SCALES)])

    def push(self, row: Row, window: int) -> None:
        """Add a reading; each full block adds its median to the next, slower scale."""
        self.count += 1
        for depth, scale in enumerate(self.scales):
            scale.append(row)
            del scale[:-window]
            if (self.count // BLOCK**depth) % BLOCK:
                return
            block = scale[-BLOCK:]
            step = int(median(r.step for r in block))
            row = Row(step, columns([r.top for r in block]), columns([r.rms for r in block]))

    def series(self, depth: int, what: str, head: int) -> list[tuple[int, float]]:
        """(step, log value) of a head's "top" or "rms", oldest first, without what was not measured."""
        rows = ((r.step, getattr(r, what)[head]) for r in self.scales[depth])
        return [(step, math.log(max(value, 1e-9))) for step, value in rows if value is not None]

    def rising(self, what: str, head: int, limits: Thresholds, margin: float | None = None) -> int | None:
        """The fastest scale on which the head's value rises by ``margin``; None where it does on none."""
        scales = range(_SCALES)
        return next((d for d in scales if rises(self.series(d, what, head), limits, margin)), None)


def rises(series: list[tuple[int, float]], limits: Thresholds, margin: float | None = None) -> bool:
    """Whether a noisy log series rises: recent median over older median, in units of one reading's noise.

    The noise is the MAD about a robust line: a steady trend is no noise, slow wandering is no trend.
    """
    x = [value for _, value in series]
    p = limits.patience
    if len(x) < p or x[-1] <= x[-p]:
        return False
    growth = median(x[-p:]) - median(x[:-p]) if len(x) >= 2 * p else x[-1] - x[0]
    if growth < math.log1p(limits.rise_margin if margin is None else margin):
        return False
    slope = median(slopes(list(enumerate(x))))
    offsets = [value - slope * i for i, value in enumerate(x)]
    base = median(offsets)
    noise = 1.4826 * median(abs(offset - base) for offset in offsets)
    return growth >= limits.rise_sigmas * max(noise, limits.rise_noise * p / len(x))


def slopes(points: Sequence[tuple[int, float]]) -> list[float]:
    """The slopes between all pairs of points, sorted; their median is the Theil-Sen slope (Sen 1968)."""
    return sorted((b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(points, 2) if b[0] > a[0])


def doubled(series: list[tuple[int, float | None]], limits: Thresholds) -> bool:
    """Whether the last value is twice the base of the last `double_within` steps; an odd low one is none."""
    (now, last), earlier = series[-1], series[:-1]
    base = sorted(v for step, v in earlier if v is not None and now - step <= limits.double_within)
    return last is not None and bool(base) and last >= 2 * base[1 if len(base) > 2 else 0]


def forecast(past: History, head: int, step: int, limits: Thresholds) -> Forecast:
    """Steps to each limit from a Theil-Sen line through log max, on the fastest scale that rises.

    The interval comes from the 10 % and 90 % quantiles of the pairwise slopes.
    """
    targets = (limits.warn_logit, limits.critical_logit, limits.fatal_logit)
    depth = past.rising("top", head, limits)
    points = past.series(depth, "top", head) if depth is not None else []
    all_slopes = slopes(points)
    if not all_slopes or (slope := median(all_slopes)) <= 0:
        return Forecast(head, dict.fromkeys(targets))
    level = median(value + slope * (step - at) for at, value in points)
    slow, fast = (max(all_slopes[round(q * (len(all_slopes) - 1))], 0.0) for q in (0.1, 0.9))
    horizon = limits.forecast_horizon * (points[-1][0] - points[0][0])

    def steps(limit: float) -> tuple[float, float, float] | None:
        gap = math.log(max(limit, 1e-9)) - level
        if gap <= 0 or gap / slope > horizon:
            return None
        return gap / fast, gap / slope, gap / slow if slow else math.inf

    return Forecast(head, {limit: steps(limit) for limit in targets})


def columns(rows: list[Values]) -> Values:
    """Per head the median over rows; None where nothing was measured."""
    return [reduce(median, column) for column in zip(*rows, strict=True)]


def reduce(how: Callable[[list[float]], float], values: Iterable[float | None]) -> float | None:
    measured = [v for v in values if v is not None]
    return how(measured) if measured else None
