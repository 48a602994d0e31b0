"""Run a patched site on a real batch: are its queries and keys what the variant promises, where it counts?"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from qkwatch.core import Core
from qkwatch.linearity import FURTHER, check_unmoved, logit_scale, without
from qkwatch.measure import measure_at
from qkwatch.norms import CHILD, HeadNorm, QKNorm
from qkwatch.plan import SitePlan
from qkwatch.probe import ZERO, Call, Refusal, generic, replay
from qkwatch.reading import Reading, merge, reading_from
from qkwatch.sites import Site
from qkwatch.variants import Calibrate, calibrated_gains

GROWTH = 1000.0  # by how much the projections' outputs are made to grow
_SAMPLE = 8  # rows from which the scale of an unfused softmax is read


@dataclass
class Verified:
    plan: SitePlan
    drift: float
    note: str | None = None  # what the patch leaves unbounded


@dataclass
class _Run:
    """What one replay showed."""

    output: Tensor
    q: list[Tensor]  # norms per core call, (B, H, T)
    k: list[Tensor]
    samples: list[tuple[Tensor, Tensor]]  # q k^T and the logits of a few rows, (rows, keys)
    scale: float | None  # of fused cores
    terms: list[Tensor]  # the logits of these rows, or what is added to those of a fused core
    reading: Reading | None


def calibrate_and_verify(site: Site, draft: SitePlan, *, cap: float, calibrate: Calibrate) -> Verified:
    """Find the constants and gains of an installed draft, set them, and check what the patched site does.

    Raises:
        Refusal: where the promise does not hold; the caller takes the patch out again.
    """
    norm = site.module._modules[CHILD]
    assert isinstance(norm, QKNorm) and site.call is not None
    with _bypassed(site, norm):
        before = _run(site, site.call, measured=True)
        with without(site):
            alone = _run(site, site.call, measured=True) if site.loose.parameters else before
    assert before.reading is not None and alone.reading is not None
    loose = site.loose
    with _unit_gains(norm), without(site):
        grown = _run_grown(site, norm)
        q_ratio, k_ratio = (
            _path_ratio(side, norms, what)
            for side, norms, what in ((norm.q, grown.q, "queries"), (norm.k, grown.k, "keys"))
        )
        with _entering(norm, generic):
            scale, further = (grown.scale, False) if grown.scale is not None else logit_scale(site, norm, _run)
        if further and not loose.factors:
            loose = replace(loose, factors=(FURTHER,))
    plan, factor, k_factor = draft, scale * q_ratio * k_ratio, 1.0
    length = max(2, *(lengths.shape[-1] for lengths in before.k))  # of the keys
    start = draft.variant.start_bound(draft.head_dim, factor, length)
    if calibrate == "needed":
        calibrate = bool(loose) or start > cap
    gains: dict[str, Tensor] = {}
    q_rms, k_rms = alone.reading.q_rms / q_ratio, alone.reading.k_rms / k_ratio
    if any(bool((rms <= ZERO).all()) for rms in (q_rms, k_rms)):  # one starts at zero, and has no length to keep yet
        calibrate, q_rms = calibrate and start > cap, torch.full_like(q_rms, math.nan)
    if calibrate:
        largest = before.reading.product_logit
        gains = calibrated_gains(
            draft.variant,
            q_rms,
            k_rms,
            largest,
            draft.head_dim,
            factor,
            cap if draft.max_gain is None or draft.variant.scale == "keep" else min(cap, draft.max_gain),
            k_heads=draft.k_heads,
            floor=start if calibrate == "raised" else 0.0,
        )
        norm.set_gains(gains)
        k_factor = _k_factor(norm, q_rms, k_rms, abs(factor)) if loose else 1.0
    elif draft.variant.start is None and norm.q.gain is not None:  # it goes by the length of the keys
        gains = {"q.gain": torch.full(norm.q.gain.shape, draft.variant.start_value(length))}
        norm.set_gains(gains)
    plan = replace(plan, gains={key: value.tolist() for key, value in gains.items()})
    if draft.variant.scale != "keep":
        plan = replace(plan, q_factor=1.0 / (factor * k_factor), k_factor=k_factor)
        norm.q.factor, norm.k.factor = plan.q_factor, plan.k_factor
    after = _run(site, site.call, measured=True)
    with without(site):
        _check_bound(norm, _run_grown(site, norm), (q_ratio, k_ratio))
    if loose:
        check_unmoved(_run_grown(site, norm, 1.0).terms, _run_grown(site, norm).terms)
    return Verified(plan, relative_change(before.output, after.output), loose.note() if loose else None)


def _k_factor(norm: QKNorm, q_rms: Tensor, k_rms: Tensor, scale: float) -> float:
    """How long keys shall be where queries and keys meet more than each other, so that each keeps its own length.

    What a gain takes off both lengths it takes off evenly; what it adds (to a dead head) goes to the keys.
    """
    gain = norm.q.effective_gain()
    known = q_rms.isfinite() & k_rms.isfinite() & (q_rms > 0) & (k_rms > 0)
    if gain is None or not bool(known.any()):
        return 1.0
    width = norm.q.head_dim
    q, k = (float(rms[known].mean()) * math.sqrt(width) for rms in (q_rms, k_rms))
    change = float(gain.detach().float().mean()) / (scale * q * k)
    return k * (change if change > 1 else math.sqrt(change))


def output_of(site: Site) -> Tensor:
    """What the site returns on the inputs that found it, float32."""
    assert site.call is not None
    return _output(replay(site.module, site.call, on_core=lambda core: None).output)


def relative_change(before: Tensor, after: Tensor) -> float:
    """||after - before|| / ||before||."""
    return float((after - before).norm() / before.norm().clamp_min(1e-30))


# -- runs ---------------------------------------------------------------------------------------------------


def _run(site: Site, call: Call, *, measured: bool = False) -> _Run:
    packs, q, k, samples, scales = [], [], [], [], []
    terms: list[Tensor] = []

    def on_core(core: Core) -> None:
        queries, keys = core.queries().detach(), core.keys().detach()
        q.append(_norms(site, core, queries))
        k_lengths = _norms(site, core, keys)
        k.append(k_lengths[:, :: max(1, k_lengths.shape[1] // site.k_heads)])  # not repeated for their queries
        if core.fused:
            scales.append(core.scale)
            terms.extend(bias.tensor.detach().float() for bias in core.biases)
        else:
            samples.append(_sample(core, queries, keys))
            terms.append(samples[-1][1])
        if measured:
            packs.append(measure_at(site, core, "all"))

    result = replay(site.module, call, on_core=on_core)
    if not q:
        raise Refusal("patched, it computes no attention")
    reading = reading_from(merge(packs), site.name) if packs else None
    scale = scales[0] if scales and not samples else None
    return _Run(_output(result.output), q, k, samples, scale, terms, reading)


def _run_grown(site: Site, norm: QKNorm, growth: float = GROWTH) -> _Run:
    """The site with what enters its norms multiplied: as if the projections had grown."""
    assert site.call is not None
    grow = functools.partial(_grow, growth)
    with _entering(norm, grow):
        return _run(site, site.call)


@contextlib.contextmanager
def _entering(norm: QKNorm, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """What enters the norms is changed."""
    handles = [side.register_forward_pre_hook(lambda m, args: (change(args[0]),)) for side in (norm.q, norm.k)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _grow(growth: float, x: Tensor) -> Tensor:
    x = generic(x)
    size = float(x.detach().float().square().mean().sqrt())
    # projections that start near zero must not drown in a norm's epsilon
    return x * (growth * max(1.0, 1.0 / size) if 0.0 < size < math.inf else growth)


@contextlib.contextmanager
def _bypassed(site: Site, norm: QKNorm) -> Iterator[None]:
    """The norms pass everything through: the unpatched function."""
    handles = [side.register_forward_hook(lambda m, args, out: args[0]) for side in (norm.q, norm.k)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _unit_gains(norm: QKNorm) -> Iterator[None]:
    """All gains one, no biases, while the path from tap to core is measured."""
    saved = [(p, p.detach().clone()) for p in norm.parameters()]
    with torch.no_grad():
        for side in (norm.q, norm.k):
            if side.gain is not None:
                side.gain.copy_(norm.variant.stored(torch.ones_like(side.gain)))
            if side.bias is not None:
                side.bias.zero_()
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value in saved:
                parameter.copy_(value)


def _output(output: Any) -> Tensor:
    tensors = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.is_floating_point()]
    if not tensors:
        raise Refusal("its forward returns no tensor to compare")
    return tensors[0].detach().float()


def _norms(site: Site, core: Core, tensor: Tensor) -> Tensor:
    """Lengths of the head vectors, (B, H, T), as they enter the core."""
    if not core.fused and site.layout.kind == "axis":
        lead = core.rows().shape[:-2]
        if lead.numel() == tensor.shape[:-2].numel():
            tensor = tensor.reshape(*lead, *tensor.shape[-2:])
    heads = site.layout.heads
    if site.layout.kind in ("minor", "major") and core.fused and tensor.shape[:-2] != core.q.shape[:-2]:
        heads = heads * tensor.shape[:-2].numel() // core.q.shape[:-2].numel()
    split = site.layout.split(tensor / core.factor, heads)
    lengths: Tensor = torch.linalg.vector_norm(split.float(), dim=-1)
    return lengths


def _sample(core: Core, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    rows = core.rows().detach()
    length = queries.shape[-2]
    index = torch.linspace(0, length - 1, min(_SAMPLE, length), device=queries.device).long()
    product = queries[..., index, :].float() @ keys.float().transpose(-1, -2) / core.factor**2
    extra = rows.shape[-1] - product.shape[-1]
    if 0 < extra <= rows.shape[-1] // 2 + 1:
        rows = rows[..., : product.shape[-1]]  # learned sinks follow the keys
    if rows.shape[-2] != length or rows.numel() != product.numel() // len(index) * length:
        raise Refusal("its logits are not laid out as the product of its queries and keys")
    return product.flatten(0, -2), rows[..., index, :].float().flatten(0, -2)


# -- checks -------------------------------------------------------------------------------------------------


def _path_ratio(side: HeadNorm, norms: list[Tensor], what: str) -> float:
    """Length at the core over length at the tap, which must be one number for all rows (a rotation, a scale)."""
    width = side.head_dim * (side.heads if side.variant.axis == "full" else 1)
    promised = 1.0 if side.variant.norm == "l2" else math.sqrt(width)
    if side.variant.axis == "full":
        norms = [n.square().sum(1, keepdim=True).sqrt() for n in norms]
    lengths = torch.cat([n.flatten() for n in norms])
    lengths = lengths[lengths > lengths.amax() * 1e-3]  # zero rows are padding
    low, high = (lengths.amin(), lengths.amax()) if len(lengths) else (torch.zeros(()), torch.zeros(()))
    if not bool(torch.isfinite(high)) or float(high) <= 0:
        raise Refusal(f"normed, its {what} are zero or not finite at the softmax")
    spread = float(high / low) - 1
    if spread > 0.03:
        raise Refusal(
            f"between projection and softmax its {what} change their lengths unevenly (by up to {spread:.0%}), "
            "so that a norm at the projection would not bound the logits"
        )
    return float((low + high) / 2) / promised


def _check_bound(norm: QKNorm, grown: _Run, ratios: tuple[float, float]) -> None:
    """However the projections grow, no query and no key leaves longer than its gain allows."""
    for what, side, norms, ratio in (
        ("queries", norm.q, grown.q, ratios[0]),
        ("keys", norm.k, grown.k, ratios[1]),
    ):
        longest = torch.stack([n.amax((0, 2)) for n in norms]).amax(0)
        allowed = side.max_norm().detach().to(longest) * ratio * 1.03
        if not bool((longest <= allowed).all()):
            raise Refusal(f"normed, its {what} are longer at the softmax than the gain allows")
