"""Small models of every kind, built without downloads: what `survey.py` studies.

Each entry is a name and a function that builds a model and inputs for it. Nothing here knows how a model attends.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn


@dataclass
class Built:
    """A model and inputs that it accepts; ``eager`` builds its twin that can return its own probabilities."""

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    eager: Callable[[], nn.Module] | None = None


Build = Callable[[], Built]


class NotBuilt(Exception):
    """A model that could not be made small: it isn't part of the study."""


def entries(package: str) -> dict[str, Build]:
    """Name -> builder of every model of a package."""
    return PACKAGES[package]()


def transformers_models() -> dict[str, Build]:
    """Every configuration class of transformers' automatic mappings."""
    import zoo_hf

    return zoo_hf.transformers_models()


# -- torch.nn -----------------------------------------------------------------------------------------------


def torch_models() -> dict[str, Build]:
    """`nn.MultiheadAttention` and PyTorch's layers on top of it."""
    x, y = torch.randn(2, 7, 32), torch.randn(2, 9, 32)

    def mha(inputs: tuple[Any, ...], call: dict[str, Any] | None = None, **options: Any) -> Built:
        layer = nn.MultiheadAttention(32, 4, batch_first=True, **options)
        return Built(nn.ModuleDict({"mha": layer})["mha"].eval(), inputs, call or {})

    def stack(kind: str, **options: Any) -> Built:
        layer = getattr(nn, f"Transformer{kind}Layer")(32, 4, 48, dropout=0.0, batch_first=True, **options)
        return Built(getattr(nn, f"Transformer{kind}")(layer, 2).eval(), (x,) if kind == "Encoder" else (x, y))

    causal = nn.Transformer.generate_square_subsequent_mask(7)
    return {
        "MultiheadAttention": lambda: mha((x, x, x)),
        "MultiheadAttention need_weights=False": lambda: mha((x, x, x), {"need_weights": False}),
        "MultiheadAttention cross": lambda: mha((x, y, y)),
        "MultiheadAttention kdim": lambda: mha((x, torch.randn(2, 9, 16), torch.randn(2, 9, 24)), kdim=16, vdim=24),
        "MultiheadAttention bias_kv": lambda: mha((x, x, x), add_bias_kv=True, add_zero_attn=True),
        "MultiheadAttention causal": lambda: mha((x, x, x), {"attn_mask": causal, "is_causal": True}),
        "TransformerEncoder": lambda: stack("Encoder"),
        "TransformerEncoder norm_first": lambda: stack("Encoder", norm_first=True),
        "TransformerDecoder": lambda: stack("Decoder"),
        "Transformer": lambda: Built(nn.Transformer(32, 4, 1, 1, 48, 0.0, batch_first=True).eval(), (y, x)),
    }


# -- timm ---------------------------------------------------------------------------------------------------


def timm_models() -> dict[str, Build]:
    """One model of each of timm's model files: the smallest that builds."""
    import timm

    return {module: partial(_timm_model, module) for module in timm.list_modules()}


def _timm_model(module: str) -> Built:
    import timm

    names = [n for n in timm.list_models(module=module) if not n.startswith("test_")] or timm.list_models(module=module)
    problem: Exception = NotBuilt("no model in this file")
    order = sorted(names, key=lambda n: _size_word(n))[:6]
    for name in order:
        for options in ({"img_size": 64}, {"img_size": 128}, {"img_size": 224}, {}):
            try:
                with torch.device("meta"):
                    size = sum(p.numel() for p in timm.create_model(name, **options).parameters())
                if size > 100_000_000:
                    raise NotBuilt(f"{name} has {size / 1e6:.0f} M parameters")
                torch.manual_seed(0)
                model = timm.create_model(name, **options).eval()
                edge = options.get("img_size") or model.default_cfg["input_size"][-1]
                images = torch.randn(2, model.default_cfg["input_size"][0], edge, edge)
                with torch.no_grad():
                    model(images)
                return Built(model, (images,))
            except Exception as error:
                problem = error
    raise NotBuilt(f"{type(problem).__name__}: {problem}"[:300])


_SIZE_WORDS = ("pico", "atto", "femto", "nano", "xxtiny", "xx_tiny", "xtiny", "x_tiny", "xxs", "xs", "tiny", "mini")


def _size_word(name: str) -> tuple[int, int]:
    small = (*_SIZE_WORDS, "_s0", "small", "_b0", "_s1", "_s", "_m0", "medium", "base", "large")
    return next((i for i, word in enumerate(small) if word in name), len(small)), len(name)


# -- diffusers ----------------------------------------------------------------------------------------------


def diffusers_models() -> dict[str, Build]:
    """Denoisers with self-, cross- and joint attention."""
    import diffusers as d

    time, text = torch.tensor([3, 5]), torch.randn(2, 5, 32)

    def unet() -> Built:
        model = d.UNet2DConditionModel(
            sample_size=16, block_out_channels=(32, 64), layers_per_block=1, cross_attention_dim=32,
            attention_head_dim=8, norm_num_groups=8, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        )  # fmt: skip
        return Built(model.eval(), (torch.randn(2, 4, 16, 16), time, text))

    def unet_plain() -> Built:
        model = d.UNet2DModel(
            sample_size=16, block_out_channels=(32, 64), layers_per_block=1, attention_head_dim=8, norm_num_groups=8,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        )  # fmt: skip
        return Built(model.eval(), (torch.randn(2, 3, 16, 16), time))

    def dit() -> Built:
        model = d.DiTTransformer2DModel(
            num_attention_heads=4, attention_head_dim=8, in_channels=4, num_layers=2, sample_size=8, norm_num_groups=8,
            num_embeds_ada_norm=10,
        )  # fmt: skip
        labels = torch.tensor([1, 2])
        return Built(model.eval(), (torch.randn(2, 4, 8, 8),), {"timestep": time, "class_labels": labels})

    def transformer2d() -> Built:
        model = d.Transformer2DModel(4, 8, in_channels=32, num_layers=2, norm_num_groups=8, cross_attention_dim=32)
        return Built(model.eval(), (torch.randn(2, 32, 8, 8), text))

    def sd3(**options: Any) -> Built:
        model = d.SD3Transformer2DModel(
            sample_size=8, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=4,
            joint_attention_dim=32, caption_projection_dim=32, pooled_projection_dim=16, out_channels=4,
            pos_embed_max_size=8, **options,
        )  # fmt: skip
        return Built(model.eval(), (torch.randn(2, 4, 8, 8), text, torch.randn(2, 16), time))

    def flux() -> Built:
        model = d.FluxTransformer2DModel(
            patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
            num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=16, axes_dims_rope=(4, 4, 8),
        )  # fmt: skip
        return Built(
            model.eval(), (),
            {
                "hidden_states": torch.randn(2, 16, 4), "encoder_hidden_states": text, "timestep": time / 10,
                "pooled_projections": torch.randn(2, 16), "img_ids": torch.rand(16, 3), "txt_ids": torch.zeros(5, 3),
                "guidance": None,
            },
        )  # fmt: skip

    def pixart() -> Built:
        model = d.PixArtTransformer2DModel(
            num_attention_heads=4, attention_head_dim=8, in_channels=4, out_channels=8, num_layers=2, sample_size=8,
            cross_attention_dim=32, caption_channels=32, norm_num_groups=8, use_additional_conditions=False,
        )  # fmt: skip
        call = {"encoder_hidden_states": text, "timestep": time, "added_cond_kwargs": {}}
        return Built(model.eval(), (torch.randn(2, 4, 8, 8),), call)

    def vae() -> Built:
        model = d.AutoencoderKL(block_out_channels=(32,), norm_num_groups=8, sample_size=16)
        return Built(model.eval(), (torch.randn(2, 3, 16, 16),))

    def prior() -> Built:
        model = d.PriorTransformer(
            num_attention_heads=2, attention_head_dim=8, num_layers=2, embedding_dim=16, num_embeddings=5,
        )  # fmt: skip
        vector = torch.randn(2, 16)
        return Built(model.eval(), (vector, time, vector), {"encoder_hidden_states": torch.randn(2, 5, 16)})

    return {
        "UNet2DConditionModel": unet,
        "UNet2DModel": unet_plain,
        "AutoencoderKL": vae,
        "DiTTransformer2DModel": dit,
        "Transformer2DModel": transformer2d,
        "PixArtTransformer2DModel": pixart,
        "PriorTransformer": prior,
        "SD3Transformer2DModel": sd3,
        "SD3Transformer2DModel qk_norm": lambda: sd3(qk_norm="rms_norm"),
        "FluxTransformer2DModel": flux,
    }


# -- x-transformers -----------------------------------------------------------------------------------------

_X_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "flash": {"attn_flash": True},
    "rotary": {"rotary_pos_emb": True},
    "rotary flash": {"rotary_pos_emb": True, "attn_flash": True},
    "alibi": {"alibi_pos_bias": True},
    "t5 bias": {"rel_pos_bias": True},
    "grouped keys": {"attn_kv_heads": 2},
    "one key head": {"attn_one_kv_head": True},
    "grouped keys flash": {"attn_kv_heads": 2, "attn_flash": True},
    "talking heads": {"attn_pre_talking_heads": True, "attn_post_talking_heads": True},
    "qk norm": {"attn_qk_norm": True},
    "qk norm with scale": {"attn_qk_norm": True, "attn_qk_norm_dim_scale": True},
    "soft cap": {"attn_softclamp_logits": True},
    "memory keys": {"attn_num_mem_kv": 2},
    "gated": {"attn_gate_values": True},
    "head scale": {"attn_head_scale": True},
    "cross": {"cross_attend": True},
    "sandwich": {"sandwich_norm": True},
    "shared keys and values": {"attn_shared_kv": True},
    "value residual": {"attn_add_residual": True},
}


def x_transformers_models() -> dict[str, Build]:
    """x-transformers' decoder under each option that changes how it attends."""
    return {name: partial(_x_transformer, options) for name, options in _X_OPTIONS.items()}


def _x_transformer(options: dict[str, Any]) -> Built:
    from x_transformers import Decoder, TransformerWrapper

    torch.manual_seed(0)
    try:
        layers = Decoder(dim=32, depth=2, heads=4, attn_dim_head=8, **options)
    except TypeError as error:
        raise NotBuilt(str(error)) from error
    model = TransformerWrapper(num_tokens=100, max_seq_len=64, attn_layers=layers)
    call = {"context": torch.randn(2, 9, 32)} if "cross_attend" in options else {}
    return Built(model.eval(), (torch.randint(0, 100, (2, 12)),), call)


# -- vit-pytorch --------------------------------------------------------------------------------------------


def vit_pytorch_models() -> dict[str, Build]:
    """The first classifier of each of vit-pytorch's files that builds from common options."""
    import vit_pytorch

    names = [info.name for info in pkgutil.iter_modules(vit_pytorch.__path__)]
    return {name: partial(_vit, name) for name in names}


_VIT: dict[str, Any] = {
    "image_size": 64, "patch_size": 16, "num_classes": 5, "dim": 32, "depth": 2, "heads": 4, "dim_head": 8,
    "mlp_dim": 48, "frames": 4, "frame_patch_size": 2, "seq_len": 64, "image_patch_size": 16, "spatial_depth": 1,
    "temporal_depth": 1, "cls_depth": 1, "ndim": 2, "input_shape": 64, "num_register_tokens": 2,
    "img_size": 64, "embedding_dim": 32, "n_input_channels": 3, "num_layers": 2, "num_heads": 4, "mlp_ratio": 2,
}  # fmt: skip
_VIT_SPECIAL: dict[str, dict[str, Any]] = {
    "cvt": {}, "levit": {"image_size": 224, "dim": (32, 48, 64), "heads": (2, 3, 4), "stages": 3, "mlp_mult": 2},
    "cross_vit": {"image_size": 64, "sm_dim": 32, "lg_dim": 48, "sm_patch_size": 16, "lg_patch_size": 32},
    "pit": {"depth": (1, 1), "image_size": 64}, "twins_svt": {"s1_emb_dim": 16, "s2_emb_dim": 24, "s3_emb_dim": 32,
        "s4_emb_dim": 48, "s3_depth": 1, "image_size": 224}, "nest": {"num_hierarchies": 2, "block_repeats": (1, 1),
        "patch_size": 8, "image_size": 64}, "max_vit": {"dim": 32, "depth": (1, 1), "dim_conv_stem": 16,
        "window_size": 4, "image_size": 64}, "max_vit_with_registers": {"dim": 32, "depth": (1, 1),
        "dim_conv_stem": 16, "window_size": 4, "image_size": 64}, "mobile_vit": {"image_size": (64, 64),
        "dims": [32, 48, 64], "channels": [8, 8, 16, 16, 24, 24, 32, 32, 48, 48, 64]},
    "regionvit": {"dim": (16, 32, 48, 64), "depth": (1, 1, 1, 1), "image_size": 224},
    "crossformer": {"dim": (16, 32, 48, 64), "depth": (1, 1, 1, 1), "image_size": 224, "global_window_size": (8, 4, 2,
        1), "local_window_size": 7}, "scalable_vit": {"dim": 16, "heads": (2, 2, 2, 2), "depth": (1, 1, 1, 1),
        "image_size": 256}, "sep_vit": {"dim": 16, "heads": (1, 2, 2, 2), "depth": (1, 1, 1, 1), "image_size": 224,
        "dim_head": 16, "window_size": 7}, "xcit": {"cls_depth": 1, "local_patch_kernel_size": 3},
    "vit_nd": {"image_size": (64, 64), "patch_size": (16, 16)}, "cait": {"cls_depth": 1},
    "vit_nd_rotary": {"image_size": (64, 64), "patch_size": (16, 16)},
    "vit_nd_pope": {"image_size": (64, 64), "patch_size": (16, 16)},
    "t2t": {"t2t_layers": ((7, 4), (3, 2))}, "ats_vit": {"max_tokens_per_depth": (8, 6)},
    "local_vit": {}, "rvt": {}, "vit_for_small_dataset": {}, "learnable_memory_vit": {},
}  # fmt: skip


def _vit(name: str) -> Built:
    import inspect

    module = importlib.import_module(f"vit_pytorch.{name}")
    options = {**_VIT, **_VIT_SPECIAL.get(name, {})}
    problem: Exception = NotBuilt("no classifier in this file")
    words = name.replace("_", "")
    classes = [c for c in vars(module).values() if isinstance(c, type) and issubclass(c, nn.Module)]
    own = [c for c in classes if c.__module__ == module.__name__]
    for cls in sorted(own, key=lambda c: c.__name__.lower().replace("_", "") != words):
        if not {"image_size", "img_size", "num_classes", "seq_len"} & set(inspect.signature(cls).parameters):
            continue
        parameters = inspect.signature(cls).parameters
        open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        special = _VIT_SPECIAL.get(name, {})
        chosen = {k: v for k, v in options.items() if k in parameters or (open_ended and k in special)}
        for images in _pictures(options["image_size"]):
            try:
                torch.manual_seed(0)
                model = cls(**chosen).eval()
                with torch.no_grad():
                    model(images)
                return Built(model, (images,))
            except Exception as error:
                problem = error
    raise NotBuilt(f"{type(problem).__name__}: {problem}"[:300])


def _pictures(edge: Any) -> list[torch.Tensor]:
    edge = edge if isinstance(edge, int) else edge[0]
    flat, film = torch.randn(2, 3, edge, edge), torch.randn(2, 3, 4, edge, edge)
    return [flat, film, torch.randn(2, 3, 64)]


PACKAGES: dict[str, Callable[[], dict[str, Build]]] = {
    "torch": torch_models,
    "transformers": transformers_models,
    "timm": timm_models,
    "diffusers": diffusers_models,
    "x-transformers": x_transformers_models,
    "vit-pytorch": vit_pytorch_models,
}
