"""The runs of `study.py`: one training loop, its same-seed QK-norm twin, and what is done at the first WARN."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from study_models import TASKS, Task
from torch import nn

from qkwatch import QKClip, Reading, Thresholds, find_sites, retrofit_
from qkwatch.midrun import set_ramp
from qkwatch.monitor import Monitor, Ranks
from qkwatch.optim import add_parameters
from qkwatch.surgery import norm_parameters

STEPS, PROBE, READ = 600, 10, 5  # steps of a run; between held-out probes; between readings kept for the rules
EVERY = 10  # steps between the readings that the rules see: QKWatch's default
HARM, IN_A_ROW = 0.1, 3  # nats above the twin, on so many probes in a row
WARM_UP = 50
Key = dict[str, Any]
Row = dict[str, Any]


def optimizers(model: nn.Module, kind: str, lr: float) -> list[torch.optim.Optimizer]:
    decay = 0.1 if kind == "adamw-wd" else 0.0
    if kind != "muon":
        return [torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=decay)]
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n and "head" not in n]
    chosen = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in chosen]
    return [
        torch.optim.Muon(matrices, lr=lr, weight_decay=0.0),
        torch.optim.AdamW(others, lr=min(lr, 1e-2), betas=(0.9, 0.95), weight_decay=0.0),
    ]


def schedule(step: int) -> float:
    if step < WARM_UP:
        return (step + 1) / WARM_UP
    return 0.5 * (1 + math.cos(math.pi * (step - WARM_UP) / (STEPS - WARM_UP)))


class Run:
    """One training run in a plain loop."""

    def __init__(self, key: Key):
        torch.manual_seed(key["seed"])
        self.task: Task = TASKS[key["task"]]()
        self.model = self.task.build()
        self.batches = self.task.batches(key["seed"])
        self.optimizers = optimizers(self.model, key["optimizer"], key["lr"])
        self.schedulers = [torch.optim.lr_scheduler.LambdaLR(o, schedule) for o in self.optimizers]
        self.probes: list[float] = []
        self.losses: list[float] = []

    def sites(self) -> Any:
        self.model.train()
        return find_sites(self.model, next(self.task.batches(12345))[0])

    def normed(self, gain_lr: float = 1.0, **options: Any) -> None:
        """Patch now, and train the gains, at a learning rate of their own where asked."""
        retrofit_(self.model, self.sites(), **options)
        new = norm_parameters(self.model)
        if not new:
            return
        places = add_parameters(self.optimizers, new, beside=list(self.model.parameters()), schedulers=self.schedulers)
        for o, g in set(places):
            group = self.optimizers[o].param_groups[g]
            group["lr"] *= gain_lr
            group["initial_lr"] *= gain_lr
            self.schedulers[o].base_lrs[g] *= gain_lr

    def monitor(self, every: int = READ) -> Monitor:
        def fault(where: str, error: Exception) -> None:
            raise error

        return Monitor(
            self.model,
            every_n_steps=every,
            layers=None,
            rows="all",
            thresholds=Thresholds(),
            on_fault=fault,
            on_unseen=lambda *a: None,
            ranks=Ranks(),
        )

    @torch.no_grad()
    def probe(self) -> float:
        self.model.eval()
        value = float(self.task.loss(self.model, self.task.held_out))
        self.model.train()
        return round(value, 5) if math.isfinite(value) else 100.0

    def steps(self, monitor: Monitor | None = None) -> Iterator[tuple[int, list[Reading]]]:
        self.model.train()
        for step in range(STEPS):
            if step % PROBE == 0:
                self.probes.append(self.probe())
            if monitor is not None and monitor.due(step):
                monitor.begin(step)
            loss = self.task.loss(self.model, next(self.batches))
            if monitor is not None:
                monitor.end_forward()
            self.losses.append(round(float(loss.detach()), 4))
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            for optimizer, scheduler in zip(self.optimizers, self.schedulers, strict=True):
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
            yield step, monitor.collect(step)[0] if monitor is not None else []
        self.probes.append(self.probe())


# -- labelled runs ------------------------------------------------------------------------------------------


def harm_step(probes: list[float], twin: list[float]) -> int | None:
    """Step of the first of three probes in a row that lie 0.1 nat above the twin's."""
    above = [a - b > HARM for a, b in zip(probes, twin, strict=True)]
    for i in range(len(above) - IN_A_ROW + 1):
        if all(above[i : i + IN_A_ROW]):
            return i * PROBE
    return None


def labelled(key: Key) -> Row:
    twin = Run(key)
    twin.normed(calibrate=twin.task.calibrated_twin)
    for _ in twin.steps():
        pass
    run = Run(key)
    readings = [[pack(r) for r in found] for _, found in run.steps(run.monitor()) if found]
    harm = harm_step(run.probes, twin.probes)
    figures = {"probes": run.probes, "twin": twin.probes, "losses": run.losses, "readings": readings}
    return {**key, "harm": harm, **figures}


def pack(reading: Reading) -> Row:
    row = {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in vars(reading).items()}
    return {k: [round(x, 6) for x in v] if isinstance(v, list) else v for k, v in row.items()}


def unpack(row: Row) -> Reading:
    row = {"product_logit": row["max_logit"], **row}  # of runs that were recorded before it was
    return Reading(**{k: torch.tensor(v) if isinstance(v, list) else v for k, v in row.items()})


# -- actions ------------------------------------------------------------------------------------------------

DEFAULT = "l2, constant 10"  # what QKWatch(retrofit="auto") does
ACTIONS: dict[str, Row] = {
    "l2, constant 10": {"variant": "l2", "calibrate": False},
    "l2, constant 10, ramp 20": {"variant": "l2", "calibrate": False, "ramp": 20},
    "l2, cap 20": {"variant": "l2", "cap": 20.0},
    "qwen3, cap 20": {"variant": "qwen3", "cap": 20.0},
    "qwen3, from 1": {"variant": "qwen3", "calibrate": False},
    "qwen3, 1 to cap 20": {"variant": "qwen3", "cap": 20.0, "calibrate": "raised"},
    "qkclip, 100, each step": {"clip": 100.0, "every": 1},
    "l2, constant 10, ramp 50": {"variant": "l2", "calibrate": False, "ramp": 50},
    "l2, constant 10, ramp 100": {"variant": "l2", "calibrate": False, "ramp": 100},
    "l2, constant 10, ramp 20, gains at 10 LR": {"variant": "l2", "calibrate": False, "ramp": 20, "gain_lr": 10.0},
    "l2, cap 20, ramp 20, gains at 10 LR": {"variant": "l2", "cap": 20.0, "ramp": 20, "gain_lr": 10.0},
    "l2, cap 20, ramp 100": {"variant": "l2", "cap": 20.0, "ramp": 100},
    "l2, 10 to 20": {"variant": "l2", "cap": 20.0, "calibrate": "raised"},
    "l2, 10 to 20, gains at 10 LR": {"variant": "l2", "cap": 20.0, "calibrate": "raised", "gain_lr": 10.0},
    "l2, cap 10": {"variant": "l2", "cap": 10.0},
    "l2, cap 50": {"variant": "l2", "cap": 50.0},
    "qkclip, 100": {"clip": 100.0},
}


def act(key: Key) -> Row:
    """The run of `key` with one of `ACTIONS` at step `at`; held-out loss right before and after, and at the end."""
    options = dict(ACTIONS[key["action"]])
    ramp, tau, every = options.pop("ramp", 0), options.pop("clip", None), options.pop("every", EVERY)
    run, clip, jump, largest = Run(key), None, math.nan, 0.0
    for step, found in run.steps(monitor := run.monitor(every)):
        if step > key["at"]:
            largest = max([largest, *(float(r.max_logit.max()) for r in found)])
        if step == key["at"]:
            before = run.probe()
            if tau is not None:
                clip = QKClip(run.sites(), tau)
            else:
                run.normed(**options)
                monitor.reset_sites()
                set_ramp(run.model, 0.0 if ramp else None)
        elif ramp and key["at"] < step <= key["at"] + ramp:
            alpha = (step - key["at"]) / ramp
            set_ramp(run.model, alpha if alpha < 1 else None)
        if clip is not None and found:
            clip.clip_(found)
        if step == key["at"]:
            jump = run.probe() - before
    return {**key, "jump": round(jump, 5), "final": run.probes[-1], "largest": round(largest, 2)}
