"""Tables of PyTorch's operations, as a dispatch mode sees them."""

from __future__ import annotations

from typing import Any

import torch

aten = torch.ops.aten

VIEWS = {
    getattr(aten, name)
    for name in [
        "t",
        "transpose",
        "permute",
        "view",
        "_unsafe_view",
        "reshape",
        "expand",
        "slice",
        "select",
        "narrow",
        "squeeze",
        "unsqueeze",
        "detach",
        "alias",
        "_to_copy",
        "clone",
        "contiguous",
        "unbind",
        "split",
        "split_with_sizes",
        "chunk",
        "as_strided",
    ]
    if hasattr(aten, name)
}
# which of them move, drop or add whole axes, and which regroup them
MOVES = {
    getattr(aten, name)
    for name in [
        "t",
        "transpose",
        "permute",
        "expand",
        "slice",
        "select",
        "squeeze",
        "unsqueeze",
    ]
}
REGROUPS = {aten.view, aten._unsafe_view, aten.reshape}
COPIES = {aten.detach, aten.alias, aten._to_copy, aten.clone, aten.contiguous}
# elements change places within an axis
SHUFFLES = {aten.index, aten.index_select, aten.gather, aten.flip, aten.roll, aten.sort, aten.topk}
# operation -> positions of the two factors
PRODUCTS = {aten.bmm: (0, 1), aten.mm: (0, 1), aten.baddbmm: (1, 2), aten.addmm: (1, 2)}
ADDS = {aten.add, aten.add_}
SUBTRACTS = {aten.sub, aten.sub_}
MULTIPLIES = {aten.mul, aten.mul_}
DIVIDES = {aten.div, aten.div_}
FILLS = {aten.masked_fill, aten.masked_fill_}
# no logits pass through these on their way to the softmax: what comes out is a new activation
FRESH = {
    getattr(aten, name)
    for name in [
        "native_layer_norm",
        "native_group_norm",
        "native_batch_norm",
        "cudnn_batch_norm",
        "_native_batch_norm_legit",
        "_native_batch_norm_legit_no_training",
        "_batch_norm_with_update",
        "_fused_rms_norm",
    ]
    if hasattr(aten, name)
}
SOFTMAX = {getattr(aten, name) for name in ("_softmax", "_safe_softmax", "softmax") if hasattr(aten, name)}


def _fused_ops() -> dict[Any, tuple[int | str, int | str]]:
    """Fused operation -> where its mask and its is_causal flag are."""
    places: dict[str, tuple[int | str, int | str]] = {
        "_scaled_dot_product_flash_attention_for_cpu": ("attn_mask", 4),
        "_scaled_dot_product_flash_attention": ("attn_mask", 4),
        "_scaled_dot_product_efficient_attention": (3, 6),
        "_scaled_dot_product_cudnn_attention": (3, 6),
        "_scaled_dot_product_fused_attention_overrideable": (3, 5),
        "_scaled_dot_product_attention_math_for_mps": (3, 5),
    }
    return {getattr(aten, name): place for name, place in places.items() if hasattr(aten, name)}


FUSED = _fused_ops()
