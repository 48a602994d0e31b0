"""Part of `qkwatch bench`: what a training step costs in a real Trainer, with QKWatch and with what people do instead.

One Trainer, one model; the kinds of step take turns, so that whatever else the machine does hits all of them.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from qkwatch.callback import QKWatch
from qkwatch.demo import quiet
from qkwatch.demo_model import Attention, Lesson, Setup, rotate
from qkwatch.timing import Result, Times, ratio

# what a step does, in the order of their turns; a reading is due at every len(TURNS)-th step
TURNS = ("measured", "bare", "unmeasured", "hook", "eager")
SHAPES = ((256, 8), (1024, 2))  # (T, B)


class EagerAttention(Attention):
    """Attention that can also return its probabilities, as ``output_attentions=True`` makes a model do."""

    eager = False
    probabilities: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if not self.eager:
            return super().forward(x)
        b, t, c = x.shape
        q, k, v = self.heads_of(self.qkv(x))
        logits = rotate(q) @ rotate(k).transpose(-1, -2) * q.shape[-1] ** -0.5
        hidden = torch.ones(t, t, dtype=torch.bool, device=x.device).triu(1)
        self.probabilities = logits.masked_fill(hidden, -torch.inf).softmax(-1)
        out: Tensor = self.out((self.probabilities @ v).transpose(1, 2).reshape(b, t, c))
        return out


@torch.no_grad()
def recompute(attention: Attention, qkv: Tensor) -> Tensor:
    """What a monitoring hook does: softmax(QK^T) once more, its mean entropy and largest logit."""
    q, k, _ = attention.heads_of(qkv)
    logits = rotate(q) @ rotate(k).transpose(-1, -2) * q.shape[-1] ** -0.5
    visible = torch.ones(logits.shape[-2:], dtype=torch.bool, device=qkv.device).tril()
    p = logits.masked_fill(~visible, -torch.inf).softmax(-1)
    return torch.stack([-torch.xlogy(p, p).sum(-1).mean(), logits.masked_fill(~visible, 0).abs().amax()])


class Turn(pl.Callback):
    """Starts a step's clock (first in the list) or stops it and prepares the next step (last)."""

    def __init__(self, clock: dict[str, Any], last: bool = False):
        self.clock, self.last = clock, last

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if not self.last:
            self.clock["begin"] = time.perf_counter()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not self.last:
            return
        self.clock["finish"]()
        seconds = time.perf_counter() - self.clock["begin"]
        self.clock["times"].append((TURNS[batch_idx % len(TURNS)], seconds))
        self.clock["prepare"](TURNS[(batch_idx + 1) % len(TURNS)])


class Steps:
    """Makes each kind of step what it is."""

    def __init__(self, lesson: Lesson, callbacks: list[Any], trainer: Any):
        self.layers = [m for m in lesson.modules() if isinstance(m, EagerAttention)]
        self.callbacks, self.trainer = callbacks, trainer
        self.figures: list[Tensor] = []
        self.handles: list[Any] = []

    def prepare(self, kind: str) -> None:
        watched = kind in ("measured", "unmeasured")
        for watch in self.callbacks:
            # its own count of steps stands still while it is left out of the Trainer, so its cadence is set by turn
            if isinstance(watch, QKWatch) and watch._monitor is not None:
                watch._monitor.every_n_steps = 1 if kind == "measured" else sys.maxsize
        self.trainer.callbacks = [c for c in self.callbacks if watched or not isinstance(c, QKWatch)]
        for handle in self.handles:
            handle.remove()
        self.handles, self.figures = [], []
        for layer in self.layers:
            layer.eager, layer.probabilities = kind == "eager", None
            if kind == "hook":
                self.handles.append(layer.qkv.register_forward_hook(self._hook(layer)))

    def _hook(self, layer: Attention) -> Callable[[nn.Module, Any, Tensor], None]:
        return lambda module, args, output: self.figures.append(recompute(layer, output))

    def finish(self) -> None:
        """The figures reach the CPU within the step's time."""
        for layer in self.layers:
            if layer.probabilities is not None:
                p = layer.probabilities.detach()
                self.figures.append(-torch.xlogy(p, p).sum(-1).mean())
        if self.figures:
            torch.stack([figure.flatten()[0] for figure in self.figures]).tolist()


def step_times(length: int, batch: int, rounds: int, layers: int = 6, width: int = 384) -> Times:
    """Seconds of each kind of step; the first round, with the search for sites, is left out."""
    setup = Setup(steps=(rounds + 1) * len(TURNS), length=length, batch=batch, layers=layers, width=width, heads=6)
    lesson = Lesson(setup)
    for block in lesson.gpt.blocks:
        block.attn.__class__ = EagerAttention
    ids = torch.randint(256, (setup.steps * batch, length + 1))
    clock: dict[str, Any] = {"times": []}
    watch = QKWatch(every_n_steps=len(TURNS), console=False, on_error="raise")
    callbacks: list[Any] = [Turn(clock), watch, Turn(clock, last=True)]
    with tempfile.TemporaryDirectory() as folder, quiet():
        trainer: Any = pl.Trainer(
            max_steps=setup.steps,
            devices=1,
            callbacks=list(callbacks),
            logger=TensorBoardLogger(folder, name=None),
            log_every_n_steps=len(TURNS),
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,
        )
        own = [c for c in trainer.callbacks if c not in callbacks]
        steps = Steps(lesson, [*callbacks[:2], *own, callbacks[2]], trainer)
        clock |= {"prepare": steps.prepare, "finish": steps.finish}
        steps.prepare(TURNS[0])
        trainer.fit(lesson, DataLoader(TensorDataset(ids), batch_size=batch))
    times: Times = {kind: [] for kind in dict.fromkeys(TURNS)}
    for kind, seconds in clock["times"][len(TURNS) :]:
        times[kind].append(seconds)
    return times


def run_training(rounds: int = 5) -> Result:
    """Ratios of step times at both shapes."""
    ratios, targets = dict[str, float](), dict[str, str]()
    for length, batch in SHAPES:
        times = step_times(length, batch, rounds)
        for what, above, below, aim in (
            ("measured / unmeasured step", "measured", "unmeasured", "<= 1.10"),
            ("unmeasured step / without QKWatch", "unmeasured", "bare", ""),
            ("attentions returned, mean entropy / without", "eager", "bare", ""),
            ("hook that recomputes softmax(QK^T) / without", "hook", "bare", ""),
        ):
            ratios[f"T={length}, B={batch}: {what}"] = ratio(times, above, below)
            targets[f"T={length}, B={batch}: {what}"] = aim
    return {"what": "a GPT of 6 layers, width 384, in a Trainer", "ratios": ratios, "targets": targets}
