"""Products of two activations, and what becomes of them on their way to a softmax."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from qkwatch.operations import DIVIDES, MULTIPLIES


@dataclass(frozen=True, eq=False)
class Product:
    """One product of two activations: (N, R, D) by (N, D, C), or (R, D) by (D, C).

    Attributes:
        order: its number in running order.
        shape: as it left the multiplication.
        factor: the two of PyTorch's unfused SDPA already carry this factor each.
        gain: what it was multiplied with since, at most.
    """

    order: int
    a: Tensor
    b: Tensor
    shape: torch.Size
    factor: float = 1.0
    gain: float | Tensor = 1.0

    def reach(self) -> Tensor:
        """What none of its entries can pass on either side of zero: |a| |b| times all that came since; 0-dim."""
        lengths = [_longest(self.a.detach(), -1), _longest(self.b.detach(), -2)]
        return (lengths[0] * lengths[1] * self.gain).nan_to_num(nan=torch.inf)

    def after(self, op: Any, args: Sequence[Any], known: Sequence[Tensor]) -> Product:
        """The product behind one more operation, whose arguments ``known`` hold products."""
        if op not in MULTIPLIES and op not in DIVIDES:
            return self
        others = [x for x in args[:2] if not any(x is tensor for tensor in known)]
        if len(others) != 1 or (op in DIVIDES and others[0] is args[0]):
            return self
        return replace(self, gain=self.gain * _most(others[0], inverse=op in DIVIDES))

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
