"""Tables and plots of `study.py`, from its JSON lines."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from study_figures import figure_table
from study_made import CASES, warned
from study_runs import ACTIONS, DEFAULT, EVERY, HARM, Row, unpack

from qkwatch import Level, Thresholds
from qkwatch.rules import Rules

HALVES = ("tune", "held-out")
CANDIDATES: dict[str, Thresholds] = {
    "default": Thresholds(),
    "early at 50 after 20 % growth": Thresholds(early_margin=0.2),
    "early at 50 after doubling": Thresholds(early_margin=1.0),
    "early at 30": Thresholds(early_logit=30.0, info_logit=30.0),
    "no early rule": Thresholds(early_logit=100.0),
    "doubling counts from 50": Thresholds(double_logit=50.0),
    "collapse whatever the logits": Thresholds(collapsed_logit=0.0),
    "all at 200": Thresholds(early_logit=200.0, warn_logit=200.0, double_logit=200.0, collapsed_logit=200.0),
}
RULES = ("early", "rising", "over_100", "doubling", "collapse", "max_logit")


def readings(row: Row, every: int) -> list[list[Row]]:
    return [found for found in row["readings"] if found[0]["step"] % every == 0]


def first_alert(row: Row, thresholds: Thresholds, rule: str | None = None, every: int = EVERY) -> int | None:
    """Step of the first WARN or worse (of one rule)."""
    rules = Rules(thresholds)
    for found in readings(row, every):
        alerts = rules.update(found[0]["step"], [unpack(r) for r in found])
        if any(a.level >= Level.WARN and rule in (None, a.rule) for a in alerts):
            return int(found[0]["step"])
    return None


def score(rows: Sequence[Row], thresholds: Thresholds, rule: str | None = None, every: int = EVERY) -> list[str]:
    """Harmful and healthy runs; of the harmful: warned before harm, late, missed, lead in steps; false alarms."""
    leads, missed, late, false, cost = [], 0, 0, 0, [0.0]
    for row in rows:
        at = first_alert(row, thresholds, rule, every)
        if row["harm"] is None:
            false += at is not None
            cost += [row["probes"][-1] - row["twin"][-1]] if at is not None else []
        elif at is None:
            missed += 1
        elif at > row["harm"]:
            late += 1
        else:
            leads.append(row["harm"] - at)
    harmful = sum(row["harm"] is not None for row in rows)
    lead = f"{statistics.median(leads):g}" if leads else "-"
    worst = f"{min(leads):g}" if leads else "-"
    figures = [harmful, len(leads), late, missed, lead, worst, len(rows) - harmful, false]
    return [*map(str, figures), f"{max(cost):+.3f}" if false else "-"]


def rule_tables(rows: Sequence[Row], console: Console) -> None:
    names = ("harmful", "warned", "late", "missed", "median lead", "worst", "healthy", "false", "largest gap of these")
    for half in HALVES:
        part = [r for r in rows if r["kind"] == "run" and r["half"] == half]
        if not part:
            continue
        table = Table("WARN or worse by", *names, title=f"{half} seeds, a reading every {EVERY} steps")
        chosen = CANDIDATES if half == "tune" else {"default": Thresholds()}
        for name, thresholds in chosen.items():
            table.add_row(name, *score(part, thresholds))
        for rule in RULES:
            table.add_row(f"only the rule {rule}", *score(part, Thresholds(), rule))
        table.add_row("default, every 5 steps", *score(part, Thresholds(), every=5))
        console.print(table)


def run_table(rows: Sequence[Row], console: Console) -> None:
    table = Table("task", "optimizer", "LR", "harm at", "warned at", "final − twin", "largest logit")
    table.title = "labelled runs (one column entry a seed)"
    kinds: dict[tuple[Any, ...], list[Row]] = {}
    for r in rows:
        if r["kind"] == "run":
            kinds.setdefault((r["task"], r["optimizer"], r["lr"]), []).append(r)
    for (task, optimizer, lr), same in kinds.items():
        harm, at = ([r["harm"] for r in same], [first_alert(r, Thresholds()) for r in same])
        gaps = " ".join(f"{r['probes'][-1] - r['twin'][-1]:+.2f}" for r in same)
        top = statistics.median(largest(r) for r in same)
        words = [" ".join("-" if v is None else str(v) for v in values) for values in (harm, at)]
        table.add_row(task, optimizer, f"{lr:g}", *words, gaps, f"{top:,.0f}")
    console.print(table)


def largest(row: Row) -> float:
    return max(max(r["max_logit"]) for found in row["readings"] for r in found)


def made_table(console: Console, seeds: int = 20) -> None:
    table = Table("made case", "runs", "reached WARN", "largest logit", title="what must not alarm")
    for case in CASES:
        found = [warned(case, seed, Thresholds()) for seed in range(seeds)]
        table.add_row(case, str(seeds), str(sum(w for w, _ in found)), f"{max(t for _, t in found):.0f}")
    console.print(table)


# -- forecasts ----------------------------------------------------------------------------------------------


def forecast_table(rows: Sequence[Row], console: Console) -> None:
    """Each forecast of a site's largest head against the truth, where the limit was passed later in the run."""
    names = ("forecasts", "passed later", "median error", "bias", "inside the interval", "interval over, not passed")
    table = Table("seeds", "limit", *names)
    table.title = "forecasts (truth: the first reading past the limit; error, bias: a factor)"
    for half, limit in itertools.product(HALVES, (100.0, 1e3, 1e4)):
        ratios, inside, made, over = [], 0, 0, 0
        for row in rows:
            if row["kind"] == "run" and row["half"] == half:
                for (low, mid, high), truth, left in forecasts(row, limit):
                    made += 1
                    if truth is not None:
                        ratios.append(math.log(max(mid, EVERY / 2) / truth))
                        inside += low - EVERY <= truth <= high + EVERY
                    else:
                        over += high + EVERY <= left
        if ratios:
            error, bias = (math.exp(f(ratios)) for f in (lambda v: statistics.median(map(abs, v)), statistics.median))
            share = f"{inside / len(ratios):.0%}"
            table.add_row(
                half, f"{limit:,.0f}", str(made), str(len(ratios)), f"{error:.2f}", f"{bias:.2f}", share, str(over)
            )
    console.print(table)


def forecasts(row: Row, limit: float) -> list[tuple[tuple[float, float, float], int | None, int]]:
    """Every forecast of a run, the steps to the truth (None: not passed), and the steps left in the run."""
    rules, found, steps = Rules(), [], readings(row, EVERY)
    last = steps[-1][0]["step"]
    for i, now in enumerate(steps):
        step = now[0]["step"]
        rules.update(step, [unpack(r) for r in now])
        for r in now:
            head = max(range(len(r["max_logit"])), key=lambda h: r["max_logit"][h])
            span = rules.forecast(r["site"], head, step).steps_to[limit]
            if span is not None:
                found.append((span, passing(steps[i + 1 :], r["site"], head, limit, step), last - step))
    return found


def passing(later: Sequence[Sequence[Row]], site: str, head: int, limit: float, step: int) -> int | None:
    for now in later:
        if any(r["site"] == site and r["max_logit"][head] > limit for r in now):
            return int(now[0]["step"]) - step
    return None


# -- actions ------------------------------------------------------------------------------------------------


def action_tables(rows: Sequence[Row], console: Console) -> None:
    names = ("runs", "recovered: mean", "worst", "jump: mean", "worst", "largest logit after")
    names += ("healthy, forced: mean", "worst", "warned, not harmful: mean", "worst")
    for kind, when in (("action", "at the first WARN"), ("late", "half way")):
        for half in HALVES:
            table = Table(when, *names, title=f"{half} seeds: recovered share of the gap to the twin")
            done = [r for r in rows if r["kind"] == kind and r["half"] == half]
            for action in ACTIONS:
                figures = action_row(done, rows, action)
                if figures:
                    table.add_row(action, *figures)
            if table.row_count:
                console.print(table)


def action_row(done: Sequence[Row], rows: Sequence[Row], action: str) -> list[str]:
    base = {identity(r): r for r in rows if r["kind"] == "run"}
    shares, jumps, healthy, false, tops = [], [], [], [], []
    for r in done:
        if r["action"] != action:
            continue
        run = base[identity(r)]
        nothing, start = run["probes"][-1], run["twin"][-1]
        if r["harm"] is None:
            (healthy if first_alert(run, Thresholds()) is None else false).append(r["final"] - nothing)
        elif nothing - start > HARM:
            shares.append((nothing - r["final"]) / (nothing - start))
            jumps.append(r["jump"])
            tops.append(r["largest"])
    if not shares:
        return []
    mean, top = statistics.mean, f"{max(tops):,.0f}"
    others = [f"{how(part):+.3f}" if part else "-" for part in (healthy, false) for how in (mean, max)]
    recovered, jumped = (f"{mean(shares):.2f}", f"{min(shares):.2f}"), (f"{mean(jumps):+.3f}", f"{max(jumps):+.3f}")
    return [str(len(shares)), *recovered, *jumped, top, *others]


def identity(row: Row) -> tuple[Any, ...]:
    return row["task"], row["optimizer"], row["lr"], row["seed"]


# -- learning-rate sensitivity ------------------------------------------------------------------------------


ARMS = ("nothing", "auto", "from the start")


def arms(rows: Sequence[Row], action: str) -> dict[float, dict[str, list[float]]]:
    """LR -> arm -> final held-out losses, one a seed; a run without a WARN is left alone by "auto"."""
    done = {identity(r): r for r in rows if r["kind"] == "action" and r["action"] == action and r["at"] is not None}
    found: dict[float, dict[str, list[float]]] = {}
    for r in rows:
        if r["kind"] == "run" and (r["task"], r["optimizer"]) == ("rope-gpt", "adamw") and r["lr"] <= 0.1:
            cap, at = r["probes"][0], found.setdefault(r["lr"], {arm: [] for arm in ARMS})
            warned_at = first_alert(r, Thresholds())
            acted = done.get(identity(r)) if warned_at is not None else None
            at["nothing"].append(min(r["probes"][-1], cap))
            at["from the start"].append(min(r["twin"][-1], cap))
            if warned_at is None or acted is not None:
                at["auto"].append(min(acted["final"] if acted else r["probes"][-1], cap))
    return dict(sorted(found.items()))


def sensitivity_table(rows: Sequence[Row], console: Console, action: str) -> dict[float, dict[str, list[float]]]:
    found = arms(rows, action)
    table = Table("LR", *ARMS, title="final held-out loss, mean over seeds (rope-gpt, AdamW)")
    means = {lr: {arm: statistics.mean(v) for arm, v in at.items() if v} for lr, at in found.items()}
    for lr, at in means.items():
        table.add_row(f"{lr:g}", *(f"{at[arm]:.3f}" if arm in at else "-" for arm in ARMS))
    if means and all(len(at) == 3 for at in means.values()):
        sensitivity = []
        for arm in ARMS:
            losses = [at[arm] for at in means.values()]
            sensitivity.append(f"{statistics.mean(losses) - min(losses):.3f}")
        table.add_row("sensitivity", *sensitivity)
    console.print(table)
    return found


def report(rows: Sequence[Row], console: Console, plots: Path | None) -> None:
    run_table(rows, console)
    rule_tables(rows, console)
    figure_table(rows, console)
    made_table(console)
    forecast_table(rows, console)
    action_tables(rows, console)
    found = sensitivity_table(rows, console, DEFAULT)
    if plots is not None:
        from study_plots import draw

        plots.mkdir(parents=True, exist_ok=True)
        for path in draw(rows, found, plots):
            console.print(f"wrote {path}")
