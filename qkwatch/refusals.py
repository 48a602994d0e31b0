"""Why a site is left as it was: what is known before anything is changed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import nn

from qkwatch.errors import QKWatchError
from qkwatch.mha import QKNormMultiheadAttention
from qkwatch.norms import CHILD, QKNorm
from qkwatch.plan import RetrofitPlan, SitePlan
from qkwatch.probe import Refusal
from qkwatch.sites import Site
from qkwatch.taps import parts_of
from qkwatch.variants import Variant


def shared_taps(sites: Sequence[Site]) -> dict[int, set[str]]:
    """Which sites each projection belongs to, by its identity."""
    owners: dict[int, set[str]] = {}
    for site in sites:
        for tap in site.taps or ():
            owners.setdefault(id(tap.module), set()).add(site.name)
    return owners


def check_site(site: Site, names: Mapping[int, str], shared: Mapping[int, set[str]], variant: Variant) -> None:
    """Raises `Refusal`, in words for the report, where the site cannot be patched."""
    if not site.retrofittable:
        raise Refusal(site.reason or "it has no taps")
    if id(site.module) not in names:
        raise Refusal("it is not a module of this model")
    if isinstance(site.module._modules.get(CHILD), QKNorm):
        raise Refusal("it is patched already (qkwatch.undo_ takes the patch away)")
    if CHILD in site.module._modules or CHILD in site.module._parameters:
        raise Refusal(f"it has a module or parameter {CHILD!r} of its own, the name that the norms would take")
    if hasattr(type(site.module), CHILD):
        raise Refusal(f"its class has a {CHILD!r} of its own")
    if site.call is None:
        raise Refusal("the inputs of its forward are not known, so a patch could not be verified")
    _check_at_core(site, variant)
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


def _check_at_core(site: Site, variant: Variant) -> None:
    """What holds for sites without projections to norm, whose norms sit behind rotary embeddings."""
    if site.core_tap is None:
        return
    if variant.axis != "head" or variant.gain not in ("none", "scalar", "per_head"):
        raise Refusal(
            "its queries and keys can be normed only where the softmax takes them, behind any rotary embedding: "
            f"{variant.name!r} has {'one norm over all heads' if variant.axis != 'head' else 'a gain per channel'}, "
            "which means another thing there; 'l2', 'henry', 'swinv2' and 'llama4' fit"
        )
    name = type(site.module).__name__
    if "forward" in site.module.__dict__:
        raise Refusal(f"the forward of the {name} is overridden on the instance")
    if isinstance(site.module, torch.jit.ScriptModule):
        raise Refusal("it is a script module")
    if parts_of(site.module):
        raise Refusal(f"its output ({name}) is normed for another site already")


def check_plan(plan: RetrofitPlan, modules: Mapping[str, nn.Module], replaced: Collection[str] = ()) -> None:
    """Raises `QKWatchError` with the first thing in which the model is not the plan's."""
    for site in plan.sites:
        problem = _mismatch(site, modules, site.site in replaced)
        if problem is not None:
            raise QKWatchError(f"the plan does not fit this model: {problem}")


def _mismatch(plan: SitePlan, modules: Mapping[str, nn.Module], replaced: bool) -> str | None:
    site = modules.get(plan.site)
    if site is None:
        return f"it has no module {plan.site!r}"
    if CHILD in site._modules and not replaced:
        return f"{plan.site!r} is patched already"
    if plan.core is not None:
        return plan.core.mismatch(plan.site, site)
    if plan.taps is not None:
        return next((p for tap in plan.taps if (p := tap.mismatch(modules))), None)
    if type(site) not in (nn.MultiheadAttention, QKNormMultiheadAttention):
        return f"{plan.site!r} is a {type(site).__name__}, not a MultiheadAttention"
    heads, head_dim = int(site.num_heads), int(site.head_dim)  # type: ignore[arg-type]
    if (heads, head_dim) != (plan.q_heads, plan.head_dim):
        return f"{plan.site!r} has {heads} heads of {head_dim}, not {plan.q_heads} of {plan.head_dim}"
    return None
