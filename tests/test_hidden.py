"""Keys that a finite number hides among the logits: however the model writes it, they are no logits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from qkwatch import Reading, find_sites, retrofit_, watch

T, H, D = 20, 3, 8
SEEN = torch.ones(T, T, dtype=torch.bool).tril()
AT = (~SEEN).nonzero(as_tuple=True)

Spelling = Callable[[Tensor], Tensor]


def _put(logits: Tensor) -> Tensor:
    logits = logits.clone()
    logits[(slice(None), slice(None), *AT)] = -1e9
    return logits


SPELLINGS: dict[str, Spelling] = {
    "where(m, l, -1e9)": lambda x: torch.where(SEEN, x, -1e9),
    "where(~m, -1e4, l)": lambda x: torch.where(~SEEN, torch.tensor(-1e4), x),
    "masked_fill(m, tensor)": lambda x: x.masked_fill(~SEEN, torch.tensor(-1e9)),
    "masked_fill(m, -1e4)": lambda x: x.masked_fill(~SEEN, -1e4),
    "l - 1e9 m": lambda x: x - 1e9 * (~SEEN).float(),
    "l m - 1e4 (1 - m)": lambda x: x * SEEN.float() - 1e4 * (1 - SEEN.float()),
    "l + -1e4 (1 - m)": lambda x: x + (1 - SEEN.float()) * -1e4,
    "l[m] = -1e9": _put,
    "heads inside": lambda x: x.permute(0, 2, 1, 3).contiguous().masked_fill(~SEEN[:, None], -1e9).permute(0, 2, 1, 3),
}


class Written(nn.Module):
    """Attention written out, its causal mask spelled by the caller."""

    def __init__(self, mask: Spelling, times: float = 3.0):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = (nn.Linear(H * D, H * D) for _ in range(3))
        self.mask = mask
        with torch.no_grad():
            self.q.weight.mul_(times)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (H, D)).transpose(1, 2) for p in (self.q, self.k, self.v))
        logits: Tensor = self.mask(q @ k.mT * D**-0.5)
        return (logits.softmax(-1) @ v).transpose(1, 2).flatten(2)


def read(model: nn.Module, x: Tensor) -> Reading:
    with watch(model) as watcher:
        model(x)
    return watcher.readings[0]


def infinite(logits: Tensor) -> Tensor:
    return logits.masked_fill(~SEEN, -torch.inf)


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("times", [3.0, 600.0])  # 600: logits of 1000, where a mask of -10000 still is one
def test_however_a_mask_is_written_it_reads_as_minus_infinity(spelling: str, times: float) -> None:
    x = torch.randn(2, T, H * D, generator=torch.Generator().manual_seed(1))
    want, got = read(Written(infinite, times), x), read(Written(SPELLINGS[spelling], times), x)
    for name in ("max_logit", "product_logit", "margin", "entropy", "saturated", "grad_signal", "over_100"):
        torch.testing.assert_close(getattr(got, name), getattr(want, name), rtol=2e-3, atol=1e-5)
    assert got.rows == want.rows


@pytest.mark.parametrize("spelling", ["l + -1e4 (1 - m)", "where(m, l, -1e9)", "l m - 1e4 (1 - m)"])
def test_calibration_does_not_take_a_mask_for_logits(spelling: str) -> None:
    x = torch.randn(2, T, H * D, generator=torch.Generator().manual_seed(1))
    gains = []
    for mask in (infinite, SPELLINGS[spelling]):
        model = Written(mask)
        assert retrofit_(model, find_sites(model, x), variant="olmo2").applied
        gains.append(model.qk_norm.q.gain.detach())
    torch.testing.assert_close(*gains)


def test_logits_of_a_diverged_run_are_not_taken_for_a_mask() -> None:
    x = torch.randn(2, T, H * D, generator=torch.Generator().manual_seed(1))
    model = Written(lambda logits: logits - logits.amax(-1, keepdim=True), times=3e5)
    logits = []
    model.mask = lambda x: logits.append(-x.abs()) or logits[-1]  # type: ignore[assignment, func-returns-value]
    reading = read(model, x)
    assert logits[0].min() < -1e5
    torch.testing.assert_close(reading.max_logit, -logits[0].amin((0, 2, 3)))
    assert reading.excluded_rows == 0


@pytest.mark.parametrize(
    "times", [lambda x: x * 200.0, lambda x: x / 0.005, lambda x: torch.full((H, 1, 1), 200.0) * x]
)
def test_what_multiplies_the_product_counts_among_what_it_can_reach(times: Spelling) -> None:
    x = torch.randn(2, T, H * D, generator=torch.Generator().manual_seed(1))
    logits = []
    model = Written(lambda x: logits.append(times(x)) or logits[-1], times=200.0)  # type: ignore[arg-type, func-returns-value]
    reading = read(model, x)
    assert logits[0].min() < -2e4
    torch.testing.assert_close(reading.max_logit, logits[0].abs().amax((0, 2, 3)))


def test_filled_in_logits_that_hide_nothing_are_a_bias() -> None:
    x = torch.randn(2, T, H * D, generator=torch.Generator().manual_seed(1))
    plain = read(Written(lambda logits: logits), x)
    for mask in (lambda y: torch.where(SEEN, y, -500.0), lambda y: y - 500.0 * (~SEEN).float()):
        reading = read(Written(mask), x)
        assert bool((reading.max_logit > 400).all())
        assert bool((reading.product_logit <= plain.max_logit + 1e-3).all())
