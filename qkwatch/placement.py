"""Where queries, keys and heads lie in the logits, told by their product alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qkwatch.products import Product

_Steps = list[tuple[int, int]]  # sizes and what one step along each is in a flat list


@dataclass(frozen=True)
class Placement:
    """How the axes of logits come from their product.

    Attributes:
        swapped: the product was K Q^T.
        lead: the logits' axes that are neither queries nor keys, in their order.
        token: the axis of the queries; None where there is none, each leading index having one query.
        rows: how many queries each leading index has.
        of_q: sizes and steps of ``lead`` and the queries in the flat list of all queries.
        of_k: the same of ``lead`` in the list of all key matrices.
    """

    swapped: bool
    lead: tuple[int, ...]
    token: int | None
    rows: int
    of_q: _Steps
    of_k: _Steps

    def queries(self, q: Tensor, k: Tensor) -> Tensor:
        """(N, Tq, D), N the leading axes of the logits in their order."""
        q = k.transpose(-1, -2) if self.swapped else q
        queries = q.reshape(-1, q.shape[-1])
        if not _is_all(self.of_q, len(queries)):
            queries = queries[_index(self.of_q, q.device)]
        return queries.reshape(*([-1] if self.lead else []), self.rows, q.shape[-1])

    def keys(self, q: Tensor, k: Tensor) -> Tensor:
        """(N, Tk, D), repeated where several leading indices share them."""
        keys = q if self.swapped else k.transpose(-1, -2)
        if not self.lead:
            return keys.reshape(keys.shape[-2:])
        keys = keys.reshape(-1, *keys.shape[-2:])
        if _is_all(self.of_k, len(keys)):
            return keys
        if all(step == 0 for _, step in self.of_k):
            return keys[:1].expand(math.prod(size for size, _ in self.of_k), -1, -1)
        return keys[_index(self.of_k, keys.device)]


def place(product: Product, logits: Tensor, dim: int) -> Placement | None:
    """None where the leading axes, the queries and the keys cannot be told apart."""
    axes, dim = product.axes, dim % logits.ndim
    if axes is None or len(axes) != logits.ndim:
        return None
    rows, columns = product.shape[-2:]
    kinds = [{_kind(stride, rows, columns) for _, stride in atoms} for atoms in axes]
    if kinds[dim] == {"column"} or (not kinds[dim] and columns == 1):
        swapped, mine, theirs = False, "row", "column"
    elif kinds[dim] == {"row"} or (not kinds[dim] and rows == 1):
        swapped, mine, theirs = True, "column", "row"
    else:
        return None
    rest = [axis for axis in range(logits.ndim) if axis != dim]
    if any(theirs in kinds[a] or (mine in kinds[a] and len(kinds[a]) > 1) for a in rest):
        return None
    stacked = [a for a in rest if mine in kinds[a]]
    alike = [a for a in stacked if logits.shape[a] == logits.shape[dim]]
    if len(stacked) > 1 and len(alike) > 1:
        return None  # which of them are heads and which queries, only their sizes tell
    single = [a for a in rest if logits.shape[a] == 1]
    token = (alike or stacked)[-1] if stacked else single[-1] if single else None
    lead = tuple(axis for axis in rest if axis != token)
    count = columns if swapped else rows
    n = math.prod(product.shape[:-2])

    def in_q(stride: int) -> int:
        whole, within = divmod(stride, rows * columns)
        return whole * count + (within if swapped else within // columns)

    def in_k(stride: int) -> int:
        return stride // (rows * columns)

    atoms = [atom for axis in lead for atom in axes[axis]]
    tokens = axes[token] if token is not None else ()
    of_q = [(size, in_q(stride)) for size, stride in (*atoms, *tokens)]
    of_k = [(size, in_k(stride)) for size, stride in atoms]
    if _last(of_q) >= n * count or _last(of_k) >= n:
        return None  # there are more logits than the product made
    return Placement(swapped, lead, token, math.prod(size for size, _ in tokens), of_q, of_k)


def _kind(stride: int, rows: int, columns: int) -> str:
    if stride == 0:
        return "none"
    return "batch" if stride >= rows * columns else "row" if stride >= columns else "column"


def _is_all(steps: Sequence[tuple[int, int]], count: int) -> bool:
    """Whether the steps go through the whole list in its order."""
    reached = 1
    for size, step in reversed(steps):
        if size > 1:
            if step != reached:
                return False
            reached *= size
    return reached == count


def _last(steps: Sequence[tuple[int, int]]) -> int:
    return sum((size - 1) * step for size, step in steps)


def _index(steps: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
    index = torch.zeros((), dtype=torch.int64, device=device)
    for size, step in steps:
        index = index.unsqueeze(-1) + torch.arange(size, device=device) * step
    return index.flatten()
