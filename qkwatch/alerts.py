"""What the rules say, and the constants they say it with."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from enum import IntEnum
from itertools import pairwise

from qkwatch.errors import QKWatchError

ALL_SITES = "*"
"""The `Alert.site` of a rule that counts the heads of all sites together."""
BLOCK = 8  # entries of one time scale that make one entry (their median) of the next


class Level(IntEnum):
    """How bad it is, in rising order."""

    INFO = 1
    WARN = 2
    CRITICAL = 3
    FATAL = 4


@dataclass(frozen=True)
class Thresholds:
    """Every constant of the rules. A logit is what enters the softmax; a reading is one measured step.

    Args:
        info_logit: a head's largest |logit| above it is an INFO. Gemma 2 soft-caps logits at 50.
        early_logit: above it, and grown by `early_margin` within `patience` readings, is a WARN.
        warn_logit: above it, and rising or with `over_100_share`, is a WARN. Kimi K2 clips at
            100 (2507.20534).
        critical_logit: above it on `critical_readings` readings in a row is CRITICAL. 1e3 degrades the loss
            (2309.14322).
        fatal_logit: above it at once is FATAL. Every run that passed 1e4 diverged in 2309.14322.
        over_100_share: share (0..1) of visible entries above 100 that matters. 1e-4 was harmless in Moonlight
            (2502.16982).
        double_logit: a max above it that doubled within `double_within` steps is a WARN.
        double_within: optimizer steps.
        collapsed_entropy: a head is collapsed below this sink-corrected normalised entropy (0..1),
        collapsed_logit: and with a largest |logit| above this. Sharp heads with smaller logits are at work: half of a
            layer's were that sharp in every healthy run at the highest healthy LR of `examples/study.py`.
        warn_collapsed_share: share (0..1) of the non-sink heads, of a layer or of all, that must be collapsed
            while RMS(q)·RMS(k) rises.
        critical_collapsed_share: the same for CRITICAL.
        sink_mass: a head with at least this mean mass (0..1) on its sink keys is labelled a sink.
        patience: readings over which a trend must show; also calm readings in a row that end an alert.
        critical_readings: readings in a row for `critical_logit`.
        window: entries kept per time scale. Trends and forecasts see no more than these.
        rise_margin: smallest relative growth that counts as rising (0.2 is 20 %).
        early_margin: relative growth for `early_logit` (2.0: tripled). Healthy runs passed 50 too, slowly.
        rise_sigmas: growth must also exceed so many times the noise of one reading (robust, of log values).
        rise_noise: noise (log units) assumed at `patience` readings; it fades as readings come in.
        broad_norms: a rising or doubling logit counts only with RMS(q)·RMS(k) grown by this (0.2 is 20 %) over the
            same readings, or with the entropy fallen: a single entry may spike above 100 and decay by itself
            (2502.16982).
        broad_entropy: fall of the sink-corrected normalised entropy (0..1) that does as well.
        forecast_readings: the last readings (of the scale that rises) that a forecast's line goes through.
        forecast_factor: least width of a forecast's interval, either way: of the limits that were passed later in the
            runs of `examples/study.py`, 82 to 88 % were passed within it.
        forecast_horizon: nothing is forecast further ahead than so many times the span of the readings kept.
        repeat_after: readings between two alerts of one rule and site whose only news is that heads joined.

    Raises:
        QKWatchError: a value is out of range; the field is named.

    >>> Thresholds(warn_logit=200.0).warn_logit
    200.0
    """

    info_logit: float = 50.0
    early_logit: float = 50.0
    warn_logit: float = 100.0
    critical_logit: float = 1e3
    fatal_logit: float = 1e4
    over_100_share: float = 1e-3
    double_logit: float = 100.0
    double_within: int = 100
    collapsed_entropy: float = 0.1
    collapsed_logit: float = 100.0
    warn_collapsed_share: float = 0.25
    critical_collapsed_share: float = 0.5
    sink_mass: float = 0.95
    patience: int = 3
    critical_readings: int = 2
    window: int = 12
    rise_margin: float = 0.2
    early_margin: float = 2.0
    rise_sigmas: float = 4.0
    rise_noise: float = 0.05
    broad_norms: float = 0.2
    broad_entropy: float = 0.05
    forecast_readings: int = 5
    forecast_factor: float = 5.0
    forecast_horizon: float = 20.0
    repeat_after: int = 10

    def __post_init__(self) -> None:
        shares = {
            "over_100_share",
            "collapsed_entropy",
            "warn_collapsed_share",
            "critical_collapsed_share",
            "sink_mass",
        }
        least = {
            "patience": 2,
            "forecast_readings": 2,
            "forecast_factor": 1,
            "window": BLOCK,
            "critical_readings": 1,
        }
        for f in fields(self):
            value = getattr(self, f.name)
            low = least.get(f.name, 1 if f.type == "int" else 0)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise QKWatchError(f"Thresholds.{f.name} must be a finite number, got {value!r}")
            if f.type == "int" and value != int(value):
                raise QKWatchError(f"Thresholds.{f.name} must be a whole number, got {value!r}")
            if value < low or (f.name in shares and value > 1):
                span = "in [0, 1]" if f.name in shares else f"at least {low}"
                raise QKWatchError(f"Thresholds.{f.name} must be {span}, got {value!r}")
        for lower, upper in pairwise(("early_logit", "warn_logit", "critical_logit", "fatal_logit")):
            if getattr(self, lower) > getattr(self, upper):
                raise QKWatchError(f"Thresholds.{lower} must not be above {upper}: alerts would skip a level")
        if self.warn_collapsed_share > self.critical_collapsed_share:
            raise QKWatchError("Thresholds.warn_collapsed_share must not be above critical_collapsed_share")
        if self.window < 2 * self.patience:
            raise QKWatchError(f"Thresholds.window must be at least twice patience, got {self.window}")
        if self.critical_readings > self.window:
            raise QKWatchError("Thresholds.critical_readings must not be above window: older readings are gone")

    @property
    def marks(self) -> dict[str, float]:
        """The logits of the levels, by name."""
        return {"WARN": self.warn_logit, "CRITICAL": self.critical_logit, "FATAL": self.fatal_logit}


@dataclass(frozen=True)
class Forecast:
    """Steps until a head's max logit passes a limit, should it go on as in the last readings.

    `steps_to[limit]` is (low, mid, high) in optimizer steps; `high` is inf where slower fits never arrive.
    It is None where the max is flat or falling, is already above the limit, or the limit is too far to say.
    """

    head: int
    steps_to: dict[float, tuple[float, float, float] | None]

    def text(self) -> str:
        """The nearest limit in words, or "" where there is none.

        >>> Forecast(0, {100.0: None, 1000.0: (23.6, 118.0, 590.0)}).text()
        'at this rate 1,000 in ~118 steps (24-590)'
        """
        for limit, steps in sorted(self.steps_to.items()):
            if steps is not None:
                low, mid, high = steps
                span = f"{low:,.0f}-{high:,.0f}" if math.isfinite(high) else f"{low:,.0f} or more"
                return f"at this rate {limit:,.0f} in ~{mid:,.0f} steps ({span})"
        return ""


@dataclass(frozen=True)
class Alert:
    """One rule that began to hold at one site.

    `heads` are all its heads there; none for `site == "*"` (all sites together): the message names the sites.
    """

    level: Level
    step: int
    site: str
    heads: tuple[int, ...]
    rule: str
    message: str
    forecast: Forecast | None = None
