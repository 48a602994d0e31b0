"""Find the taps of a core by autograd: which module's output, and which of its channels, feed which head.

A site is run again on the inputs it was given, with every parametrised module's output cut out of the graph.
Gradients of the core's q (or k) then arrive at the nearest such output and nowhere else, on the channels that
feed it; seeds weighted by the head's number tell the heads apart. No layout table is consulted.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from qkwatch.core import Core
from qkwatch.features import Axes, is_feature_axis
from qkwatch.layout import Channels, HeadLayout
from qkwatch.probe import Call, Leaf, Loose, Refusal, Tap, Taps, replay
from qkwatch.sources import Side, Source, is_normed, multiplies, radix_of

_FEW = 4


def find_taps(site: nn.Module, call: Call) -> Taps:
    """The head layout of the site's core, and its taps for q and k.

    Raises:
        Refusal: with the reason, where the site has none or they cannot be told.
    """
    try:
        run = replay(site, call, cut=True)
    except Exception as error:
        raise Refusal(f"its forward could not be run again by itself ({type(error).__name__}: {error})") from error
    if not run.cores:
        raise Refusal("run again by itself, it computes no attention")
    try:
        with torch.inference_mode(False), torch.enable_grad():
            axes = Axes(site, call, run.leaves)
            found = [_taps_of(site, core, run.leaves, axes) for core in _looked_at(run.cores)]
    except Refusal:
        raise
    except Exception as error:
        raise Refusal(f"autograd could not follow its forward ({type(error).__name__}: {error})") from error
    taps = found[0]
    for other in found[1:]:
        _check_same(taps.q, other.q)
        _check_same(taps.k, other.k)
    if taps.q.module is taps.k.module and taps.q.channels.overlaps(taps.k.channels):
        raise Refusal("queries and keys are the same channels of one projection")
    return taps


def find_query_tap(site: nn.Module, call: Call) -> Tap:
    """The tap of the queries alone, for sites whose keys cannot be told head by head (latent attention).

    Raises:
        Refusal: the queries do not come from one projection either.
    """
    run = replay(site, call, cut=True)
    if not run.cores:
        raise Refusal("run again by itself, it computes no attention")
    axes, found = Axes(site, call, run.leaves), list[Tap]()
    with torch.inference_mode(False), torch.enable_grad():
        for core in _looked_at(run.cores):
            queries = core.queries()
            source = Side(site, queries, run.leaves, "queries").source()
            lead = (queries if core.fused else core.rows()).shape[:-2]
            channels, _ = _channels(source, "queries", queries, lead, axes)
            found.append(Tap(source.leaf.module, channels, is_normed(source.leaf, channels, queries)))
            _check_same(found[0], found[-1])
    return found[0]


def _looked_at(cores: list[Core]) -> list[Core]:
    """The first few and the last: a site may compute hundreds, one for each window."""
    return cores if len(cores) <= _FEW else [*cores[: _FEW - 1], cores[-1]]


def _check_same(tap: Tap, other: Tap) -> None:
    """Several cores of one site must take their queries (or keys) from the same place. Raises `Refusal`."""
    if tap.module is not other.module:
        raise Refusal("it computes several attentions from different projections")
    if tap.channels != other.channels:
        raise Refusal("it computes several attentions from different channels of one projection")


def _taps_of(site: nn.Module, core: Core, leaves: list[Leaf], axes: Axes) -> Taps:
    sides = [Side(site, tensor, leaves, what) for tensor, what in ((core.queries(), "queries"), (core.keys(), "keys"))]
    try:
        return _taps_from(site, core, leaves, axes, *sides)
    except Refusal as refusal:
        refusal.normed = all(side.normed for side in sides)
        raise


def _taps_from(site: nn.Module, core: Core, leaves: list[Leaf], axes: Axes, q_side: Side, k_side: Side) -> Taps:
    queries, keys = q_side.tensor, k_side.tensor
    lead = (queries if core.fused else core.rows()).shape[:-2]
    if queries.shape[-1] != keys.shape[-1]:
        raise Refusal("queries and keys differ in width")
    q, k = q_side.source(), k_side.source()
    q_channels, numbers = _channels(q, "queries", queries, lead, axes)
    layout = _layout(core, queries, numbers)
    k_channels, _ = _channels(k, "keys", keys, lead, axes)
    if layout.heads % k_channels.heads:
        raise Refusal(f"{layout.heads} query heads do not divide over {k_channels.heads} key heads")
    _check_between(site, core, leaves, (q_side, k_side))
    q_tap, k_tap = (
        Tap(source.leaf.module, channels, is_normed(source.leaf, channels, side.tensor, list(side.raw.values())))
        for source, channels, side in ((q, q_channels, q_side), (k, k_channels, k_side))
    )
    loose = _loose(site, core, leaves, (q_side, k_side), (q.leaf, k.leaf))
    return Taps(layout, q_tap, k_tap, self_attention=_same_input(q.leaf, k.leaf), loose=loose)


def _loose(site: nn.Module, core: Core, leaves: list[Leaf], sides: Sequence[Side], taps: tuple[Leaf, Leaf]) -> Loose:
    """What the logits hold besides the product of what the taps give."""
    beside = {name: p for side in sides for name, p in side.raw.items()}
    logits = core.logits if core.logits is not None else core.mask
    if logits is None or not logits.requires_grad:
        return Loose(tuple(beside))
    others = [leaf for leaf in leaves if all(leaf.module is not tap.module for tap in taps)]
    names = {id(module): name for name, module in site.named_modules()}
    factors = [(names.get(id(leaf.module), type(leaf.module).__name__), leaf.tensor) for leaf in others]
    factors += [(n, p) for n, p in site.named_parameters() if p.requires_grad and n not in beside]
    grads = torch.autograd.grad(logits, [t for _, t in factors], torch.ones_like(logits), True, allow_unused=True)
    factors = [factor for factor, grad in zip(factors, grads, strict=True) if grad is not None]
    tensors = [tensor for _, tensor in factors]
    found = {i for tap in {id(t): t for t in taps}.values() for i in multiplies(logits, tensors, tap.tensor)}
    return Loose(tuple(beside), tuple(dict.fromkeys(factors[i][0] for i in sorted(found))))


def _same_input(a: Leaf, b: Leaf) -> bool:
    if a.module is b.module or not (a.args and b.args):
        return True
    x, y = a.args[0], b.args[0]
    return x is y or (isinstance(x, Tensor) and isinstance(y, Tensor) and x.shape == y.shape and torch.equal(x, y))


# -- gradients ----------------------------------------------------------------------------------------------


def _check_between(site: nn.Module, core: Core, leaves: list[Leaf], sides: Sequence[Side]) -> None:
    """Nothing learned may scale or mix the logits between the product and the softmax: no norm would bound that."""
    if core.logits is None or not core.logits.requires_grad:
        return
    taps = {id(leaf) for side in sides for leaf, _ in side.feeding}
    others = [leaf for leaf in leaves if id(leaf) not in taps]
    seed = torch.ones_like(core.logits)
    targets = [core.q, *[leaf.tensor for leaf in others]]
    first, *grads = torch.autograd.grad(core.logits, targets, seed, retain_graph=True, allow_unused=True)
    touching = [leaf for leaf, grad in zip(others, grads, strict=True) if grad is not None]
    kinds = [type(leaf.module).__name__ for leaf in touching]
    if first is None:
        found = ", ".join(sorted(set(kinds))) or "of a module"
        raise Refusal(f"between product and softmax its logits pass through weights ({found}), which no norm bounds")
    for i in multiplies(core.logits, [leaf.tensor for leaf in touching], core.q):
        raise Refusal(f"its logits hold products of queries or keys with a further output ({kinds[i]})")
    inside = {name for side in sides for name in side.raw}
    raw = {name: p for name, p in site.named_parameters() if p.requires_grad and name not in inside}
    for i in multiplies(core.logits, list(raw.values()), core.q):
        raise Refusal(f"the parameter {list(raw)[i]!r} multiplies its logits, which no norm of queries and keys bounds")


def _channels(
    source: Source, what: str, core_tensor: Tensor, lead: torch.Size, axes: Axes
) -> tuple[Channels, list[float]]:
    """The channels of each head, and each head's number in the core's flattened leading axes."""
    leaf, codes, row = source.leaf.tensor, source.codes, source.row
    where = row.nonzero()
    if not len(where):
        raise Refusal(f"the {what} do not follow their projection")
    varying = [axis for axis in range(leaf.ndim) if len(where[:, axis].unique()) > 1]
    dim = core_tensor.shape[-1]
    if len(varying) != 1:
        raise Refusal(f"one row of the {what} comes from {len(varying)} axes of its projection's output")
    axis, place = varying[0], where[0].tolist()
    line = codes[tuple(slice(None) if a == axis else place[a] for a in range(leaf.ndim))]  # (C, digits)
    heads = _group(line)
    radix = radix_of(core_tensor)
    head_axis = None
    if len(heads) == 1 and len(lead) >= 2:
        apart = core_tensor.ndim >= 4  # else keys may be repeated for their query heads: their numbers are means
        wanted = core_tensor.shape[-3] if apart else lead[-1]
        others = (a for a in range(leaf.ndim) if a != axis)
        rising = (a for a in others if _is_head_axis(codes, a, place, wanted, apart))
        head_axis = next((a for a in rising if axes.holds_heads(source.leaf, a, place, axis)), None)
    widths = {len(channels) for _, channels in heads}
    if len(widths) != 1:
        raise Refusal(f"the heads of the {what} differ in width at their projection, or a clamp cuts channels off")
    if (width := widths.pop()) != dim:
        come = f"only {width} of it come from the projection" if width < dim else f"{width} of their projection feed it"
        raise Refusal(f"a head's {what} are {dim} wide, but {come}")
    numbers = [sum(d * radix**i for i, d in enumerate(code)) for code, _ in heads]
    if len(heads) == 1 and not is_feature_axis(source.leaf, axis, place):
        raise Refusal(f"its {what} run over tokens, not over channels (cross-covariance)")
    if head_axis is not None:
        count = leaf.shape[head_axis]
        numbers = [numbers[0] + h for h in range(count)]  # only the queries' are read further
        return Channels(axis - leaf.ndim, (0,), dim, 1, head_axis - leaf.ndim, count), numbers
    order = sorted(range(len(heads)), key=lambda i: numbers[i])
    starts, steps = [], set()
    for i in order:
        channels = heads[i][1]
        starts.append(channels[0])
        steps |= {b - a for a, b in itertools.pairwise(channels)}
    if len(steps) > 1:
        raise Refusal(f"the channels of a head's {what} are not evenly spaced in their projection")
    channels_ = Channels(axis - leaf.ndim, tuple(starts), dim, steps.pop() if steps else 1, None, len(heads))
    return channels_, [numbers[i] for i in order]


def _is_head_axis(codes: Tensor, axis: int, place: list[int], heads: int, apart: bool) -> bool:
    """Whether the numbers along an axis of the leaf rise as those of the core's heads do."""
    count = codes.shape[axis]
    if count < 2 or (count != heads if apart else heads % count):
        return False
    line = codes[tuple(slice(None) if a == axis else place[a] for a in range(codes.ndim - 1))][:, 0]
    return bool(((line.diff() - heads / count).abs() < 0.05).all())


def _group(line: Tensor) -> list[tuple[tuple[float, ...], list[int]]]:
    """Channels (C, digits) that carry the same code, in the order of their codes' first appearance."""
    groups: dict[tuple[float, ...], list[int]] = {}
    for channel, code in enumerate((line * 4).round().div(4).tolist()):
        if code[0] == code[0]:
            groups.setdefault(tuple(code), []).append(channel)
    return list(groups.items())


def _layout(core: Core, queries: Tensor, numbers: list[float]) -> HeadLayout:
    """Where the heads, known by their numbers in the flattened leading axes, lie in the core's own tensors."""
    heads = len(numbers)
    if not core.apart:
        raise Refusal("its logits are not laid out as the product of its queries and keys")
    if heads == 1:
        return HeadLayout(1, "single")
    strides = {b - a for a, b in itertools.pairwise(numbers)}
    if len(strides) != 1:
        raise Refusal("its heads are not evenly spaced in the core")
    inner = strides.pop()
    lead = list((queries if core.fused else core.rows()).shape[:-2])
    total = queries.shape[:-2].numel()
    if torch.Size(lead).numel() == total:
        stride = 1
        for axis in range(len(lead) - 1, -1, -1):
            if lead[axis] == heads and stride == inner:
                return HeadLayout(heads, "axis", axis - len(lead) - 2)
            stride *= lead[axis]
    if inner == 1 and total % heads == 0:
        return HeadLayout(heads, "minor")
    if inner * heads == total:
        return HeadLayout(heads, "major")
    raise Refusal("its heads are mixed with the batch in the core")
