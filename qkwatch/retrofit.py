"""Patch attention sites to QK-norm in place; take the patch away; make it again for a checkpoint."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from qkwatch.clip import QKClip
from qkwatch.errors import QKWatchError, unknown
from qkwatch.modules import all_names, clean_name, named_modules
from qkwatch.norms import CHILD, QKNorm, site_of
from qkwatch.optim import remove_parameters
from qkwatch.options import check_cap
from qkwatch.plan import CorePlan, RetrofitPlan, SitePlan, TapPlan, kind_of
from qkwatch.probe import Refusal
from qkwatch.refusals import check_plan, check_site, shared_taps
from qkwatch.schedulers import several
from qkwatch.sharding import is_shard, is_spread, shard_norms
from qkwatch.sites import Site
from qkwatch.stored import stored_keys, weights_of
from qkwatch.surgery import (
    check_all_removable,
    child,
    install,
    norm_parameters,
    patched_sites,
    undone_on_error,
    uninstall,
)
from qkwatch.variants import CALIBRATE, CLIP, Calibrate, Variant, get_variant
from qkwatch.verify import Verified, calibrate_and_verify, output_of, relative_change


@dataclass
class RetrofitReport:
    """What `retrofit_` did.

    Attributes:
        applied: names of the patched sites.
        refused: site name -> why it was left as it was.
        drift: site name -> relative change of the site's output on the batch at hand,
            ||new - old|| / ||old||; empty where a plan was applied unseen.
        notes: site name -> what in its logits stays unbounded: learned biases beside its queries or keys, and
            what these are multiplied with besides. A site without a note has logits bounded by its gains.
        plan: what was done, as data.
        clip: it was QK-clip: `applied` are the sites whose weights it can shrink, and there is no plan.
    """

    applied: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    drift: dict[str, float] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    plan: RetrofitPlan = field(default_factory=RetrofitPlan)
    clip: bool = False

    def enter(self, name: str, done: Verified) -> None:
        """One more patched site."""
        self.applied.append(name)
        self.drift[name] = done.drift
        if done.note is not None:
            self.notes[name] = done.note


def retrofit_(
    model: nn.Module,
    sites: Sequence[Site] | None = None,
    variant: str | Variant = "l2",
    cap: float = 20.0,
    max_gain: float | None = 100.0,
    calibrate: Calibrate = True,
    *,
    plan: RetrofitPlan | Mapping[str, Any] | None = None,
) -> RetrofitReport:
    """Patch attention sites to QK-norm, in place. Weights keep their names, values and identity.

    Each site is run again on the inputs that found it: the norms must make ||q|| and ||k|| what the variant
    promises where the softmax is, whatever the projections do (their outputs x 1000). A site for which that
    does not hold is left exactly as it was, and `RetrofitReport.refused` says why. Learned biases behind a projection
    stay as they are; `RetrofitReport.notes` names what the logits are not bounded against. Adapters (LoRA) belong on
    the model before the patch: what one adds to a patched projection comes behind the norm, unbounded.

    Where no projection can be normed (latent and joint attention, raw weights), norms sit where
    `scaled_dot_product_attention` takes queries and keys, behind any rotary embedding: gains per channel are refused
    there, and a forward that calls another implementation later on raises QKWatchError.

    Args:
        model: the model that holds the sites.
        sites: from `find_sites` (or `QKWatch`); those that are not retrofittable are refused with their reason.
        variant: a preset's name or a `Variant`; or "qkclip", which adds nothing to the model and cannot be undone:
            it shrinks, once, the projection weights of each head whose reading is above the cap (`QKClip`).
        cap: the largest logit a calibrated gain may start at.
        max_gain: the ceiling a learned gain can never pass; None for none.
        calibrate: start the gains from the measured RMS of q and k, so that the function is kept as far as the
            cap allows; "raised": likewise, but at least as the variant's system starts them; False: as it starts them;
            "needed": likewise, but for sites where that could pass the cap or where queries meet more than keys
            (relative positions): these are measured.
        plan: apply this plan instead, without running anything. On a model sharded by `fully_shard` the gains are
            sharded too (call it on every rank).

    Raises:
        QKWatchError: unknown variant, bad cap, neither sites nor plan, or a plan for another model.
    """
    if plan is not None:
        return _apply(model, plan if isinstance(plan, RetrofitPlan) else RetrofitPlan.from_dict(plan))
    if sites is None:
        raise QKWatchError("retrofit_ needs sites=find_sites(model, batch) or plan=...")
    check_cap(cap, max_gain, "retrofit_")
    if not all(isinstance(site, Site) for site in sites):
        raise QKWatchError("the sites of retrofit_ come from find_sites(model, batch)")
    if calibrate not in CALIBRATE:
        raise unknown("calibrate", calibrate, CALIBRATE)
    if variant == CLIP:
        return _clip(model, sites, cap)
    return retrofit_each_(model, sites, get_variant(variant), cap, max_gain, calibrate)


def retrofit_each_(
    model: nn.Module,
    sites: Sequence[Site],
    variant: Variant,
    cap: float,
    max_gain: float | None,
    calibrate: Calibrate = True,
    around: Callable[[str], AbstractContextManager[Any]] = contextlib.nullcontext,
) -> RetrofitReport:
    """`retrofit_` from sites, each patched and verified inside ``around(its name)``."""
    report, plans = RetrofitReport(), []
    names = {id(module): name for name, module in reversed(named_modules(model).items())}
    shared = shared_taps(sites)
    with undone_on_error(model, report.applied):
        for site in sites:
            name = names.get(id(site.module), site.name)  # the sites may have been found in a part of this model
            try:
                check_site(site, names, shared, variant)
                with around(name):
                    done = _patch(model, site, _draft(site, variant, max_gain, names), cap, calibrate)
            except (Refusal, QKWatchError) as refusal:
                report.refused[name] = str(refusal)
                continue
            plans.append(done.plan)
            report.enter(name, done)
    report.plan = RetrofitPlan(tuple(plans))
    return report


def _patch(model: nn.Module, site: Site, draft: SitePlan, cap: float, calibrate: Calibrate) -> Verified:
    """One site, patched and verified; as it was where that fails."""
    if is_spread(site.module):
        raise Refusal("its weights are sharded: patch before fully_shard, or apply a plan; QKWatch does it in mid-run")
    norm = install(model, draft)
    with undone_on_error(model, [draft.site]):
        try:
            done = calibrate_and_verify(site, draft, cap=cap, calibrate=calibrate)
        except (Refusal, QKWatchError):
            raise
        except Exception as error:
            raise Refusal(f"patched, its forward fails ({type(error).__name__}: {error})") from error
        norm.set_plan(done.plan.to_dict(gains=False))
    return done


def _clip(model: nn.Module, sites: Sequence[Site], cap: float) -> RetrofitReport:
    """Shrink the weights of the heads whose readings are above the cap."""
    names = {id(module): name for name, module in reversed(named_modules(model).items())}
    clip = QKClip(sites, cap)
    able = [site for site in sites if site.name in clip.applied]
    before = [output_of(site) for site in able]
    clip.clip_([site.reading for site in able if site.reading is not None])
    drifts = [relative_change(old, output_of(site)) for site, old in zip(able, before, strict=True)]
    named = [names.get(id(site.module), site.name) for site in able]
    return RetrofitReport(named, clip.refused, dict(zip(named, drifts, strict=True)), clip=True)


def undo_(model: nn.Module, optimizers: Any = (), schedulers: Any = ()) -> list[str]:
    """Take every patch away: the original functions, classes and state_dict keys. Returns the sites' names.

    Args:
        model: the patched model.
        optimizers: one or several that train its gains (`adopt_`): they let go of them, and of their groups.
        schedulers: their learning-rate schedulers, one or several.
    """
    check_all_removable(model)
    patched, gains = patched_sites(model), [parameter for _, parameter in norm_parameters(model)]
    for name in patched:
        uninstall(model, name)
    remove_parameters(several(optimizers), gains, several(schedulers))
    return patched


def restore_(model: nn.Module, checkpoint: str | os.PathLike[str] | Mapping[str, Any]) -> list[str]:
    """Give ``model`` the patches (and no others) that a checkpoint's weights were saved with, and their gains.

    Afterwards ``load_state_dict(strict=True)`` fits; all other weights are left to it. The state_dict's own keys say
    what is needed, so a weights-only file does too.

    Args:
        checkpoint: a state_dict, a Lightning checkpoint or another mapping that holds one state_dict, or the path of
            any of these; also a safetensors file, or the folder of a sharded checkpoint or of one that
            `transformers` saved.

    Returns:
        The names of the sites that are patched now.

    Raises:
        QKWatchError: the checkpoint was saved from another model (the message names the first mismatch), holds no
            weights or several sets of them, or cannot be read with ``weights_only=True``.
    """
    state = weights_of(checkpoint) if isinstance(checkpoint, Mapping) else stored_keys(checkpoint)
    match_(model, plan_of(state))
    stored = {clean_name(key): value for key, value in state.items()}
    with torch.no_grad():
        for name, parameter in norm_parameters(model):
            value = stored.get(name)
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape and not is_shard(parameter):
                parameter.copy_(value)  # the loader does it for shards
    return patched_sites(model)


def plan_of(state_dict: Mapping[str, Any]) -> RetrofitPlan:
    """The plan that a state_dict carries in its ``...qk_norm.plan`` entries."""
    plans = [
        # by the key, not by the name at the time: a prefix may have been put on or taken off since
        SitePlan.from_dict(QKNorm.decode_plan(value)).moved(clean_name(site_of(key)))
        for key, value in state_dict.items()
        if f".{key}".endswith(f".{CHILD}.plan")
    ]
    return RetrofitPlan(tuple(plans))


def match_(model: nn.Module, plan: RetrofitPlan, present: Mapping[str, Any] | None = None) -> bool:
    """Patch and unpatch until the model carries exactly this plan; whether anything had to be done.

    Args:
        present: the state_dict about to be loaded; a patch is taken away only where it holds the site's weights.
    """
    modules = named_modules(model)
    wanted = {site.site: site for site in plan.sites if site.site in modules}
    if len(wanted) < len(plan.sites):  # state_dicts have all names of a module that has several
        names = all_names(model)
        for site in plan.sites:
            name = names.get(site.site, site.site)
            wanted.setdefault(name, site.moved(name))
    installed = {name: SitePlan.from_dict(child(modules[name]).get_plan()) for name in patched_sites(model)}
    stale = [
        name
        for name, own in installed.items()
        if (name in wanted and own.moved(name).to_dict(gains=False) != wanted[name].to_dict(gains=False))
        or (name not in wanted and (present is None or any(clean_name(k).startswith(f"{name}.") for k in present)))
    ]
    missing = tuple(site for name, site in wanted.items() if name not in installed or name in stale)
    check_plan(RetrofitPlan(missing), modules, replaced=stale)
    for name in stale:
        uninstall(model, name)
    _apply(model, RetrofitPlan(missing))
    return bool(stale or missing)


def _draft(site: Site, variant: Variant, max_gain: float | None, names: Mapping[int, str]) -> SitePlan:
    taps = None
    if site.taps is not None:
        q, k = (TapPlan.of(names[id(tap.module)], tap.module, tap.channels) for tap in site.taps)
        taps = (q, k)
    core = None if site.core_tap is None else CorePlan(kind_of(site.module), site.core_tap.layout.axis)
    shape = (site.q_heads, site.k_heads, site.head_dim)
    return SitePlan(names[id(site.module)], *shape, variant, max_gain, taps=taps, core=core)


def _apply(model: nn.Module, plan: RetrofitPlan) -> RetrofitReport:
    """Apply a plan unseen; all or nothing."""
    check_plan(plan, named_modules(model))
    report = RetrofitReport(plan=plan)
    with undone_on_error(model, report.applied):
        for site in plan.sites:
            install(model, site)
            report.applied.append(site.site)
        shard_norms(model)
    return report
