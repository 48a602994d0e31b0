"""The small models and the real data of `study.py`: Python's own source as text, scikit-learn's digits."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, LAYERS, HEADS, LENGTH, BATCH = 64, 3, 4, 64, 16


class RopeAttention(nn.Module):
    """Causal attention with rotary positions and one fused projection."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        half = WIDTH // HEADS // 2
        angles = torch.outer(torch.arange(LENGTH), 10000 ** (-torch.arange(half) / half))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def rotate(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)  # (B, H, T, D/2) twice
        return torch.cat([a * self.cos - b * self.sin, a * self.sin + b * self.cos], -1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True)
        return self.out(heads.transpose(1, 2).flatten(2))


class RopeBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = RopeAttention()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class RopeGPT(nn.Module):
    """A GPT with rotary positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.blocks = nn.ModuleList([RopeBlock() for _ in range(LAYERS)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class EncoderGPT(nn.Module):
    """A GPT with learned positions on `nn.TransformerEncoderLayer` (and so `nn.MultiheadAttention`)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer: dict[str, Any] = {"dim_feedforward": 4 * WIDTH, "dropout": 0.0, "activation": "gelu"}
        layer |= {"batch_first": True, "norm_first": True}
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(WIDTH, HEADS, **layer) for _ in range(LAYERS)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) + self.positions.weight
        for layer in self.layers:
            x = layer(x, src_mask=self.mask, is_causal=True)
        return self.head(self.norm(x))


class DigitViT(nn.Module):
    """A ViT on 8 x 8 digits, 2 x 2 patches, mean over the patches at the end.

    A class token learns in bursts: two healthy runs then lie further apart than what counts as harm.
    """

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Linear(4, WIDTH)
        self.positions = nn.Parameter(torch.randn(1, 16, WIDTH) * 0.02)
        layer: dict[str, Any] = {"dim_feedforward": 4 * WIDTH, "dropout": 0.0, "activation": "gelu"}
        layer |= {"batch_first": True, "norm_first": True}
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(WIDTH, HEADS, **layer) for _ in range(LAYERS)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        patches = x.unflatten(-1, (4, 2)).unflatten(1, (4, 2)).permute(0, 1, 3, 2, 4).flatten(1, 2).flatten(2)
        x = self.patch(patches) + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x.mean(1)))


@dataclass
class Task:
    """A model, its training batches (the same for the same seed), its held-out data, and how its twin is patched.

    The GPTs' twins start with a constant gain of 10, as a model built with QK-norm does. That makes the small ViT learn
    faster at any learning rate, saturated or not: its twin starts with calibrated gains, as the same function.
    """

    build: Callable[[], nn.Module]
    batches: Callable[[int], Iterator[tuple[Tensor, Tensor]]]
    held_out: tuple[Tensor, Tensor]
    calibrated_twin: bool = False

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return F.cross_entropy(model(x).flatten(0, -2).float(), y.flatten())


def text() -> Tensor:
    """Bytes of the standard library's modules, (N,) uint8."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    data = b"".join(path.read_bytes() for path in files)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def text_task(build: Callable[[], nn.Module]) -> Task:
    data = text()
    cut = len(data) * 9 // 10

    def windows(starts: Tensor) -> tuple[Tensor, Tensor]:
        rows = torch.stack([data[s : s + LENGTH + 1] for s in starts.tolist()]).long()
        return rows[:, :-1], rows[:, 1:]

    def batches(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            yield windows(torch.randint(cut - LENGTH - 1, (BATCH,), generator=generator))

    starts = torch.randint(cut, len(data) - LENGTH - 1, (64,), generator=torch.Generator().manual_seed(99))
    return Task(build, batches, windows(starts))


def digits_task() -> Task:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).view(-1, 8, 8) / 16
    y = torch.tensor(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(99))
    train, test = order[:1200], order[1200:]

    def batches(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            picked = train[torch.randint(len(train), (4 * BATCH,), generator=generator)]
            yield moved(x[picked], generator), y[picked]

    return Task(DigitViT, batches, (x[test], y[test]), calibrated_twin=True)


def moved(images: Tensor, generator: torch.Generator) -> Tensor:
    """Each by up to a pixel either way: without it 1,200 images are soon known by heart, and held-out loss is noise."""
    rows, columns = (torch.randint(3, (len(images), 1), generator=generator) + torch.arange(8) for _ in range(2))
    wide = F.pad(images, (1, 1, 1, 1))
    each = torch.arange(len(images))[:, None, None]
    return wide[each, rows[:, :, None], columns[:, None, :]]


TASKS: dict[str, Callable[[], Task]] = {
    "rope-gpt": lambda: text_task(RopeGPT),
    "encoder-gpt": lambda: text_task(EncoderGPT),
    "vit": digits_task,
}
