"""Plots of `study.py`, with matplotlib."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt
from study_report import ARMS, first_alert, readings
from study_runs import EVERY, Row

from qkwatch import Thresholds

COLOURS = {"nothing": "#c0392b", "auto": "#2471a3", "from the start": "#7f8c8d"}


def draw(rows: Sequence[Row], found: Mapping[float, Mapping[str, Sequence[float]]], folder: Path) -> list[Path]:
    """Learning-rate sensitivity; largest logits of all runs with their warnings and harm. Returns the files."""
    return [sensitivity(found, folder / "sensitivity.png"), logits(rows, folder / "logits.png")]


def sensitivity(found: Mapping[float, Mapping[str, Sequence[float]]], path: Path) -> Path:
    figure, axes = plt.subplots(figsize=(6, 3.6), dpi=120)
    for arm in ARMS:
        points = [(lr, at[arm]) for lr, at in found.items() if at[arm]]
        lrs = [lr for lr, _ in points]
        axes.plot(lrs, [statistics.mean(v) for _, v in points], "o-", color=COLOURS[arm], label=arm)
        axes.fill_between(lrs, [min(v) for _, v in points], [max(v) for _, v in points], color=COLOURS[arm], alpha=0.15)
    axes.set(xscale="log", xlabel="learning rate", ylabel="final held-out loss (nats)")
    axes.legend(frameon=False, title="QK-norm")
    return _save(figure, path)


def logits(rows: Sequence[Row], path: Path) -> Path:
    runs = [r for r in rows if r["kind"] == "run"]
    tasks = sorted({r["task"] for r in runs})
    figure, grid = plt.subplots(1, len(tasks), figsize=(4 * len(tasks), 3.6), dpi=120, sharey=True, squeeze=False)
    for axes, task in zip(grid[0], tasks, strict=True):
        for r in [r for r in runs if r["task"] == task]:
            curve = {f[0]["step"]: max(max(x["max_logit"]) for x in f) for f in readings(r, EVERY)}
            colour = "#7f8c8d" if r["harm"] is None else "#c0392b"
            axes.plot(list(curve), list(curve.values()), color=colour, lw=0.8, alpha=0.6)
            _mark(axes, curve, first_alert(r, Thresholds()), "^", "#e67e22")
            _mark(axes, curve, r["harm"], "x", "black")
        axes.axhline(100, color="black", lw=0.5, ls=":")
        axes.set(yscale="log", xlabel="step", title=task)
    grid[0][0].set_ylabel("largest |logit|")
    figure.suptitle("red: harmful, grey: not; triangle: first WARN, cross: harm", fontsize=9)
    return _save(figure, path)


def _mark(axes: Any, curve: Mapping[int, float], step: int | None, marker: str, colour: str) -> None:
    if step is not None:
        nearest = min(curve, key=lambda s: abs(s - step))
        axes.plot([nearest], [curve[nearest]], marker, color=colour, ms=5)


def _save(figure: Any, path: Path) -> Path:
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
    return path
