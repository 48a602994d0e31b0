"""Which axis of a tensor is which of the product that it descends from: followed through views, whatever the sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from qkwatch.operations import COPIES, MOVES, REGROUPS, SHUFFLES, VIEWS

Atom = tuple[int, int]  # a size above 1, and its stride in the product as it left the multiplication; 0: broadcast
Axes = tuple[tuple[Atom, ...], ...]  # of each axis of a tensor, outermost first

_MARK = 1 << 20


def axes_of(shape: Sequence[int]) -> Axes:
    """Of the product itself.

    >>> axes_of((6, 5, 4))
    (((6, 20),), ((5, 4),), ((4, 1),))
    """
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    return tuple(_atom(size, stride) for size, stride in zip(shape, strides, strict=True))


def follow(func: Any, args: Sequence[Any], source: Tensor, axes: Axes, out: Tensor) -> Axes | None:
    """The axes of what an operation made of ``source``; None where they cannot be told."""
    op = getattr(func, "overloadpacket", func)
    if op in SHUFFLES:
        return None
    if op in REGROUPS:
        return regroup(axes, out.shape)
    if op in MOVES:
        return _moved(func, args, source, axes, out.shape)
    return None if op in VIEWS - COPIES else spread(axes, out.shape)


def regroup(axes: Axes, shape: Sequence[int]) -> Axes | None:
    """Of a view of other sizes: the atoms stay in their order, and are split where an axis ends within one.

    >>> regroup(axes_of((6, 5, 4)), (2, 3, 20))
    (((2, 60),), ((3, 20),), ((5, 4), (4, 1)))
    """
    atoms = [atom for axis in reversed(axes) for atom in reversed(axis)]  # the last one is the outermost
    found = []
    for size in shape:
        axis, left = [], size
        while left > 1 and atoms:
            extent, stride = atoms.pop()
            if left % extent == 0:
                axis.append((extent, stride))
                left //= extent
            elif extent % left == 0:
                axis.append((left, stride * (extent // left)))
                atoms.append((extent // left, stride))
                left = 1
            else:
                return None
        if left > 1:
            return None
        found.append(tuple(axis))
    return tuple(found) if not atoms else None


def spread(axes: Axes, shape: Sequence[int]) -> Axes | None:
    """Of an operation element by element, which may broadcast; or of one that makes an axis longer or shorter."""
    if len(shape) < len(axes):
        return None
    found: list[tuple[Atom, ...]] = []
    for size, atoms in zip(shape, ((),) * (len(shape) - len(axes)) + axes, strict=True):
        if math.prod(extent for extent, _ in atoms) == size:
            found.append(atoms)
        elif len(atoms) < 2:
            found.append(_atom(size, atoms[0][1] if atoms else 0))
        else:
            return None
    return tuple(found)


def _atom(size: int, stride: int) -> tuple[Atom, ...]:
    return ((size, stride),) if size > 1 else ()


def _moved(func: Any, args: Sequence[Any], source: Tensor, axes: Axes, shape: Sequence[int]) -> Axes | None:
    """Run the operation on a tensor without data whose strides number its axes, and see where they went."""
    marks = [_MARK + axis for axis in range(source.ndim)]
    ghost = torch.empty_strided(source.shape, marks, device="meta")
    moved = func(ghost, *args[1:])
    if not isinstance(moved, Tensor) or moved.shape != shape or moved.storage_offset():
        return None
    found: list[tuple[Atom, ...]] = []
    for size, mark in zip(moved.shape, moved.stride(), strict=True):
        step = mark // _MARK
        if size < 2 or not step:
            found.append(_atom(size, 0))
            continue
        atoms = axes[mark % _MARK // step]
        if math.prod(extent for extent, _ in atoms) != size or step > 1:
            if len(atoms) != 1:
                return None
            atoms = _atom(size, atoms[0][1] * step)
        found.append(atoms)
    return tuple(found)
