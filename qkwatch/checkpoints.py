"""Checkpoints of a model that was patched in mid-run: whoever loads one gets the structure that was saved.

The state_dict's own keys say which sites are patched and how (`QKNorm` keeps its plan in it), so weights-only
files do too. What only the optimizer knows, which group holds which parameter, is saved by name under ``KEY``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast

from torch import nn

from qkwatch.optim import group_names, regroup
from qkwatch.retrofit import match_, patched_sites, plan_of

KEY = "qkwatch"  # of our entry in a checkpoint
M = TypeVar("M")


def follow(model: nn.Module) -> Any:
    """From now on `model` patches or unpatches itself to fit the weights it is about to load; returns the handle."""
    return model.register_load_state_dict_pre_hook(_fit_to)


def _fit_to(module: nn.Module, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
    """A function of the module's, not a method of ours: weight averaging deep-copies it with the module."""
    own = {key[len(prefix) :]: value for key, value in state_dict.items() if key.startswith(prefix)}
    match_(module, plan_of(own), present=own)


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
