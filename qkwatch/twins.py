"""Copies of a part of the model inside the model: its average, its frozen target.

Whoever keeps one pairs its parameters with the part's, so it has to be patched as the part is, though it may never
run in training. It is known by its class, by the names and shapes of what it holds, and by its weights: those of a
sister layer, of the same shape, are others.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from qkwatch.errors import QKWatchError
from qkwatch.modules import named_modules
from qkwatch.norms import CHILD
from qkwatch.plan import RetrofitPlan, SitePlan
from qkwatch.reclass import own_class
from qkwatch.refusals import check_plan

ALIKE = 0.5  # cosine between the weights of a part and a copy of it, at least; between sister layers it is near 0


def find_twins(model: nn.Module, sites: Collection[str], known: Collection[str]) -> dict[str, list[str]]:
    """Where copies of these sites are: site -> names. What holds a known site has run, and is no copy."""
    modules = named_modules(model)
    parts = {above for site in sites for above in _above(site)}
    kinds = {name: own_class(modules[name]) for name in parts if name in modules}
    found: dict[str, list[str]] = {}
    taken: list[str] = []
    for name, module in modules.items():
        if not name or any(_within(name, other) for other in taken) or any(_touch(name, site) for site in known):
            continue
        likely = [part for part, kind in kinds.items() if kind is own_class(module) and not _sisters(part, name)]
        own = isinstance(modules.get(name.rpartition(".")[0]), AveragedModel)  # however far its average has drifted
        original = _original(module, {part: modules[part] for part in likely if not _touch(part, name)}, own)
        if original is not None:
            taken.append(name)
            for site in sites:
                if _within(site, original):
                    found.setdefault(site, []).append(name + site[len(original) :])
    return found


def twin_plans(
    model: nn.Module, plan: RetrofitPlan, twins: Mapping[str, list[str]]
) -> tuple[RetrofitPlan, dict[str, str], dict[str, str]]:
    """The plan for the copies of its sites; of each what it is a copy of; and why others have to be left."""
    modules = named_modules(model)
    plans: list[SitePlan] = []
    origins: dict[str, str] = {}
    refused: dict[str, str] = {}
    for site in plan.sites:
        for name in twins.get(site.site, ()):
            if CHILD in modules[name]._modules:
                continue
            moved = site.moved(name)
            try:
                if any(tap.module == own.module for tap, own in zip(moved.taps or (), site.taps or (), strict=True)):
                    raise QKWatchError("its projections are outside of what was copied")
                check_plan(RetrofitPlan((moved,)), modules)
            except QKWatchError as error:
                refused[name] = f"it is a copy of {site.site}, but {error}"
                continue
            plans.append(moved)
            origins[name] = site.site
    return RetrofitPlan(tuple(plans)), origins, refused


def _original(module: nn.Module, parts: Mapping[str, nn.Module], surely: bool) -> str | None:
    """Which of the parts a module is a copy of."""
    shapes = _shapes(module) if parts else {}
    fits = {name: _alike(part, module) for name, part in parts.items() if _shapes(part) == shapes}
    best = max(fits, key=fits.__getitem__, default=None)
    return best if best is not None and (surely or fits[best] >= ALIKE) else None


def _shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    held = [*module.named_parameters(), *module.named_buffers()]
    return {name: tuple(value.shape) for name, value in held if not name.endswith(f"{CHILD}.plan")}


@torch.no_grad()
def _alike(part: nn.Module, copy: nn.Module) -> float:
    """Cosine between the matrices of both, as far as they are here."""
    dots = [0.0, 0.0, 0.0]
    for a, b in zip(part.parameters(), copy.parameters(), strict=True):
        if a.ndim >= 2:
            x, y = _local(a), _local(b)
            dots = [dot + float((u * v).sum()) for dot, (u, v) in zip(dots, ((x, y), (x, x), (y, y)), strict=True)]
    length = (dots[1] * dots[2]) ** 0.5
    return dots[0] / length if length > 0 else 0.0


def _local(parameter: Tensor) -> Tensor:
    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return local.float()


def averaged(value: object) -> object:
    """What an `AveragedModel` holds; anything else as it is."""
    return value.module if isinstance(value, AveragedModel) else value


def _above(name: str) -> list[str]:
    """A module's own name and those above it, less the model's own."""
    parts = name.split(".") if name else []
    return [".".join(parts[:depth]) for depth in range(1, len(parts) + 1)]


def _within(name: str, above: str) -> bool:
    return f"{name}.".startswith(f"{above}.")


def _touch(a: str, b: str) -> bool:
    return _within(a, b) or _within(b, a)


def _sisters(a: str, b: str) -> bool:
    """In items of one list: layers, though some build all of them as copies of the first."""
    pairs = zip(a.split("."), b.split("."), strict=False)
    first = next(((x, y) for x, y in pairs if x != y), ("", ""))
    return first[0].isdigit() and first[1].isdigit()
