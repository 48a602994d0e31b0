"""What is known of a tensor's descent, and how an operation passes it on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from qkwatch.core import Bias
from qkwatch.kernels import may_look
from qkwatch.masks import HIDING
from qkwatch.products import Product


@dataclass
class Info:
    """What is known of one tensor's descent."""

    weight: bool = False
    products: tuple[Product, ...] = ()  # in running order; relative positions bring products of their own
    unshifted: Tensor | None = None  # the logits before a row's own maximum was taken off
    probs: tuple[object, ...] = ()  # a token per softmax that it descends from: differences of two are attention too
    factor: float | None = None
    biases: tuple[Bias, ...] = ()  # what was added to a product


def products_after(func: Any, args: Any, found: list[tuple[Tensor, Info]], out: Any) -> tuple[Product, ...]:
    """The products that an operation's output descends from, in running order."""
    others = [x for x in args[:2] if not any(x is tensor and info.products for tensor, info in found)]
    merged: dict[int, Product] = {}
    for tensor, info in found:
        for product in info.products:
            behind = product.after(func, args, tensor, out, others)
            merged[product.order] = merged[product.order].wider(behind) if product.order in merged else behind
    return tuple(merged[order] for order in sorted(merged))


def products_of_base(written: Info, base: Info | None) -> tuple[Product, ...]:
    """Of a tensor that was written to through a view: what was known of its axes stays."""
    before = {product.order: product for product in base.products} if base is not None else {}
    return tuple(before.get(p.order, replace(p, axes=None)) for p in written.products)


def filled(mask: Tensor, value: Any, shape: torch.Size) -> tuple[Bias, ...]:
    """Logits that a fill put there; where it hides their keys, they are told by being too low for a product."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            return ()
        if not may_look(value):
            return (Bias(torch.where(mask, value.detach().float(), 0.0), shape),)
        value = value.item()
    return (Bias(mask * float(value), shape),) if HIDING < value < 0 else ()


def is_per_row(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and tensor.ndim > 1 and tensor.shape[-1] == 1


def tensors(values: Any) -> list[Tensor]:
    """The tensors among ``values``, one level of lists deep."""
    found = [value for value in values if isinstance(value, Tensor)]
    for value in values:
        if isinstance(value, (list, tuple)):
            found.extend(item for item in value if isinstance(item, Tensor))
    return found
