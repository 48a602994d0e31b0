"""Per-head statistics of one core, whatever the layout of its tensors."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from qkwatch.core import Core
from qkwatch.layout import HeadLayout
from qkwatch.masks import HIDING, hidden_beyond
from qkwatch.reading import Packed
from qkwatch.sites import Site
from qkwatch.stats import logit_stats, qk_stats, row_budget, with_bias

Rows = int | str  # "all", "auto" or a number of query rows

_CHEAP = 2**26  # multiply-adds of Q K^T that rows="auto" never minds


def measure(core: Core, layout: HeadLayout, rows: Rows, self_attention: bool) -> Packed:
    """The per-head statistics of one core, still on its device (H, C); of one head where none can be told apart."""
    if not core.apart:
        layout, self_attention = HeadLayout(1, "single"), False
    packed = _measure(core, layout, rows, self_attention)
    bias = core.bias
    if bias is None or not bias.is_floating_point() or bias.numel() < 2:
        return packed
    bias = bias.detach()
    if layout == HeadLayout(layout.heads, "axis", -3) and _stands_like_its_biases(core):
        full = bias[(None,) * (4 - bias.ndim)]
        if full.shape[1] in (1, layout.heads):
            return with_bias(packed, full)
    return with_bias(packed, bias.reshape(1, 1, 1, -1))  # not told apart by head


def _stands_like_its_biases(core: Core) -> bool:
    """Whether the biases were added to (B, H, Tq, Tk), which entered the softmax as it was."""
    if core.logits is None or core.placement is None:
        return core.fused and core.q.ndim == 4
    still = core.placement.lead == (0, 1) and core.placement.token == 2
    return still and all(bias.shape == core.logits.shape for bias in core.biases)


def _measure(core: Core, layout: HeadLayout, rows: Rows, self_attention: bool) -> Packed:
    q, k = core.queries().detach(), core.keys().detach()
    if core.fused:
        q4 = layout.split(q)
        k4 = layout.split(k, None if k.shape[:-2] == q.shape[:-2] else _key_heads(q, k, layout))
        mask = None if core.mask is None else _split_mask(core.mask.detach(), q, k, layout)
        budget = _rows(rows, q4.shape, k4.shape[-2])
        return qk_stats(
            q4,
            k4,
            scale=core.scale,
            mask=mask,
            hiding=HIDING,
            is_causal=core.is_causal,
            rows=budget,
            self_attention=self_attention,
        )
    logits = core.rows().detach()
    hiding = hidden_beyond(core.reach(), logits.dtype) if core.products else None
    lead = logits.shape[:-2]
    if q.shape[:-2].numel() == lead.numel() and layout.kind == "axis":
        q, k = (t.reshape(*lead, *t.shape[-2:]) for t in (q, k))
    logits4 = layout.split(logits)
    fits = q.shape[:-2].numel() == lead.numel() and q.shape[:-2].numel() == k.shape[:-2].numel()
    lengths = [layout.split(t) / core.factor if fits else None for t in (q, k)]
    budget = _rows(rows, (*logits4.shape[:3], q.shape[-1]), logits4.shape[-1])
    return logit_stats(logits4, q=lengths[0], k=lengths[1], hiding=hiding, rows=budget, self_attention=self_attention)


def measure_at(site: Site, core: Core, rows: Rows) -> Packed:
    """The statistics of one of a site's cores, always for the site's number of heads."""
    layout, shape = site.layout, (core.q if core.logits is None else core.rows()).shape
    if layout.kind == "axis" and (len(shape) < -layout.axis or shape[layout.axis] != layout.heads):
        # one of several cores of the site, laid out unlike the one that was looked at
        axes = [axis for axis in range(-len(shape), -2) if shape[axis] == layout.heads]
        layout = HeadLayout(layout.heads, "axis", axes[0]) if len(axes) == 1 else HeadLayout(1, "single")
    packed = measure(core, layout, rows, site.self_attention)
    if len(packed.values) == site.layout.heads:
        return packed
    return Packed(packed.values[:1].expand(site.layout.heads, -1), packed.exact)  # not told apart by head


def _key_heads(q: Tensor, k: Tensor, layout: HeadLayout) -> int:
    return layout.heads * k.shape[:-2].numel() // q.shape[:-2].numel()


def _split_mask(mask: Tensor, q: Tensor, k: Tensor, layout: HeadLayout) -> Tensor:
    """A mask that broadcasts to (..., Tq, Tk), to one that broadcasts to (B, H, Tq, Tk)."""
    if q.ndim == 4 and layout == HeadLayout(layout.heads, "axis", -3):
        return mask
    if mask.ndim <= 2:
        return mask
    return layout.split(mask.expand(*q.shape[:-2], *mask.shape[-2:]))


def _rows(rows: Rows, shape: Sequence[int], k_len: int) -> int | None:
    if rows == "all":
        return None
    if isinstance(rows, int):
        return rows
    batch, heads, q_len, head_dim = shape
    exact = batch * heads * q_len * k_len * head_dim
    # a layer costs ~36 T d^2 multiply-adds forward and backward, Q K^T costs T^2 d, each of them read at two to three
    # times the price of the layer's: all rows up to T = d / 3 are well below a tenth of the step
    affordable = exact * heads * head_dim // (3 * k_len)
    return row_budget(batch, heads, q_len, k_len, head_dim, max(affordable, _CHEAP))
