"""Where the heads are: in a core's tensors, and in the output channels of a projection."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class HeadLayout:
    """How a core's leading axes (all but the last two) hold its heads.

    Attributes:
        heads: number of query heads, H.
        kind: "axis": an axis of their own, at ``axis`` (negative); "minor" / "major": flattened with the batch,
            heads running fastest / slowest; "single": one head.
    """

    heads: int
    kind: Literal["axis", "minor", "major", "single"] = "axis"
    axis: int = -3

    def split(self, tensor: Tensor, heads: int | None = None) -> Tensor:
        """(..., T, D) to (B, H, T, D); ``heads`` where it is not the query's number (grouped keys).

        >>> HeadLayout(2, "minor").split(torch.zeros(6, 5, 4)).shape
        torch.Size([3, 2, 5, 4])
        """
        heads, tail = heads or self.heads, tensor.shape[-2:]
        if self.kind == "axis" and tensor.ndim >= -self.axis:
            tensor = tensor.movedim(self.axis, -3)
            return tensor if tensor.ndim == 4 else tensor.reshape(-1, *tensor.shape[-3:])
        if self.kind == "minor":
            return tensor.reshape(-1, heads, *tail)
        if self.kind == "major":
            return tensor.reshape(heads, -1, *tail).transpose(0, 1)
        return tensor.reshape(-1, 1, *tail)


def default_layout(shape: Sequence[int]) -> HeadLayout:
    """The layout to assume where nothing could be found out: (B, H, T, .) as it is, anything else as one head."""
    return HeadLayout(shape[-3]) if len(shape) == 4 else HeadLayout(1, "single")


@dataclass(frozen=True)
class Channels:
    """Which channels of a module's output belong to which head.

    Attributes:
        axis: the channel axis, counted from the end (-1 of a linear layer, -3 of a 2-d convolution).
        starts: first channel of each head.
        dim: channels of a head, D.
        step: distance between one channel of a head and the next.
        head_axis: the axis that holds the heads where the output is split already; ``starts`` is then (0,).
        heads: how many heads.
    """

    axis: int
    starts: tuple[int, ...]
    dim: int
    step: int = 1
    head_axis: int | None = None
    heads: int = 0

    @property
    def stride(self) -> int | None:
        """Distance between neighbouring heads where it is the same for all; None where it is not."""
        if len(self.starts) == 1:
            return self.dim * self.step
        strides = {b - a for a, b in zip(self.starts, self.starts[1:], strict=False)}
        return strides.pop() if len(strides) == 1 else None

    @property
    def is_block(self) -> bool:
        """The heads lie one behind the other without gaps."""
        return self.step == 1 and self.stride == self.dim

    def index(self, device: torch.device | None = None) -> Tensor:
        """(H, D) int64: the channel of each head's each component."""
        starts = torch.tensor(self.starts, device=device)
        return starts[:, None] + torch.arange(self.dim, device=device) * self.step

    def overlaps(self, other: Channels) -> bool:
        mine, theirs = set(self.index().flatten().tolist()), set(other.index().flatten().tolist())
        return bool(mine & theirs)

    def to_dict(self) -> dict[str, Any]:
        return {
            "axis": self.axis,
            "starts": list(self.starts),
            "dim": self.dim,
            "step": self.step,
            "head_axis": self.head_axis,
            "heads": self.heads,
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Channels:
        return cls(**{**data, "starts": tuple(data["starts"])})
