"""Find out whether a site can be normed where its fused softmax takes queries and keys, and on which axis.

The fallback where no projections can be normed. The site is run again with gradients on its inputs: an axis of q holds
the heads where one index depends on the same tokens of the same samples as any other; a batch or windows do not.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from qkwatch.layout import HeadLayout
from qkwatch.modules import ModuleStack
from qkwatch.probe import Call, CoreTap, Refusal, replay

_ALIKE = 0.5  # of what two heads depend on, at least so much is common to both
_EVEN = 1e-3  # head vectors whose lengths differ by less are normed already


@dataclass
class _Fused:
    """One call of `F.scaled_dot_product_attention`, in the graph."""

    owner: nn.Module | None  # the innermost module with weights in whose forward it ran
    q: Tensor
    k: Tensor
    mask: Tensor | None


class _Watch(TorchFunctionMode):
    def __init__(self, stack: ModuleStack):
        super().__init__()
        self.stack, self.calls = stack, list[_Fused]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            owner = next((m for m in reversed(self.stack.frames) if next(m.parameters(), None) is not None), None)
            self.calls.append(_Fused(owner, *_operands(*args, **kwargs)))
        return func(*args, **kwargs)


def _operands(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor, Tensor | None]:
    return query, key, attn_mask


def find_core_tap(site: nn.Module, call: Call) -> CoreTap:
    """Where the site's queries and keys can be normed at its fused softmax.

    Raises:
        Refusal: with the reason, where they cannot.
    """
    with torch.inference_mode(False), torch.enable_grad():
        inputs, tracked = call.tracked()
        try:
            with ModuleStack() as stack, _Watch(stack) as watch:
                cores = len(replay(site, tracked).cores)
        except Exception as error:
            raise Refusal(f"its forward could not be run again by itself ({type(error).__name__}: {error})") from error
        if not watch.calls or len(watch.calls) != cores:
            raise Refusal("not all of its attention is a call of scaled_dot_product_attention")
        if any(fused.owner is not site for fused in watch.calls):
            raise Refusal("attention of a module inside it would be normed with it")
        found = [_tap_of(fused, inputs) for fused in watch.calls]
    if any(tap != found[0] for tap in found):
        raise Refusal("it computes several attentions that differ in their heads")
    return found[0]


def _tap_of(fused: _Fused, inputs: Sequence[Tensor]) -> CoreTap:
    q, k = fused.q, fused.k
    if q.is_nested or k.is_nested or q.ndim < 4:
        raise Refusal("its heads are not on an axis of their own at the softmax")
    if _even(q) and _even(k):
        raise Refusal("its queries and keys are normed already", normed=True)
    axis = _head_axis(q, k, inputs)
    of_q, of_k = _dependence(q, inputs), _dependence(k, inputs)
    feeding = [i for i, (a, b) in enumerate(zip(of_q, of_k, strict=True)) if a is not None or b is not None]
    if fused.mask is not None and fused.mask.requires_grad:
        of_mask = _dependence(fused.mask, inputs)
        if any(of_mask[i] is not None for i in feeding):
            raise Refusal("what is added to its logits depends on the same inputs as its queries and keys")
    heads, k_heads = q.shape[axis], k.shape[axis]
    if heads % k_heads:
        raise Refusal(f"{heads} query heads do not divide over {k_heads} key heads")
    groups = k_heads // _repeats(k, axis) if heads == k_heads else k_heads
    both = [i for i in feeding if of_q[i] is not None and of_k[i] is not None]
    layout = HeadLayout(heads, "axis", axis)
    return CoreTap(layout, groups, q.shape[-1], self_attention=bool(both) or not feeding)


def _even(x: Tensor) -> bool:
    """Whether all head vectors along the tokens have one length, as a norm leaves them."""
    lengths = x.detach().float().norm(dim=-1)
    low, high = lengths.amin(-1), lengths.amax(-1)
    return lengths.shape[-1] > 2 and bool((high > 0).all()) and bool((high <= low * (1 + _EVEN)).all())


def _repeats(k: Tensor, axis: int) -> int:
    """How often each key head is repeated, one copy behind the other."""
    heads = k.detach().movedim(axis, 0)
    same = [torch.equal(a, b) for a, b in itertools.pairwise(heads)]
    run = same.index(False) + 1 if False in same else len(same) + 1
    whole = len(heads) % run == 0 and all(equal == ((i + 1) % run != 0) for i, equal in enumerate(same))
    return run if whole else 1


def _head_axis(q: Tensor, k: Tensor, inputs: Sequence[Tensor]) -> int:
    """The axis (negative) of q that holds the heads."""
    if q.shape[:-2] != k.shape[:-2]:
        return -3  # grouped keys: PyTorch itself takes this axis for the heads
    leading = range(-q.ndim, -2)
    wide = [axis for axis in leading if q.shape[axis] > 1]
    for tensor in (q, k):  # learned queries depend on no input
        if any(g is not None for g in _dependence(tensor, inputs)):
            shared = [axis for axis in wide if _is_shared(tensor, axis, inputs)]
            if len(shared) == 1:
                return shared[0]
            if not shared and q.shape[-3] == 1:
                return -3  # one head
            break
    raise Refusal("its heads could not be told from its batch at the softmax")


def _is_shared(x: Tensor, axis: int, inputs: Sequence[Tensor]) -> bool:
    """Whether the first and the last index along an axis depend on the same elements of the inputs."""
    first, last = (_dependence(x.select(axis, index), inputs) for index in (0, -1))
    common = either = 0
    for a, b in zip(first, last, strict=True):
        if a is not None and b is not None:
            common, either = common + int((a & b).sum()), either + int((a | b).sum())
        elif a is not None or b is not None:
            either += int((a if a is not None else b).sum())  # type: ignore[union-attr]
    return common > _ALIKE * either


def _dependence(x: Tensor, inputs: Sequence[Tensor]) -> list[Tensor | None]:
    """For each input, which of its elements ``x`` depends on; None where on none."""
    if not x.requires_grad or not inputs:
        return [None] * len(inputs)
    seed = torch.rand(x.shape, generator=torch.Generator().manual_seed(3)).add(0.5).to(x)
    grads = torch.autograd.grad(x, list(inputs), seed, retain_graph=True, allow_unused=True)
    return [None if g is None or not bool(g.count_nonzero()) else g != 0 for g in grads]
