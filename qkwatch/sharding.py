"""Models sharded by FSDP2 (`fully_shard`): whole weights around one site, shards of what a patch brought.

Everything here does nothing to a model that is not sharded, and does not even import FSDP for it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any, TypeGuard

from torch import nn

from qkwatch.errors import QKWatchError
from qkwatch.norms import HeadNorm, site_of

_HOME = "torch.distributed.fsdp"  # where FSDP's hooks are written


def is_sharded(module: nn.Module) -> TypeGuard[Any]:
    """Whether `fully_shard` was called on this very module."""
    fsdp = sys.modules.get(_HOME)
    kind = getattr(fsdp, "FSDPModule", None)
    return kind is not None and isinstance(module, kind)


def is_spread(module: nn.Module) -> bool:
    """Whether this rank holds only parts of the module's weights at the moment."""
    return _mesh(module) is not None


def shards(model: nn.Module) -> list[Any]:
    """The modules of ``model`` that `fully_shard` was called on."""
    return [module for module in model.modules() if is_sharded(module)]


def reshard(model: nn.Module) -> None:
    """Every parameter in its sharded form, which is the one that optimizers hold. No communication."""
    for part in shards(model):
        part.reshard()


@contextlib.contextmanager
def unsharded(model: nn.Module, module: nn.Module) -> Iterator[None]:
    """Inside, ``module`` has its weights whole and may be run again, by any rank as often as it likes.

    Entering is collective: all ranks enter for the same modules in the same order. What happens inside is not.
    """
    inside = shards(module)
    around = [part for part in shards(model) if part not in inside and any(m is module for m in part.modules())]
    for part in (*around, *inside):
        part.unshard()
    try:
        with contextlib.ExitStack() as stack:
            for part in inside:
                stack.enter_context(_without_hooks(part))
            yield
    finally:
        for part in (*around, *inside):
            part.reshard()


@contextlib.contextmanager
def _without_hooks(module: nn.Module) -> Iterator[None]:
    """FSDP gathers and frees weights in hooks around a forward; the user's own hooks stay."""
    tables: list[Any] = [module._forward_pre_hooks, module._forward_hooks]
    saved = [dict(table) for table in tables]
    for table in tables:
        for key, hook in list(table.items()):
            if (getattr(hook, "__module__", None) or "").startswith(_HOME):
                del table[key]
    try:
        yield
    finally:
        for table, hooks in zip(tables, saved, strict=True):
            table.clear()
            table.update(hooks)


def shard_norms(model: nn.Module) -> None:
    """Shard the gains that are not sharded yet as their site's own weights are. Nothing is communicated.

    The gains of all ranks must be equal. From then on FSDP averages their gradients, optimizers, clipping and
    checkpoints meet sharded parameters everywhere, and taking a patch away takes its shards with it.
    """
    if not shards(model):
        return
    from torch.distributed.fsdp import fully_shard

    reshard(model)
    for name, norm in list(model.named_modules()):
        plain = isinstance(norm, HeadNorm) and any(not hasattr(p, "device_mesh") for p in norm.parameters())
        if plain and not is_sharded(norm):
            mesh = _mesh(model.get_submodule(site_of(name))) or _mesh(model)
            if mesh is None:
                raise QKWatchError(f"{name}: no parameter of the model is sharded over a mesh")
            # on its own, not with the block around it: an enclosing fully_shard has settled its parameters
            fully_shard(norm, mesh=mesh, reshard_after_forward=True)


def is_shard(parameter: nn.Parameter) -> bool:
    """Whether this rank holds a part of it only."""
    return hasattr(parameter, "device_mesh")


def _mesh(module: nn.Module) -> Any:
    return next((getattr(p, "device_mesh", None) for p in module.parameters() if is_shard(p)), None)
