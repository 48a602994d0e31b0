"""Norm queries and keys right where the fused softmax takes them, by changing the site's class in place.

For sites without projections that could be normed: latent and joint attention, projections used as raw weights, learned
biases and scales behind the projection. What enters `F.scaled_dot_product_attention` are the true queries and keys,
wherever they come from.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from qkwatch.errors import QKWatchError
from qkwatch.layout import HeadLayout
from qkwatch.norms import HeadNorm, QKNorm
from qkwatch.probe import CoreTap
from qkwatch.reclass import Changed, change_class, restore_class, set_plainly


class NormAtCore(TorchFunctionMode):
    """While entered, norms q and k of each call of `F.scaled_dot_product_attention`; ``calls`` counts them.

    Masks, dropout, scale and values stay as they are. Keys out of a cache come by un-normed, and are normed anew.
    """

    def __init__(self, norm: QKNorm, axis: int):
        super().__init__()
        self.norm, self.axis, self.calls = norm, axis, 0
        self.with_grad = torch.is_grad_enabled()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        if self.with_grad and not torch.is_grad_enabled():
            raise QKWatchError(
                f"{_name(self.norm)}: its attention runs without gradients inside a forward with them (checkpointing "
                "inside the layer?); recomputed in the backward pass it would lack its norm. Checkpoint the whole "
                "layer instead, or take the patch away with qkwatch.undo_"
            )
        self.calls += 1
        return self._attend(*args, **(kwargs or {}))

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        query, key = (_normed(n, x, self.axis) for n, x in ((self.norm.q, query), (self.norm.k, key)))
        # the operation itself: a patched module around this one must not take the call for its own
        attended: Tensor = torch.ops.aten.scaled_dot_product_attention(query, key, value, *args, **kwargs)
        return attended


def _normed(norm: HeadNorm, x: Tensor, axis: int) -> Tensor:
    """(..., H, T, D) with the heads on ``axis``, normed; keys may come repeated for their query heads."""
    heads = x.movedim(axis, -2)  # (..., T, H, D)
    repeats = heads.shape[-2] // norm.heads
    if repeats < 2 or heads.shape[-2] % norm.heads:
        return norm(heads).movedim(-2, axis)  # type: ignore[no-any-return]
    grouped = heads.unflatten(-2, (norm.heads, repeats)).transpose(-2, -3)  # (..., T, repeats, G, D)
    return norm(grouped).transpose(-2, -3).flatten(-3, -2).movedim(-2, axis)  # type: ignore[no-any-return]


class _NormedAtCore(Changed):
    """A site whose fused softmax takes normed queries and keys."""

    _qkwatch_axis: int

    @classmethod
    def members(cls, base: type[nn.Module]) -> dict[str, Any]:
        """A forward with the signature of the site's own."""
        return {"forward": _forward_of(base)}


def _forward_of(base: type[nn.Module]) -> Callable[..., Any]:
    @functools.wraps(base.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        mode = NormAtCore(self.qk_norm, self._qkwatch_axis)
        with mode:
            output = base.forward(self, *args, **kwargs)
        if not mode.calls:
            raise QKWatchError(
                f"{_name(self.qk_norm)}: its forward called no scaled_dot_product_attention, where its norm sits, so "
                "it ran without the norm. Set its attention implementation back to 'sdpa' (fused), as it was when it "
                "was patched, or take the patch away with qkwatch.undo_"
            )
        return output

    return forward


def _name(norm: QKNorm) -> str:
    return repr(norm.get_plan().get("site", ""))


def has_core_norm(site: nn.Module) -> bool:
    """Whether a site norms its queries and keys at the softmax itself."""
    return isinstance(site, _NormedAtCore)


def installed_core_tap(site: nn.Module) -> CoreTap | None:
    """Where a patched site norms its queries and keys; None where it does not do so at the softmax."""
    if not isinstance(site, _NormedAtCore):
        return None
    norm: QKNorm = site.qk_norm  # type: ignore[assignment]
    layout = HeadLayout(norm.q.heads, "axis", site._qkwatch_axis)
    return CoreTap(layout, norm.k.heads, norm.q.head_dim)


def add_core_norm(site: nn.Module, axis: int) -> None:
    """From now on ``site.qk_norm`` (which the caller puts there) norms what its fused softmax takes."""
    change_class(site, _NormedAtCore)
    set_plainly(site, "_qkwatch_axis", axis)


def remove_core_norm(site: nn.Module) -> None:
    """The site's own class again."""
    restore_class(site)
    del site.__dict__["_qkwatch_axis"]
