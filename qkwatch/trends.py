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
    """What a site's past keeps of one reading, per head: max logit, RMS(q)·RMS(k), corrected entropy."""

    step: int
    top: Values
    rms: Values
    entropy: Values


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
            row = Row(step, *(columns([getattr(r, what) for r in block]) for what in ("top", "rms", "entropy")))

    def series(self, depth: int, what: str, head: int) -> list[tuple[int, float]]:
        """(step, log value) of a head's "top" or "rms", oldest first, without what was not measured."""
        rows = ((r.step, getattr(r, what)[head]) for r in self.scales[depth])
        return [(step, math.log(max(value, 1e-9))) for step, value in rows if value is not None]

    def broad(self, depth: int, head: int, limits: Thresholds) -> bool:
        """Whether more than single logits has moved: the norms grew, or the entropy fell. True where not measured."""
        rows = self.scales[depth]
        rms = [r.rms[head] for r in rows]
        entropy = [r.entropy[head] for r in rows]
        norms, sharp = [v for v in rms if v is not None], [v for v in entropy if v is not None]
        if len(norms) < 2 and len(sharp) < 2:
            return True
        grown = len(norms) > 1 and norms[-1] >= (1 + limits.broad_norms) * median(norms[:-1])
        return grown or (len(sharp) > 1 and sharp[-1] <= median(sharp[:-1]) - limits.broad_entropy)

    def rising(self, what: str, head: int, limits: Thresholds) -> int | None:
        """The fastest scale on which the head's value rises; None where it does on none."""
        return next((d for d in range(_SCALES) if rises(self.series(d, what, head), limits)), None)

    def leaps(self, head: int, limits: Thresholds) -> bool:
        """Whether the head's max logit grew by ``early_margin`` within the last `patience` readings, and not alone."""
        top = [r.top[head] for r in self.scales[0][-limits.patience :]]
        measured = [v for v in top if v is not None]
        if len(measured) < 2 or top[-1] is None:
            return False
        grown = measured[-1] >= (1 + limits.early_margin) * measured[0] and measured[-1] >= measured[-2]
        return grown and self.broad(0, head, limits)

    def climbs(self, head: int, limits: Thresholds) -> bool:
        """Whether the head's max logit rises, on a scale on which more than single logits moved."""
        scales = [d for d in range(_SCALES) if rises(self.series(d, "top", head), limits)]
        return any(self.broad(d, head, limits) for d in scales)


def rises(series: list[tuple[int, float]], limits: Thresholds) -> bool:
    """Whether a noisy log series rises: recent median over older median, in units of one reading's noise.

    The noise is the MAD about a robust line: a steady trend is no noise, slow wandering is no trend.
    """
    x = [value for _, value in series]
    p = limits.patience
    if len(x) < p or x[-1] <= x[-p]:
        return False
    growth = median(x[-p:]) - median(x[:-p]) if len(x) >= 2 * p else x[-1] - x[0]
    if growth < math.log1p(limits.rise_margin):
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
    """Steps to each limit from a Theil-Sen line through the last max logits, on the fastest scale that rises.

    A line, not an exponential: that came 20 and more times too early in the labelled runs of `examples/study.py`. The
    interval comes from the 10 % and 90 % quantiles of the pairwise slopes, and is at least `forecast_factor` wide
    either way: those slopes say how well the line fits, not how growth will change.
    """
    targets = (limits.warn_logit, limits.critical_logit, limits.fatal_logit)
    depth = past.rising("top", head, limits)
    points = [(at, math.exp(value)) for at, value in past.series(depth, "top", head)] if depth is not None else []
    recent = points[-limits.forecast_readings :]
    all_slopes = slopes(recent)
    if not all_slopes or (slope := median(all_slopes)) <= 0:
        return Forecast(head, dict.fromkeys(targets))
    level = median(value + slope * (step - at) for at, value in recent)
    slow, fast = (max(all_slopes[round(q * (len(all_slopes) - 1))], 0.0) for q in (0.1, 0.9))
    slow, fast = min(slow, slope / limits.forecast_factor), max(fast, slope * limits.forecast_factor)
    horizon = limits.forecast_horizon * (points[-1][0] - points[0][0])
    reached = past.scales[0][-1].top[head] or 0.0  # the line may pass below it

    def steps(limit: float) -> tuple[float, float, float] | None:
        gap = limit - level
        if limit <= reached or gap <= 0 or gap / slope > horizon:
            return None
        return gap / fast, gap / slope, gap / slow if slow else math.inf

    return Forecast(head, {limit: steps(limit) for limit in targets})


def columns(rows: list[Values]) -> Values:
    """Per head the median over rows; None where nothing was measured."""
    return [reduce(median, column) for column in zip(*rows, strict=True)]


def reduce(how: Callable[[list[float]], float], values: Iterable[float | None]) -> float | None:
    measured = [v for v in values if v is not None]
    return how(measured) if measured else None
