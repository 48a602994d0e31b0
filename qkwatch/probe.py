"""Find the taps of a core by autograd: which module's output, and which of its channels, feed which head.

A site is run again on the inputs it was given, with every parametrised module's output cut out of the graph.
Gradients of the core's q (or k) then arrive at the nearest such output and nowhere else, on the channels that
feed it; seeds weighted by the head's number tell the heads apart. No layout table is consulted.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from qkwatch.capture import Core, CoreCapture
from qkwatch.layout import Channels, HeadLayout
from qkwatch.taps import parts_of


class Refusal(Exception):
    """Why a site cannot be patched.

    ``widen``: an ancestor of the module may still hold what is missing; ``normed``: what could be told of its
    queries or keys is that they are normed already.
    """

    def __init__(self, reason: str, *, widen: bool = False, normed: bool = False):
        super().__init__(reason)
        self.reason, self.widen, self.normed = reason, widen, normed


@dataclass
class Call:
    """The inputs of one forward call, kept so that it can be run again."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    autocast: dict[str, torch.dtype] = field(default_factory=dict)

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        kinds = {"cpu", *(t.device.type for t in tensors)} - {"meta"}
        autocast = {k: torch.get_autocast_dtype(k) for k in kinds if torch.is_autocast_enabled(k)}
        detached: dict[int, Tensor] = {}  # one tensor passed twice stays one tensor: self-attention

        def detach(value: Any) -> Any:
            return detached.setdefault(id(value), value.detach()) if isinstance(value, Tensor) else value

        return cls(*tree_map(detach, (args, kwargs)), autocast)

    def fresh(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The inputs once more; caches, which the call would fill a second time, are left out."""
        return tree_map(_reusable, (self.args, self.kwargs))  # type: ignore[no-any-return]


def _reusable(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone() if value.is_inference() else value
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device, nn.Module)):
        return value
    if hasattr(value, "update") or "cache" in type(value).__name__.lower():
        return None
    try:
        return copy.deepcopy(value)
    except Exception:
        return value


@dataclass
class Leaf:
    """A module output that was cut out of the graph."""

    module: nn.Module
    tensor: Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    alone: bool  # the output was this one tensor


@dataclass
class Replay:
    output: Any
    cores: list[Core]
    leaves: list[Leaf]


@contextlib.contextmanager
def isolated(module: nn.Module, autocast: Mapping[str, torch.dtype]) -> Iterator[None]:
    """Grad mode on; random state, buffers and the surrounding saved-tensor hooks (checkpointing) left alone."""
    saved = [(buffer, buffer.clone()) for buffer in module.buffers()]
    devices = sorted({p.device.index or 0 for p in module.parameters() if p.device.type == "cuda"})
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t))
        for kind in ("cpu", "cuda"):
            dtype = autocast.get(kind)
            stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=dtype is not None))
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, value in saved:
                    if not torch.equal(buffer, value):
                        buffer.copy_(value)


def replay(
    module: nn.Module,
    call: Call,
    *,
    cut: bool = False,
    edit: Mapping[nn.Module, Callable[[Tensor], Tensor]] | None = None,
    on_core: Callable[[Core], None] | None = None,
) -> Replay:
    """Run ``module`` again on ``call``.

    Args:
        cut: cut the outputs of its parametrised submodules out of the graph, and return them.
        edit: module -> what to do to its output.
        on_core: called with each core as it runs; without it the cores are kept and returned.
    """
    cores: list[Core] = []
    leaves: list[Leaf] = []
    faults: list[Exception] = []
    capture = CoreCapture(on_core or cores.append, on_fault=faults.append)
    handles = []
    if cut:
        cutter, inner = _cutter(leaves), [m for m in module.modules() if _parametrised(m, module)]
        handles = [m.register_forward_hook(cutter, with_kwargs=True) for m in inner]
    for target, change in (edit or {}).items():
        handles.append(target.register_forward_hook(lambda m, a, out, change=change: change(out)))
    args, kwargs = call.fresh()
    try:
        with isolated(module, call.autocast), capture, capture.alone():
            output = module(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    if faults:
        raise faults[0]
    return Replay(output, cores, leaves)


def _parametrised(module: nn.Module, root: nn.Module) -> bool:
    return module is not root and next(module.parameters(), None) is not None


def _cutter(leaves: list[Leaf]) -> Callable[..., Any]:
    def cut(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        alone = isinstance(output, Tensor)

        def one(value: Any) -> Any:
            if not isinstance(value, Tensor) or not value.is_floating_point():
                return value
            leaf = value.detach().requires_grad_()
            leaves.append(Leaf(module, leaf, args, kwargs, alone))
            return leaf.clone()  # not the leaf itself: the site may write into it

        return tree_map(one, output)

    return cut


@dataclass
class Tap:
    """Where q (or k) can be normed: a module and the channels of each head in its output."""

    module: nn.Module
    channels: Channels
    normed: bool


@dataclass
class Taps:
    """The taps of a site's core, how its tensors hold the heads, and whether queries and keys are of one input."""

    layout: HeadLayout
    q: Tap
    k: Tap
    self_attention: bool


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
    queries, keys = core.queries(), core.keys()
    lead = (queries if core.fused else core.rows()).shape[:-2]
    if queries.shape[-1] != keys.shape[-1]:
        raise Refusal("queries and keys differ in width")
    q_leaf, q_codes, q_row = _trace(site, queries, leaves, "queries")
    q_channels, numbers = _channels(q_leaf.tensor, q_codes, q_row, "queries", queries, lead)
    layout = _layout(core, queries, numbers)
    k_leaf, k_codes, k_row = _trace(site, keys, leaves, "keys")
    k_channels, _ = _channels(k_leaf.tensor, k_codes, k_row, "keys", keys, lead)
    if layout.heads % k_channels.heads:
        raise Refusal(f"{layout.heads} query heads do not divide over {k_channels.heads} key heads")
    taps = []
    for leaf, channels, tensor in ((q_leaf, q_channels, queries), (k_leaf, k_channels, keys)):
        if not leaf.alone:
            raise Refusal(f"{type(leaf.module).__name__} returns more than one tensor")
        taps.append(Tap(leaf.module, channels, _is_normed(leaf, channels, tensor)))
    return Taps(layout, *taps, self_attention=_same_input(q_leaf, k_leaf))


def _same_input(a: Leaf, b: Leaf) -> bool:
    if a.module is b.module or not (a.args and b.args):
        return True
    x, y = a.args[0], b.args[0]
    return x is y or (isinstance(x, Tensor) and isinstance(y, Tensor) and x.shape == y.shape and torch.equal(x, y))


# -- gradients ----------------------------------------------------------------------------------------------


def _trace(site: nn.Module, core_tensor: Tensor, leaves: list[Leaf], what: str) -> tuple[Leaf, Tensor, Tensor]:
    """The leaf that feeds q (or k), the number of the core row-block each of its elements feeds, and one row's.

    Returns:
        leaf; codes: like the leaf plus a last axis of digits, NaN where an element feeds nothing; row: boolean,
        like the leaf: the elements that feed one single row of q.
    """
    if not core_tensor.requires_grad:
        raise Refusal(f"no projection of its own feeds the {what}", widen=True)
    n = core_tensor.shape[:-2].numel()
    generator = torch.Generator().manual_seed(0)
    # the same positive weights for every head, so that the ratio of two gradients is the head's number alone
    weights = (torch.rand(core_tensor.shape[-2:], generator=generator) + 0.5).to(core_tensor)
    seed = weights.expand(n, *weights.shape)

    def backward(seed: Tensor, targets: list[Tensor]) -> list[Tensor | None]:
        seed = seed.reshape(core_tensor.shape)
        return list(torch.autograd.grad(core_tensor, targets, seed, retain_graph=True, allow_unused=True))

    tensors = [leaf.tensor for leaf in leaves]
    raw = {name: p for name, p in site.named_parameters() if p.requires_grad}
    grads = backward(seed, tensors + list(raw.values()))
    feeding = [(leaf, g) for leaf, g in zip(leaves, grads, strict=False) if g is not None and g.count_nonzero()]
    used = [n for n, g in zip(raw, grads[len(leaves) :], strict=True) if g is not None and bool(g.count_nonzero())]
    if any(raw[name].ndim > 1 for name in used):
        degree = _degree(core_tensor, [raw[name] for name in used])
        raise Refusal(f"the {what} are projected by {used[0]!r} itself, not by a module's forward", normed=degree < 0.1)
    if not feeding:
        raise Refusal(f"no projection of its own feeds the {what}", widen=True)
    modules = {id(leaf.module): leaf.module for leaf, _ in feeding}
    if len(feeding) > 1:
        kinds = ", ".join(sorted(type(m).__name__ for m in modules.values()))
        raise Refusal(f"the {what} are put together from {len(feeding)} module outputs ({kinds})")
    leaf, base = feeding[0]
    radix = 8 if core_tensor.dtype in (torch.float16, torch.bfloat16) else 1024
    numbers, digits = torch.arange(n, device=core_tensor.device), []
    for place in range(max(1, _places(n, radix))):
        digit = (numbers // radix**place % radix + 1).to(core_tensor.dtype)
        grad = backward(seed * digit[:, None, None], [leaf.tensor])[0]
        assert grad is not None
        digits.append((grad.float() / base.float()) - 1)
    codes = torch.stack(digits, -1)
    threshold = base.abs().amax() * 1e-3
    codes[base.abs() <= threshold] = torch.nan
    one = torch.zeros(n, *weights.shape, dtype=core_tensor.dtype, device=core_tensor.device)
    one[0, weights.shape[0] // 2] = weights[weights.shape[0] // 2]
    row_grad = backward(one, [leaf.tensor])[0]
    assert row_grad is not None
    return leaf, codes, row_grad.abs() > row_grad.abs().amax() * 1e-6


def _places(n: int, radix: int) -> int:
    places = 0
    while n > 1:
        n, places = -(-n // radix), places + 1
    return places


def _channels(
    leaf: Tensor, codes: Tensor, row: Tensor, what: str, core_tensor: Tensor, lead: torch.Size
) -> tuple[Channels, list[float]]:
    """The channels of each head, and each head's number in the core's flattened leading axes."""
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
    radix = 8 if core_tensor.dtype in (torch.float16, torch.bfloat16) else 1024
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
    if head_axis is not None:
        count = leaf.shape[head_axis]
        numbers = [numbers[0] + h for h in range(count)]  # only the queries' are read further
        return Channels(axis - leaf.ndim, (0,), dim, 1, head_axis - leaf.ndim, count), numbers
    order = sorted(range(len(heads)), key=lambda i: numbers[i])
    starts, steps = [], set()
    for i in order:
        channels = heads[i][1]
        starts.append(channels[0])
        steps |= {b - a for a, b in zip(channels, channels[1:], strict=False)}
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
    if heads == 1:
        return HeadLayout(1, "single")
    strides = {b - a for a, b in zip(numbers, numbers[1:], strict=False)}
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
    if _degree(core_tensor, [leaf.tensor]) < 0.1:
        return True
    inputs = [a for a in leaf.args if isinstance(a, Tensor) and a.is_floating_point()]
    if len(inputs) != 1 or not leaf.args or leaf.args[0] is not inputs[0]:
        return False
    x = inputs[0].detach()
    axes = 1 if x.shape[0] > 1 or x.ndim < 3 else 2
    generator = torch.Generator().manual_seed(1)
    scale = torch.rand(x.shape[:axes], generator=generator).add(1.5).to(x)
    with isolated(leaf.module, {}), torch.no_grad():
        scaled = leaf.module(x * scale.reshape(*x.shape[:axes], *[1] * (x.ndim - axes)), *leaf.args[1:])
    index = channels.index(x.device).flatten()
    original, scaled = (t.detach().float().movedim(channels.axis, -1)[..., index] for t in (leaf.tensor, scaled))
    return bool((scaled - original).norm() < 0.02 * original.norm())
