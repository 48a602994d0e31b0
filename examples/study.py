"""How early do attention statistics warn, how often do they cry wolf, and what is best done then?

    python examples/study.py runs    [--out study.jsonl]   labelled runs, each with its same-seed QK-norm twin
    python examples/study.py actions [--half tune]         what to do at the first WARN
    python examples/study.py auto                          the product's own action on runs that are warned of
    python examples/study.py late                          what to do half way through a run, harmed or healthy
    python examples/study.py report  [--plots DIR]         all tables, and plots

Results are JSON lines, one per run; what is in the file already is not run again. Real data only: Python's own source
as text, scikit-learn's digits. Rules and actions are chosen on the seeds "tune" and reported on the seeds "held-out".
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import study_runs
import torch
from rich.console import Console
from study_report import first_alert, report
from study_runs import ACTIONS, DEFAULT, Key, Row, act, labelled

from qkwatch import Thresholds

SEEDS = {"tune": (0, 1), "held-out": (2, 3)}
GRID: dict[tuple[str, str], tuple[float, ...]] = {
    ("rope-gpt", "adamw"): (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1),
    ("encoder-gpt", "adamw"): (1e-3, 3e-3, 1e-2, 3e-2, 1e-1),
    ("vit", "adamw"): (1e-3, 3e-3, 1e-2, 3e-2, 1e-1),
    ("rope-gpt", "adamw-wd"): (3e-2, 1e-1),
    ("rope-gpt", "muon"): (5e-2, 3e-1),
    ("encoder-gpt", "muon"): (5e-2, 3e-1),
}
FINALISTS = (
    DEFAULT,
    "l2, constant 10, ramp 20",
    "l2, cap 20",
    "qwen3, cap 20",
    "qwen3, from 1",
    "qkclip, 100, each step",
)
LATE = (
    DEFAULT,
    "l2, constant 10, ramp 20",
    "l2, constant 10, ramp 100",
    "l2, 10 to 20",
    "l2, cap 20",
    "l2, cap 20, ramp 100",
    "qwen3, 1 to cap 20",
    "qwen3, from 1",
)
FORCED_AT, FORCED_FROM = 50, 3e-3  # where a healthy run is patched by force; the lowest learning rate of these


class Results:
    """A file of JSON lines that remembers what was run."""

    def __init__(self, path: Path, console: Console):
        self.path, self.console = path, console
        self.rows: list[Row] = [json.loads(line) for line in path.open()] if path.exists() else []

    def once(self, key: Key, run: Callable[[Key], Row]) -> None:
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

    def runs(self, half: str) -> list[Row]:
        return [r for r in self.rows if r["kind"] == "run" and r["half"] == half]


def run_all(results: Results) -> None:
    for (task, optimizer), lrs in GRID.items():
        for lr, (half, seeds) in itertools.product(lrs, SEEDS.items()):
            for seed in seeds:
                key = {"kind": "run", "task": task, "optimizer": optimizer, "lr": lr, "half": half, "seed": seed}
                results.once(key, labelled)


def act_all(results: Results, half: str) -> None:
    """At the first WARN of each harmful run; by force on the healthy runs that are never warned of.

    All actions on the first of the tuning seeds, the finalists on all held-out seeds.
    """
    chosen = list[tuple[Row, int]]()
    for row in results.runs(half):
        at = first_alert(row, Thresholds())
        if half == "tune" and row["seed"] != SEEDS[half][0]:
            continue
        if row["harm"] is not None and at is not None:
            chosen.append((row, at))
        elif row["harm"] is None and at is None and row["lr"] >= FORCED_FROM:
            chosen.append((row, FORCED_AT))
    for action in ACTIONS if half == "tune" else FINALISTS:
        for row, at in chosen:
            results.once(action_key(row, action, at), act)


def act_auto(results: Results) -> None:
    """Every held-out run that is warned of, harmful or not; for the learning-rate sensitivity of the one model, all."""
    for row in [*results.runs("held-out"), *results.runs("tune")]:
        at = first_alert(row, Thresholds())
        if at is not None and (row["half"] == "held-out" or (row["task"], row["optimizer"]) == ("rope-gpt", "adamw")):
            results.once(action_key(row, DEFAULT, at), act)


def act_late(results: Results) -> None:
    """Half way, on the first tuning seed: harmful runs, most of them long after harm, and those never warned of."""
    rows = [row for row in results.runs("tune") if row["seed"] == SEEDS["tune"][0]]
    healthy = [r for r in rows if r["harm"] is None and r["lr"] >= FORCED_FROM and first_alert(r, Thresholds()) is None]
    for action, row in itertools.product(LATE, [*(r for r in rows if r["harm"] is not None), *healthy]):
        results.once({**action_key(row, action, study_runs.STEPS // 2), "kind": "late"}, act)


def action_key(row: Row, action: str, at: int) -> Key:
    same: dict[str, Any] = {k: row[k] for k in ("task", "optimizer", "lr", "half", "seed", "harm")}
    return {"kind": "action", **same, "action": action, "at": at}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["runs", "actions", "auto", "late", "report"])
    parser.add_argument("--out", type=Path, default=Path("study.jsonl"))
    parser.add_argument("--half", choices=list(SEEDS), default="tune")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=study_runs.STEPS, help="of a run; another --out for each")
    parser.add_argument("--plots", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    study_runs.STEPS = options.steps
    console = Console()
    results = Results(options.out, console)
    if options.what == "runs":
        run_all(results)
    elif options.what == "actions":
        act_all(results, options.half)
    elif options.what == "auto":
        act_auto(results)
    elif options.what == "late":
        act_late(results)
    else:
        report(results.rows, console, options.plots)


if __name__ == "__main__":
    main()
