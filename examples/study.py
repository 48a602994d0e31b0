"""How early do attention statistics warn, how often do they cry wolf, and what is best done then?

    python examples/study.py runs    [--out study.jsonl]     labelled runs, each with its same-seed QK-norm twin
    python examples/study.py rules   [--out study.jsonl]     the alert rules on them: recall, lead, false alarms
    python examples/study.py actions [--out study.jsonl]     what to do at the first WARN
    python examples/study.py report  [--out study.jsonl]     all tables once more, and plots (--plots DIR)

Results are JSON lines, one per run; what is in the file already is not run again. Real data only: Python's own source
as text, scikit-learn's digits.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from study_models import TASKS, Task
from torch import nn

from qkwatch import Level, Reading, Thresholds, find_sites, retrofit_
from qkwatch.monitor import Monitor, Ranks
from qkwatch.optim import add_parameters
from qkwatch.retrofit import norm_parameters
from qkwatch.rules import Rules

STEPS, PROBE, READ = 300, 10, 5  # steps of a run; between held-out probes; between readings
HARM, IN_A_ROW = 0.1, 3  # nats above the twin, on so many probes in a row
SEEDS = {"tune": (0, 1), "held-out": (2, 3)}
GRID: dict[tuple[str, str], tuple[float, ...]] = {
    ("rope-gpt", "adamw"): (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1),
    ("encoder-gpt", "adamw"): (1e-3, 3e-3, 1e-2, 3e-2),
    ("vit", "adamw"): (1e-3, 3e-3, 1e-2, 3e-2),
    ("rope-gpt", "adamw-wd"): (3e-3, 1e-2, 3e-2),
    ("rope-gpt", "muon"): (1e-2, 5e-2, 2e-1),
    ("encoder-gpt", "muon"): (1e-2, 5e-2, 2e-1),
}


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
    warm_up = 15
    return (
        (step + 1) / warm_up if step < warm_up else 0.5 * (1 + math.cos(math.pi * (step - warm_up) / (STEPS - warm_up)))
    )


class Run:
    """One training run in a plain loop."""

    def __init__(self, task: Task, optimizer: str, lr: float, seed: int):
        torch.manual_seed(seed)
        self.task, self.model = task, task.build()
        self.batches = task.batches(seed)
        self.optimizers = optimizers(self.model, optimizer, lr)
        self.schedulers = [torch.optim.lr_scheduler.LambdaLR(o, schedule) for o in self.optimizers]
        self.probes: list[float] = []
        self.losses: list[float] = []

    def normed(self, **options: Any) -> Any:
        """Patch now, and train the gains; returns the report."""
        batch = next(self.task.batches(12345))
        self.model.train()
        report = retrofit_(self.model, find_sites(self.model, batch[0]), **options)
        new = norm_parameters(self.model)
        if new:
            add_parameters(self.optimizers, new, beside=list(self.model.parameters()), schedulers=self.schedulers)
        return report

    def monitor(self) -> Monitor:
        def fault(where: str, error: Exception) -> None:
            raise error

        return Monitor(
            self.model,
            every_n_steps=READ,
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
        return value if math.isfinite(value) else 100.0

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


def pack(reading: Reading) -> dict[str, Any]:
    row = {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in vars(reading).items()}
    return {k: [round(x, 6) for x in v] if isinstance(v, list) else v for k, v in row.items()}


def unpack(row: dict[str, Any]) -> Reading:
    return Reading(**{k: torch.tensor(v) if isinstance(v, list) else v for k, v in row.items()})


def labelled(key: dict[str, Any]) -> dict[str, Any]:
    task = TASKS[key["task"]]()
    twin = Run(task, key["optimizer"], key["lr"], key["seed"])
    twin.normed(calibrate=False)
    for _ in twin.steps():
        pass
    run = Run(task, key["optimizer"], key["lr"], key["seed"])
    readings = [[pack(r) for r in found] for _, found in run.steps(run.monitor()) if found]
    harm = harm_step(run.probes, twin.probes)
    figures = {"probes": run.probes, "twin": twin.probes, "losses": run.losses, "readings": readings}
    return {**key, "harm": harm, **figures}


def runs(results: Results) -> None:
    for (task, optimizer), lrs in GRID.items():
        for lr, (half, seeds) in itertools.product(lrs, SEEDS.items()):
            for seed in seeds:
                key = {"kind": "run", "task": task, "optimizer": optimizer, "lr": lr, "half": half, "seed": seed}
                results.once(key, labelled)


# -- rules --------------------------------------------------------------------------------------------------


def first_alert(row: dict[str, Any], thresholds: Thresholds, rule: str | None = None) -> int | None:
    """Step of the first WARN or worse (of one rule)."""
    rules = Rules(thresholds)
    for found in row["readings"]:
        alerts = rules.update(found[0]["step"], [unpack(r) for r in found])
        if any(a.level >= Level.WARN and rule in (None, a.rule) for a in alerts):
            return int(found[0]["step"])
    return None


def score(rows: list[dict[str, Any]], thresholds: Thresholds, rule: str | None = None) -> dict[str, Any]:
    """Recall before harm, lead in steps, false alarms."""
    leads, missed, late, false = [], 0, 0, 0
    for row in rows:
        at = first_alert(row, thresholds, rule)
        if row["harm"] is None:
            false += at is not None
        elif at is None:
            missed += 1
        elif at > row["harm"]:
            late += 1
        else:
            leads.append(row["harm"] - at)
    harmful = sum(row["harm"] is not None for row in rows)
    return {
        "harmful": harmful,
        "healthy": len(rows) - harmful,
        "warned": len(leads),
        "late": late,
        "missed": missed,
        "median lead": statistics.median(leads) if leads else None,
        "worst lead": min(leads) if leads else None,
        "false": false,
    }


def rules(results: Results, console: Console) -> None:
    rows = [r for r in results.rows if r["kind"] == "run"]
    for half in SEEDS:
        part = [r for r in rows if r["half"] == half]
        if not part:
            continue
        scores = {"any": score(part, Thresholds())}
        for rule in ("early", "rising", "over_100", "doubling", "collapse", "max_logit"):
            scores[rule] = score(part, Thresholds(), rule)
        columns = list(scores["any"])
        table = Table("rule (WARN or worse)", *columns, title=f"{half} seeds")
        for name, figures in scores.items():
            table.add_row(name, *(str(figures[c]) for c in columns))
        console.print(table)
    table = Table(
        "task", "optimizer", "lr", "harm at", "warned at", "final − twin", "largest logit", title="median run"
    )
    for (task, optimizer), lrs in GRID.items():
        for lr in lrs:
            same = [r for r in rows if (r["task"], r["optimizer"], r["lr"]) == (task, optimizer, lr)]
            if same:
                table.add_row(task, optimizer, f"{lr:g}", *summary(same))
    console.print(table)


def summary(rows: list[dict[str, Any]]) -> list[str]:
    harm = [r["harm"] for r in rows]
    warned = [first_alert(r, Thresholds()) for r in rows]
    gap = statistics.median(r["probes"][-1] - r["twin"][-1] for r in rows)
    top = statistics.median(max(max(x["max_logit"]) for f in r["readings"] for x in f) for r in rows)
    return [" ".join(map(str, harm)), " ".join(map(str, warned)), f"{gap:+.3f}", f"{top:,.0f}"]


# -- actions ------------------------------------------------------------------------------------------------

ACTIONS: dict[str, dict[str, Any]] = {
    "l2 cap 20": {"variant": "l2", "cap": 20.0},
    "l2 cap 10": {"variant": "l2", "cap": 10.0},
    "l2 cap 50": {"variant": "l2", "cap": 50.0},
    "l2 gain 10": {"variant": "l2", "calibrate": False},
    "qwen3 cap 20": {"variant": "qwen3", "cap": 20.0},
    "l2 cap 20 ramp 20": {"variant": "l2", "cap": 20.0, "ramp": 20},
}


def act(key: dict[str, Any]) -> dict[str, Any]:
    options = dict(ACTIONS[key["action"]])
    ramp = options.pop("ramp", 0)
    run = Run(TASKS[key["task"]](), key["optimizer"], key["lr"], key["seed"])
    jump = None
    largest = 0.0
    for step, found in run.steps(monitor := run.monitor()):
        largest = max([largest, *(float(r.max_logit.max()) for r in found)]) if jump is not None else 0.0
        if step == key["at"]:
            before = run.probe()
            run.normed(**options)
            monitor.reset_sites()
            set_ramp(run.model, 0.0 if ramp else None)
            jump = run.probe() - before
        elif ramp and step > key["at"]:
            alpha = (step - key["at"]) / ramp
            set_ramp(run.model, alpha if alpha < 1 else None)
    return {**key, "jump": jump, "final": run.probes[-1], "largest": largest}


def set_ramp(model: nn.Module, alpha: float | None) -> None:
    from qkwatch.norms import QKNorm

    for module in model.modules():
        if isinstance(module, QKNorm):
            module.set_ramp(alpha)


def actions(results: Results) -> None:
    """At the first WARN of each harmful held-out run; by force, at step 50, on one healthy run of each kind."""
    forced: set[tuple[str, str]] = set()
    for row in [r for r in results.rows if r["kind"] == "run" and r["half"] == "held-out"]:
        at = first_alert(row, Thresholds())
        if row["harm"] is None:
            if at is not None or (row["task"], row["optimizer"]) in forced or row["lr"] != 3e-3:
                continue
            forced.add((row["task"], row["optimizer"]))
            at = 50
        for action in ACTIONS:
            if at is not None:
                same = {k: row[k] for k in ("task", "optimizer", "lr", "seed", "harm")}
                results.once({"kind": "action", **same, "action": action, "at": at}, act)


def action_table(results: Results, console: Console) -> None:
    base = {(r["task"], r["optimizer"], r["lr"], r["seed"]): r for r in results.rows if r["kind"] == "run"}
    table = Table(
        "action",
        "runs",
        "recovered: mean",
        "worst",
        "jump: mean",
        "worst",
        "healthy: final − unpatched",
        "largest after",
    )
    for action in ACTIONS:
        rows = [r for r in results.rows if r["kind"] == "action" and r["action"] == action]
        shares, jumps, healthy = [], [], []
        for r in rows:
            run = base[r["task"], r["optimizer"], r["lr"], r["seed"]]
            nothing, start = run["probes"][-1], run["twin"][-1]
            if r["harm"] is None:
                healthy.append(r["final"] - nothing)
            elif nothing - start > HARM:
                shares.append((nothing - r["final"]) / (nothing - start))
                jumps.append(r["jump"])
        if shares:
            table.add_row(
                action,
                str(len(shares)),
                f"{statistics.mean(shares):.2f}",
                f"{min(shares):.2f}",
                f"{statistics.mean(jumps):+.3f}",
                f"{max(jumps):+.3f}",
                f"{max(healthy, default=math.nan):+.3f}",
                f"{max(r['largest'] for r in rows):,.0f}",
            )
    console.print(table)


# -- results ------------------------------------------------------------------------------------------------


class Results:
    """A file of JSON lines that remembers what was run."""

    def __init__(self, path: Path, console: Console):
        self.path, self.console = path, console
        self.rows: list[dict[str, Any]] = [json.loads(line) for line in path.open()] if path.exists() else []

    def once(self, key: dict[str, Any], run: Any) -> None:
        if any(all(row.get(k) == v for k, v in key.items()) for row in self.rows):
            return
        started = time.time()
        row = run(key)
        self.rows.append(row)
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        words = " ".join(f"{v}" for v in key.values())
        rest = {k: row[k] for k in ("harm", "jump", "final") if k in row}
        self.console.print(f"{words}: {rest} ({time.time() - started:.0f} s)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["runs", "rules", "actions", "report"])
    parser.add_argument("--out", type=Path, default=Path("study.jsonl"))
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    console = Console()
    results = Results(options.out, console)
    if options.what == "runs":
        runs(results)
    if options.what == "actions":
        actions(results)
    if options.what in ("rules", "report"):
        rules(results, console)
    if options.what in ("actions", "report"):
        action_table(results, console)


if __name__ == "__main__":
    main()
