"""What feeds the queries, or the keys, of a core: questions put to autograd.

The tensors come from a replay with the outputs of parametrised modules cut out of the graph (`probe.replay`), so that
gradients stop at the nearest module output, and say which of its elements feed what.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qkwatch.layout import Channels
from qkwatch.probe import Leaf, Refusal, generic, isolated
from qkwatch.taps import parts_of


@dataclass
class Source:
    """The module output that feeds q (or k): which of its elements feed which row-block, and one single row.

    ``codes`` is like the leaf plus a last axis of digits, NaN where an element feeds nothing; ``row`` is boolean,
    like the leaf: the elements that feed one single row of q.
    """

    leaf: Leaf
    codes: Tensor
    row: Tensor


class Side:
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
        return _degree(self.tensor, sources) < 0.1 or (
            bool(self.feeding) and all(is_norm(leaf) for leaf, _ in self.feeding)
        )

    def source(self) -> Source:
        """The one output that feeds it. Raises `Refusal` where there is none, or where there is more."""
        what, (leaf, base) = self.what, self._single()
        radix = radix_of(self.tensor)
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
        return Source(leaf, codes, row.abs() > row.abs().amax() * 1e-6)

    def _single(self) -> tuple[Leaf, Tensor]:
        what = self.what
        wide = next((name for name, p in self.raw.items() if p.ndim > 1), None)
        if wide is not None and not self.feeding:
            raise Refusal(f"its {what} come from the parameter {wide!r}, not from a module's output")
        if not self.feeding:
            raise Refusal(f"no projection of its own feeds the {what}", widen=True)
        if len(self.feeding) > 1:
            kinds = ", ".join(sorted(type(leaf.module).__name__ for leaf, _ in self.feeding))
            raise Refusal(f"its {what} are put together from {len(self.feeding)} module outputs ({kinds})")
        leaf, base = self.feeding[0]
        for i in multiplies(self.tensor, list(self.raw.values()), leaf.tensor):
            raise Refusal(f"the parameter {list(self.raw)[i]!r} multiplies its {what} between projection and softmax")
        if not leaf.alone:
            raise Refusal(f"the {type(leaf.module).__name__} that feeds its {what} returns more than one tensor")
        return leaf, base


def multiplies(output: Tensor, factors: Sequence[Tensor], other: Tensor) -> list[int]:
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


def radix_of(tensor: Tensor) -> int:
    return 8 if tensor.dtype in (torch.float16, torch.bfloat16) else 1024


def _places(n: int, radix: int) -> int:
    places = 0
    while n > 1:
        n, places = -(-n // radix), places + 1
    return places


def _degree(core_tensor: Tensor, sources: list[Tensor]) -> float:
    """Euler's degree of q in what feeds it: 1 of something linear, 0 where a norm takes the length away.

    Where q is zero nothing can be told, and it counts as linear.
    """
    q = core_tensor.detach().float()
    largest = q.abs().amax()
    if not bool(largest > 0):
        return 1.0
    seed = (q / largest).to(core_tensor)
    grads = torch.autograd.grad(core_tensor, sources, seed, retain_graph=True, allow_unused=True)
    pairs = [(g.float() * s.detach().float()).sum() for g, s in zip(grads, sources, strict=True) if g is not None]
    return float(sum(pairs) / ((q / largest).square().sum() * largest))


def is_normed(leaf: Leaf, channels: Channels, core_tensor: Tensor, beside: Sequence[Tensor] = ()) -> bool:
    """Whether something between the projection and the core takes the length away.

    Either behind the tap (Euler's degree of q in the tap's output is 0, not 1) or in the tap itself (a norm
    layer, or a projection of ours with its norm: these channels stay when each sample of the input is scaled).
    Parameters ``beside`` the output take a share of the degree: both together have 1 where nothing is normed.
    """
    if any(channels.overlaps(ours) for ours, _ in parts_of(leaf.module)):
        return True
    normed = _degree(core_tensor, [leaf.tensor]) < 0.1
    if normed and beside:
        normed = abs(_degree(core_tensor, [leaf.tensor, *beside]) - 1) > 0.05
    return normed or is_norm(leaf, channels)


def is_norm(leaf: Leaf, channels: Channels | None = None) -> bool:
    """Whether a module's output (or these channels of it) stays when each sample of its input is scaled."""
    inputs = [a for a in leaf.args if isinstance(a, Tensor) and a.is_floating_point()]
    if len(inputs) != 1 or not leaf.args or leaf.args[0] is not inputs[0]:
        return False
    x = generic(inputs[0].detach())
    axes = 1 if x.shape[0] > 1 or x.ndim < 3 else 2
    scale = torch.rand(x.shape[:axes], generator=torch.Generator().manual_seed(1)).add(1.5).to(x)
    try:
        with isolated(leaf.module, {}, leaf.args, leaf.kwargs), torch.no_grad():
            grown = x * scale.reshape(*x.shape[:axes], *[1] * (x.ndim - axes))
            original, scaled = (leaf.module(t, *leaf.args[1:], **leaf.kwargs) for t in (x, grown))
    except Exception:
        return False
    if not isinstance(scaled, Tensor):
        return False
    original, scaled = leaf.tensor.detach().float(), scaled.detach().float()
    if channels is not None:
        index = channels.index(x.device).flatten()
        original, scaled = (t.movedim(channels.axis, -1)[..., index] for t in (original, scaled))
    return bool((scaled - original).norm() < 0.02 * original.norm())
