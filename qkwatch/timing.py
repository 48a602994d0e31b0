"""Times measured side by side: every contender once a round, and what is told is a ratio within a round."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import torch

Times = dict[str, list[float]]  # contender -> seconds, one a round
Ratios = dict[str, float]
Result = dict[str, Any]  # "ratios", "targets", "what", or "skipped"


def timed(contenders: Mapping[str, Callable[[], object]], rounds: int) -> Times:
    """Every contender once a round, the first to go rotating; one round before it counts."""
    times: Times = {name: [] for name in contenders}
    names = list(contenders)
    for turn in range(-1, rounds):
        start = turn % len(names)
        for name in names[start:] + names[:start]:
            settle()
            begin = time.perf_counter()
            contenders[name]()
            settle()
            if turn >= 0:
                times[name].append(time.perf_counter() - begin)
    return times


def settle() -> None:
    """Wait for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def ratio(times: Times, above: str, below: str) -> float:
    """Median over rounds.

    >>> ratio({"a": [2.0, 9.0, 4.0], "b": [1.0, 3.0, 1.0]}, "a", "b")
    3.0
    """
    return median(a / b for a, b in zip(times[above], times[below], strict=True))


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
