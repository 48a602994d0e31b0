"""A retrofit in the middle of a Trainer's run: model, averages, optimizers, schedulers, ranks. All or nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from qkwatch import trainers
from qkwatch.adopt import adopt_, unchanged_on_error
from qkwatch.modules import named_modules
from qkwatch.norms import QKNorm, Variant
from qkwatch.plan import RetrofitPlan
from qkwatch.ranks import Broken, Ranks
from qkwatch.retrofit import RetrofitReport, patched_sites, retrofit_, uninstall
from qkwatch.sites import Site


@dataclass
class Retrofit:
    """One entry of `QKWatch.retrofits`: what was done after which step, and the training loss around it."""

    step: int
    report: RetrofitReport
    loss_before: float | None = None
    loss_after: float | None = None


def patch_(
    trainer: Any,
    pl_module: nn.Module,
    sites: Sequence[Site],
    ranks: Ranks,
    variant: Variant,
    cap: float,
    max_gain: float | None,
) -> tuple[RetrofitReport, list[nn.Parameter]]:
    """Patch between two optimizer steps; returns the report and the parameters that are new in training.

    Rank zero measures and decides, the others do what it did. If anything fails on any rank, every rank has the
    model and the optimizers that it had before.
    """
    refusal = trainers.refuses_patches(trainer)
    if refusal is not None:
        return RetrofitReport(refused={site.name: refusal for site in sites}), []
    models = [pl_module, *trainers.averaged_models(trainer)]
    before = [set(patched_sites(model)) for model in models]
    schedulers = trainers.schedulers(trainer)
    with unchanged_on_error(trainer.optimizers, schedulers):
        try:
            fault, report, new = None, RetrofitReport(), []
            try:
                report = _decide(pl_module, sites, ranks, variant, cap, max_gain)
                for model in models[1:]:
                    retrofit_(model, plan=report.plan)
                if report.applied:
                    new = [p for _, p in adopt_(pl_module, trainer.optimizers, schedulers)]
            except Broken:
                raise  # every rank knows
            except Exception as error:
                fault = error
            ranks.agree(fault)
        except BaseException:
            for model, had in zip(models, before, strict=True):
                for name in set(patched_sites(model)) - had:
                    uninstall(model, name)
            raise
    return report, new


def _decide(
    pl_module: nn.Module, sites: Sequence[Site], ranks: Ranks, variant: Variant, cap: float, max_gain: float | None
) -> RetrofitReport:
    if ranks.size == 1:
        return retrofit_(pl_module, sites, variant, cap, max_gain)
    report, told = RetrofitReport(), None
    if ranks.rank == 0:
        try:
            report = retrofit_(pl_module, sites, variant, cap, max_gain)
            told = (report.refused, report.drift, report.notes, report.plan.to_dict())
        except Exception as fault:
            ranks.broadcast(None)
            raise fault
    told = ranks.broadcast(told)
    if told is None:
        return RetrofitReport()  # rank zero failed, and is about to say so
    if ranks.rank:
        refused, drift, notes, plan = told
        report = retrofit_(pl_module, plan=RetrofitPlan.from_dict(plan))
        report.refused, report.drift, report.notes = refused, drift, notes
    return report


def set_ramp(model: nn.Module, alpha: float | None) -> None:
    """How far every patch of the model has come: 0 the old function, 1 or None the normed one."""
    for module in named_modules(model).values():
        if isinstance(module, QKNorm):
            module.set_ramp(alpha)
