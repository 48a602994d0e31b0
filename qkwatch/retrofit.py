"""Patch attention sites to QK-norm in place; take the patch away; make it again for a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from qkwatch.errors import QKWatchError
from qkwatch.mha import QKNormMultiheadAttention, patch_mha_, unpatch_mha_
from qkwatch.modules import clean_name, named_modules
from qkwatch.norms import QKNorm, Variant, get_variant
from qkwatch.plan import RetrofitPlan, SitePlan, TapPlan
from qkwatch.probe import Refusal
from qkwatch.sites import Site
from qkwatch.taps import add_part, parts_of, remove_part
from qkwatch.verify import calibrate_and_verify

CHILD = "qk_norm"


@dataclass
class RetrofitReport:
    """What `retrofit_` did.

    Attributes:
        applied: names of the patched sites.
        refused: site name -> why it was left as it was.
        drift: site name -> relative change of the site's output on the batch at hand,
            ||new - old|| / ||old||; empty where a plan was applied unseen.
        plan: what was done, as data.
    """

    applied: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    drift: dict[str, float] = field(default_factory=dict)
    plan: RetrofitPlan = field(default_factory=RetrofitPlan)


def retrofit_(
    model: nn.Module,
    sites: Sequence[Site] | None = None,
    variant: str | Variant = "l2",
    cap: float = 20.0,
    max_gain: float | None = 100.0,
    calibrate: bool = True,
    *,
    plan: RetrofitPlan | Mapping[str, Any] | None = None,
) -> RetrofitReport:
    """Patch attention sites to QK-norm, in place. Weights keep their names, values and identity.

    Each site is run again on the inputs that found it: the norms must make ||q|| and ||k|| what the variant
    promises where the softmax is, whatever the projections do (their outputs x 1000). A site for which that
    does not hold is left exactly as it was, and `RetrofitReport.refused` says why.

    Args:
        model: the model that holds the sites.
        sites: from `find_sites` (or `QKWatch`); those that are not retrofittable are refused with their reason.
        variant: a preset's name or a `Variant`.
        cap: the largest logit a calibrated gain may start at.
        max_gain: the ceiling a learned gain can never pass; None for none.
        calibrate: start the gains from the measured RMS of q and k, so that the function is kept as far as the
            cap allows; False starts them as the variant's system does.
        plan: apply this plan instead, without running anything.

    Raises:
        QKWatchError: unknown variant, bad cap, neither sites nor plan, or a plan for another model.
    """
    if plan is not None:
        return _apply(model, plan if isinstance(plan, RetrofitPlan) else RetrofitPlan.from_dict(plan))
    if sites is None:
        raise QKWatchError("retrofit_ needs sites=find_sites(model, batch) or plan=...")
    if not cap > 0:
        raise QKWatchError(f"cap must be positive, got {cap!r}")
    chosen, report, plans = get_variant(variant), RetrofitReport(), []
    names = {id(module): name for name, module in reversed(named_modules(model).items())}
    shared = _shared_taps(sites)
    for site in sites:
        try:
            _check(site, names, shared)
            draft = _draft(site, chosen, max_gain, names)
            install(model, draft)
            try:
                done = calibrate_and_verify(site, draft, cap=cap, calibrate=calibrate)
            except BaseException:
                uninstall(model, site.name)
                raise
        except (Refusal, QKWatchError) as refusal:
            report.refused[site.name] = str(refusal)
            continue
        site.module.get_submodule(CHILD).set_plan(done.plan.to_dict(gains=False))  # type: ignore[operator]
        plans.append(done.plan)
        report.applied.append(site.name)
        report.drift[site.name] = done.drift
    report.plan = RetrofitPlan(tuple(plans))
    return report


def undo_(model: nn.Module) -> list[str]:
    """Take every patch away: the original functions, classes and state_dict keys. Returns the sites' names."""
    patched = patched_sites(model)
    for name in patched:
        uninstall(model, name)
    return patched


def patched_sites(model: nn.Module) -> list[str]:
    """Names of the sites that carry a patch."""
    return [name for name, module in named_modules(model).items() if isinstance(module._modules.get(CHILD), QKNorm)]


def norm_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Name and parameter of every gain and bias that patches brought."""
    return [
        (f"{site}.{CHILD}.{name}".lstrip("."), parameter)
        for site in patched_sites(model)
        for name, parameter in _child(named_modules(model)[site]).named_parameters()
    ]


def restore_(model: nn.Module, checkpoint: str | os.PathLike[str] | Mapping[str, Any]) -> list[str]:
    """Give ``model`` the patches (and no others) that a checkpoint's weights were saved with.

    Afterwards ``load_state_dict(strict=True)`` fits. The state_dict's own keys say what is needed, so a
    weights-only file does too.

    Args:
        checkpoint: a state_dict, a Lightning checkpoint, or the path of either.

    Returns:
        The names of the sites that are patched now.

    Raises:
        QKWatchError: the checkpoint was saved from another model; the message names the first mismatch.
    """
    if not isinstance(checkpoint, Mapping):
        checkpoint = torch.load(checkpoint, map_location="cpu", weights_only=True)
    state = checkpoint.get("state_dict", checkpoint)
    match_(model, plan_of(state))
    return patched_sites(model)


def plan_of(state_dict: Mapping[str, Any]) -> RetrofitPlan:
    """The plan that a state_dict carries in its ``...qk_norm.plan`` entries."""
    suffix = f"{CHILD}.plan"
    plans = [
        SitePlan.from_dict(QKNorm.decode_plan(value))
        for key, value in state_dict.items()
        if key == suffix or key.endswith("." + suffix)
    ]
    return RetrofitPlan(tuple(plans))


def match_(model: nn.Module, plan: RetrofitPlan, present: Mapping[str, Any] | None = None) -> bool:
    """Patch and unpatch until the model carries exactly this plan; whether anything had to be done.

    Args:
        present: the state_dict about to be loaded; a patch is taken away only where it holds the site's weights.
    """
    wanted = {site.site: site for site in plan.sites}
    changed = False
    for name in patched_sites(model):
        child = _child(named_modules(model)[name])
        if name not in wanted and present is not None and not any(k.startswith(f"{name}.") for k in present):
            continue
        if name not in wanted or child.get_plan() != wanted[name].to_dict(gains=False):
            uninstall(model, name)
            changed = True
    missing = tuple(site for name, site in wanted.items() if name not in patched_sites(model))
    _apply(model, RetrofitPlan(missing))
    return changed or bool(missing)


# -- the surgery --------------------------------------------------------------------------------------------


def install(model: nn.Module, plan: SitePlan) -> QKNorm:
    """Put one site's norms in, with the gains of the plan (or the variant's own start)."""
    modules = named_modules(model)
    site = modules[plan.site]
    reference = _reference(site if plan.taps is None else modules[plan.taps[0].module])
    shadowed = site.__dict__.pop(CHILD, None)
    kind = QKNorm if shadowed is None else ShadowingQKNorm
    norm = kind(
        plan.variant,
        plan.q_heads,
        plan.k_heads,
        plan.head_dim,
        max_gain=plan.max_gain,
        q_factor=plan.q_factor,
        dtype=reference.dtype,
        device=reference.device,
    )
    norm.train(site.training)
    norm.requires_grad_(any(p.requires_grad for p in site.parameters()))
    if isinstance(norm, ShadowingQKNorm):
        norm.shadowed = shadowed
    if plan.gains:
        norm.set_gains({key: torch.tensor(value) for key, value in plan.gains.items()})
    norm.set_plan(plan.to_dict(gains=False))
    if plan.taps is None:
        patch_mha_(site, norm)  # type: ignore[arg-type]
        return norm
    site.add_module(CHILD, norm)
    for tap, head_norm in zip(plan.taps, (norm.q, norm.k), strict=True):
        add_part(modules[tap.module], tap.channels, head_norm)
    return norm


def uninstall(model: nn.Module, name: str) -> None:
    """Take one site's norms out."""
    site = named_modules(model)[name]
    norm = _child(site)
    if isinstance(site, QKNormMultiheadAttention):
        unpatch_mha_(site)
    else:
        for module in list(named_modules(model).values()):
            for head_norm in (norm.q, norm.k):
                remove_part(module, head_norm)
        del site._modules[CHILD]
    if isinstance(norm, ShadowingQKNorm):
        site.__dict__[CHILD] = norm.shadowed


class ShadowingQKNorm(QKNorm):
    """A `QKNorm` in a module that keeps a plain setting of the same name: it answers for it in ``if`` tests."""

    shadowed: Any = False

    def __bool__(self) -> bool:
        return bool(self.shadowed)


def _child(site: nn.Module) -> QKNorm:
    child = site._modules[CHILD]
    assert isinstance(child, QKNorm)
    return child


def _reference(module: nn.Module) -> torch.Tensor:
    """A floating parameter whose dtype and device new ones should have."""
    for parameter in module.parameters():
        if parameter.is_floating_point():
            return parameter
    return torch.empty(0)


def _shared_taps(sites: Sequence[Site]) -> dict[int, set[str]]:
    owners: dict[int, set[str]] = {}
    for site in sites:
        for tap in site.taps or ():
            owners.setdefault(id(tap.module), set()).add(site.name)
    return owners


def _check(site: Site, names: Mapping[int, str], shared: Mapping[int, set[str]]) -> None:
    if not site.retrofittable:
        raise Refusal(site.reason or "it has no taps")
    if id(site.module) not in names:
        raise Refusal("it is not a module of this model")
    if CHILD in site.module._modules or CHILD in site.module._parameters:
        raise Refusal(f"it has a {CHILD!r} of its own")
    if site.call is None:
        raise Refusal("the inputs of its forward are not known, so a patch could not be verified")
    for tap in site.taps or ():
        name = type(tap.module).__name__
        others = shared[id(tap.module)] - {site.name}
        if others:
            raise Refusal(f"it shares a projection ({name}) with {', '.join(sorted(others))}")
        if parts_of(tap.module):
            raise Refusal(f"its projection ({name}) is normed for another site already")
        if id(tap.module) not in names:
            raise Refusal(f"its projection ({name}) is not a module of this model")
        if "forward" in tap.module.__dict__:
            raise Refusal(f"the forward of its projection ({name}) is overridden on the instance")
        if isinstance(tap.module, torch.jit.ScriptModule):
            raise Refusal(f"its projection ({name}) is a script module")


def _draft(site: Site, variant: Variant, max_gain: float | None, names: Mapping[int, str]) -> SitePlan:
    taps = None
    if site.taps is not None:
        q, k = (TapPlan.of(names[id(tap.module)], tap.module, tap.channels) for tap in site.taps)
        taps = (q, k)
    return SitePlan(site.name, site.q_heads, site.k_heads, site.head_dim, variant, max_gain, taps=taps)


def _apply(model: nn.Module, plan: RetrofitPlan) -> RetrofitReport:
    """Apply a plan unseen; all or nothing."""
    modules = named_modules(model)
    for site in plan.sites:
        problem = _mismatch(site, modules)
        if problem is not None:
            raise QKWatchError(f"the plan does not fit this model: {problem}")
    for site in plan.sites:
        install(model, site)
    return RetrofitReport(applied=[clean_name(site.site) for site in plan.sites], plan=plan)


def _mismatch(plan: SitePlan, modules: Mapping[str, nn.Module]) -> str | None:
    site = modules.get(plan.site)
    if site is None:
        return f"it has no module {plan.site!r}"
    if CHILD in site._modules:
        return f"{plan.site!r} is patched already"
    if plan.taps is not None:
        return next((p for tap in plan.taps if (p := tap.mismatch(modules))), None)
    if type(site) is not nn.MultiheadAttention:
        return f"{plan.site!r} is a {type(site).__name__}, not a MultiheadAttention"
    if (site.num_heads, site.head_dim) != (plan.q_heads, plan.head_dim):
        return f"{plan.site!r} has {site.num_heads} heads of {site.head_dim}, not {plan.q_heads} of {plan.head_dim}"
    return None
