"""A retrofit in the middle of a run: model, averages, optimizers, schedulers, ranks. All or nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from qkwatch.adopt import adopt_, unchanged_on_error
from qkwatch.clip import QKClip
from qkwatch.modules import named_modules
from qkwatch.norms import CHILD, QKNorm, site_of
from qkwatch.optim import remove_parameters
from qkwatch.plan import RetrofitPlan
from qkwatch.ranks import Broken, Ranks
from qkwatch.retrofit import RetrofitReport, retrofit_, retrofit_each_
from qkwatch.sharding import reshard, shards, unsharded
from qkwatch.sites import Site
from qkwatch.surgery import norm_parameters, patched_sites, uninstall
from qkwatch.twins import find_twins, twin_plans
from qkwatch.variants import Calibrate, Variant


@dataclass
class Retrofit:
    """One entry of `QKWatch.retrofits`: what was done after which step, and the training loss around it."""

    step: int
    report: RetrofitReport
    loss_before: float | None = None
    loss_after: float | None = None
    undone: int | None = None  # the step after which it was taken back: over budget


@dataclass
class Live:
    """What a retrofit in mid-run changes.

    Attributes:
        models: the one in training, and its averages.
        optimizers, schedulers: all that train it.
        refusal: why nothing may be changed; None where it may.
        settle: called when the optimizers have taken new parameters.
    """

    models: Sequence[nn.Module]
    optimizers: Sequence[Any]
    schedulers: Sequence[Any]
    refusal: str | None = None
    settle: Callable[[], None] = lambda: None


class Recipe(NamedTuple):
    """How sites are patched; in the order in which `retrofit_` takes it."""

    variant: Variant
    cap: float = 20.0
    max_gain: float | None = 100.0
    calibrate: Calibrate = True


def patch_(
    live: Live, sites: Sequence[Site], ranks: Ranks, recipe: Recipe, known: Collection[str] = ()
) -> tuple[RetrofitReport, list[nn.Parameter]]:
    """Patch between two optimizer steps; returns the report and the parameters that are new in training.

    Copies of the sites in the model that are not ``known`` to run themselves are patched with them.

    Rank zero measures and decides, the others do what it did. If anything fails on any rank, every rank has the
    model and the optimizers that it had before.
    """
    if live.refusal is not None:
        return RetrofitReport(refused={site.name: live.refusal for site in sites}), []
    model, models = live.models[0], live.models
    reshard(model)
    before = [set(patched_sites(each)) for each in models]
    twins = _agreed_twins(model, [site.name for site in sites], known, ranks)
    with unchanged_on_error(live.optimizers, live.schedulers):
        try:
            fault, report, new = None, RetrofitReport(), []
            try:
                report = _decide(model, sites, ranks, recipe)
                _patch_twins(model, report, twins)
                for average in models[1:]:
                    retrofit_(average, plan=report.plan)
                if report.applied:
                    new = [p for _, p in adopt_(model, live.optimizers, live.schedulers)]
                    live.settle()
            except Broken:
                raise  # every rank knows
            except Exception as error:
                fault = error
            ranks.agree(fault)
        except BaseException:
            for each, had in zip(models, before, strict=True):
                for name in set(patched_sites(each)) - had:
                    uninstall(each, name)
            raise
    return report, new


def _agreed_twins(model: nn.Module, names: Sequence[str], known: Collection[str], ranks: Ranks) -> dict[str, list[str]]:
    """Where copies of the sites are, as rank zero sees it."""
    twins: dict[str, list[str]] = {}
    fault = None
    try:
        twins = find_twins(model, names, {*known, *names})
    except Exception as error:
        fault = error
    ranks.agree(fault)
    return ranks.first(twins if ranks.rank == 0 else None) or {}


def _patch_twins(model: nn.Module, report: RetrofitReport, twins: dict[str, list[str]]) -> None:
    """Enter the copies of what was patched into the report, patched likewise."""
    plan, origins, refused = twin_plans(model, report.plan, twins)
    retrofit_(model, plan=plan)
    norms = _norms(model)
    for name, site in origins.items():  # who averages copies the buffers too: the same bytes, whatever the name
        norms[name].set_plan(norms[site].get_plan())
    report.plan = RetrofitPlan((*report.plan.sites, *plan.sites))
    report.applied += origins
    report.refused |= refused
    report.notes |= {
        name: f"it did not run: patched as {site}, of which it is a copy" for name, site in origins.items()
    }


def _decide(pl_module: nn.Module, sites: Sequence[Site], ranks: Ranks, recipe: Recipe) -> RetrofitReport:
    report, told, sharded = RetrofitReport(), None, bool(shards(pl_module))
    if ranks.size == 1 and not sharded:
        return retrofit_(pl_module, sites, *recipe)
    if ranks.rank == 0:
        try:
            if sharded:
                report = _rehearse(pl_module, sites, ranks, recipe)
            else:
                report = retrofit_(pl_module, sites, *recipe)
            told = (report.refused, report.drift, report.notes, report.plan.to_dict())
        except Exception as fault:
            ranks.broadcast(None)
            raise fault
    elif sharded:
        _attend(pl_module, ranks)
    told = ranks.broadcast(told)
    if told is None:
        return RetrofitReport()  # rank zero failed, and is about to say so
    if ranks.rank or sharded:
        refused, drift, notes, plan = told
        report = retrofit_(pl_module, plan=RetrofitPlan.from_dict(plan))
        report.refused, report.drift, report.notes = refused, drift, notes
    return report


def _rehearse(pl_module: nn.Module, sites: Sequence[Site], ranks: Ranks, recipe: Recipe) -> RetrofitReport:
    """Rank zero patches and verifies a sharded model, and takes it all back: only the plan is wanted.

    The weights of one site at a time are whole, on all ranks, because no rank can gather them alone.
    """

    @contextlib.contextmanager
    def around(name: str) -> Iterator[None]:
        ranks.broadcast(name)
        with unsharded(pl_module, named_modules(pl_module)[name]):
            yield

    try:
        report = retrofit_each_(pl_module, sites, *recipe, around=around)
    finally:
        ranks.broadcast(None)
    for name in report.applied:
        uninstall(pl_module, name)
    return report


def _attend(pl_module: nn.Module, ranks: Ranks) -> None:
    """What the other ranks do meanwhile."""
    while (name := ranks.broadcast(None)) is not None:
        with unsharded(pl_module, named_modules(pl_module)[name]):
            pass


def clip_for(live: Live, sites: Sequence[Site], ranks: Ranks, tau: float) -> tuple[QKClip, RetrofitReport]:
    """QK-clip for the sites that every rank can clip. Nothing is shrunk yet."""
    refusal = live.refusal
    if refusal is None and shards(live.models[0]):
        refusal = "its weights are sharded, and QK-clip shrinks whole rows of them"
    clip, fault = QKClip([], tau), None
    try:
        clip = QKClip(sites if refusal is None else [], tau)
    except Exception as error:
        fault = error
    ranks.agree(fault)
    refused = clip.refused if refusal is None else {site.name: refusal for site in sites}
    if ranks.size > 1:
        everywhere = set.intersection(*map(set, ranks.gather_objects(clip.applied)))
        refused |= {name: "another rank could not clip it" for name in clip.applied if name not in everywhere}
        clip.keep(everywhere)
    return clip, RetrofitReport(list(clip.applied), refused, clip=True)


def take_back_(live: Live, report: RetrofitReport) -> None:
    """Uninstall what a retrofit installed, in the model, its averages, the optimizers and the schedulers."""
    if report.clip:
        return
    owned = norm_parameters(live.models[0])
    gains = [p for name, p in owned if site_of(name) in report.applied]
    for model in live.models:
        for name in report.applied:
            uninstall(model, name)
    remove_parameters(live.optimizers, gains, live.schedulers)


def ramps_of(model: nn.Module) -> dict[str, float]:
    """How far the patches that are on a ramp have come, by the names of their sites."""
    norms = _norms(model)
    return {name: float(norm.q.ramp) for name, norm in norms.items() if norm.q.ramp is not None}


def set_ramp(model: nn.Module, alpha: float | None, sites: Collection[str] | None = None) -> None:
    """How far the patches of these sites (None: of all) have come: 0 the old function, 1 or None the normed one."""
    for name, norm in _norms(model).items():
        if sites is None or name in sites:
            norm.set_ramp(alpha)


def _norms(model: nn.Module) -> dict[str, QKNorm]:
    children = {name: module._modules.get(CHILD) for name, module in named_modules(model).items()}
    return {name: norm for name, norm in children.items() if isinstance(norm, QKNorm)}
