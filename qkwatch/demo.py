"""`qkwatch demo`: one small GPT trained three times at a learning rate that saturates its attention.

The arms differ in one thing: nothing is done, `QKWatch` patches when it warns, or QK-norm is there from the
start. Weights, data and their order are the same.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import sysconfig
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.loggers import TensorBoardLogger
from rich import get_console
from rich.box import SIMPLE_HEAD
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


def as_dict(outcomes: dict[str, Outcome], setup: Setup) -> dict[str, Any]:
    """The comparison as JSON-able data; a figure that is missing or not finite is None."""
    common = ("val_loss", "max_logit", "last_logit")
    arms = {
        arm: {key: _finite(value) for key, value in asdict(outcome).items() if arm == "auto" or key in common}
        for arm, outcome in outcomes.items()
    }
    return {"arms": arms, "recovered": _finite(recovered(outcomes)), "setup": asdict(setup)}


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value


# -- the whole ----------------------------------------------------------------------------------------------


def run(setup: Setup, logdir: str | os.PathLike[str], json_file: str | None = None, progress: bool = True) -> Any:
    """Train the three arms, show them side by side, and return `as_dict` of them.

    Args:
        setup: sizes and seed.
        logdir: TensorBoard logs go there, one run per arm; into `run-2` and so on where it holds a run already.
        json_file: also write the result there.
        progress: progress bars, and alerts as they come.

    Raises:
        QKWatchError: a place that can't be written to, or a Python without its library's source.
    """
    data = corpus()
    place = free_place(Path(logdir))
    if json_file is not None and not os.access(Path(json_file).resolve().parent, os.W_OK):
        raise QKWatchError(f"cannot write {json_file}: its folder does not exist or is not writable")
    console, outcomes = get_console(), {}
    console.print(_introduction(setup, data))
    begin = time.perf_counter()
    for arm, title in ARMS.items():
        console.print(Rule(Text(f"{len(outcomes) + 1} of {len(ARMS)}: {title}")))
        with quiet():
            outcomes[arm] = train_arm(arm, setup, data, place, progress)
    result = as_dict(outcomes, setup)
    if json_file is not None:
        _write(Path(json_file), json.dumps(result, indent=2) + "\n")
    console.print(Rule(Text("side by side")))
    console.print(comparison(outcomes))
    console.print(conclusion(outcomes, setup))
    console.print(f"{time.perf_counter() - begin:.0f} s in all. Charts: tensorboard --logdir {place}", markup=False)
    return result


def free_place(logdir: Path) -> Path:
    """`logdir`, or the first `logdir/run-N` without logs: runs written over each other give broken charts."""
    try:
        place, n = logdir, 2
        while any((place / arm).exists() for arm in ARMS):
            place, n = logdir / f"run-{n}", n + 1
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise QKWatchError(f"cannot write logs to {logdir}: {error.strerror}; pass another --logdir") from error
    if not os.access(place, os.W_OK):
        raise QKWatchError(f"cannot write logs to {logdir}: no permission; pass another --logdir")
    return place


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise QKWatchError(f"cannot write {file}: {error.strerror}") from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without Lightning's remarks on hardware, workers and loggers."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="lightning")
            warnings.filterwarnings("ignore", message=".*LeafSpec.*")
            yield
    finally:
        logger.setLevel(level)


def _introduction(setup: Setup, data: tuple[Tensor, Tensor]) -> Text:
    size = f"{setup.layers} layers, width {setup.width}, {setup.heads} heads, RoPE"
    read = f"{len(data[0]) / 1e6:.1f} MB of this Python's own library, byte by byte"
    how = f"{setup.steps} steps at learning rate {setup.lr:g}, seed {setup.seed}, three times from the same start"
    return Text(f"A small GPT ({size}) reads {read}: {how}.")


def comparison(outcomes: dict[str, Outcome]) -> Table:
    """A row per arm, at most 80 columns wide."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("arm", no_wrap=True)
    for name in ("held-out\nloss", "largest logit\nat end (in run)", "warned\nat step", "patched\nafter"):
        table.add_column(name, justify="right", no_wrap=True)
    for arm, o in outcomes.items():
        logits = f"{o.last_logit:,.0f} ({o.max_logit:,.0f})"
        table.add_row(Text(ARMS[arm]), f"{o.val_loss:.3f}", logits, _or_dash(o.alert_step), _or_dash(o.retrofit_step))
    return table


def _or_dash(step: int | None) -> str:
    return "-" if step is None else f"{step:,}"


def conclusion(outcomes: dict[str, Outcome], setup: Setup) -> Text:
    """What this run showed, in words that claim nothing beyond it."""
    auto, share = outcomes["auto"], recovered(outcomes)
    lines = []
    if auto.loss_before is not None and auto.loss_after is not None:
        jump = auto.loss_after - auto.loss_before
        lines.append(
            f"The patch: held-out loss {auto.loss_before:.3f} before, {auto.loss_after:.3f} after ({jump:+.3f})."
        )
    else:
        lines.append("No warning came, so nothing was patched.")
    if share is None:
        lines.append("Doing nothing was not worse than QK-norm from the start in this run: there was no gap to close.")
    else:
        lines.append(f"Share of the gap closed: {share:.2f} (0: as doing nothing, 1: as QK-norm from the start).")
    lines.append(f"This is one run of one small model; another --seed than {setup.seed} gives other figures.")
    return Text("\n".join(lines))
