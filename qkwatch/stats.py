"""Per-head attention statistics: q and k, or the logits -> packed sums on the device.

Pure tensor maths, which never waits for the device. The results have one fixed width, so that many sites travel in
one transfer or one collective.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .errors import QKWatchError
from .kernels import EMPTY, LogitSource, QKSource, RowSums, Source, may_look, stream
from .masks import BIG, HIDING, Mask, RowPlan, hidden_below
from .reading import COLUMNS, MAXIMA, Packed

MANY_KEYS = 16  # normalised entropy is taken over rows with so many visible keys where there are any
SINK_MASS = 0.3  # a key with more than this of the mean mass is a sink
MAX_SINKS = 3  # at most so many keys can have it: the masses of all keys add up to 1
SHARP = 0.99  # a row whose largest weight is above this is saturated
MIN_ROW_LEFT = 1e-4  # without its sinks a row with less mass than this is all rounding
BIAS_BLOCK = 1 << 20  # elements of a bias looked at together


@torch.no_grad()
def qk_stats(
    q: Tensor,
    k: Tensor,
    *,
    scale: float,
    mask: Tensor | None = None,
    hiding: float | None = None,
    is_causal: bool = False,
    rows: int | None = None,
    self_attention: bool = True,
) -> Packed:
    """Statistics of `softmax(scale * q k^T + mask)`, computed in float32 whatever the inputs' float dtype.

    Args:
        q: `(B, H, Tq, D)`, as it enters the core.
        k: `(B, G, Tk, D)`; G divides H, query head h uses key head `h // (H // G)`.
        scale: the factor on q k^T.
        mask: broadcastable to `(B, H, Tq, Tk)`; bool (True = visible) or additive.
        hiding: entries of an additive mask at or below this hide their key; None: half of the dtype's minimum.
        is_causal: query i sees keys j <= i (top-left aligned, as torch's SDPA); may be combined with a mask.
        rows: measure only so many query rows per batch element, evenly spread, the last included; None: all.
        self_attention: q and k come from the same tokens, so where Tq = Tk a key that no row sees marks a
            padded query row.

    Raises:
        QKWatchError: shapes that do not fit together.

    >>> from qkwatch.reading import reading_from
    >>> packed = qk_stats(torch.zeros(1, 2, 5, 4), torch.zeros(1, 1, 5, 4), scale=0.5)
    >>> reading_from(packed, "attn").entropy
    tensor([1., 1.])
    """
    _check_shapes(q, k, mask)
    with torch.autocast(q.device.type, enabled=False):
        q, k = q.detach(), k.detach()
        plan = _row_plan(q.shape[2], rows, q.device)
        visible = Mask(None if mask is None else mask.detach(), is_causal, plan, k.shape[2], hiding)
        lengths = _lengths(q), _lengths(k)
        source = QKSource(plan.take(q, 2), k, scale, visible, lengths)
        return _measure(source, {"q": _rms(q, lengths[0]), "k": _rms(k, lengths[1])}, self_attention)


@torch.no_grad()
def logit_stats(
    logits: Tensor,
    *,
    q: Tensor | None = None,
    k: Tensor | None = None,
    hiding: Tensor | None = None,
    rows: int | None = None,
    self_attention: bool = True,
) -> Packed:
    """Statistics of `softmax(logits)`, logits `(B, H, Tq, Tk)` of any float dtype as they enter the softmax.

    Entries at or below `hiding` (0-dim; None: half of the dtype's minimum) are not visible. `q` `(B, H, Tq, D)` and `k`
    `(B, G, Tk, D)` are read for their RMS only. `rows` and `self_attention` as in `qk_stats`.
    """
    if logits.ndim != 4 or not logits.is_floating_point():
        raise QKWatchError(f"logits must be float (B, H, Tq, Tk), got {logits.dtype} {tuple(logits.shape)}")
    with torch.autocast(logits.device.type, enabled=False):
        logits = logits.detach()
        below = hidden_below(logits.dtype) if hiding is None else hiding
        source = LogitSource(logits, _row_plan(logits.shape[2], rows, logits.device), below)
        rms = {name: _rms(x, _lengths(x)) for name, x in (("q", q), ("k", k)) if x is not None}
        return _measure(source, rms, self_attention)


def row_budget(batch: int, heads: int, q_len: int, k_len: int, head_dim: int, budget: int) -> int | None:
    """Largest number of query rows (at least 1) within `budget` multiply-adds of q k^T; None: all fit.

    >>> row_budget(2, 4, 100, 100, 10, 80_000)
    10
    """
    rows = budget // max(1, batch * heads * k_len * head_dim)
    return None if rows >= q_len else max(1, rows)


@torch.no_grad()
def with_bias(packed: Packed, bias: Tensor) -> Packed:
    """Note how far up and down an additive mask `(B|1, H|1, Tq|1, Tk)` moves the entries that it leaves visible."""
    batch, heads, rows, keys = bias.shape
    ends = bias.new_full((2, heads), -torch.inf, dtype=torch.float32)
    step = max(1, BIAS_BLOCK // (batch * heads * keys))
    for start in range(0, rows, step):
        block = bias.detach()[:, :, start : start + step].float()
        seen = block > HIDING
        both = [torch.where(seen, x, -torch.inf).amax((0, 2, 3)) for x in (block, -block)]
        ends = torch.maximum(ends, torch.stack(both))
    values = packed.values.clone()
    for name, end in zip(("bias_up", "bias_down"), ends, strict=True):
        values[:, COLUMNS.index(name)] = end.to(values)
    return Packed(values, packed.exact)


def _row_plan(q_len: int, rows: int | None, device: torch.device) -> RowPlan:
    if rows is not None and rows < 1:
        raise QKWatchError(f"rows must be at least 1 or None (all), got {rows}")
    return RowPlan(q_len, q_len if rows is None else min(rows, q_len), device)


def _check_shapes(q: Tensor, k: Tensor, mask: Tensor | None) -> None:
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}"
    if q.ndim != 4 or k.ndim != 4 or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise QKWatchError(f"q must be (B, H, Tq, D) and k (B, G, Tk, D), got {shapes}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise QKWatchError(f"the key heads must divide the query heads, got {shapes}")
    if mask is None:
        return
    full = (*q.shape[:3], k.shape[2])
    fits = mask.ndim <= 4 and all(m in (1, f) for m, f in zip(mask.shape[::-1], full[::-1], strict=False))
    if not fits or not (mask.dtype == torch.bool or mask.is_floating_point()):
        got = f"{mask.dtype} {tuple(mask.shape)}"
        raise QKWatchError(f"mask must be bool or float and broadcast to {full}, got {got}")


def _measure(source: Source, rms: dict[str, Tensor], self_attention: bool) -> Packed:
    batch, heads, rows, k_len = source.shape
    plan = source.mask.plan
    zero = torch.zeros(heads, dtype=torch.float32, device=plan.device)
    figures = dict.fromkeys(COLUMNS, zero)
    figures |= dict.fromkeys(MAXIMA, zero - torch.inf) | {"sampled": zero + (not plan.exact)}
    if batch * heads * rows * k_len:
        padded = source.mask.unseen() if self_attention and plan.q_len == k_len else None
        padded = None if padded is None else plan.take(padded, -1)
        sums, mass = stream(source, padded)
        figures |= _reduce_rows(source, sums, mass, padded)
    for name, pair in rms.items():  # (2, H|G)
        figures[f"{name}_rms"], figures[f"{name}_tokens"] = pair.repeat_interleave(heads // pair.shape[1], dim=1)
    wide = torch.float32 if plan.device.type == "mps" else torch.float64
    return Packed(torch.stack([figures[name].to(wide) for name in COLUMNS], dim=-1), plan.exact)


def _lengths(x: Tensor) -> Tensor:
    """Length of each token's vector, `(B, H, T)`, in float32 or wider."""
    wide = torch.promote_types(x.dtype, torch.float32)
    lengths: Tensor = torch.linalg.vector_norm(x.detach(), dim=-1, dtype=wide)
    return lengths


def _rms(x: Tensor, lengths: Tensor) -> Tensor:
    """Sum over finite tokens of the root mean square over D, and their number, `(2, H)`."""
    rms = lengths.float() / max(1, x.shape[-1]) ** 0.5
    finite = rms.isfinite()
    return torch.stack([rms.masked_fill(~finite, 0).sum((0, 2)), finite.sum((0, 2)).float()])


def _reduce_rows(source: Source, sums: RowSums, mass: Tensor, padded: Tensor | None) -> dict[str, Tensor]:
    """Row sums `(B, H, R)` -> one figure per head, by column name."""
    included = sums.seen > 0 if padded is None else (sums.seen > 0) & ~padded
    live = included & (sums.largest < BIG)  # rows that count: visible, not padded, finite
    broken = included & ~live

    top = torch.maximum(sums.first, sums.peak)  # row maximum over all visible keys
    shrink = torch.exp(sums.peak - top)  # brings sums over keys 1.. from their peak to the row maximum
    alone = torch.exp(sums.first - top)  # weight of key 0 before normalising
    z = sums.z * shrink + alone
    shift = (sums.first - top).clamp(min=EMPTY) * alone
    zt = shrink * (sums.zt + (sums.peak - top) * sums.z) + shift
    z2 = sums.z2 * shrink.square() + alone.square()
    nats = (z.log() - zt / z).clamp(min=0)
    several, many = live & (sums.seen >= 2), live & (sums.seen >= MANY_KEYS)
    share = nats / sums.seen.log()
    up, down = (torch.where(broken, torch.inf, torch.where(live, x, -torch.inf)) for x in (top, -sums.low))
    margin = torch.where(live, top - sums.total / sums.seen, -torch.inf)
    rows = {
        "measured": included,
        "excluded": ~included,
        "nonfinite": broken,
        "rows": live,
        "keys": torch.where(live, sums.seen, 0),
        "over": torch.where(live, sums.over, 0),
        "nats": torch.where(live, nats, 0),
        "grad": torch.where(live, 1 - z2 / z.square(), 0),
        "rows_2": several,
        "sharp": several & (z < 1 / SHARP),
        "entropy_2": torch.where(several, share, 0),
        "rows_16": many,
        "entropy_16": torch.where(many, share, 0),
    }
    rows |= _without_sinks(source, sums, mass, live, shrink / z)
    stacked = torch.stack([value.float() for value in rows.values()])  # (C, B, H, R)
    totals = dict(zip(rows, stacked.sum((1, 3)), strict=True))
    return {**totals, "up": up.amax((0, 2)), "down": down.amax((0, 2)), "margin": margin.amax((0, 2))}


def _without_sinks(source: Source, sums: RowSums, mass: Tensor, live: Tensor, weight: Tensor) -> dict[str, Tensor]:
    """Sink-corrected figures per row: key 0 is not in the sums, the few other sink keys are subtracted.

    `weight` `(B, H, R)` turns a sum relative to the row's peak into probability.
    """
    measured = live.sum(-1, keepdim=True).clamp(min=1)
    largest, index = (mass / measured).topk(min(MAX_SINKS, mass.shape[-1]), dim=-1)  # (B, H, C), heaviest first
    if may_look(mass):  # as a rule there is none but key 0, and no logit to compute again
        sinks = int((largest > SINK_MASS).sum(-1).amax())
        largest, index = largest[..., :sinks], index[..., :sinks]
    z, zt, keys = sums.z, sums.zt, sums.seen - (sums.first > EMPTY).float()
    if index.shape[-1]:
        z, zt, keys = _subtract(source.columns(index), largest > SINK_MASS, index, sums.peak, (z, zt, keys))
    left = (z * weight).clamp(0, 1)  # probability that is not on sinks
    share = ((z.log() - zt / z) / keys.log()).clamp(0, 1)
    kept = live & (left >= MIN_ROW_LEFT) & (keys >= 2)
    many = kept & (keys >= MANY_KEYS)
    return {
        "sink": torch.where(live, 1 - left, 0),
        "kept_2": kept,
        "corrected_2": torch.where(kept, share, 0),
        "kept_16": many,
        "corrected_16": torch.where(many, share, 0),
    }


def _subtract(
    logits: Tensor, sinks: Tensor, index: Tensor, peak: Tensor, sums: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """`sums` (z, zt and the number of keys, each `(B, H, R)`) without the sink keys, logits `(B, H, R, C)`."""
    drop = (sinks & (index > 0)).unsqueeze(2) & (logits > EMPTY)
    t = (logits - peak.unsqueeze(-1)).clamp(max=0)
    # a sink that is the row's peak must cancel exactly, whatever rounding recomputing its logit brings
    t = t.masked_fill(t > -1e-6 * (1 + peak.abs().unsqueeze(-1)), 0)
    e = torch.where(drop, t.exp(), 0)
    z, zt, keys = sums
    return z - e.sum(-1), zt - (e * t.clamp(min=EMPTY)).sum(-1), keys - drop.sum(-1)
