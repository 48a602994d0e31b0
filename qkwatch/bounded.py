"""Two functions with gradients of their own: a ceiling that lets go, a unit vector that is sane at zero."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

GRADIENT_FLOOR = 1e-4
"""An L2 norm below this passes gradients as if it were this long: at most 1e4, not 1e12 at a zero vector."""


class Ceiling(torch.autograd.Function):
    """clamp(gain, low, high) whose gradient is dropped only where it would push a gain further outside."""

    generate_vmap_rule = True

    @staticmethod
    def forward(gain: Tensor, low: float, high: float) -> Tensor:
        return gain.clamp(low, high)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float, float], output: Tensor) -> None:
        gain, ctx.low, ctx.high = inputs
        ctx.save_for_backward(gain)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (gain,) = ctx.saved_tensors
        # descent moves against the gradient: a negative one raises the gain
        outward = ((gain > ctx.high) & (grad < 0)) | ((gain < ctx.low) & (grad > 0))
        return grad.masked_fill(outward, 0.0), None, None


class Unit(torch.autograd.Function):
    """x / max(|x|, eps) over the axes, as F.normalize; the gradient divides by max(|x|, GRADIENT_FLOOR)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, eps: float, axes: tuple[int, ...]) -> Tensor:
        return x * torch.rsqrt(x.pow(2).sum(axes, keepdim=True).clamp_min(eps * eps))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float, tuple[int, ...]], output: Tensor) -> None:
        x, ctx.eps, ctx.axes = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        square = x.pow(2).sum(ctx.axes, keepdim=True)  # from x again, so that second derivatives are right
        floor = max(ctx.eps, GRADIENT_FLOOR) ** 2
        unit = x * torch.rsqrt(square.clamp_min(floor))
        along = (grad * unit).sum(ctx.axes, keepdim=True)
        sideways = grad - unit * torch.where(square > floor, along, 0.0)
        return sideways * torch.rsqrt(square.clamp_min(floor)), None, None
