"""QK-norm inside `torch.nn.MultiheadAttention`, which has no projection modules to tap.

`patch_mha_` swaps the class in place: parameters, optimizer state and state_dict keys stay as they are.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qkwatch.errors import QKWatchError
from qkwatch.norms import CHILD, QKNorm


class QKNormMultiheadAttention(nn.MultiheadAttention):
    """A `nn.MultiheadAttention` with a `qk_norm` child; made by `patch_mha_`, undone by `unpatch_mha_`.

    `nn.TransformerEncoderLayer` reads the weights and skips this forward in eval without grad, which
    would leave out the norm silently. It does so only where `_qkv_same_embed_dim` is true, hence the
    property.
    """

    qk_norm: QKNorm

    @property
    def _qkv_same_embed_dim(self) -> bool:
        return False if CHILD in self._modules else bool(self.__dict__.get("_qkv_same_embed_dim", True))

    @_qkv_same_embed_dim.setter
    def _qkv_same_embed_dim(self, value: bool) -> None:
        self.__dict__["_qkv_same_embed_dim"] = value  # the true answer is needed again after unpatching

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As `nn.MultiheadAttention.forward`, with normed queries and keys."""
        return normed_mha_forward(
            self,
            self.qk_norm,
            query,
            key,
            value,
            key_padding_mask=key_padding_mask,
            need_weights=need_weights,
            attn_mask=attn_mask,
            average_attn_weights=average_attn_weights,
            is_causal=is_causal,
        )


def patch_mha_(mha: nn.MultiheadAttention, qk_norm: QKNorm) -> None:
    """Give `mha` the norm, in place. Raises QKWatchError for a subclass (its own forward would be lost) or a
    norm with other heads."""
    if type(mha) is not nn.MultiheadAttention:
        raise QKWatchError(f"only torch.nn.MultiheadAttention itself can be patched, got {type(mha).__name__}")
    for side in (qk_norm.q, qk_norm.k):
        if (side.heads, side.head_dim) != (mha.num_heads, mha.head_dim):
            raise QKWatchError(
                f"the norm has {side.heads} heads of {side.head_dim} channels, "
                f"the layer {mha.num_heads} of {mha.head_dim}"
            )
    mha.qk_norm = qk_norm
    mha.__class__ = QKNormMultiheadAttention


def unpatch_mha_(mha: nn.MultiheadAttention) -> None:
    """Back to a plain `nn.MultiheadAttention`, in place; nothing happens to one that is not patched."""
    if isinstance(mha, QKNormMultiheadAttention):
        mha.__class__ = nn.MultiheadAttention  # type: ignore[assignment]
        del mha.qk_norm


def normed_mha_forward(
    mha: nn.MultiheadAttention,
    qk_norm: QKNorm,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The forward of `mha` with `qk_norm.q` and `qk_norm.k` on the head vectors; shapes and masks as there.

    The learned `bias_k` is normed like every key, so the norm's bound holds for it; the row of
    `add_zero_attn` stays zero. Without `need_weights` it runs on `scaled_dot_product_attention`. Nested
    tensors pass in self-attention without masks or weights (`nn.TransformerEncoder` makes them of padded
    batches in eval), else they raise QKWatchError, as do wrong shapes and a causal hint without its mask.
    """
    if query.is_nested or key.is_nested or value.is_nested:
        plain = query is key and key is value and query.layout == torch.strided
        if not plain or need_weights or key_padding_mask is not None or attn_mask is not None:
            raise QKWatchError(
                "nested tensors are taken only in strided self-attention without masks and weights; "
                "pad the batch and pass key_padding_mask"
            )
        return _nested_forward(mha, qk_norm, query, is_causal), None
    if is_causal and attn_mask is None:
        raise QKWatchError("is_causal is a hint about attn_mask: pass the causal attn_mask too")
    batched = query.dim() == 3
    _check_shapes(mha, query, key, value, key_padding_mask, attn_mask)
    if not batched:
        query, key, value = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
        key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
    elif not mha.batch_first:
        query, key, value = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)

    q, k, v = _heads(mha, qk_norm, query, key, value)  # (B, H, L, D), (B, H, S', D) twice
    causal_only = is_causal and key_padding_mask is None and not need_weights
    mask = None if causal_only else _merged_mask(mha, q, k, key_padding_mask, attn_mask, query.dtype)
    dropout = mha.dropout if mha.training else 0.0
    weights = None
    if need_weights:
        weights = _weights(q, k, mask, dropout)  # (B, H, L, S')
        heads = weights @ v
        weights = weights.mean(1) if average_attn_weights else weights
    else:
        heads = F.scaled_dot_product_attention(q, k, v, mask, dropout, causal_only)
    # the weights, not a call of out_proj: nn.MultiheadAttention never runs it as a module (nor its hooks)
    output = F.linear(heads.transpose(1, 2).flatten(2), mha.out_proj.weight, mha.out_proj.bias)
    if not batched:
        return output.squeeze(0), None if weights is None else weights.squeeze(0)
    return output if mha.batch_first else output.transpose(0, 1), weights


def _check_shapes(
    mha: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
) -> None:
    """Raise QKWatchError with the shapes where broadcasting would hide a wrong one."""
    dims = query.dim()
    same = key.dim() == dims and key.shape[:-1] == value.shape[:-1]
    if dims not in (2, 3) or not same:
        shapes = ", ".join(str(tuple(t.shape)) for t in (query, key, value))
        raise QKWatchError(f"query, key, value must be all 2-D or all 3-D, key and value of one length: {shapes}")
    sequence = 1 if dims == 3 and mha.batch_first else 0
    batch = query.shape[1 - sequence] if dims == 3 else 1
    rows, columns = query.shape[sequence], key.shape[sequence]
    if dims == 3 and key.shape[1 - sequence] != batch:
        raise QKWatchError(f"query has batch size {batch}, key {key.shape[1 - sequence]}")
    padding = (batch, columns) if dims == 3 else (columns,)
    if key_padding_mask is not None and key_padding_mask.shape != padding:
        raise QKWatchError(f"key_padding_mask must be {padding}, got {tuple(key_padding_mask.shape)}")
    allowed = ((rows, columns), (batch * mha.num_heads, rows, columns))
    if attn_mask is not None and tuple(attn_mask.shape) not in allowed:
        raise QKWatchError(f"attn_mask must be {allowed[0]} or {allowed[1]}, got {tuple(attn_mask.shape)}")


def _heads(
    mha: nn.MultiheadAttention, qk_norm: QKNorm, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Batch-first inputs -> normed q (B, H, L, D), normed k and v (B, H, S', D) with the extra keys."""
    if mha.in_proj_weight is not None:
        weights = list(mha.in_proj_weight.chunk(3))
    else:
        weights = [mha.q_proj_weight, mha.k_proj_weight, mha.v_proj_weight]
    biases = [None] * 3 if mha.in_proj_bias is None else list(mha.in_proj_bias.chunk(3))
    if mha.in_proj_weight is not None and query is key and key is value:
        q, k, v = F.linear(query, mha.in_proj_weight, mha.in_proj_bias).chunk(3, dim=-1)
    else:
        q, k, v = (F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))
    if mha.bias_k is not None and mha.bias_v is not None:
        k = torch.cat([k, mha.bias_k.expand(k.shape[0], -1, -1)], dim=1)
        v = torch.cat([v, mha.bias_v.expand(v.shape[0], -1, -1)], dim=1)
    split = (mha.num_heads, mha.head_dim)
    q, k, v = (x.reshape(*x.shape[:2], *split) for x in (q, k, v))  # (B, L, H, D)
    q, k = qk_norm.q(q), qk_norm.k(k)
    if mha.add_zero_attn:
        k, v = (torch.cat([x, x.new_zeros(x.shape[0], 1, *split)], dim=1) for x in (k, v))
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A boolean mask (True: hidden) as 0 and −inf; a float mask as it is."""
    if mask.is_floating_point():
        return mask
    if mask.dtype != torch.bool:
        raise QKWatchError(f"masks are boolean or floating, got {mask.dtype}")
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -math.inf)


def _merged_mask(
    mha: nn.MultiheadAttention,
    q: Tensor,
    k: Tensor,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    dtype: torch.dtype,
) -> Tensor | None:
    """Both masks as one to add to the logits, broadcastable to (B, H, L, S'); the extra keys are visible."""
    merged: Tensor | None = None
    if attn_mask is not None:
        merged = _additive(attn_mask, dtype)
        if merged.dim() == 3:
            merged = merged.view(q.shape[0], mha.num_heads, *merged.shape[-2:])
    if key_padding_mask is not None:
        padding = _additive(key_padding_mask, dtype)[:, None, None, :]
        merged = padding if merged is None else merged + padding
    extra = 0 if merged is None else k.shape[2] - merged.shape[-1]
    return F.pad(merged, (0, extra)) if merged is not None and extra else merged


def _weights(q: Tensor, k: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
    """softmax(q·kᵀ/√D + mask), dropped out, (B, H, L, S')."""
    logits = (q * math.sqrt(1.0 / q.shape[-1])) @ k.transpose(-2, -1)
    weights = (logits if mask is None else logits + mask).softmax(-1)
    return F.dropout(weights, dropout) if dropout > 0.0 else weights


def _nested_forward(mha: nn.MultiheadAttention, qk_norm: QKNorm, x: Tensor, is_causal: bool) -> Tensor:
    """Self-attention over a strided nested (B, *, E) by way of a padded batch and its mask."""
    if is_causal:
        raise QKWatchError("a causal hint with a nested tensor needs a mask: pad the batch and pass both masks")
    lengths = [row.shape[0] for row in x.unbind()]
    padded = x.to_padded_tensor(0.0)  # (B, max length, E)
    positions = torch.arange(padded.shape[1], device=padded.device)
    hidden = positions >= torch.tensor(lengths, device=padded.device)[:, None]
    if not mha.batch_first:
        padded = padded.transpose(0, 1)
    output, _ = normed_mha_forward(mha, qk_norm, padded, padded, padded, hidden, need_weights=False)
    output = output if mha.batch_first else output.transpose(0, 1)
    return torch.nested.as_nested_tensor([row[:n] for row, n in zip(output, lengths, strict=True)])
