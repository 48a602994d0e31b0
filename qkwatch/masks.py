"""What of the logits is measured and what is hidden: row samples, masks, the causal triangle.

Plain tensor ops only: no host sync, no branch on tensor values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

HIDING = -9900.0  # a bias that is meant to hide, though above half of the dtype's minimum: -10000, in bfloat16 -9984
HIDE = -60.0  # no weight among logits within +-20: exp(-60) is nothing beside exp(-20)
_ROUNDED = 1.02  # by how much half-precision logits may be longer than the product of their lengths
BIG = 3e38  # stands in for inf and NaN so that every later product is finite; marks the row as broken
CPU_BLOCK = 1 << 18  # logits per block: two float32 buffers of it stay in cache


class Block(NamedTuple):
    """A rectangle of the logits: batch, query head and measured-row slices, and the first `width` keys."""

    b: slice
    h: slice
    r: slice
    width: int


class Shade(NamedTuple):
    """Hidden entries of a block, among the keys from `start` on; all earlier keys are visible."""

    visible: Tensor  # 1.0 or 0.0
    hide: Tensor  # 0.0 or -BIG
    veil: Tensor  # 0.0 or HIDE
    start: int

    @classmethod
    def of(cls, visible: Tensor, start: int) -> Shade:
        ones = visible.float()
        return cls(ones, (ones - 1).mul_(BIG), (1 - ones).mul_(HIDE), start)


@dataclass(frozen=True)
class RowPlan:
    """Which query rows are measured: `count` of `q_len`, evenly spread, the last one always among them."""

    q_len: int
    count: int
    device: torch.device

    @property
    def exact(self) -> bool:
        """All rows are measured."""
        return self.count == self.q_len

    def at(self, r: int) -> int:
        """Position of the r-th measured row.

        >>> [RowPlan(10, 4, torch.device("cpu")).at(r) for r in range(4)]
        [1, 4, 6, 9]
        """
        return (r + 1) * self.q_len // self.count - 1

    def positions(self) -> Tensor:
        """Positions `(R,)` of all measured rows, int64."""
        steps = torch.arange(1, self.count + 1, device=self.device)
        return torch.div(steps * self.q_len, self.count, rounding_mode="floor") - 1

    def take(self, x: Tensor, dim: int) -> Tensor:
        """The measured rows of `x` along `dim` (untouched where that axis is broadcast or all rows count)."""
        return x if self.exact or x.shape[dim] == 1 else x.index_select(dim, self.positions())


def hidden_below(dtype: torch.dtype) -> float:
    """Entries at or below this are masking, not logits: half of the dtype's minimum (float32's if wider)."""
    return max(torch.finfo(dtype).min, torch.finfo(torch.float32).min) / 2


def hidden_beyond(reach: Tensor, dtype: torch.dtype) -> Tensor:
    """The same where masks of -10000 or -1e9 stand among the logits, whichever way they got there; 0-dim.

    No product of queries and keys is larger than `reach`, so that what lies below -`reach` (and a rounding) holds more
    than a product. The mask is in it where it is at or below `HIDING` and a product up to `reach` on top. A run that
    diverged to logits of -20000 has as large a reach, and keeps them. Only from logits of about 10000 on a mask of
    -10000 cannot be told from them, and does hide no longer.
    """
    lowest = torch.minimum(reach * -_ROUNDED, reach + HIDING)
    return lowest.clamp(min=hidden_below(dtype))


def shown(mask: Tensor, hiding: float | Tensor | None = None) -> Tensor:
    """Bool of the mask's shape: True where it leaves the key visible (a NaN bias does)."""
    if mask.dtype == torch.bool:
        return mask
    return mask.le(hidden_below(mask.dtype) if hiding is None else hiding).logical_not_()


class Mask:
    """A bool (True = visible) or additive mask, broadcast to `(B, H, Tq, Tk)`, and the causal triangle.

    Entries of an additive mask at or below `hiding` (None: half of the dtype's minimum) hide their key.
    """

    def __init__(
        self,
        mask: Tensor | None,
        is_causal: bool,
        plan: RowPlan,
        k_len: int,
        hiding: float | Tensor | None = None,
    ) -> None:
        self.plan, self.hiding = plan, hiding
        self.is_causal = is_causal
        self.positions = plan.positions()
        self.mask = mask
        if mask is not None:
            mask = mask[(None,) * (4 - mask.ndim)]
            for dim in range(3):  # an expanded mask is no larger than what it was expanded from
                mask = mask.narrow(dim, 0, 1) if mask.stride(dim) == 0 else mask
            self.mask = mask.expand(-1, -1, -1, k_len)
        self._per_head = self.mask is not None and self.mask.shape[1] > 1
        self._last: tuple[Any, tuple[Shade | None, Tensor | None]] = (None, (None, None))
        self._corners: dict[tuple[int, int], Shade] = {}

    def width(self, r: slice, k_len: int) -> int:
        """How many leading keys the rows `r` can see at all."""
        return min(k_len, self.plan.at(r.stop - 1) + 1) if self.is_causal else k_len

    def counts(self, k_len: int) -> Tensor:
        """Visible keys `(R,)` per measured row where there is no mask but the triangle, float32."""
        seen = self.positions.clamp(max=k_len - 1) + 1
        return (seen if self.is_causal else torch.full_like(seen, k_len)).float()

    def block(self, block: Block) -> tuple[Shade | None, Tensor | None]:
        """What is hidden of the block (None: nothing), and the additive bias."""
        shared = self.mask is None or self.mask.shape[0] == 1
        key = (None if shared else block.b.start, block.h.start if self._per_head else None, block.r, block.width)
        if key != self._last[0]:  # the blocks of other heads come next: most masks look the same to them
            self._last = (key, self._make(block))
        return self._last[1]

    def _make(self, block: Block) -> tuple[Shade | None, Tensor | None]:
        if self.mask is not None:
            part = self._part(self.mask, block)
            bias = None if part.dtype == torch.bool else part.float()
            return Shade.of(self._visible(part, block), 0), bias
        if self.is_causal:
            start = min(self.plan.at(block.r.start) + 1, block.width)  # all its rows see the keys before
            return self._corner(block, start), None
        return None, None

    def _corner(self, block: Block, start: int) -> Shade:
        """The triangle off the keys that all rows see: with no row left out, the same in each block of one shape."""
        if not self.plan.exact:
            return Shade.of(self._triangle(block, start), start)
        shape = (block.r.stop - block.r.start, block.width - start)
        if shape not in self._corners:
            self._corners[shape] = Shade.of(self._triangle(block, start), start)
        return self._corners[shape]._replace(start=start)

    def unseen(self) -> Tensor | None:
        """Keys that no query row sees, bool `(B|1, H|1, Tk)`: padding. None without a mask."""
        if self.mask is None:
            return None
        batch, heads, rows, k_len = self.mask.shape
        plan = RowPlan(rows, rows, self.plan.device)
        # with one mask row for all, the triangle cannot hide a key from its own row
        full = Mask(self.mask, self.is_causal and rows > 1, plan, k_len, self.hiding)
        step = max(1, CPU_BLOCK // (batch * heads * k_len))
        seen = torch.zeros(batch, heads, k_len, dtype=torch.bool, device=plan.device)
        for r in range(0, rows, step):
            block = Block(slice(None), slice(None), slice(r, min(r + step, rows)), k_len)
            seen |= full._visible(full._part(self.mask, block), block).any(-2)
        return seen.logical_not_()

    def columns(self, index: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """`(visible, bias)` of the keys `index` `(B, H, C)` in the measured rows, each `(B, H, R, C)`."""
        batch, heads, columns = index.shape
        visible: Tensor | None = None
        bias: Tensor | None = None
        if self.mask is not None:
            rows, k_len = self.mask.shape[-2:]
            part = self.mask.expand(batch, heads, rows, k_len)
            part = self.plan.take(part.gather(3, index[:, :, None].expand(batch, heads, rows, columns)), 2)
            bias = None if part.dtype == torch.bool else part.float()
            visible = shown(part, self.hiding)
        if self.is_causal:
            below = index[:, :, None] <= self.positions[:, None]
            visible = below if visible is None else visible & below
        return visible, bias

    def _triangle(self, block: Block, start: int) -> Tensor:
        keys = torch.arange(start, block.width, device=self.plan.device)
        return keys <= self.positions[block.r, None]  # (R, width - start)

    def _visible(self, part: Tensor, block: Block) -> Tensor:
        visible = shown(part, self.hiding)
        return visible & self._triangle(block, 0) if self.is_causal else visible

    def _part(self, mask: Tensor, block: Block) -> Tensor:
        """The block's rectangle of the mask, broadcast axes kept at 1."""
        b, h = (s if size > 1 else slice(None) for s, size in zip((block.b, block.h), mask.shape, strict=False))
        part = mask[b, h, :, : block.width]
        if part.shape[2] == 1:
            return part
        return part[:, :, block.r] if self.plan.exact else part[:, :, self.positions[block.r]]
