"""Run one module again on the inputs it was given, without a trace left on it."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from qkwatch.capture import CoreCapture
from qkwatch.core import Core
from qkwatch.layout import Channels, HeadLayout
from qkwatch.untouched import untouched

ZERO = 1e-12  # the outputs of a projection that starts at zero are no larger


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

        kept_args, kept_kwargs = tree_map(detach, (args, kwargs))
        return cls(kept_args, kept_kwargs, autocast)

    def fresh(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The inputs once more; caches, which the call would fill a second time, are left out."""
        again: dict[int, Any] = {}  # tensors of their own, which an operation in place cannot tie to a graph

        def reuse(value: Any) -> Any:
            return again.setdefault(id(value), _reusable(value)) if isinstance(value, Tensor) else _reusable(value)

        return tree_map(reuse, (self.args, self.kwargs))  # type: ignore[no-any-return]

    def tracked(self) -> tuple[list[Tensor], Call]:
        """The floating inputs as leaves, and the same call with them in it."""
        leaves: list[Tensor] = []
        known: dict[int, Tensor] = {}  # one tensor passed twice stays one tensor

        def track(value: Any) -> Any:
            if not isinstance(value, Tensor) or not value.is_floating_point():
                return value
            if id(value) not in known:
                leaves.append(value.detach().clone().requires_grad_())
                known[id(value)] = leaves[-1].clone()  # not the leaf itself: the site may write into it
            return known[id(value)]

        args, kwargs = tree_map(track, (self.args, self.kwargs))
        return leaves, Call(args, kwargs, self.autocast)


def _alike(tensor: Tensor) -> Tensor:
    return tensor if tensor.requires_grad else tensor.detach()


def _reusable(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone() if value.is_inference() else _alike(value)
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device, nn.Module)):
        return value
    if isinstance(value, MutableMapping):
        return copy.copy(value)  # shared between layers: filled by one, read by the next
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
def isolated(
    module: nn.Module, autocast: Mapping[str, torch.dtype], *inputs: Any, weights: bool = True
) -> Iterator[None]:
    """Grad mode on, the surrounding saved-tensor hooks (checkpointing) off; everything left as it was, see `untouched`.

    ``inputs``: what the module is run on.
    """
    devices = sorted({p.device.index or 0 for p in module.parameters() if p.device.type == "cuda"})
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(untouched(module, *inputs, weights=weights))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t))
        for kind in ("cpu", "cuda"):
            dtype = autocast.get(kind)
            stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=dtype is not None))
        yield


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
        cut: cut the outputs of its parametrised submodules out of the graph, and return them; zeros among them
            (projections that start there) become random numbers, so such a run is for questions to autograd only.
        edit: module -> what to do to its output.
        on_core: called with each core as it runs; without it the cores are kept and returned.
    """
    cores: list[Core] = []
    leaves: list[Leaf] = []
    faults: list[Exception] = []
    capture = CoreCapture(on_core or cores.append, on_fault=faults.append)
    handles = []
    if cut:
        cutter, inner = _cutter(leaves, capture), [m for m in module.modules() if _parametrised(m, module)]
        handles = [m.register_forward_hook(cutter, with_kwargs=True) for m in inner]
    for target, change in (edit or {}).items():
        handles.append(target.register_forward_hook(lambda m, a, out, change=change: change(out)))
    args, kwargs = call.fresh()
    try:
        with isolated(module, call.autocast, args, kwargs, call.args, call.kwargs), capture, capture.alone():
            output = module(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    if faults:
        raise faults[0]
    return Replay(output, cores, leaves)


def generic(tensor: Tensor) -> Tensor:
    """The tensor, or random numbers in its place where it is next to zero: there gradients and norms tell nothing."""
    if not tensor.numel() or not bool(tensor.abs().amax() <= ZERO):
        return tensor
    return torch.randn(tensor.shape, generator=torch.Generator().manual_seed(4)).to(tensor)


def _parametrised(module: nn.Module, root: nn.Module) -> bool:
    return module is not root and next(module.parameters(), None) is not None


def _cutter(leaves: list[Leaf], capture: CoreCapture) -> Callable[..., Any]:
    def cut(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if any(capture.descends(value) for value in args):
            return output  # logits pass through it: what it does to them must stay in the graph
        alone = isinstance(output, Tensor)

        def one(value: Any) -> Any:
            if not isinstance(value, Tensor) or not value.is_floating_point():
                return value
            leaf = generic(value.detach()).requires_grad_()
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


@dataclass(frozen=True)
class CoreTap:
    """Where q and k can be normed as the fused softmax takes them: the heads' axis, and how many key heads."""

    layout: HeadLayout
    k_heads: int
    head_dim: int
    self_attention: bool = field(default=True, compare=False)


@dataclass(frozen=True)
class Loose:
    """What stands beside normed queries and keys in the logits, and is bounded by no norm at the projections.

    ``parameters``: names of those that are added to (or stand among) the queries or keys behind their projection;
    ``factors``: names of what else queries or keys are multiplied with.
    """

    parameters: tuple[str, ...] = ()
    factors: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.parameters or self.factors)

    def note(self) -> str:
        """One line: what a patch at the projections leaves open."""
        parts = []
        if self.parameters:
            parts.append(f"{_listed(self.parameters)} beside its queries or keys")
        if self.factors:
            parts.append(f"{_listed(self.factors)}, with which its queries or keys are multiplied besides")
        return f"bounded however its projections grow, but not against the growth of {' and of '.join(parts)}"


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(name if " " in name else repr(name) for name in names)


@dataclass
class Taps:
    """The taps of a site's core, how its tensors hold the heads, and whether queries and keys are of one input."""

    layout: HeadLayout
    q: Tap
    k: Tap
    self_attention: bool
    loose: Loose = Loose()
