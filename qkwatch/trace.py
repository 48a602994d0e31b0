"""Find the taps of a core by autograd: which module's output, and which of its channels, feed which head.

A site is run again on the inputs it was given, with every parametrised module's output cut out of the graph.
Gradients of the core's q (or k) then arrive at the nearest such output and nowhere else, on the channels that
feed it; seeds weighted by the head's number tell the heads apart. No layout table is consulted.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qkwatch.capture import Core
from qkwatch.layout import Channels, HeadLayout
from qkwatch.probe import Call, Leaf, Refusal, Tap, Taps, isolated, replay
from qkwatch.taps import parts_of


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
    with torch.inference_mode(False), torch.enable_grad():
        found = [_taps_of(site, core, run.leaves) for core in run.cores[:4]]
    taps = found[0]
    if any((t.q.module, t.k.module) != (taps.q.module, taps.k.module) for t in found):
        raise Refusal("it computes several attentions from different projections")
    if taps.q.module is taps.k.module and taps.q.channels.overlaps(taps.k.channels):
        raise Refusal("queries and keys are the same channels of one projection")
    return taps


def _taps_of(site: nn.Module, core: Core, leaves: list[Leaf]) -> Taps:
    sides = [_Side(site, tensor, leaves, what) for tensor, what in ((core.queries(), "queries"), (core.keys(), "keys"))]
    try:
        return _taps_from(site, core, leaves, *sides)
    except Refusal as refusal:
        refusal.normed = all(side.normed for side in sides)
        raise


def _taps_from(site: nn.Module, core: Core, leaves: list[Leaf], q_side: _Side, k_side: _Side) -> Taps:
    queries, keys = q_side.tensor, k_side.tensor
    lead = (queries if core.fused else core.rows()).shape[:-2]
    if queries.shape[-1] != keys.shape[-1]:
        raise Refusal("queries and keys differ in width")
    q, k = q_side.source(), k_side.source()
    q_channels, numbers = _channels(q, "queries", queries, lead)
    layout = _layout(core, queries, numbers)
    k_channels, _ = _channels(k, "keys", keys, lead)
    if layout.heads % k_channels.heads:
        raise Refusal(f"{layout.heads} query heads do not divide over {k_channels.heads} key heads")
    _check_between(site, core, leaves, (q_side, k_side))
    taps = [
        Tap(source.leaf.module, channels, _is_normed(source.leaf, channels, tensor))
        for source, channels, tensor in ((q, q_channels, queries), (k, k_channels, keys))
    ]
    return Taps(layout, *taps, self_attention=_same_input(q.leaf, k.leaf))


def _same_input(a: Leaf, b: Leaf) -> bool:
    if a.module is b.module or not (a.args and b.args):
        return True
    x, y = a.args[0], b.args[0]
    return x is y or (isinstance(x, Tensor) and isinstance(y, Tensor) and x.shape == y.shape and torch.equal(x, y))


# -- gradients ----------------------------------------------------------------------------------------------


@dataclass
class _Source:
    """The module output that feeds q (or k): which of its elements feed which row-block, and one single row.

    ``codes`` is like the leaf plus a last axis of digits, NaN where an element feeds nothing; ``row`` is boolean,
    like the leaf: the elements that feed one single row of q.
    """

    leaf: Leaf
    codes: Tensor
    row: Tensor


class _Side:
    """The queries, or the keys, of a core: what feeds them."""

    def __init__(self, site: nn.Module, tensor: Tensor, leaves: list[Leaf], what: str):
        self.tensor, self.what = tensor, what
        self.n = tensor.shape[:-2].numel()
        generator = torch.Generator().manual_seed(0)
        # the same positive weights for every head, so that the ratio of two gradients is the head's number alone
        self.weights = (torch.rand(tensor.shape[-2:], generator=generator) + 0.5).to(tensor)
        self.feeding: list[tuple[Leaf, Tensor]] = []
        self.raw: dict[str, nn.Parameter] = {}
        if tensor.requires_grad:
            self._look(site, leaves)

    def _look(self, site: nn.Module, leaves: list[Leaf]) -> None:
        parameters = {name: p for name, p in site.named_parameters() if p.requires_grad}
        seed = self.weights.expand(self.n, *self.weights.shape)
        grads = self._backward(seed, [leaf.tensor for leaf in leaves] + list(parameters.values()))
        live = [g if g is not None and bool(g.count_nonzero()) else None for g in grads]
        self.feeding = [(leaf, g) for leaf, g in zip(leaves, live, strict=False) if g is not None]
        named = zip(parameters.items(), live[len(leaves) :], strict=True)
        self.raw = {name: p for (name, p), g in named if g is not None}

    def _backward(self, seed: Tensor, targets: Sequence[Tensor]) -> list[Tensor | None]:
        seed = seed.reshape(self.tensor.shape)
        return list(torch.autograd.grad(self.tensor, targets, seed, retain_graph=True, allow_unused=True))

    @property
    def normed(self) -> bool:
        """Whether the length of all that feeds it does not matter."""
        sources: list[Tensor] = [leaf.tensor for leaf, _ in self.feeding] or list(self.raw.values())
        if not sources:
            return False
        return _degree(self.tensor, sources) < 0.1 or (bool(self.feeding) and all(_is_norm(leaf) for leaf, _ in self.feeding))

    def source(self) -> _Source:
        """The one output that feeds it. Raises `Refusal` where there is none, or where there is more."""
        what, (leaf, base) = self.what, self._single()
        radix = _radix(self.tensor)
        numbers, digits = torch.arange(self.n, device=self.tensor.device), []
        for place in range(max(1, _places(self.n, radix))):
            digit = (numbers // radix**place % radix + 1).to(self.tensor.dtype)
            grad = self._backward(self.weights * digit[:, None, None], [leaf.tensor])[0]
            assert grad is not None, what
            digits.append((grad.float() / base.float()) - 1)
        codes = torch.stack(digits, -1)
        codes[base.abs() <= base.abs().amax() * 1e-3] = torch.nan
        one, middle = self.weights.new_zeros(self.n, *self.weights.shape), self.weights.shape[0] // 2
        one[0, middle] = self.weights[middle]
        row = self._backward(one, [leaf.tensor])[0]
        assert row is not None, what
        return _Source(leaf, codes, row.abs() > row.abs().amax() * 1e-6)

    def _single(self) -> tuple[Leaf, Tensor]:
        what = self.what
        wide = next((name for name, p in self.raw.items() if p.ndim > 1), None)
        if wide is not None and self.feeding:
            kind = type(self.feeding[0][0].module).__name__
            raise Refusal(f"the parameter {wide!r} enters its {what} beside their projection ({kind})")
        if wide is not None:
            raise Refusal(f"its {what} come from the parameter {wide!r}, not from a module's output")
        if not self.feeding:
            raise Refusal(f"no projection of its own feeds the {what}", widen=True)
        if len(self.feeding) > 1:
            kinds = ", ".join(sorted(type(leaf.module).__name__ for leaf, _ in self.feeding))
            raise Refusal(f"its {what} are put together from {len(self.feeding)} module outputs ({kinds})")
        leaf, base = self.feeding[0]
        for i in _multiplies(self.tensor, list(self.raw.values()), leaf.tensor):
            raise Refusal(f"the parameter {list(self.raw)[i]!r} multiplies its {what} between projection and softmax")
        if not leaf.alone:
            raise Refusal(f"the {type(leaf.module).__name__} that feeds its {what} returns more than one tensor")
        return leaf, base


def _multiplies(output: Tensor, factors: Sequence[Tensor], other: Tensor) -> list[int]:
    """Which of the factors ``output`` holds multiplied with ``other``: what they do to it depends on the other."""
    generator = torch.Generator().manual_seed(2)
    seed = (torch.rand(output.shape, generator=generator) + 0.5).to(output)
    grads = torch.autograd.grad(output, factors, seed, create_graph=True, allow_unused=True) if factors else ()
    found = []
    for i, grad in enumerate(grads):
        if grad is None or not grad.requires_grad:
            continue
        second = torch.autograd.grad(grad, other, grad.detach(), retain_graph=True, allow_unused=True)[0]
        if second is not None and bool(second.count_nonzero()):
            found.append(i)
    return found


def _check_between(site: nn.Module, core: Core, leaves: list[Leaf], sides: Sequence[_Side]) -> None:
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
    for i in _multiplies(core.logits, [leaf.tensor for leaf in touching], core.q):
        raise Refusal(f"its logits hold products of queries or keys with a further output ({kinds[i]})")
    inside = {name for side in sides for name in side.raw}
    raw = {name: p for name, p in site.named_parameters() if p.requires_grad and name not in inside}
    for i in _multiplies(core.logits, list(raw.values()), core.q):
        raise Refusal(f"the parameter {list(raw)[i]!r} multiplies its logits, which no norm of queries and keys bounds")


def _radix(tensor: Tensor) -> int:
    return 8 if tensor.dtype in (torch.float16, torch.bfloat16) else 1024


def _places(n: int, radix: int) -> int:
    places = 0
    while n > 1:
        n, places = -(-n // radix), places + 1
    return places


def _channels(source: _Source, what: str, core_tensor: Tensor, lead: torch.Size) -> tuple[Channels, list[float]]:
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
    radix = _radix(core_tensor)
    head_axis = None
    if len(heads) == 1 and len(lead) >= 2:
        apart = core_tensor.ndim >= 4  # else keys may be repeated for their query heads: their numbers are means
        wanted = core_tensor.shape[-3] if apart else lead[-1]
        others = (a for a in range(leaf.ndim) if a != axis)
        head_axis = next((a for a in others if _is_head_axis(codes, a, place, wanted, apart)), None)
    widths = {len(channels) for _, channels in heads}
    if len(widths) != 1:
        raise Refusal(f"the heads of the {what} have different widths in their projection")
    if widths != {dim}:
        raise Refusal(f"a head's {what} are {dim} wide, but only {widths.pop()} of it come from the projection")
    numbers = [sum(d * radix**i for i, d in enumerate(code)) for code, _ in heads]
    if len(heads) == 1 and not _is_feature_axis(source.leaf, axis, place):
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


def _is_feature_axis(leaf: Leaf, axis: int, place: list[int]) -> bool:
    """Whether elements along an axis of a module's output come from different weights: channels, not positions."""
    parameters = [p for p in leaf.module.parameters() if p.requires_grad]
    if not parameters or leaf.tensor.shape[axis] < 2:
        return True
    try:
        with isolated(leaf.module, {}):
            output = leaf.module(*leaf.args, **leaf.kwargs)
            masks = []
            for index in (0, 1):
                element = output[tuple(index if a == axis else p for a, p in enumerate(place))]
                grads = torch.autograd.grad(element, parameters, retain_graph=True, allow_unused=True)
                masks.append([None if g is None else g != 0 for g in grads])
    except Exception:
        return True  # it cannot be run by itself: the check of the patched site will have to tell
    pairs = zip(*masks, strict=True)
    return not all(a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)


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


# -- already normed? ----------------------------------------------------------------------------------------


def _degree(core_tensor: Tensor, sources: list[Tensor]) -> float:
    """Euler's degree of q in what feeds it: 1 of something linear, 0 where a norm takes the length away."""
    seed = core_tensor.detach()
    grads = torch.autograd.grad(core_tensor, sources, seed, retain_graph=True, allow_unused=True)
    pairs = [(g.float() * s.detach().float()).sum() for g, s in zip(grads, sources, strict=True) if g is not None]
    return float(sum(pairs) / seed.float().square().sum().clamp_min(1e-30))


def _is_normed(leaf: Leaf, channels: Channels, core_tensor: Tensor) -> bool:
    """Whether something between the projection and the core takes the length away.

    Either behind the tap (Euler's degree of q in the tap's output is 0, not 1) or in the tap itself (a norm
    layer, or a projection of ours with its norm: these channels stay when each sample of the input is scaled).
    """
    if any(channels.overlaps(ours) for ours, _ in parts_of(leaf.module)):
        return True
    return _degree(core_tensor, [leaf.tensor]) < 0.1 or _is_norm(leaf, channels)


def _is_norm(leaf: Leaf, channels: Channels | None = None) -> bool:
    """Whether a module's output (or these channels of it) stays when each sample of its input is scaled."""
    inputs = [a for a in leaf.args if isinstance(a, Tensor) and a.is_floating_point()]
    if len(inputs) != 1 or not leaf.args or leaf.args[0] is not inputs[0]:
        return False
    x = inputs[0].detach()
    axes = 1 if x.shape[0] > 1 or x.ndim < 3 else 2
    scale = torch.rand(x.shape[:axes], generator=torch.Generator().manual_seed(1)).add(1.5).to(x)
    try:
        with isolated(leaf.module, {}), torch.no_grad():
            grown = x * scale.reshape(*x.shape[:axes], *[1] * (x.ndim - axes))
            scaled = leaf.module(grown, *leaf.args[1:], **leaf.kwargs)
    except Exception:
        return False
    original, scaled = leaf.tensor.detach().float(), scaled.detach().float()
    if channels is not None:
        index = channels.index(x.device).flatten()
        original, scaled = (t.movedim(channels.axis, -1)[..., index] for t in (original, scaled))
    return bool((scaled - original).norm() < 0.02 * original.norm())
