"""The core inside PyTorch's fused inference path, which holds projections and attention in one operation."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from qkwatch.core import Core
from qkwatch.operations import aten
from qkwatch.probe import Call


def fast_path_core(op: Any, args: tuple[Any, ...], chain: list[nn.Module]) -> tuple[Core, list[nn.Module], Call]:
    """The core inside PyTorch's fused inference path, from the operation's own arguments.

    ``_native_multi_head_attention`` and ``_transformer_encoder_layer_fwd`` hold projections, attention and more
    in one operation; what enters the softmax is recomputed beside it.
    """
    if op is aten._native_multi_head_attention:
        query, key, _, width, heads, weight, bias = args[:7]
        mask, kind = (args[9], args[12] if len(args) > 12 else None) if len(args) > 9 else (None, None)
    else:
        query, width, heads, weight, bias = args[:5]
        if args[8]:
            query = F.layer_norm(query, (width,), args[10], args[11], args[9])
        key, mask, kind = query, *(args[18:20] if len(args) > 19 else (None, None))
        layer = chain[0]
        mha = getattr(layer, "self_attn", None)
        if isinstance(mha, nn.MultiheadAttention):
            chain = [mha, *chain]
    if query.is_nested:
        lengths = query._nested_tensor_size()[:, 0]
        query = query.to_padded_tensor(0.0)
        key = query
        mask, kind = torch.arange(query.shape[1]) >= lengths[:, None], 1
        mask = mask.to(query.device)
    q, k = (
        F.linear(x, weight[i * width : (i + 1) * width], bias[i * width : (i + 1) * width])
        .unflatten(-1, (heads, -1))
        .transpose(1, 2)
        for i, x in enumerate((query, key))
    )
    visible = None
    if mask is not None:
        hidden = mask.bool()  # the fast path's masks name what is hidden
        visible = ~(hidden[:, None, None, :] if kind == 1 else hidden)
    core = Core(q, k, mask=visible, scale=q.shape[-1] ** -0.5)
    return core, chain, Call.of((query, key, key), {"need_weights": False})
