"""Small models of many families, and what their attention sites are known to be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

T, VOCAB = 12, 100
TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 0,
}


class Expected(NamedTuple):
    """One site: name, H, G, D, and per side the tap's name and the first channel of each head."""

    name: str
    q_heads: int
    k_heads: int
    head_dim: int
    q: tuple[str, tuple[int, ...]] | None = None
    k: tuple[str, tuple[int, ...]] | None = None


@dataclass
class Family:
    """How to make a model and its inputs, and its sites in running order."""

    build: Callable[[], nn.Module]
    sites: list[Expected]
    args: Callable[[], tuple[Any, ...]] = lambda: (token_ids(),)
    kwargs: Callable[[], dict[str, Any]] = dict
    modes: tuple[bool, ...] = (True,)
    tags: set[str] = field(default_factory=set)


def token_ids(batch: int = 2, length: int = T) -> Tensor:
    return torch.randint(1, 90, (batch, length))


def first_tensor(output: Any) -> Tensor:
    return next(t for t in tree_leaves(output) if isinstance(t, Tensor) and t.is_floating_point())


def heads(count: int, start: int = 0, stride: int = 8) -> tuple[int, ...]:
    return tuple(start + i * stride for i in range(count))


def _repeat(template: str, count: int, h: int, g: int, d: int, q: tuple, k: tuple) -> list[Expected]:
    """The same site in several layers; ``q`` and ``k`` are (name inside the site, starts)."""
    names = [template.format(i) for i in range(count)]
    return [Expected(n, h, g, d, (f"{n}.{q[0]}", q[1]), (f"{n}.{k[0]}", k[1])) for n in names]


# -- hand-written ---------------------------------------------------------------------------------------------


class TinyAttention(nn.Module):
    """Causal self-attention with one fused projection, as in many small repositories."""

    def __init__(self, dim: int, heads: int, flash: bool, dropout: float = 0.0):
        super().__init__()
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.heads, self.flash, self.dropout = heads, flash, nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        b, t, c = x.shape
        q, k, v = (z.view(b, t, self.heads, -1).transpose(1, 2) for z in self.qkv(x).split(c, -1))
        if self.flash:
            dropout = self.dropout.p if self.training else 0.0
            y = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=mask is None)
        else:
            logits = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
            visible = torch.ones(t, t, dtype=torch.bool, device=x.device).tril() if mask is None else mask
            y = self.dropout(logits.masked_fill(~visible, float("-inf")).softmax(-1)) @ v
        return self.proj(y.transpose(1, 2).reshape(b, t, c))


class TinyBlock(nn.Module):
    def __init__(self, dim: int, heads: int, flash: bool, dropout: float):
        super().__init__()
        self.ln, self.attn = nn.LayerNorm(dim), TinyAttention(dim, heads, flash, dropout)
        self.mlp = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.BatchNorm1d(T), nn.Linear(dim, dim))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.attn(self.ln(x), mask)
        return x + self.mlp(x)


class TinyGPT(nn.Module):
    """Two blocks over token ids (B, T); batch norms, so that a stray forward pass would show in the buffers."""

    def __init__(self, flash: bool = True, dim: int = 32, heads: int = 4, dropout: float = 0.1, layers: int = 2):
        super().__init__()
        self.wte = nn.Embedding(VOCAB, dim)
        self.h = nn.ModuleList(TinyBlock(dim, heads, flash, dropout) for _ in range(layers))
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.wte(ids)
        for block in self.h:
            x = block(x, mask)
        return self.head(x)


class ConvAttention(nn.Module):
    """Attention over an image (B, C, H, W) with a 1 x 1 convolution for q, k and v."""

    def __init__(self, dim: int = 16, heads: int = 2):
        super().__init__()
        self.qkv, self.out, self.heads = nn.Conv2d(dim, 3 * dim, 1), nn.Conv2d(dim, dim, 1), heads

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        q, k, v = self.qkv(x).view(b, 3, self.heads, c // self.heads, h * w).transpose(-1, -2).unbind(1)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(-1, -2).reshape(b, c, h, w))


# -- libraries ------------------------------------------------------------------------------------------------


def hf(model: str, config: str, impl: str = "sdpa", **options: Any) -> nn.Module:
    """A transformers model by the names of its classes."""
    import transformers

    return getattr(transformers, model)(getattr(transformers, config)(**options, attn_implementation=impl))


def llama(impl: str = "sdpa", **options: Any) -> nn.Module:
    return hf("LlamaForCausalLM", "LlamaConfig", impl, **{**TEXT, "num_key_value_heads": 2, **options})


def timm_model(name: str, **options: Any) -> nn.Module:
    import timm

    return timm.create_model(name, **options)


def x_transformer(**options: Any) -> nn.Module:
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(dim=32, depth=2, heads=4, attn_dim_head=8, **options)
    return TransformerWrapper(num_tokens=VOCAB, max_seq_len=64, attn_layers=layers)


def vit_pytorch() -> nn.Module:
    from vit_pytorch import ViT

    return ViT(image_size=32, patch_size=8, num_classes=5, dim=32, depth=2, heads=4, dim_head=8, mlp_dim=48)


SEPARATE = [("q_proj", heads(4)), ("k_proj", heads(4))]
WHISPER = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "num_mel_bins": 8,
    "max_source_positions": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "dropout": 0.1,
}
SWIN = {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2], "num_heads": [2], "window_size": 4}


def _image(size: int, channels: int = 3) -> Callable[[], tuple[Any, ...]]:
    return lambda: (torch.randn(2, channels, size, size),)


def _hf_families(impl: str) -> dict[str, Family]:
    gpt2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4}
    falcon = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    t5 = {"vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4}
    both = lambda: {"input_ids": token_ids(), "decoder_input_ids": token_ids()}  # noqa: E731
    audio = lambda: {"input_features": torch.randn(2, 8, 32), "decoder_input_ids": token_ids()}  # noqa: E731
    qk = ("q", heads(4)), ("k", heads(4))
    families = {
        "llama": Family(
            lambda: llama(impl),
            _repeat("model.layers.{}.self_attn", 2, 4, 2, 8, ("q_proj", heads(4)), ("k_proj", heads(2))),
        ),
        "gpt2": Family(
            lambda: hf("GPT2LMHeadModel", "GPT2Config", impl, **gpt2),
            _repeat("transformer.h.{}.attn", 2, 4, 4, 8, ("c_attn", heads(4)), ("c_attn", heads(4, 32))),
        ),
        "bert": Family(
            lambda: hf("BertModel", "BertConfig", impl, **TEXT),
            _repeat("encoder.layer.{}.attention.self", 2, 4, 4, 8, ("query", heads(4)), ("key", heads(4))),
        ),
        "neox": Family(
            lambda: hf("GPTNeoXForCausalLM", "GPTNeoXConfig", impl, **TEXT),
            _repeat(
                "gpt_neox.layers.{}.attention",
                2,
                4,
                4,
                8,
                ("query_key_value", heads(4, 0, 24)),
                ("query_key_value", heads(4, 8, 24)),
            ),
        ),
        "falcon": Family(
            lambda: hf("FalconForCausalLM", "FalconConfig", impl, **falcon),
            _repeat(
                "transformer.h.{}.self_attention",
                2,
                4,
                1,
                8,
                ("query_key_value", heads(4)),
                ("query_key_value", (32,)),
            ),
        ),
        "falcon-grouped": Family(
            lambda: hf(
                "FalconForCausalLM", "FalconConfig", impl, **falcon, num_kv_heads=2, new_decoder_architecture=True
            ),
            _repeat(
                "transformer.h.{}.self_attention",
                2,
                4,
                2,
                8,
                ("query_key_value", (0, 8, 32, 40)),
                ("query_key_value", (16, 48)),
            ),
        ),
        "t5": Family(
            lambda: hf("T5Model", "T5Config", impl, **t5),
            [
                *_repeat("encoder.block.0.layer.{}.SelfAttention", 1, 4, 4, 8, *qk),
                *_repeat("decoder.block.0.layer.{}.SelfAttention", 1, 4, 4, 8, *qk),
                *_repeat("decoder.block.0.layer.1.EncDecAttention", 1, 4, 4, 8, *qk),
            ],
            args=tuple,
            kwargs=both,
        ),
        "whisper": Family(
            lambda: hf("WhisperModel", "WhisperConfig", impl, **WHISPER),
            [
                *_repeat("encoder.layers.{}.self_attn", 1, 4, 4, 8, *SEPARATE),
                *_repeat("decoder.layers.{}.self_attn", 1, 4, 4, 8, *SEPARATE),
                *_repeat("decoder.layers.{}.encoder_attn", 1, 4, 4, 8, *SEPARATE),
            ],
            args=tuple,
            kwargs=audio,
        ),
        "swin": Family(
            lambda: hf("SwinModel", "SwinConfig", impl, **SWIN),
            _repeat("encoder.layers.0.blocks.{}.attention", 2, 2, 2, 8, ("q_proj", heads(2)), ("k_proj", heads(2))),
            args=_image(32),
        ),
    }
    return {f"{name}-{impl}": family for name, family in families.items()}


def _torch_families() -> dict[str, Family]:
    x = lambda: (torch.randn(2, 7, 32),)  # noqa: E731
    three = lambda: (torch.randn(2, 7, 32),) * 3  # noqa: E731
    cross = lambda: (torch.randn(2, 7, 32), *(torch.randn(2, 9, 32),) * 2)  # noqa: E731
    mha = lambda: nn.MultiheadAttention(32, 4, dropout=0.1, batch_first=True)  # noqa: E731
    layer = {"d_model": 32, "nhead": 4, "dim_feedforward": 48, "batch_first": True}
    padding = torch.tensor([[False] * 7, [False] * 4 + [True] * 3])
    one, both = [Expected("", 4, 4, 8)], (True, False)
    encoder = lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(**layer), 2)  # noqa: E731
    decoder = lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(**layer), 2)  # noqa: E731
    encoders = [Expected(f"layers.{i}.self_attn", 4, 4, 8) for i in range(2)]
    decoders = [Expected(f"layers.{i}.{n}", 4, 4, 8) for i in range(2) for n in ("self_attn", "multihead_attn")]
    return {
        "mha": Family(mha, one, three, modes=both),
        "mha-quiet": Family(mha, one, three, lambda: {"need_weights": False}, modes=both),
        "mha-cross": Family(mha, one, cross, modes=both),
        "mha-cross-quiet": Family(mha, one, cross, lambda: {"need_weights": False}, modes=both),
        "encoder-layer": Family(
            lambda: nn.TransformerEncoderLayer(**layer), [Expected("self_attn", 4, 4, 8)], x, modes=both
        ),
        "encoder": Family(encoder, encoders, x, modes=both),
        "encoder-padded": Family(encoder, encoders, x, lambda: {"src_key_padding_mask": padding}, modes=both),
        "decoder": Family(decoder, decoders, lambda: (torch.randn(2, 7, 32), torch.randn(2, 9, 32)), modes=both),
    }


def _other_families() -> dict[str, Family]:
    fused = ("qkv", heads(4)), ("qkv", heads(4, 32))
    xt = _repeat("attn_layers.layers.{}.1", 3, 4, 4, 8, ("to_q", heads(4)), ("to_k", heads(4)))[::2]
    return {
        "tiny-flash": Family(lambda: TinyGPT(True), _repeat("h.{}.attn", 2, 4, 4, 8, *fused), modes=(True, False)),
        "tiny-eager": Family(lambda: TinyGPT(False), _repeat("h.{}.attn", 2, 4, 4, 8, *fused), modes=(True, False)),
        "conv": Family(
            lambda: nn.Sequential(ConvAttention()),
            _repeat("{}", 1, 2, 2, 8, ("qkv", heads(2)), ("qkv", heads(2, 16))),
            _image(4, 16),
        ),
        "timm-vit": Family(
            lambda: timm_model("vit_tiny_patch16_224", img_size=32, depth=2),
            _repeat("blocks.{}.attn", 2, 3, 3, 64, ("qkv", heads(3, 0, 64)), ("qkv", heads(3, 192, 64))),
            _image(32),
        ),
        "timm-swin": Family(
            lambda: timm_model("swin_tiny_patch4_window7_224", img_size=56, depths=(2,), num_heads=(3,)),
            _repeat("layers.0.blocks.{}.attn", 2, 3, 3, 32, ("qkv", heads(3, 0, 32)), ("qkv", heads(3, 96, 32))),
            _image(56),
        ),
        "x-transformers": Family(lambda: x_transformer(), xt),
        "x-transformers-flash": Family(lambda: x_transformer(attn_flash=True), xt),
        "vit-pytorch": Family(
            vit_pytorch,
            _repeat("transformer.layers.{}.0", 2, 4, 4, 8, ("to_qkv", heads(4)), ("to_qkv", heads(4, 32))),
            _image(32),
        ),
    }


FAMILIES = {**_torch_families(), **_hf_families("eager"), **_hf_families("sdpa"), **_other_families()}
