"""One softmax(QK^T) as it ran: its queries, its keys, and what else there was on the way to the softmax."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from qkwatch.placement import Placement, place
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
        products: all that the logits descend from, the one of q and k first; empty of a fused call.
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

    @cached_property
    def placement(self) -> Placement | None:
        """Where queries and keys lie in the logits; None of a fused call, and where it cannot be told."""
        return place(self.products[0], self.logits, self.dim) if self.logits is not None and self.products else None

    @property
    def apart(self) -> bool:
        """The leading axes of queries, keys and logits are the same, so that heads can be told apart."""
        return self.fused or self.placement is not None

    def queries(self) -> Tensor:
        """(..., Tq, D), in the graph of whoever built it; the leading axes of the logits, in their order."""
        return self.q if self.placement is None else self.placement.queries(self.q, self.k)

    def keys(self) -> Tensor:
        """(..., Tk, D), in the graph of whoever built it; the leading axes of the logits, in their order."""
        if self.logits is None:
            return self.k
        return self.k.transpose(-1, -2) if self.placement is None else self.placement.keys(self.q, self.k)

    def rows(self) -> Tensor:
        """The logits with queries second to last and keys last: (..., Tq, Tk)."""
        assert self.logits is not None
        placed = self.placement
        if placed is None:
            return self.logits.movedim(self.dim, -1)
        if placed.token is None:
            return self.logits.movedim(self.dim, -1).unsqueeze(-2)
        return self.logits.movedim((placed.token, self.dim), (-2, -1))
