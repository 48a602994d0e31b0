"""Norm some channels of a projection's output: its class becomes one whose forward norms what the old one returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from qkwatch.layout import Channels
from qkwatch.norms import HeadNorm
from qkwatch.reclass import Changed, change_class, check_unchanged, restore_class, set_plainly

Part = tuple[Channels, HeadNorm]


class _Normed(Changed):
    """A projection whose output is normed."""

    _qkwatch_parts: tuple[Part, ...]

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return norm_channels(super().forward(*args, **kwargs), self._qkwatch_parts)  # type: ignore[misc]


class _NormedAdapter(_Normed):
    """For a wrapper such as peft's LoRA layers: where it is taken off, the norm passes to what it wraps."""

    def unload_and_optionally_merge_module(self, merge: bool, safe_merge: bool, adapter_names: Any) -> nn.Module:
        """peft calls this, where a layer has it, instead of exchanging the layer for its content."""
        if merge:
            self.merge(safe_merge=safe_merge, adapter_names=adapter_names)  # type: ignore[attr-defined]
        inner: nn.Module = self.get_base_layer()  # type: ignore[attr-defined]
        for channels, norm in self._qkwatch_parts:
            add_part(inner, channels, norm)
        return inner


def parts_of(module: nn.Module) -> tuple[Part, ...]:
    """The norms that ``module`` applies to its own output."""
    return getattr(module, "_qkwatch_parts", ())


def add_part(module: nn.Module, channels: Channels, norm: HeadNorm) -> None:
    """Let ``module`` norm these channels of its output with ``norm`` (which somebody else owns)."""
    parts = (*parts_of(module), (channels, norm))
    if not isinstance(module, _Normed):
        change_class(module, _NormedAdapter if hasattr(module, "get_base_layer") else _Normed)
    # in a tuple, so that nn.Module does not adopt the norms: their keys belong to the site
    set_plainly(module, "_qkwatch_parts", tuple(sorted(parts, key=lambda part: part[0].starts[0])))


def remove_part(module: nn.Module, norm: HeadNorm) -> None:
    """Take one norm away; the last one takes the changed class with it."""
    if not isinstance(module, _Normed):
        return
    parts = parts_of(module)
    left = tuple(part for part in parts if part[1] is not norm)
    if len(left) == len(parts):
        return
    check_unchanged(module, "")
    if left:
        set_plainly(module, "_qkwatch_parts", left)
        return
    restore_class(module)
    del module.__dict__["_qkwatch_parts"]


def norm_channels(output: Tensor, parts: Sequence[Part]) -> Tensor:
    """``output`` with the channels of each part normed per head, all others as they are."""
    first = parts[0][0]
    if first.head_axis is not None:
        (channels, norm), ends = parts[0], (-2, -1)
        split = output.movedim((first.head_axis, channels.axis), ends)
        return norm(split).movedim(ends, (first.head_axis, channels.axis))  # type: ignore[no-any-return]
    moved = output if first.axis == -1 else output.movedim(first.axis, -1)
    if all(channels.is_block for channels, _ in parts):
        moved = _blocks(moved, parts)
    elif _interleaved(parts, moved.shape[-1]):
        moved = _strided(moved, parts)
    else:
        moved = _scattered(moved, parts)
    return moved if first.axis == -1 else moved.movedim(-1, first.axis)


def _blocks(output: Tensor, parts: Sequence[Part]) -> Tensor:
    """Each part is one run of channels: (..., [q heads | k heads | rest])."""
    return _runs(output, [(c.starts[0], c.heads * c.dim, _split(c, norm)) for c, norm in parts])


def _split(channels: Channels, norm: HeadNorm) -> Callable[[Tensor], Tensor]:
    return lambda run: norm(run.unflatten(-1, (channels.heads, channels.dim))).flatten(-2)


def _runs(x: Tensor, runs: Sequence[tuple[int, int, Callable[[Tensor], Tensor]]]) -> Tensor:
    """``x`` with each run (start, width, what to do) of its last axis replaced, the rest as it is."""
    sizes: list[int] = []
    norms: list[Callable[[Tensor], Tensor] | None] = []
    for start, width, norm in runs:
        gap = start - sum(sizes)
        sizes += [gap, width] if gap else [width]
        norms += [None, norm] if gap else [norm]
    rest = x.shape[-1] - sum(sizes)
    if rest:
        sizes.append(rest)
        norms.append(None)
    if len(sizes) == 1 and norms[0] is not None:
        return norms[0](x)  # a piece of a split may not be written into by whoever gets it
    # one split, not slices: its backward is one concatenation, theirs a tensor of zeros each
    pieces = x.split(sizes, -1)
    done = [piece if norm is None else norm(piece) for piece, norm in zip(pieces, norms, strict=True)]
    return torch.cat(done, -1)


def _interleaved(parts: Sequence[Part], width: int) -> bool:
    """The channels are H groups of equal size, each with one head of every part at the same place."""
    strides = {(c.stride, c.heads, c.step) for c, _ in parts}
    if len(strides) != 1:
        return False
    stride, heads, step = strides.pop()
    fits = all(c.starts[0] + c.dim <= (stride or 0) for c, _ in parts)
    return stride is not None and step == 1 and stride * heads == width and fits


def _strided(output: Tensor, parts: Sequence[Part]) -> Tensor:
    """(..., H groups of [q | k | rest])."""
    channels, stride = parts[0][0], parts[0][0].stride
    assert stride is not None
    groups = output.unflatten(-1, (channels.heads, stride))  # (..., H, stride)
    return _runs(groups, [(c.starts[0], c.dim, norm) for c, norm in parts]).flatten(-2)


def _scattered(output: Tensor, parts: Sequence[Part]) -> Tensor:
    """Any channels at all."""
    for channels, norm in parts:
        index = channels.index(output.device).flatten()
        heads = output.index_select(-1, index).unflatten(-1, (channels.heads, channels.dim))
        output = output.index_copy(-1, index, norm(heads).flatten(-2))
    return output
