"""Small models of every configuration class of transformers, cut by the names of their attributes.

Nothing here knows a model: sizes are cut by the names of configuration attributes, inputs are guessed from the names
of forward's parameters and tried until one runs.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from zoo import Build, Built, NotBuilt


@dataclass(frozen=True)
class Size:
    """What a configuration is cut to."""

    hidden: int = 32
    heads: int = 4
    kv: int = 2
    layers: int = 2
    image: int = 32
    patch: int = 8

    @property
    def head(self) -> int:
        return self.hidden // self.heads


_SIZES = (
    Size(),
    Size(hidden=64, kv=4),
    Size(hidden=96, heads=4, image=64, patch=16),
    Size(hidden=256, heads=4, image=64),
    Size(hidden=64, heads=2, image=224, patch=32),
)

# (words, any of which is part of an attribute's name) -> its new value; the first that fits counts
_RULES: list[tuple[tuple[str, ...], Callable[[Size, int], int]]] = [
    (("token_id", "_id", "index", "version", "theta", "stride", "kernel", "seed", "axis"), lambda s, v: v),
    (("vocab_size", "num_embeddings", "codebook_size"), lambda s, v: min(v, 256)),
    (("key_value_head", "kv_head", "num_kv", "query_group"), lambda s, v: min(v, s.kv, s.heads)),
    (("head_dim", "d_kv", "head_size", "key_length", "head_width"), lambda s, v: min(v, s.head)),
    (("attention_heads", "num_heads", "n_head", "_heads", "n_heads", "nhead"), lambda s, v: min(v, s.heads)),
    (("lora_rank", "lora_r", "low_rank"), lambda s, v: min(v, 16)),
    (("layer_scale", "layerscale", "layer_norm"), lambda s, v: v),
    (("num_layers", "hidden_layers", "n_layer", "_layers", "num_blocks", "depth"), lambda s, v: min(v, s.layers)),
    (("intermediate", "ffn", "inner_dim", "d_ff", "mlp_dim", "n_inner"), lambda s, v: min(v, 2 * s.hidden)),
    (("per_tok", "top_k", "topk"), lambda s, v: min(v, 2)),
    (("expert", "n_group"), lambda s, v: min(v, 4)),
    (("image_size", "img_size", "input_size", "pretrain_image"), lambda s, v: min(v, s.image)),
    (("patch_size",), lambda s, v: min(v, s.patch)),
    (("max_position", "n_positions", "max_seq", "max_source", "max_target"), lambda s, v: min(v, 128)),
    (("num_frames",), lambda s, v: min(v, 4)),
    (("num_queries",), lambda s, v: min(v, 9)),
    (("hidden_size", "d_model", "embed_dim", "n_embd", "embedding_size", "_dim", "width", "hidden_dim", "dim",
      "hidden_channels", "model_dim", "projection_size", "channels_hidden"), lambda s, v: min(v, s.hidden)),
]  # fmt: skip
_SPECIAL_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")
_KEEP = ("channels", "mel", "conv_dim", "rope", "num_dim")


def _cut_int(name: str, value: int, size: Size) -> int:
    if any(word in name for word in _KEEP) and "hidden" not in name and "head_dim" not in name:
        return value
    for words, rule in _RULES:
        if any(word in name for word in words):
            return rule(size, value)
    return value


def _cut_list(name: str, value: list[Any], size: Size) -> list[Any]:
    if not value or not all(type(v) is int for v in value):
        return value
    if "depth" in name or "num_layers" in name or "blocks" in name:
        return [min(v, 1) for v in value]
    if "heads" in name:
        unit = math.gcd(*value)
        return [v // unit * (1 if max(value) // unit > 2 else 2) for v in value]
    if any(word in name for word in ("hidden_size", "embed_dim", "widths", "dims")) and min(value) > 16:
        unit = math.gcd(*value)
        return [min(v, v // unit * 16) for v in value]
    if "image_size" in name or "img_size" in name:
        return [min(v, size.image) for v in value]
    if "mrope_section" in name:
        half = size.head // 2
        rest = half // 3
        return [half - 2 * rest, rest, rest]
    return value


def shrink(config: Any, size: Size) -> None:
    """Cut a configuration, and those inside it, by the names of their attributes."""
    values = config if isinstance(config, dict) else vars(config)
    _cut_layer_lists(values, size)
    for name, value in list(values.items()):
        if name.startswith("_") or isinstance(value, (bool, str)) or value is None:
            continue
        new = value
        if isinstance(value, dict) or hasattr(value, "to_dict"):
            if name not in ("id2label", "label2id", "attribute_map"):
                shrink(value, size)
            continue
        if isinstance(value, float) and "drop" in name:
            new = 0.0
        elif isinstance(value, float) and ("initializer_range" in name or "init_std" in name):
            new = max(value, 0.02)
        elif isinstance(value, int):
            new = min(value, 2) if name in _SPECIAL_TOKENS else _cut_int(name, value, size)
        elif isinstance(value, (list, tuple)):
            new = type(value)(_cut_list(name, list(value), size))
        if new is not value and new != value:
            with contextlib.suppress(Exception):
                if isinstance(config, dict):
                    config[name] = new
                else:
                    setattr(config, name, new)


def _cut_layer_lists(values: dict[str, Any], size: Size) -> None:
    """Lists with one entry a layer keep one layer of each kind, and as many as the model will have."""
    total = next((values[n] for n in ("num_hidden_layers", "num_layers", "n_layer") if type(values.get(n)) is int), 0)
    if total <= size.layers:
        return
    for name, value in values.items():
        if isinstance(value, (list, tuple)) and len(value) == total and "section" not in name:
            first = [value.index(kind) for kind in dict.fromkeys(value)] if _plain(value) else []
            chosen = sorted((first + [i for i in range(total) if i not in first])[: size.layers])
            with contextlib.suppress(Exception):
                values[name] = type(value)(value[i] for i in chosen)


def _plain(value: Any) -> bool:
    return all(isinstance(v, (str, int, float)) for v in value)


def transformers_models() -> dict[str, Build]:
    """Every configuration class of transformers' automatic mappings that has a model class."""
    from transformers import LlamaModel, ViTModel, WhisperModel  # noqa: F401  (imported once, before processes fork)
    from transformers.models.auto import configuration_auto, modeling_auto  # noqa: F401

    return {name: partial(_transformers_model, name) for name in configuration_auto.CONFIG_MAPPING_NAMES}


def _model_classes(kind: str, config_class: type) -> Iterator[type]:
    """Model classes of a configuration: those of the automatic mappings, then those of its own file."""
    import transformers
    from transformers.models.auto import modeling_auto

    mappings = sorted(n for n in dir(modeling_auto) if n.startswith("MODEL_FOR_") and n.endswith("_MAPPING_NAMES"))
    for mapping in ["MODEL_MAPPING_NAMES", *mappings]:
        names = getattr(modeling_auto, mapping).get(kind) or ()
        for name in [names] if isinstance(names, str) else names:
            if isinstance(cls := getattr(transformers, name, None), type):
                yield cls
    with contextlib.suppress(ImportError):
        module = importlib.import_module(config_class.__module__.replace("configuration_", "modeling_"))
        for value in vars(module).values():
            own = isinstance(value, type) and value.__module__ == module.__name__
            if own and getattr(value, "config_class", None) is config_class and "forward" in vars(value):
                yield value


def _transformers_model(kind: str) -> Built:
    from transformers import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[kind]
    problem = "no model class"
    classes = list(dict.fromkeys(_model_classes(kind, config_class)))[:2]
    for cls, size in itertools.product(classes, _SIZES):
        try:
            config = config_class()
            shrink(config, size)
            model = _affordable(lambda c=config, k=cls: k._from_config(c))
            model.eval()
            kwargs = _working_inputs(model, config, size)
        except Exception as error:
            first = problem if problem != "no model class" else f"{cls.__name__}: {type(error).__name__}: {error}"
            problem = first[:300]
            continue
        return Built(model, (), kwargs, partial(_eager_twin, cls, config, model))
    raise NotBuilt(problem)


def _eager_twin(cls: Any, config: Any, model: nn.Module) -> nn.Module:
    twin: nn.Module = cls._from_config(copy.deepcopy(config), attn_implementation="eager")
    twin.load_state_dict(model.state_dict())
    return twin.eval()


def _affordable(make: Callable[[], Any], limit: int = 40_000_000) -> Any:
    """Build only what is small; sized up without memory where that works."""
    try:
        with torch.device("meta"):
            size = sum(p.numel() for p in make().parameters())
    except Exception:
        size = 0
    if size > limit:
        raise NotBuilt(f"{size / 1e6:.0f} M parameters after cutting")
    torch.manual_seed(0)
    return make()


def _find(config: Any, name: str, default: Any = None) -> Any:
    """An attribute of a configuration or of the first one inside it that has it."""
    value = getattr(config, name, None)
    if value is not None:
        return value
    for inner in vars(config).values():
        if hasattr(inner, "to_dict") and (value := _find(inner, name)) is not None:
            return value
    return default


def _working_inputs(model: nn.Module, config: Any, size: Size) -> dict[str, Any]:
    problem: Exception | None = None
    for kwargs in _candidates(model, config, size):
        state = torch.get_rng_state()
        try:
            with torch.no_grad():
                model(**kwargs)
            return kwargs
        except Exception as error:
            problem = problem or error
        torch.set_rng_state(state)
    raise problem or NotBuilt("no inputs are known for it")


def _candidates(model: nn.Module, config: Any, size: Size) -> Iterator[dict[str, Any]]:
    """Inputs to try, by the names of forward's parameters."""
    parameters = inspect.signature(model.forward).parameters
    vocabulary = min(int(_find(config, "vocab_size", 100)), 250)
    ids = torch.randint(3, max(4, vocabulary - 3), (2, 12))
    open_ended = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    required = {n for n, p in parameters.items() if p.default is p.empty and p.kind not in open_ended}
    main = getattr(model, "main_input_name", "input_ids")
    extra: dict[str, Any] = {}
    if "decoder_input_ids" in parameters:
        extra["decoder_input_ids"] = ids[:, :7]
    options: list[dict[str, Any]] = []
    hidden = _find(config, "hidden_size", size.hidden)
    for name in dict.fromkeys([main, *required, *parameters]):
        options += [{name: value} for value in _values(name, config, size, ids, hidden)]
        if name not in required and len(options) > 12:
            break
    if "bbox" in parameters:
        extra["bbox"] = torch.zeros(2, 12, 4, dtype=torch.long)
    for option in options:
        yield {**option, **extra}
        yield option
    for name, value in itertools.product(("pixel_values", "input_features", "input_values"), (None,)):
        if "input_ids" in parameters and name in parameters and value is None:
            for other in _values(name, config, size, ids, hidden):
                yield {"input_ids": ids, name: other}
    if required:
        pools = [_values(name, config, size, ids, hidden) or [None] for name in sorted(required)]
        for values in itertools.islice(itertools.product(*pools), 30):
            yield {**dict(zip(sorted(required), values, strict=True)), **extra}


def _values(name: str, config: Any, size: Size, ids: Tensor, hidden: int) -> list[Any]:
    """Values to try for one parameter of a forward."""
    if name in ("input_ids", "decoder_input_ids"):
        books = _find(config, "num_codebooks", 1) or 1
        return [ids, ids[:, :, None].expand(-1, -1, int(books)), ids[:, None].expand(-1, int(books), -1)]
    if name in ("inputs_embeds", "hidden_states", "encoder_hidden_states", "image_embeddings", "embeddings"):
        return [torch.randn(2, 12, hidden)]
    if name.endswith("mask"):
        return [torch.ones(2, n, dtype=torch.long) for n in (12, 64)]
    if name == "bbox":
        return [torch.zeros(2, 12, 4, dtype=torch.long)]
    if name in ("pixel_values", "pixel_values_videos"):
        return _images(config, size)
    if name in ("input_values", "input_features", "audio_values", "input_audio"):
        return _sounds(config, size)
    if name in ("past_values", "past_observed_mask"):
        length = int(_find(config, "context_length", 32)) + max(_find(config, "lags_sequence", [0]) or [0])
        many = torch.rand(2, length, int(_find(config, "num_input_channels", 1)))
        return [many, many[..., 0]]
    if name in ("grid_thw", "image_grid_thw", "grid_hws"):
        return [torch.tensor([[1, 4, 4]]), torch.tensor([[1, 4, 4], [1, 4, 4]])]
    if name in ("past_time_features", "future_time_features"):
        return [torch.rand(2, 40, int(_find(config, "num_time_features", 1)))]
    return []


def _images(config: Any, size: Size) -> list[Tensor]:
    channels = int(_find(config, "num_channels", _find(config, "in_channels", 3)))
    edge = _find(config, "image_size", size.image)
    edge = edge if isinstance(edge, int) else max(edge)
    frames = int(_find(config, "num_frames", _find(config, "frames_per_clip", 4)) or 4)
    pictures = [torch.randn(2, channels, e, e) for e in dict.fromkeys((edge, 64, 32, 224))]
    films = [torch.randn(2, frames, channels, edge, edge), torch.randn(2, channels, frames, edge, edge)]
    patch = _find(config, "patch_size", 8)
    if not isinstance(patch, int):
        patch = patch[-1]
    deep = int(_find(config, "temporal_patch_size", 1) or 1)
    return [*pictures[:1], *films, *pictures[1:], torch.randn(16, channels * deep * patch * patch)]


def _sounds(config: Any, size: Size) -> list[Tensor]:
    mel = int(_find(config, "num_mel_bins", _find(config, "feature_size", 80)))
    length = int(_find(config, "max_source_positions", 64))
    frames = int(_find(config, "max_length", 64) or 64)
    return [
        torch.randn(2, 4000),
        torch.randn(2, mel, 2 * length),
        torch.randn(2, mel, length),
        torch.randn(2, 64, mel),
        torch.randn(2, frames, mel),
        torch.randn(2, 1, 4000),
        torch.randn(2, 1, 64, mel),
        torch.randn(2, 16000),
    ]
