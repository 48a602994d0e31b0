"""Are the options of `QKWatch` what they should be? Before anything is trained."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from typing import Any

from qkwatch.alerts import Thresholds
from qkwatch.errors import QKWatchError, unknown
from qkwatch.variants import CALIBRATE, CLIP, get_variant


def check_options(watch: Any) -> None:
    """Raises `QKWatchError` for the first option that is out of range, with its name and what is allowed."""
    for name, known in (("retrofit", ("off", "auto", "now")), ("on_error", ("warn", "raise"))):
        if getattr(watch, name) not in known:
            raise unknown(f"QKWatch {name}", getattr(watch, name), known)
    for name, least in (("every_n_steps", 1), ("ramp_steps", 0), ("budget_steps", 1)):
        if not _whole(getattr(watch, name), least):
            raise QKWatchError(
                f"QKWatch {name} must be a whole number of at least {least}, got {getattr(watch, name)!r}"
            )
    check_rows("QKWatch", watch.rows)
    check_cap(watch.cap, watch.max_gain, "QKWatch")
    if watch.variant == CLIP and watch.ramp_steps:
        raise QKWatchError(f"QKWatch ramp_steps must be 0 with variant {CLIP!r}: it has no normed function to pass to")
    if watch.budget is not None and not _positive(watch.budget):
        raise QKWatchError(f"QKWatch budget must be a positive number or None, got {watch.budget!r}")
    if watch.calibrate is not None and watch.calibrate not in CALIBRATE:
        raise unknown("QKWatch calibrate", watch.calibrate, (*CALIBRATE, None))
    if not isinstance(watch.thresholds, Thresholds):
        raise QKWatchError(f"QKWatch thresholds must be a Thresholds, got {type(watch.thresholds).__name__}")
    several = isinstance(watch.layers, Iterable) and all(isinstance(pattern, str) for pattern in watch.layers)
    if watch.layers is not None and not several:  # a string is both
        raise QKWatchError(f"QKWatch layers must be a glob over module names, or several, got {watch.layers!r}")
    idle = [
        f"{name}={getattr(watch, name)!r}" for name in ("ramp_steps", "calibrate", "budget") if getattr(watch, name)
    ]
    if watch.variant != get_variant("l2"):
        idle.insert(0, f"variant={getattr(watch.variant, 'name', watch.variant)!r}")
    if watch.retrofit == "off" and idle:
        warnings.warn(f'QKWatch: {", ".join(idle)} has no effect with retrofit="off"', stacklevel=4)


def check_cap(cap: object, max_gain: object, where: str) -> None:
    """Raises `QKWatchError` where one of them is no positive, finite number (None: no ceiling)."""
    if not _positive(cap):
        raise QKWatchError(f"{where} cap must be a positive, finite number, got {cap!r}")
    if max_gain is not None and not _positive(max_gain):
        raise QKWatchError(f"{where} max_gain must be a positive number or None, got {max_gain!r}")


def check_rows(whose: str, rows: object) -> None:
    """Raises `QKWatchError` unless ``rows`` says how many query rows to measure."""
    if rows not in ("all", "auto") and not _whole(rows, 1):
        raise QKWatchError(f'{whose} rows must be "all", "auto" or a whole number of at least 1, got {rows!r}')


def _whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _positive(value: object) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and math.isfinite(value) and value > 0  # type: ignore[arg-type, operator]
