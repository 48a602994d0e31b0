"""What of a patched site's logits is the product of its queries and keys, and what stands beside it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from qkwatch.masks import HIDING
from qkwatch.norms import QKNorm
from qkwatch.probe import Refusal
from qkwatch.sites import Site

FURTHER = "something from outside the layer"
_OPEN = 0.05  # the share of the logits' changes that may be left unexplained


@contextlib.contextmanager
def without(site: Site) -> Iterator[None]:
    """The parameters that stand beside the site's queries or keys are zero."""
    parameters = [site.module.get_parameter(name) for name in site.loose.parameters]
    saved = [p.detach().clone() for p in parameters]
    with torch.no_grad():
        for p in parameters:
            p.zero_()
    try:
        yield
    finally:
        with torch.no_grad():
            for p, value in zip(parameters, saved, strict=True):
                p.copy_(value)


def logit_scale(site: Site, norm: QKNorm, run: Callable[..., Any]) -> tuple[float, bool]:
    """d logit / d (q k^T) of an unfused softmax, and whether queries or keys enter it in a further term.

    From two runs, the second with q longer and k shorter, so that a term in one of them alone stands out; where there
    is one, from what changes only where both do.
    """

    def samples(q_factor: float, k_factor: float) -> list[tuple[Tensor, Tensor]]:
        norm.q.factor, norm.k.factor = q_factor, k_factor
        try:
            return run(site, site.call).samples  # type: ignore[no-any-return]
        finally:
            norm.q.factor = norm.k.factor = 1.0

    first, last = samples(1.0, 1.0), samples(2.0, 0.25)
    scale, error = _fit([(d[0] - a[0], d[1] - a[1], a[1]) for a, d in zip(first, last, strict=True)])
    if error <= _OPEN and scale != 0:
        return scale, False
    if not math.isfinite(error) or scale == 0:
        raise Refusal("its logits do not follow its queries")
    corners = zip(first, samples(2.0, 1.0), samples(1.0, 0.25), last, strict=True)
    scale, error = _fit([(d[0] - b[0] - c[0] + a[0], d[1] - b[1] - c[1] + a[1], a[1]) for a, b, c, d in corners])
    if not error <= _OPEN or scale == 0:
        raise Refusal(
            "its logits are not a multiple of q k^T: something besides depends on both, or they are laid out otherwise"
        )
    return scale, True


def check_unmoved(before: Sequence[Tensor], grown: Sequence[Tensor]) -> None:
    """Whatever stands beside the normed product, it does not grow with the projections. Raises `Refusal`."""
    for a, b in zip(before, grown, strict=True):
        seen = torch.isfinite(a) & (a > HIDING)
        moved = (b - a)[seen].abs()
        if moved.numel() and not bool(moved.max() <= 0.02 * a[seen].abs().max() + 1e-4):
            raise Refusal("something in its logits grows with its projections in spite of the norm")


_Pair = tuple[Tensor, Tensor]


def _fit(differences: list[tuple[Tensor, Tensor, Tensor]]) -> tuple[float, float]:
    scale, error = _slope(differences, _moved)
    return (scale, error) if error <= _OPEN else _slope(differences, _centred)


def _slope(
    differences: list[tuple[Tensor, Tensor, Tensor]], chosen: Callable[[Tensor, Tensor, Tensor], _Pair]
) -> tuple[float, float]:
    """The factor between products and logits over the chosen entries, and the share of the logits it leaves open."""
    both = [chosen(*difference) for difference in differences]
    products, logits = (torch.cat([pair[i] for pair in both]) for i in (0, 1))
    size, length = float(products.square().sum()), float(logits.norm())
    if size == 0 or length == 0:
        return 0.0, math.inf
    scale = float((products * logits).sum()) / size
    return scale, float((logits - scale * products).norm()) / length


def _moved(products: Tensor, logits: Tensor, before: Tensor) -> _Pair:
    """The entries whose logits moved: masked ones do not, and large negative masks swallow what does."""
    seen = torch.isfinite(logits) & torch.isfinite(products) & (logits != 0)
    return products[seen], logits[seen]


def _centred(products: Tensor, logits: Tensor, before: Tensor) -> _Pair:
    """The visible entries of both, each less its row's mean: a softmax does not mind what a whole row has in common."""
    seen = torch.isfinite(logits) & torch.isfinite(products) & (before > HIDING)
    count = seen.sum(-1, keepdim=True).clamp_min(1)
    both = []
    for x in (products, logits):
        x = torch.where(seen, x, 0.0)
        both.append((x - x.sum(-1, keepdim=True) / count)[seen])
    return both[0], both[1]
