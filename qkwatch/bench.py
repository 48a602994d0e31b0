"""`qkwatch bench`: what watching and patching cost here, as ratios of things measured side by side in one run.

Absolute times depend on the machine and on who else uses it; so each round runs every contender once, in turns,
and what is reported is the median over rounds of the ratio within a round.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich import get_console
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

from qkwatch.bench_training import run_training
from qkwatch.demo_model import GPT
from qkwatch.errors import QKWatchError
from qkwatch.find import find_sites
from qkwatch.retrofit import retrofit_
from qkwatch.stats import MANY_KEYS, MIN_ROW_LEFT, SHARP, SINK_MASS, qk_stats
from qkwatch.timing import Ratios, Result, device, ratio, timed

# -- (a) a reading ------------------------------------------------------------------------------------------


def bench_reading(rounds: int = 15, length: int = 2048, heads: int = 8) -> Result:
    """An exact reading of one core against the fused kernel, and against keeping the matrix."""
    q, k, v = (torch.randn(1, heads, length, 64, device=device()) for _ in range(3))
    scale = 64**-0.5

    def reading() -> object:
        return qk_stats(q, k, scale=scale, is_causal=True)

    fused = timed(
        {"reading": reading, "sdpa": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)}, 2 * rounds
    )
    # apart from the pair above: what the matrix leaves in caches and in the allocator would be charged to one of it
    matrix = timed({"reading": reading, "matrix": lambda: dense_figures(q, k, scale)}, rounds)
    return {
        "what": f"one exact reading, B=1, H={heads}, D=64, T={length}, float32, causal",
        "ratios": {
            "reading / fused attention forward": ratio(fused, "reading", "sdpa"),
            "the same figures from softmax(QK^T) / reading": ratio(matrix, "matrix", "reading"),
        },
        "targets": {
            "reading / fused attention forward": "<= 1.5",
            "the same figures from softmax(QK^T) / reading": ">= 5",
        },
    }


@torch.no_grad()
def dense_figures(q: Tensor, k: Tensor, scale: float) -> dict[str, Tensor]:
    """The figures of a `Reading` the plain way: with the whole (B, H, T, T) of causal attention in memory."""
    logits = q @ k.transpose(-1, -2) * scale
    visible = torch.ones(logits.shape[-2:], dtype=torch.bool, device=q.device).tril()
    seen = visible.sum(-1)
    hidden = logits.masked_fill(~visible, -torch.inf)
    p = hidden.softmax(-1)
    nats = -torch.xlogy(p, p).sum(-1)
    mass = p.mean(-2)  # (B, H, T)
    drop = mass > SINK_MASS
    drop[..., 0] = True
    kept = p.masked_fill(drop.unsqueeze(-2), 0)
    left = kept.sum(-1)
    rest = kept / left.clamp_min(1e-12).unsqueeze(-1)
    many = seen >= MANY_KEYS
    mean = logits.masked_fill(~visible, 0).sum(-1) / seen
    keys = seen - (drop.unsqueeze(-2) & visible).sum(-1)  # (B, H, T)
    rows = (keys >= MANY_KEYS) & (left >= MIN_ROW_LEFT)
    corrected = torch.where(rows, -torch.xlogy(rest, rest).sum(-1) / keys.log(), 0)
    return {
        "max_logit": hidden.masked_fill(~visible, 0).abs().amax((0, 2, 3)),
        "margin": (hidden.amax(-1) - mean).amax((0, 2)),
        "entropy": (nats[..., many] / seen[many].log()).mean((0, 2)),
        "entropy_nats": nats.mean((0, 2)),
        "entropy_corrected": corrected.sum((0, 2)) / rows.sum((0, 2)),
        "sink_mass": 1 - left.mean((0, 2)),
        "saturated": (p.amax(-1) > SHARP)[..., 1:].float().mean((0, 2)),
        "grad_signal": (1 - p.square().sum(-1)).mean((0, 2)),
        "over_100": (logits.abs() > 100).logical_and(visible).sum((0, 2, 3)) / seen.sum(),
        "q_rms": q.square().mean(-1).sqrt().mean((0, 2)),
        "k_rms": k.square().mean(-1).sqrt().mean((0, 2)),
    }


# -- (c) a patched layer ------------------------------------------------------------------------------------


class _WithRope(nn.Module):
    """A transformers attention layer that needs nothing but hidden states (B, T, C)."""

    def __init__(self, attention: nn.Module, rotary: nn.Module):
        super().__init__()
        self.attention, self.rotary = attention, rotary

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
        out: Tensor = self.attention(x, position_embeddings=self.rotary(x, positions), attention_mask=None)[0]
        return out


def _llama_and_qwen3() -> tuple[list[nn.Module], str]:
    llama = importlib.import_module("transformers.models.llama.modeling_llama")
    qwen3 = importlib.import_module("transformers.models.qwen3.modeling_qwen3")
    size: dict[str, Any] = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
    size |= {"num_hidden_layers": 1, "attn_implementation": "sdpa"}
    plain, native = llama.LlamaConfig(**size), qwen3.Qwen3Config(**size)
    parts = [(llama.LlamaAttention, llama.LlamaRotaryEmbedding, plain)] * 2
    parts.append((qwen3.Qwen3Attention, qwen3.Qwen3RotaryEmbedding, native))
    return [_WithRope(attention(config, 0), rotary(config)) for attention, rotary, config in parts], "qwen3"


def _timm() -> tuple[list[nn.Module], str]:
    attention = importlib.import_module("timm.models.vision_transformer").Attention
    native = attention(512, num_heads=8, qk_norm=True, norm_layer=nn.LayerNorm)
    return [attention(512, num_heads=8), attention(512, num_heads=8), native], "vit22b"


def bench_patched(rounds: int = 21, length: int = 256, batch: int = 4) -> Result:
    """Forward and backward of patched layers against the packages' own QK-norm and no norm.

    Once as things are, and once with freed memory kept by the process: glibc gives much of what one lone layer
    frees back to the system at each step and takes it again page by page, more or less of it by chance.
    """
    contenders, notes = {}, []
    x = torch.randn(batch, length, 512, device=device(), requires_grad=True)
    for title, make in (("Llama + qwen3, Qwen3Attention", _llama_and_qwen3), ("timm + vit22b, qk_norm=True", _timm)):
        try:
            modules, variant = make()
        except ImportError as error:
            notes.append(f"{title}: skipped ({error})")
            continue
        plain, patched, native = (module.to(device()) for module in modules)
        report = retrofit_(patched, find_sites(patched, x), variant=variant)
        if not report.applied:
            raise QKWatchError(f"{title}: not patched: {report.refused}")
        layers = {"plain": plain, "patched": patched, "native": native}
        contenders[title] = {name: _step(layer, x) for name, layer in layers.items()}
    ratios, targets = Ratios(), {}
    for memory in ("", ", memory kept"):
        if memory and not _keep_memory():
            continue
        for title, steps in contenders.items():
            times = timed(steps, rounds)
            ratios[f"{title}: patched / native{memory}"] = ratio(times, "patched", "native")
            targets[f"{title}: patched / native{memory}"] = "<= 1.05"
            if not memory:
                ratios[f"{title}: patched / unpatched"] = ratio(times, "patched", "plain")
    what = f"a layer's forward and backward, B={batch}, T={length}, C=512, 8 heads, float32"
    return {"what": what, "ratios": ratios, "targets": targets, "notes": notes}


def _keep_memory() -> bool:
    """Tell glibc, for the rest of this process, not to give freed memory back; False where there is none."""
    trim, mmap = -1, -3  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD of mallopt(3)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    return mallopt is not None and bool(mallopt(trim, 2**31 - 1)) and bool(mallopt(mmap, 2**30))


def _step(module: nn.Module, x: Tensor) -> Callable[[], None]:
    def step() -> None:
        module(x).square().mean().backward()

    return step


# -- (d) finding sites --------------------------------------------------------------------------------------


def bench_find(rounds: int = 7, layers: int = 12, width: int = 384, length: int = 256, batch: int = 4) -> Result:
    """`find_sites` against one training step's forward and backward."""
    model = GPT(layers, width, heads=6).to(device())
    ids = torch.randint(256, (batch, length), device=device())

    def both_ways() -> None:
        F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()

    times = timed({"find": lambda: find_sites(model, ids), "step": both_ways}, rounds)
    name = "find_sites / forward and backward"
    return {
        "what": f"a GPT of {layers} layers, width {width}, B={batch}, T={length}",
        "ratios": {name: ratio(times, "find", "step")},
        "targets": {name: "<= 3"},
    }


BENCHES: dict[str, Callable[..., Result]] = {
    "reading": bench_reading,
    "training": run_training,
    "find": bench_find,
    "patched": bench_patched,  # last: it changes how this process keeps memory
}


# -- the whole ----------------------------------------------------------------------------------------------


def run(only: str | None = None, json_file: str | None = None, rounds: int | None = None) -> dict[str, Any]:
    """Run one comparison or all of them, print a table of each, and return the figures.

    Raises:
        QKWatchError: fewer than one round, or a file that can't be written.
    """
    if rounds is not None and rounds < 1:
        raise QKWatchError(f"--rounds must be at least 1, got {rounds}")
    machine = {"torch": torch.__version__, "device": device().type, "threads": torch.get_num_threads()}
    console, results = get_console(), dict[str, Any](machine=machine)
    console.print(f"torch {torch.__version__}, {device().type}, {torch.get_num_threads()} threads; medians of ratios")
    for name, bench in BENCHES.items():
        if only in (None, name):
            torch.manual_seed(0)
            results[name] = bench() if rounds is None else bench(rounds)
            console.print(table(name, results[name]))
    if json_file is not None:
        try:
            Path(json_file).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise QKWatchError(f"cannot write {json_file}: {error.strerror}") from error
    return results


def table(name: str, result: Result) -> Table:
    """A row per ratio, with its target where it has one."""
    view = Table(title=Text(f"{name}: {result['what']}"), box=SIMPLE_HEAD, show_edge=False, title_justify="left")
    view.add_column("ratio")
    view.add_column("measured", justify="right", no_wrap=True)
    view.add_column("aim", justify="right", no_wrap=True)
    for what, value in result["ratios"].items():
        view.add_row(Text(what), "-" if math.isnan(value) else f"{value:.2f}", result["targets"].get(what, ""))
    if result.get("notes"):
        view.caption = Text("; ".join(result["notes"]))
    return view
