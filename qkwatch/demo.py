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
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.loggers import TensorBoardLogger
from rich import get_console
from rich.box import SIMPLE_HEAD
from rich.rule import Rule
from rich.table import Table
from rich.text import Text
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from qkwatch.alerts import Level
from qkwatch.callback import QKWatch
from qkwatch.demo_model import Lesson, Setup, corpus, held_out_loss, windows
from qkwatch.errors import QKWatchError
from qkwatch.find import find_sites
from qkwatch.retrofit import retrofit_

ARMS = {
    "none": "nothing (QKWatch only watches)",
    "auto": 'QKWatch(retrofit="auto")',
    "from_start": "QK-norm from the start",
}


QUICK = Setup(steps=200)


# -- arms ---------------------------------------------------------------------------------------------------


class WatchedPatch(QKWatch):
    """`QKWatch` that also takes the held-out loss directly before and after it patches."""

    def __init__(self, held_out: Callable[[], float], **options: Any):
        super().__init__(**options)
        self.held_out, self.around = held_out, (math.nan, math.nan)

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        warned = self.retrofit == "auto" and any(alert.level >= Level.WARN for alert in self.alerts)
        due = warned and not self.retrofits
        before = self.held_out() if due else math.nan
        super().on_train_batch_end(*args, **kwargs)
        if due and self.retrofits:
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
        max_epochs=1,  # as many batches as steps
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
    console = get_console()
    outcomes: dict[str, Outcome] = {}
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
    """Without Lightning's remarks on hardware, workers and loggers; either of its packages may make them."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="(pytorch_)?lightning")
            warnings.filterwarnings("ignore", message=".*LeafSpec.*")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
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
