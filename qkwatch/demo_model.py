"""What `qkwatch demo` trains: a small GPT with RoPE in plain torch, on text that every Python carries."""

from __future__ import annotations

import math
import os
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from qkwatch.errors import QKWatchError

HELD_OUT = 10  # every so many files are held out
BYTES = 256


@dataclass(frozen=True)
class Setup:
    """Sizes of one demonstration; the defaults take about a minute and a half on two cores."""

    steps: int = 300
    batch: int = 8
    length: int = 64
    layers: int = 4
    width: int = 128
    heads: int = 4
    lr: float = 1e-2
    warmup: int = 15
    every_n_steps: int = 10
    val_batches: int = 16
    seed: int = 0


# -- text ---------------------------------------------------------------------------------------------------


def corpus(root: str | os.PathLike[str] | None = None) -> tuple[Tensor, Tensor]:
    """Python's own library as bytes, (N,) uint8 each: for training, and files that are held out.

    Raises:
        QKWatchError: there are too few source files under `root` (default: this Python's library).
    """
    root = Path(root or sysconfig.get_paths()["stdlib"])
    files = sorted(root.glob("*.py"))
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for i, file in enumerate(files):
        parts[i % HELD_OUT == HELD_OUT - 1].append(file.read_bytes())
    train, held_out = (torch.frombuffer(bytearray(b"".join(part) or b"\0"), dtype=torch.uint8) for part in parts)
    if min(len(train), len(held_out)) < 20_000:
        raise QKWatchError(f"the demo trains on Python's own source, but {root} holds only {len(files)} .py files")
    return train, held_out


def windows(text: Tensor, count: int, length: int, seed: int) -> Tensor:
    """`count` random excerpts, (count, length + 1) int64; the same seed gives the same ones in the same order."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - length, (count, 1), generator=generator)
    return text[starts + torch.arange(length + 1)].long()


# -- model --------------------------------------------------------------------------------------------------


def rotate(x: Tensor) -> Tensor:
    """Rotary position embedding of head vectors (B, H, T, D). [Su et al. 2021, arXiv 2104.09864]"""
    half = x.shape[-1] // 2
    rate = 10_000.0 ** (-torch.arange(half, device=x.device) / half)
    angle = torch.arange(x.shape[-2], device=x.device)[:, None] * rate  # (T, D/2)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], dim=-1)


class Attention(nn.Module):
    """Causal self-attention, (B, T, width) -> (B, T, width)."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.heads_of(self.qkv(x))
        y = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        out: Tensor = self.out(y.transpose(1, 2).reshape(b, t, c))
        return out

    def heads_of(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, T, 3 width) -> q, k, v, each (B, H, T, D)."""
        b, t, c = qkv.shape
        q, k, v = qkv.view(b, t, 3, self.heads, c // (3 * self.heads)).permute(2, 0, 3, 1, 4)
        return q, k, v


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(width), Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class GPT(nn.Module):
    """Bytes (B, T) -> logits (B, T, 256)."""

    def __init__(self, layers: int, width: int, heads: int):
        super().__init__()
        self.embed = nn.Embedding(BYTES, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, BYTES, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Lesson(pl.LightningModule):
    """Next-byte prediction: AdamW(.9, .95), no weight decay, warm-up then cosine."""

    def __init__(self, setup: Setup):
        super().__init__()
        self.setup_, self.gpt = setup, GPT(setup.layers, setup.width, setup.heads)

    def loss(self, batch: Sequence[Tensor]) -> Tensor:
        (ids,) = batch
        return F.cross_entropy(self.gpt(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), prog_bar=True)

    def configure_optimizers(self) -> Any:
        s = self.setup_
        optimizer = torch.optim.AdamW(self.parameters(), lr=s.lr, betas=(0.9, 0.95), weight_decay=0.0)

        def factor(step: int) -> float:
            if step < s.warmup:
                return (step + 1) / s.warmup
            return 0.5 + 0.5 * math.cos(math.pi * (step - s.warmup) / max(1, s.steps - s.warmup))

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@torch.no_grad()
def held_out_loss(lesson: Lesson, loader: DataLoader[Any]) -> float:
    """Mean loss (nats per byte) over the held-out batches; the model is left in the mode it was in."""
    training = lesson.training
    lesson.eval()
    losses = [lesson.loss([part.to(lesson.device) for part in batch]) for batch in loader]
    lesson.train(training)
    return float(torch.stack(losses).mean())
