"""Are the options of `QKWatch` what they should be? Before anything is trained."""

from __future__ import annotations

import math
from typing import Any

from qkwatch.errors import QKWatchError, unknown
from qkwatch.rules import Thresholds
from qkwatch.variants import CALIBRATE, CLIP


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
    if watch.rows not in ("all", "auto") and not _whole(watch.rows, 1):
        raise QKWatchError(f'QKWatch rows must be "all", "auto" or a whole number of at least 1, got {watch.rows!r}')
    if not _positive(watch.cap):
        raise QKWatchError(f"QKWatch cap must be a positive number, got {watch.cap!r}")
    if watch.variant == CLIP and watch.ramp_steps:
        raise QKWatchError(f"QKWatch ramp_steps must be 0 with variant {CLIP!r}: it has no normed function to pass to")
    if watch.max_gain is not None and not _positive(watch.max_gain):
        raise QKWatchError(f"QKWatch max_gain must be a positive number or None, got {watch.max_gain!r}")
    if watch.budget is not None and not _positive(watch.budget):
        raise QKWatchError(f"QKWatch budget must be a positive number or None, got {watch.budget!r}")
    if watch.calibrate is not None and watch.calibrate not in CALIBRATE:
        raise unknown("QKWatch calibrate", watch.calibrate, (*CALIBRATE, None))
    if not isinstance(watch.thresholds, Thresholds):
        raise QKWatchError(f"QKWatch thresholds must be a Thresholds, got {type(watch.thresholds).__name__}")
    patterns = [watch.layers] if isinstance(watch.layers, str) or watch.layers is None else list(watch.layers)
    for pattern in patterns:
        if pattern is not None and not isinstance(pattern, str):
            raise QKWatchError(f"QKWatch layers must be globs over module names, got {pattern!r}")


def _whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _positive(value: object) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and math.isfinite(value) and value > 0  # type: ignore[arg-type, operator]
