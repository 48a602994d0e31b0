"""Two functions with gradients of their own: a ceiling that lets go, a unit vector that is sane at zero."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

GRADIENT_FLOOR = 1e-4
"""An L2 norm below this passes gradients as if it were this long: at most 1e4, not 1e12 at a zero vector."""


class _Own(torch.autograd.Function):
    """A function that torch.func and torch.compile can transform; `call` it.

    A `setup_context` of its own, which they need, makes torch look up and bind the signature of `forward` in every
    call. That takes longer than all the rest, so `call` goes round it wherever nothing is transformed.
    """

    generate_vmap_rule = True
    _plain: type[torch.autograd.Function]

    def __init_subclass__(cls) -> None:
        def forward(ctx: Any, *args: Any) -> Tensor:
            output: Tensor = cls.forward(*args)
            cls.setup_context(ctx, args, output)
            return output

        members = {"forward": staticmethod(forward), "backward": staticmethod(cls.backward)}
        cls._plain = type(cls.__name__, (torch.autograd.Function,), members)

    @classmethod
    def call(cls, *args: Any) -> Tensor:
        transformed = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
        output: Tensor = (cls if transformed else cls._plain).apply(*args)
        return output


class Ceiling(_Own):
    """clamp(gain, low, high) whose gradient is dropped only where it would push a gain further outside."""

    @staticmethod
    def forward(gain: Tensor, low: float, high: float) -> Tensor:
        return gain.clamp(low, high)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float, float], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        gain, limited = ctx.saved_tensors
        # descent moves against the gradient: a negative one raises a gain, and outward if that is above its limit
        return grad.masked_fill((limited - gain) * grad > 0, 0.0), None, None


class Unit(_Own):
    """x / max(|x|, eps) over the axes, as F.normalize; the gradient divides by max(|x|, eps, GRADIENT_FLOOR).

    The two bounds come squared, from `squares`: with dynamic shapes Dynamo cannot do arithmetic with a number that
    is an attribute of a module.
    """

    @staticmethod
    def forward(x: Tensor, least: float, floor: float, axes: tuple[int, ...]) -> Tensor:
        return x * torch.rsqrt(x.pow(2).sum(axes, keepdim=True).clamp_min(least))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float, float, tuple[int, ...]], output: Tensor) -> None:
        x, _, ctx.floor, ctx.axes = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (x,) = ctx.saved_tensors
        square = x.pow(2).sum(ctx.axes, keepdim=True)  # from x again, so that second derivatives are right
        unit = x * torch.rsqrt(square.clamp_min(ctx.floor))
        along = (grad * unit).sum(ctx.axes, keepdim=True)
        sideways = grad - unit * torch.where(square > ctx.floor, along, 0.0)
        return sideways * torch.rsqrt(square.clamp_min(ctx.floor)), None, None, None


def squares(eps: float) -> tuple[float, float]:
    """The bounds of `Unit` for values and for gradients."""
    return eps**2, max(eps, GRADIENT_FLOOR) ** 2
