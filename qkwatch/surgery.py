"""Put the norms of one planned site into a model, and take them out again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from qkwatch.coretaps import add_core_norm, has_core_norm, remove_core_norm
from qkwatch.errors import QKWatchError
from qkwatch.mha import QKNormMultiheadAttention, patch_mha_, unpatch_mha_
from qkwatch.modules import named_modules
from qkwatch.norms import CHILD, QKNorm
from qkwatch.plan import SitePlan
from qkwatch.reclass import as_before_on_error, check_unchanged
from qkwatch.taps import add_part, remove_part


def install(model: nn.Module, plan: SitePlan) -> QKNorm:
    """Put one site's norms in, with the gains of the plan (or the variant's own start); all or nothing.

    Raises:
        QKWatchError: with the site's name, whatever went wrong.
    """
    modules = named_modules(model)
    taps = [(modules[tap.module], tap.channels) for tap in plan.taps or ()]
    site = modules[plan.site]
    try:
        with as_before_on_error([site, *(module for module, _ in taps)]):
            norm = _norm_of(site, plan, taps[0][0] if taps else site)
            if plan.core is not None:
                add_core_norm(site, plan.core.axis)
            elif plan.taps is None:
                patch_mha_(site, norm)  # type: ignore[arg-type]
                return norm
            site.add_module(CHILD, norm)
            for (module, channels), head_norm in zip(taps, (norm.q, norm.k), strict=False):
                add_part(module, channels, head_norm)
    except Exception as error:
        what = str(error) if isinstance(error, QKWatchError) else f"{type(error).__name__}: {error}"
        raise QKWatchError(f"{plan.site!r} could not be patched: {what}") from error
    return norm


def _norm_of(site: nn.Module, plan: SitePlan, like: nn.Module) -> QKNorm:
    """The norms of a plan, with dtype and device of the module ``like``."""
    reference = _reference(like)
    kind = ShadowingQKNorm if CHILD in site.__dict__ else QKNorm
    with torch.inference_mode(False):  # or the gains could never be trained
        norm = kind(
            plan.variant,
            plan.q_heads,
            plan.k_heads,
            plan.head_dim,
            max_gain=plan.max_gain,
            q_factor=plan.q_factor,
            k_factor=plan.k_factor,
            dtype=reference.dtype,
            device=reference.device,
        )
    norm.train(site.training)
    norm.requires_grad_(any(p.requires_grad for p in site.parameters()))
    if plan.gains:
        norm.set_gains({key: torch.tensor(value) for key, value in plan.gains.items()})
    norm.set_plan(plan.to_dict(gains=False))
    if isinstance(norm, ShadowingQKNorm):
        norm.shadowed = site.__dict__.pop(CHILD)
    return norm


def uninstall(model: nn.Module, name: str) -> None:
    """Take one site's norms out."""
    check_all_removable(model)
    site = named_modules(model)[name]
    norm = child(site)
    if isinstance(site, QKNormMultiheadAttention):
        unpatch_mha_(site)
    elif has_core_norm(site):
        remove_core_norm(site)
        del site._modules[CHILD]
    else:
        for module in list(named_modules(model).values()):
            for head_norm in (norm.q, norm.k):
                remove_part(module, head_norm)
        del site._modules[CHILD]
    if isinstance(norm, ShadowingQKNorm):
        site.__dict__[CHILD] = norm.shadowed


def check_all_removable(model: nn.Module) -> None:
    """Raise `QKWatchError`, before anything is touched, where a patch could not be taken out whole."""
    for name, module in named_modules(model).items():
        check_unchanged(module, name)


class ShadowingQKNorm(QKNorm):
    """A `QKNorm` in a module that keeps a plain setting of the same name: it answers for it in ``if`` tests."""

    shadowed: Any = False

    def __bool__(self) -> bool:
        return bool(self.shadowed)


def child(site: nn.Module) -> QKNorm:
    """The norms of a patched site."""
    norm = site._modules[CHILD]
    assert isinstance(norm, QKNorm)
    return norm


def _reference(module: nn.Module) -> torch.Tensor:
    """A floating parameter whose dtype and device new ones should have."""
    for parameter in module.parameters():
        if parameter.is_floating_point():
            return parameter
    return torch.empty(0)


def patched_sites(model: nn.Module) -> list[str]:
    """Names of the sites that carry a patch."""
    return [name for name, module in named_modules(model).items() if isinstance(module._modules.get(CHILD), QKNorm)]


def norm_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Name and parameter of every gain and bias that patches brought."""
    modules = named_modules(model)
    return [
        (f"{site}.{CHILD}.{name}".lstrip("."), parameter)
        for site in patched_sites(model)
        for name, parameter in child(modules[site]).named_parameters()
    ]


@contextlib.contextmanager
def undone_on_error(model: nn.Module, installed: Sequence[str]) -> Iterator[None]:
    """Whatever ends the block early, the patches of these sites go."""
    try:
        yield
    except BaseException:
        for name in installed:
            uninstall(model, name)
        raise
