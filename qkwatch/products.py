"""Products of two activations, and what becomes of them on their way to a softmax."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from qkwatch.axes import Axes, follow
from qkwatch.operations import DIVIDES, MULTIPLIES


@dataclass(frozen=True, eq=False)
class Product:
    """One product of two activations: (N, R, D) by (N, D, C), or (R, D) by (D, C).

    Attributes:
        order: its number in running order.
        shape: as it left the multiplication.
        factor: the two of PyTorch's unfused SDPA already carry this factor each.
        gain: what it was multiplied with since, at most.
        axes: of the tensor that it has become; None where they cannot be told.
    """

    order: int
    a: Tensor
    b: Tensor
    shape: torch.Size
    factor: float = 1.0
    gain: float | Tensor = 1.0
    axes: Axes | None = None

    def reach(self) -> Tensor:
        """What none of its entries can pass on either side of zero: |a| |b| times all that came since; 0-dim."""
        lengths = [_longest(self.a.detach(), -1), _longest(self.b.detach(), -2)]
        return (lengths[0] * lengths[1] * self.gain).nan_to_num(nan=torch.inf)

    def after(self, func: Any, args: Sequence[Any], source: Tensor, out: Any, others: Sequence[Any]) -> Product:
        """The product that ``source`` is, behind one more operation; ``others``: arguments that hold no product."""
        op = getattr(func, "overloadpacket", func)
        axes = None if self.axes is None or not isinstance(out, Tensor) else follow(func, args, source, self.axes, out)
        scales = op in MULTIPLIES or (op in DIVIDES and source is args[0])
        gain = self.gain * _most(others[0], inverse=op in DIVIDES) if scales and len(others) == 1 else self.gain
        return replace(self, gain=gain, axes=axes)

    def wider(self, other: Product) -> Product:
        """Itself, or the same product on its way through another argument, whichever is more of the logits."""
        extents = [sum(len(atoms) for atoms in p.axes) if p.axes is not None else -1 for p in (self, other)]
        return self if extents[0] >= extents[1] else other

    def misfit(self, logits: Tensor, dim: int) -> int:
        """How unlike the logits it is: 0 where it has their rows and keys, 1 where only as many numbers."""
        if self.shape.numel() != logits.numel():
            return 2
        rows_and_keys = {logits.movedim(dim, -1).shape[-2], logits.shape[dim]}
        return 0 if {*self.shape[-2:]} == rows_and_keys else 1


def _longest(x: Tensor, dim: int) -> Tensor:
    """The largest length along an axis; vectors that hold NaN or inf make rows that are told of by themselves."""
    if not x.numel():
        return x.new_zeros((), dtype=torch.float32)
    wide = torch.promote_types(x.dtype, torch.float32)
    lengths: Tensor = torch.linalg.vector_norm(x, dim=dim, dtype=wide)
    return torch.where(lengths.isfinite(), lengths, 0.0).amax().float()


def _most(factor: Any, inverse: bool) -> float | Tensor:
    """The largest |factor|, or the largest |1 / factor|."""
    if not isinstance(factor, Tensor):
        size = abs(float(factor))
        return size if not inverse else 1 / size if size else torch.inf
    if not factor.numel() or factor.dtype == torch.bool:
        return 1.0
    sizes = factor.detach().abs()
    return sizes.amin().float().reciprocal() if inverse else sizes.amax().float()
