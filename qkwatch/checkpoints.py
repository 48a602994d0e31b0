"""Checkpoints of a model that was patched in mid-run: whoever loads one gets the structure that was saved.

The state_dict's own keys say which sites are patched and how (`QKNorm` keeps its plan in it), so weights-only
files do too. What only the optimizer knows, which group holds which parameter, is saved by name under ``KEY``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import nn

from qkwatch.midrun import set_ramp
from qkwatch.optim import group_names, regroup, remove_parameters
from qkwatch.retrofit import match_, plan_of
from qkwatch.schedulers import unwrap
from qkwatch.sharding import reshard
from qkwatch.stored import stored_keys
from qkwatch.surgery import norm_parameters, patched_sites

KEY = "qkwatch"  # of our entry in a checkpoint
SHARDED_EXTRAS = "meta.pt"  # where Lightning keeps a sharded checkpoint's other entries
M = TypeVar("M")


def follow(model: nn.Module) -> Any:
    """From now on `model` patches or unpatches itself to fit the weights it is about to load; returns the handle."""
    return model.register_load_state_dict_pre_hook(_fit_to)


def end_ramps(model: nn.Module) -> Any:
    """From now on weights that are loaded end any ramp of `model`: they do not hold how far it had come."""
    return model.register_load_state_dict_pre_hook(_end_ramps)


def _end_ramps(module: nn.Module, *args: Any) -> None:
    set_ramp(module, None)


def _fit_to(module: nn.Module, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
    """A function of the module's, not a method of ours: weight averaging deep-copies it with the module."""
    own = {key[len(prefix) :]: value for key, value in state_dict.items() if key.startswith(prefix)}
    match_(module, plan_of(own), present=own)


@dataclass
class BeforeLoad:
    """While it lives, ``prepare(path, **options)`` runs before the strategy loads a checkpoint.

    For strategies that load model and optimizers themselves, after both were set up: the model's own load hook
    would come too late there, and no hook of a callback is told the path.
    """

    strategy: Any
    prepare: Callable[..., None]

    def __post_init__(self) -> None:
        load = self.strategy.load_checkpoint

        def load_checkpoint(checkpoint_path: Any, *args: Any, **options: Any) -> Any:
            self.prepare(self.strategy.broadcast(checkpoint_path), *args, **options)
            return load(checkpoint_path, *args, **options)

        self.strategy.load_checkpoint = load_checkpoint

    def remove(self) -> None:
        """The strategy's own method again."""
        self.strategy.__dict__.pop("load_checkpoint", None)


def fit_sharded(
    model: nn.Module, optimizers: Sequence[Any], schedulers: Sequence[Any], path: Any, weights_only: bool | None = None
) -> None:
    """Give a model sharded by FSDP2, and its optimizers, the structure of a checkpoint (a file or a folder of shards)
    that is about to be loaded."""
    path = Path(path)
    if path.is_dir():
        state: Mapping[str, Any] = stored_keys(path)
        checkpoint = torch.load(path / SHARDED_EXTRAS, map_location="cpu", weights_only=weights_only)
    else:
        checkpoint = torch.load(path, mmap=True, map_location="cpu", weights_only=weights_only)
        state = checkpoint["state_dict"]
    reshard(model)
    before = [p for _, p in norm_parameters(model)]
    match_(model, plan_of(state), present=state)
    set_ramp(model, None)
    kept = {id(p) for _, p in norm_parameters(model)}
    remove_parameters(optimizers, [p for p in before if id(p) not in kept], schedulers)
    restore_groups(saved_groups(checkpoint), model, optimizers, schedulers)
    for optimizer in map(unwrap, optimizers):
        optimizer.zero_grad()  # its state is about to be loaded, and torch wants it either fresh or complete
        optimizer.state.clear()


def save_groups(checkpoint: dict[str, Any], model: nn.Module, optimizers: Sequence[Any]) -> None:
    """Note which parameters each optimizer group holds, where they are not simply the model's own order."""
    if patched_sites(model):
        checkpoint[KEY] = {"groups": [group_names(optimizer, model) for optimizer in optimizers]}


def saved_groups(checkpoint: Mapping[str, Any]) -> Any:
    """What `save_groups` noted; None for a checkpoint of an unpatched model or of a run without us."""
    return checkpoint.get(KEY, {}).get("groups")


def restore_groups(groups: Any, model: nn.Module, optimizers: Sequence[Any], schedulers: Sequence[Any]) -> None:
    """Give fresh optimizers the saved groups, before their state is loaded by index."""
    if groups is not None and optimizers:
        regroup(optimizers, model, groups, schedulers)


def load_from_checkpoint(module_class: type[M], path: Any, **kwargs: Any) -> M:
    """``module_class.load_from_checkpoint(path, **kwargs)`` for checkpoints that may hold a patched model.

    Args:
        module_class: a LightningModule class of ``lightning`` or ``pytorch_lightning``.
        path: the checkpoint; everything else as in Lightning, initial arguments of the class included.

    Raises:
        QKWatchError: the checkpoint was saved from another model.
    """

    def load_state_dict(self: Any, state_dict: Mapping[str, Any], *args: Any, **options: Any) -> Any:
        match_(self, plan_of(state_dict))
        return super(restoring, self).load_state_dict(state_dict, *args, **options)

    body = {"load_state_dict": load_state_dict, "__module__": module_class.__module__, "__doc__": module_class.__doc__}
    restoring: Any = type(module_class.__name__, (module_class,), body)
    module = restoring.load_from_checkpoint(path, **kwargs)
    module.__class__ = module_class
    return cast(M, module)
