"""Which axes of a module's output run over features (channels, heads), and which over positions (batch, frames)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from qkwatch.probe import Call, Leaf, generic, isolated, replay
from qkwatch.taps import parts_of


def is_feature_axis(leaf: Leaf, axis: int, place: list[int]) -> bool:
    """Whether elements along an axis of a module's output come from different weights: channels, not positions."""
    if parts := parts_of(leaf.module):  # a norm of ours mixes what comes from different weights
        return axis - leaf.tensor.ndim in (parts[0][0].axis, parts[0][0].head_axis)
    parameters = [p for p in leaf.module.parameters() if p.requires_grad]
    if not parameters or leaf.tensor.shape[axis] < 2:
        return True
    try:
        with isolated(leaf.module, {}, leaf.args, leaf.kwargs):
            args = [generic(a) if isinstance(a, Tensor) and a.is_floating_point() else a for a in leaf.args]
            output = leaf.module(*args, **leaf.kwargs)
            masks = []
            for index in (0, 1):
                element = output[tuple(index if a == axis else p for a, p in enumerate(place))]
                grads = torch.autograd.grad(element, parameters, retain_graph=True, allow_unused=True)
                masks.append([None if g is None else g != 0 for g in grads])
    except Exception:
        return True  # it cannot be run by itself: the check of the patched site will have to tell
    pairs = zip(*masks, strict=True)
    return not all(a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)


class Axes:
    """Tells heads from positions along the axes of a site's inner outputs.

    Heads have weights of their own, or are cut out of the features of what came before: of a projection, or of the
    site's input. Frames, windows and samples are neither, wherever they stand.
    """

    def __init__(self, site: nn.Module, call: Call, leaves: Sequence[Leaf]):
        self._site, self._call, self._leaves = site, call, leaves
        self._inputs: list[Tensor] = []
        self._again: list[Leaf] = []  # the same leaves, in the graph of the inputs

    def holds_heads(self, leaf: Leaf, axis: int, place: list[int], channels: int) -> bool:
        """Whether an axis of the leaf may be one of heads; ``channels`` is its axis of a head's components."""
        number = next(i for i, other in enumerate(self._leaves) if other is leaf)
        try:
            if not self._again:
                self._inputs, tracked = self._call.tracked()
                self._again = replay(self._site, tracked, cut=True).leaves
            return self._is_of_features(self._again[number], axis, place, channels)
        except (RuntimeError, IndexError):
            return True

    def _is_of_features(self, leaf: Leaf, axis: int, place: list[int], channels: int) -> bool:
        if isinstance(leaf.module, nn.Embedding):  # other tokens have other weights
            return axis == leaf.tensor.ndim - 1
        if is_feature_axis(leaf, axis, place):
            return True
        x = next((t for t in (*leaf.args, *leaf.kwargs.values()) if isinstance(t, Tensor)), None)
        if (
            x is None
            or not x.requires_grad
            or x.shape[:channels] != leaf.tensor.shape[:channels]
            or axis >= x.ndim
            or channels >= x.ndim
        ):
            return True
        earlier = self._again[: next(i for i, other in enumerate(self._again) if other is leaf)]
        targets = [*self._inputs, *(other.tensor for other in earlier)]
        ends = []
        for index in (0, 1):
            at = [index if a == axis else slice(None) if a == channels else p for a, p in enumerate(place)]
            row = x[tuple(at)]
            grads = torch.autograd.grad(row, targets, torch.ones_like(row), retain_graph=True, allow_unused=True)
            ends.append([None if g is None else g.nonzero() for g in grads])
        apart = list(zip(*ends, strict=True))
        origins = [None] * len(self._inputs) + list(earlier)
        return all(self._apart_in_features(o, *pair) for o, pair in zip(origins, apart, strict=True))

    def _apart_in_features(self, origin: Leaf | None, a: Tensor | None, b: Tensor | None) -> bool:
        """Whether two rows, known by the elements that feed them, lie apart in the features of where they come from."""
        if a is None or b is None or not len(a) or not len(b):
            return True
        axes = range(a.shape[1])
        apart = [i for i in axes if not torch.equal(a[:, i].unique(), b[:, i].unique())]
        along = [i for i in axes if len(a[:, i].unique()) > 1]
        if origin is None:
            return set(apart) <= set(along)  # a row runs along the features of the input
        return all(
            self._is_of_features(origin, i, a[0].tolist(), along[-1] if along else a.shape[1] - 1) for i in apart
        )
