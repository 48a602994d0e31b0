"""Streaming softmax maths: attention logits, a block of rows at a time, reduced to a few numbers per row.

Plain tensor ops only: no host sync, no branch on tensor values, so it runs asynchronously on an accelerator
and inside a `TorchDispatchMode`. Memory is O(block x Tk), never Tq x Tk.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from qkwatch.masks import BIG, CPU_BLOCK, HIDE, Block, Mask, RowPlan, Shade

EMPTY = -1e38  # the peak of a row without visible keys: above -BIG (hidden), below any logit that counts
FLOOR = -40.0  # exp(-40) = 4e-18 is far below fp32 rounding, but its square is no (slow) denormal yet
OVER = 100.0  # the logit above which entries are counted
CAUSAL_ROWS = 128  # rows per block; a taller causal block computes more hidden entries
PLAIN_ROWS = 256
GENTLE = 20.0  # logits that exp can take as they are: nothing overflows, also squared
LOOK = True  # values may steer the work where they are at hand
GPU_BLOCK = 1 << 24  # enough to fill an accelerator, and few launches


class RowSums(NamedTuple):
    """What is kept of each measured query row; every field is a float32 view `(B, H, R)`.

    `e = exp(t)`, `t = logit - peak`, both over visible keys *but key 0*, which is kept apart in `first`:
    key 0 is always dropped from the sink-corrected entropy, and adding it back loses no digits where
    subtracting it would.
    """

    seen: Tensor  # visible keys
    total: Tensor  # sum of the visible logits
    low: Tensor  # smallest visible logit, or 0 where that is smaller
    over: Tensor  # visible entries with |logit| > OVER
    first: Tensor  # logit of key 0; -BIG where hidden
    peak: Tensor  # largest logit without key 0; EMPTY where there is none
    z: Tensor  # sum of e
    zt: Tensor  # sum of e * t
    z2: Tensor  # sum of e * e
    base: Tensor  # what is taken off a block's logits before exp; everything else is relative to the peak

    @property
    def largest(self) -> Tensor:
        """max |logit| over the visible keys; BIG in rows that hold NaN or inf."""
        return torch.maximum(torch.maximum(self.peak, self.first), -self.low)


class Source(Protocol):
    """Where logits come from: computed from q and k, or already there."""

    mask: Mask
    shape: tuple[int, int, int, int]  # B, H, R (measured rows), Tk
    group: int  # query heads that must stay in one block (they share a key head)

    tame: bool  # it is known that no logit is NaN or inf
    gentle: bool  # it is known that every |logit| is below GENTLE

    def fill(self, block: Block, s: Tensor) -> Shade | None:
        """Write the block's logits into `s` `(b, h, r, width)`, all finite; return what of them is hidden."""
        ...

    def columns(self, index: Tensor) -> Tensor:
        """Logits `(B, H, R, C)` of the keys `index` `(B, H, C)`; -BIG where hidden."""
        ...


def may_look(x: Tensor) -> bool:
    """Whether a look at values is free: on the CPU nothing waits for a device."""
    return LOOK and x.device.type == "cpu"


def scrub(x: Tensor) -> Tensor:
    """NaN and inf to +-BIG, in place: a product with 0 hides them now, and no NaN leaks between rows."""
    return x.nan_to_num_(nan=BIG, posinf=BIG, neginf=-BIG)


class QKSource:
    """Logits `scale * q k^T + bias`, q `(B, H, R, D)`, k `(B, G, Tk, D)` of any float dtype, in float32.

    `lengths`: |q| and |k| of all tokens, `(B, H, T)` and `(B, G, Tk)`.
    """

    def __init__(self, q: Tensor, k: Tensor, scale: float, mask: Mask, lengths: tuple[Tensor, Tensor]) -> None:
        batch, heads, rows, dim = q.shape
        groups, k_len = k.shape[1:3]
        self.mask = mask
        self.shape = (batch, heads, rows, k_len)
        self.group = heads // groups
        self.q, self.scale = q.float().reshape(batch, groups, self.group, rows, dim), scale
        self.k = k.float().transpose(-1, -2).contiguous()  # (B, G, D, Tk): the product is a fifth quicker so
        # no product of these can be NaN or inf, so no pass over the logits need look for them
        biased = mask.mask is not None and mask.mask.dtype != torch.bool
        look = may_look(q) and not biased and q.numel() and k.numel()
        reach = abs(scale) * float(lengths[0].amax() * lengths[1].amax()) if look else BIG
        self.tame, self.gentle = reach < BIG / 10, reach < GENTLE  # |q k| <= |q| |k|; NaN is neither

    def fill(self, block: Block, s: Tensor) -> Shade | None:
        g = slice(block.h.start // self.group, block.h.stop // self.group)
        q = self.q[block.b, g, :, block.r].flatten(0, 1).flatten(1, 2)  # (b*g, group*r, D)
        k = self.k[block.b, g, :, : block.width].flatten(0, 1)  # (b*g, D, width)
        product = s.view(q.shape[0], q.shape[1], block.width)
        torch.baddbmm(product, q, k, beta=0, alpha=self.scale, out=product)
        shade, bias = self.mask.block(block)
        if bias is not None:
            s.add_(bias)
        if not self.tame:
            scrub(s)
        return shade

    def columns(self, index: Tensor) -> Tensor:
        batch, heads, columns = index.shape
        groups, dim = self.k.shape[1:3]
        picked = index.reshape(batch, groups, 1, self.group * columns).expand(-1, -1, dim, -1)
        k = self.k.gather(3, picked).view(batch, groups, dim, self.group, columns).transpose(2, 3)
        s = torch.matmul(self.q, k).mul_(self.scale).view(batch, heads, self.shape[2], columns)
        visible, bias = self.mask.columns(index)
        s = scrub(s if bias is None else s.add_(bias))
        return s if visible is None else s.masked_fill_(visible.logical_not(), -BIG)


class LogitSource:
    """Logits `(B, H, Tq, Tk)` that exist already, masking included: entries at or below `hiding` are masking."""

    group = 1
    tame = gentle = False

    def __init__(self, logits: Tensor, plan: RowPlan, hiding: float | Tensor) -> None:
        batch, heads, _, k_len = logits.shape
        self.hiding = hiding
        self.mask = Mask(logits, False, plan, k_len, hiding)  # logits hide keys as an additive mask does
        self.logits = logits
        self.shape = (batch, heads, plan.count, k_len)

    def fill(self, block: Block, s: Tensor) -> Shade | None:
        plan = self.mask.plan
        rows = self.logits[block.b, block.h]
        s.copy_(rows[:, :, block.r] if plan.exact else rows[:, :, self.mask.positions[block.r]])
        scrub(s)
        return Shade.of(s.gt(self.hiding), 0)

    def columns(self, index: Tensor) -> Tensor:
        visible, s = self.mask.columns(index)
        assert visible is not None
        assert s is not None
        return scrub(s).masked_fill_(visible.logical_not(), -BIG)


def stream(source: Source, padded: Tensor | None) -> tuple[RowSums, Tensor]:
    """Reduce all logits to `RowSums` and the mass of each key but key 0, summed over rows, `(B, H, Tk)`.

    `padded`: bool `(B|1, H|1, R)`, measured rows that are padding; they, fully masked and broken rows give none.
    """
    batch, heads, rows, k_len = source.shape
    device = source.mask.plan.device
    sums = torch.zeros(len(RowSums._fields), batch, heads, rows, dtype=torch.float32, device=device)
    sums[0] = source.mask.counts(k_len)
    mass = torch.zeros(batch, heads, k_len, dtype=torch.float32, device=device)
    live = None if padded is None else padded.logical_not().expand(batch, heads, rows)
    # threads share each operation: what each of them works on should stay in its own cache
    budget = CPU_BLOCK * min(torch.get_num_threads(), 8) if device.type == "cpu" else GPU_BLOCK
    # the dtype is spelled out: Lightning's bf16-true makes another one the default during a forward pass
    s_buffer, e_buffer = torch.empty(2, largest_block(source, budget), dtype=torch.float32, device=device).unbind()
    for block in blocks(source, budget):
        out = RowSums(*sums[:, block.b, block.h, block.r].unbind())
        used, shape = out.seen.numel() * block.width, (*out.seen.shape, block.width)
        s, e = s_buffer[:used].view(shape), e_buffer[:used].view(shape)
        shade = source.fill(block, s)
        reduce_block(s, e, shade, out, source.gentle)
        if source.gentle:
            weight = out.first.exp().add_(out.z).reciprocal_()  # 1 / denominator
        else:
            weight = (out.first - out.base).exp_().add_(out.z).clamp_(min=1e-30).reciprocal_()
        if live is not None or not source.tame or (shade is not None and shade.start == 0):
            weight.mul_(_counts(out, None if live is None else live[block.b, block.h, block.r]))
        columns = torch.matmul(weight.unsqueeze(-2), e).squeeze(-2)  # baddbmm is slow where `out` has gaps
        mass[block.b, block.h, : block.width].add_(columns)
        torch.sum(s.mul_(e), -1, out=out.zt)  # last: `e` was still in cache for the product above
    done = RowSums(*sums.unbind())
    _rebase(done, source.gentle)
    return done, mass


def blocks(source: Source, budget: int) -> Iterator[Block]:
    """Cut the logits into blocks of about `budget` entries: as many heads, then batch elements, as fit."""
    batch, heads, rows, k_len = source.shape
    tall = CAUSAL_ROWS if source.mask.is_causal else PLAIN_ROWS
    r_step = max(1, min(tall, rows, budget // (source.group * k_len)))
    for r in range(0, rows, r_step):
        row = slice(r, min(r + r_step, rows))
        width = source.mask.width(row, k_len)
        h_step = source.group * max(1, budget // (r_step * width * source.group))
        b_step = max(1, h_step // heads)
        for b, h in product(range(0, batch, b_step), range(0, heads, h_step)):
            yield Block(slice(b, min(b + b_step, batch)), slice(h, min(h + h_step, heads)), row, width)


def largest_block(source: Source, budget: int) -> int:
    """A buffer of so many entries holds any block."""
    sizes: list[int] = []
    for b, h, r, width in blocks(source, budget):
        sizes.append((b.stop - b.start) * (h.stop - h.start) * (r.stop - r.start) * width)
    return max(sizes)


def reduce_block(s: Tensor, e: Tensor, shade: Shade | None, out: RowSums, gentle: bool) -> None:
    """Reduce one block of finite logits `s` `(b, h, r, w)` to `out` but for `zt`; `e` becomes exp(s), s -= base.

    The block is small enough to stay in cache, so what costs is the number of passes over it, all in place.
    """
    if shade is not None:
        tail = s[..., shade.start :]
        tail.mul_(shade.visible)  # hidden logits are 0 here: they change neither the sum nor the largest |s|
        if shade.start == 0:
            out.seen.copy_(shade.visible.sum(-1))
    torch.sum(s, -1, out=out.total)
    torch.amin(s, -1, out=out.low)
    if shade is not None:
        veiled = gentle and shade.start > 0  # else key 0 may be hidden, and `first` must tell
        tail.add_(shade.veil if veiled else shade.hide)  # and very low from here on: no weight in the softmax
    key_0 = s[..., 0]
    out.first.copy_(key_0)
    key_0.fill_(HIDE if gentle else -BIG)
    torch.amax(s, -1, out=out.peak)
    if gentle or (may_look(s) and out.low.amin().item() > -GENTLE and out.peak.amax().item() < GENTLE):
        if not gentle:
            torch.gt(out.first, OVER, out=out.over)  # of all keys only the first can be
            key_0.fill_(HIDE)  # exp is slow far outside of its range
        if shade is not None and not veiled:
            tail.clamp_(min=HIDE)
    else:
        _count_over(s, e, shade, out)
        torch.clamp(out.peak, min=EMPTY, out=out.base)
        s.sub_(out.base.unsqueeze(-1)).clamp_(min=FLOOR)
    torch.exp(s, out=e)
    torch.sum(e, -1, out=out.z)
    torch.linalg.vector_norm(e, 2, dim=-1, out=out.z2)


def _counts(out: RowSums, live: Tensor | None) -> Tensor:
    """Rows that count: with a visible key, finite, no padding."""
    counts = (out.largest < BIG) & (out.seen > 0)
    return counts if live is None else counts & live


def _count_over(s: Tensor, e: Tensor, shade: Shade | None, out: RowSums) -> None:
    """Count the visible |logits| above `OVER`; `s` has key 0 and the hidden keys at -BIG."""
    torch.abs(s, out=e)
    torch.sum(e.gt_(OVER), -1, out=out.over)
    first = (out.first.abs() > OVER) & (out.first > EMPTY)
    out.over.sub_(1).add_(first)
    if shade is not None:
        out.over.sub_(shade.visible.shape[-1] - shade.visible.sum(-1))
        if shade.start == 0:
            out.over.add_(out.first <= EMPTY)  # key 0 was not counted twice


def _rebase(sums: RowSums, gentle: bool) -> None:
    """Bring the exponential sums of all rows from the base they were taken at to the row's peak, in place."""
    # a row whose other keys are all hidden; where all logits were known to be small, key 0 was hidden less deeply
    sums.peak.masked_fill_(sums.peak <= HIDE if gentle else sums.peak <= EMPTY, EMPTY)
    distance = torch.where(sums.peak > EMPTY, sums.base - sums.peak, 0.0)
    shrink = distance.exp()
    sums.zt.add_(distance * sums.z).mul_(shrink)
    sums.z.mul_(shrink)
    sums.z2.mul_(shrink).square_()
