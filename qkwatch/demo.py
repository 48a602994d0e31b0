"""`qkwatch demo`: one small GPT trained three times at a learning rate that saturates its attention.

The arms differ in one thing: nothing is done, `QKWatch` patches when it warns, or QK-norm is there from the
start. Weights, data and their order are the same.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sysconfig
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.loggers import TensorBoardLogger
from rich import get_console
from rich.rule import Rule
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from qkwatch.callback import QKWatch
from qkwatch.errors import QKWatchError
from qkwatch.retrofit import retrofit_
from qkwatch.rules import Level
from qkwatch.scout import find_sites

ARMS = {
    "none": "nothing (QKWatch only watches)",
    "auto": 'QKWatch(retrofit="auto")',
    "from_start": "QK-norm from the start",
}
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


QUICK = Setup(steps=150)


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
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)  # (B, H, T, D)
        y = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        out: Tensor = self.out(y.transpose(1, 2).reshape(b, t, c))
        return out


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
        self.apply(_initialise)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def _initialise(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


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


# -- arms ---------------------------------------------------------------------------------------------------


class WatchedPatch(QKWatch):
    """`QKWatch` that also takes the held-out loss directly before and after it patches."""

    def __init__(self, held_out: Callable[[], float], **options: Any):
        super().__init__(**options)
        self.held_out, self.around = held_out, (math.nan, math.nan)

    def _patch(self, trainer: Any, pl_module: Any, step: int) -> None:
        before, done = self.held_out(), len(self.retrofits)
        super()._patch(trainer, pl_module, step)
        if len(self.retrofits) > done:
            self.around = (before, self.held_out())


@dataclass
class Outcome:
    """What one arm came to. Losses: nats per byte on the held-out files; steps: optimizer steps."""

    val_loss: float
    max_logit: float  # over the run
    last_logit: float
    alert_step: int | None = None
    retrofit_step: int | None = None
    loss_before: float | None = None
    loss_after: float | None = None


def train_arm(arm: str, setup: Setup, data: tuple[Tensor, Tensor], logdir: Path, progress: bool = True) -> Outcome:
    """Train one of `ARMS` and report it."""
    torch.manual_seed(setup.seed)
    lesson = Lesson(setup)
    batches = windows(data[0], setup.steps * setup.batch, setup.length, setup.seed)
    held_out = windows(data[1], setup.val_batches * 2 * setup.batch, setup.length, setup.seed)
    train_loader = DataLoader(TensorDataset(batches), batch_size=setup.batch)
    val_loader = DataLoader(TensorDataset(held_out), batch_size=2 * setup.batch)
    if arm == "from_start":
        sites = find_sites(lesson.gpt, batches[: setup.batch, :-1])
        retrofit_(lesson.gpt, sites, variant="l2", calibrate=False)
    watch = WatchedPatch(
        lambda: held_out_loss(lesson, val_loader),
        every_n_steps=setup.every_n_steps,
        retrofit="auto" if arm == "auto" else "off",
        console=progress,
        on_error="raise",
    )
    trainer = pl.Trainer(
        max_steps=setup.steps,
        accelerator="cpu",
        devices=1,
        gradient_clip_val=1.0,
        callbacks=[watch, *([RichProgressBar()] if progress else [])],
        logger=TensorBoardLogger(logdir, name=None, version=arm),
        val_check_interval=min(50, setup.steps),
        num_sanity_val_steps=0,
        log_every_n_steps=10,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=progress,
    )
    trainer.fit(lesson, train_loader, val_loader)
    return _outcome(watch, held_out_loss(lesson, val_loader))


def _outcome(watch: WatchedPatch, val_loss: float) -> Outcome:
    largest = [max(float(r.max_logit.max()) for r in readings) for _, readings in watch.history]
    warned = [alert.step for alert in watch.alerts if alert.level >= Level.WARN]
    outcome = Outcome(val_loss, max(largest), largest[-1], alert_step=min(warned, default=None))
    if watch.retrofits:
        outcome.retrofit_step = watch.retrofits[0].step
        outcome.loss_before, outcome.loss_after = watch.around
    return outcome


def recovered(outcomes: dict[str, Outcome]) -> float | None:
    """Share of the gap between nothing and QK-norm from the start that the retrofit closed; None where
    nothing was not the worse of the two."""
    gap = outcomes["none"].val_loss - outcomes["from_start"].val_loss
    return (outcomes["none"].val_loss - outcomes["auto"].val_loss) / gap if gap > 0 else None
