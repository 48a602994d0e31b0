"""One softmax(QK^T) as it ran: its queries, its keys, and what else there was on the way to the softmax."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qkwatch.products import Product


@dataclass(frozen=True, eq=False)
class Bias:
    """What was added to a product, the product's shape at that place, and the products it descends from itself."""

    tensor: Tensor
    shape: torch.Size
    products: frozenset[int] = frozenset()


@dataclass(eq=False)
class Core:
    """One softmax(QK^T).

    Attributes:
        q: the queries as they enter: (..., Tq, D) of a fused call, (N, Tq, D) of a product.
        k: the keys as they enter: (..., Tk, D) or (N, Tk, D); of a product stored as it was multiplied, so read
            it through `keys`.
        logits: what enters the softmax, as it stands in memory; None for a fused call.
        dim: the key axis of ``logits``.
        mask, is_causal, scale: of a fused call; None, False, 1.0 otherwise.
        factor: q and k of PyTorch's unfused SDPA already carry this factor each.
        biases: what was added to the product on its way to the softmax (masks, relative and linear biases).
        products: all that the logits descend from, this one among them; empty of a fused call.
    """

    q: Tensor
    k: Tensor
    logits: Tensor | None = None
    dim: int = -1
    mask: Tensor | None = None
    is_causal: bool = False
    scale: float = 1.0
    factor: float = 1.0
    biases: tuple[Bias, ...] = ()
    products: tuple[Product, ...] = ()

    def reach(self) -> Tensor:
        """What no logit can pass that is made of products alone, on either side of zero; 0-dim, on its device."""
        return torch.stack([product.reach() for product in self.products]).sum()

    @property
    def bias(self) -> Tensor | None:
        """All biases together; broadcasts to the logits where there is one, has their shape where there are more."""
        if len(self.biases) < 2 or self.logits is None:
            return self.biases[0].tensor if self.biases else None
        shape = self.logits.shape
        whole = [b.tensor.detach().float().expand(b.shape) for b in self.biases if b.shape.numel() == shape.numel()]
        if not whole:
            return self.biases[0].tensor
        # two masks of the dtype's minimum overflow together
        total: Tensor = whole[0].reshape(shape)
        for bias in whole[1:]:
            total = total + bias.reshape(shape)
        return total.clamp_min(torch.finfo(torch.float32).min)

    @property
    def fused(self) -> bool:
        return self.logits is None

    def queries(self) -> Tensor:
        """(..., Tq, D), in the graph of whoever built it."""
        if self.logits is None:
            return self.q
        q = self.k.transpose(-1, -2) if self._swapped() else self.q
        heads = self._stacked()
        if heads == 1:
            return q
        # in memory order of the logits: all rows of a head, or all heads of a row, follow one another
        outer = self.logits.stride(-3) >= self.logits.stride(-2)
        split: Tensor = q.unflatten(-2, (heads, -1) if outer else (-1, heads))
        return (split if outer else split.transpose(-3, -2)).flatten(0, -3)

    def keys(self) -> Tensor:
        """(..., Tk, D), in the graph of whoever built it."""
        if self.logits is None:
            return self.k
        k, heads = self.q if self._swapped() else self.k.transpose(-1, -2), self._stacked()
        return k if heads == 1 else k.unsqueeze(-3).expand(*k.shape[:-2], heads, *k.shape[-2:]).flatten(0, -3)

    def rows(self) -> Tensor:
        """The logits with queries second to last and keys last: (..., Tq, Tk)."""
        assert self.logits is not None
        logits = self.logits.movedim(self.dim, -1)
        rows = self.queries().shape[-2]
        if logits.ndim > 2 and logits.shape[-2] != rows:
            axis = next((a for a in range(logits.ndim - 2, -1, -1) if logits.shape[a] == rows), None)
            if axis is not None:
                logits = logits.movedim(axis, -2)
        return logits

    def _stacked(self) -> int:
        """How many query heads a product with one shared key head multiplied as rows of one matrix."""
        assert self.logits is not None
        shape, rows = self.logits.shape, self.q.shape[-2]
        if len(shape) < 4 or self.dim % len(shape) != len(shape) - 1 or rows in shape[:-1]:
            return 1
        total = self.q.shape[:-1].numel()
        return rows // shape[-2] if rows == shape[-3] * shape[-2] and total == shape[:-1].numel() else 1

    def _swapped(self) -> bool:
        """Whether the product was K Q^T: the softmax then runs over the product's first axis."""
        assert self.logits is not None
        shape, dim = self.logits.shape, self.dim % self.logits.ndim
        if dim == self.logits.ndim - 1:
            return shape[dim] != self.k.shape[-1] and shape[dim] == self.q.shape[-2]
        return dim == self.logits.ndim - 2 and shape[dim] == self.q.shape[-2] and shape[-1] == self.k.shape[-1]
