"""Made cases that look alarming and are not: none may reach WARN."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from qkwatch import Level, Thresholds
from qkwatch.reading import reading_from
from qkwatch.rules import Rules
from qkwatch.stats import qk_stats

BATCH, HEADS, LENGTH, DIM = 2, 4, 64, 16
READINGS, EVERY = 40, 10
Case = tuple[Tensor, Tensor, "Tensor | None", bool]  # q, k, mask, is_causal


def _noise(g: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=g)


def _random(g: torch.Generator) -> tuple[Tensor, Tensor]:
    return _noise(g, BATCH, HEADS, LENGTH, DIM), _noise(g, BATCH, HEADS, LENGTH, DIM)


def sink(reading: int, g: torch.Generator) -> Case:
    """From the 15th reading on every head puts most of its mass on the first token."""
    q, k = _random(g)
    if reading >= 15:
        q[..., 0] += 6
        k[:, :, 0, 0] += 8
    return q, k, None, True


def previous_token(reading: int, g: torch.Generator) -> Case:
    """Heads as sharp as can be, on the right key; logits near 45."""
    angle = torch.arange(LENGTH)[:, None] * (10000 ** (-torch.arange(DIM // 2) / (DIM // 2)))
    at = torch.cat([angle.cos(), angle.sin()], -1).expand(BATCH, HEADS, -1, -1)
    one = torch.ones(())
    size = math.sqrt(45 * math.sqrt(DIM) / (DIM // 2))
    k = at * size * (1 + 0.05 * _noise(g, BATCH, HEADS, 1, 1))
    return torch.roll(at, 1, dims=2) * size * one, k, None, True


def window(reading: int, g: torch.Generator) -> Case:
    """Each row sees eight keys."""
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    return *_random(g), (distance >= 0) & (distance < 8), False


def padding(reading: int, g: torch.Generator) -> Case:
    """Three quarters of every second sequence are padding."""
    mask = torch.ones(BATCH, 1, 1, LENGTH, dtype=torch.bool)
    mask[1, ..., LENGTH // 4 :] = False
    return *_random(g), mask, False


def spike(reading: int, g: torch.Generator) -> Case:
    """One entry in 16,000 jumps above 100 at the 15th reading and decays by itself (as in Moonlight)."""
    q, k = _random(g)
    size = 150 * 0.8 ** (reading - 15) if reading >= 15 else 0.0
    direction = torch.zeros(DIM)
    direction[0] = math.sqrt(size * math.sqrt(DIM))
    q[0, 0, 40, :], k[0, 0, 7, :] = q[0, 0, 40] * 0.1 + direction, k[0, 0, 7] * 0.1 + direction
    k[0, 0, :7, 0] *= 0.05
    k[0, 0, 8:, 0] *= 0.05
    q[0, 0, :40, 0] *= 0.05
    q[0, 0, 41:, 0] *= 0.05
    return q, k, None, True


CASES: dict[str, Callable[[int, torch.Generator], Case]] = {
    "first-token sinks": sink,
    "previous-token heads": previous_token,
    "windows": window,
    "padding": padding,
    "sparse spike above 100": spike,
}


def warned(case: str, seed: int, thresholds: Thresholds) -> tuple[bool, float]:
    """Whether the rules reached WARN in `READINGS` readings, and the largest logit among these."""
    g, rules, worst, top = torch.Generator().manual_seed(seed), Rules(thresholds), 0, 0.0
    for reading in range(READINGS):
        q, k, mask, causal = CASES[case](reading, g)
        packed = qk_stats(q, k, scale=DIM**-0.5, mask=mask, is_causal=causal)
        found = reading_from(packed, "made", step=reading * EVERY)
        top = max(top, float(found.max_logit.max()))
        worst = max([worst, *(a.level for a in rules.update(reading * EVERY, [found]))])
    return worst >= Level.WARN, top
