"""What the callback needs to know of Lightning's Trainer, its strategies and its loops. Lightning 2.5 and 2.6."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from qkwatch.ranks import Ranks
from qkwatch.reclass import own_class
from qkwatch.sharding import shards
from qkwatch.twins import averaged

_REFUSALS = {
    "DeepSpeedStrategy": "DeepSpeed has flattened the parameters",
    "FSDPStrategy": "FSDP has flattened the parameters",
}
_REMEDY = (
    "patch first, then shard: with a plan made on the unsharded model (qkwatch.retrofit_(...).plan), call "
    "qkwatch.retrofit_(model, plan=plan) in configure_model before the model is wrapped"
)


def callback_bases() -> tuple[type, ...]:
    """The Callback classes of ``lightning`` and ``pytorch_lightning``: two different ones, ours is both."""
    shared: Any = importlib.import_module("lightning_utilities.core.rank_zero")  # both packages log through it
    bases = []
    for package in ("lightning.pytorch", "pytorch_lightning"):
        logger = getattr(shared, "log", None)
        try:
            bases.append(importlib.import_module(package).Callback)
        except ImportError:
            continue
        if logger is not None:
            shared.log = logger  # the import put its own there: whoever silenced the first would hear of it again
    return tuple(dict.fromkeys(bases)) or (object,)


def steps_done(trainer: Any) -> int:
    """Batches after which the optimizers had stepped, of a run that we have not counted ourselves."""
    several = len(trainer.optimizers) > 1  # each of them counts in global_step
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped if several else trainer.global_step)


def schedulers(trainer: Any) -> list[Any]:
    """The learning-rate schedulers themselves."""
    return [config.scheduler for config in trainer.lr_scheduler_configs]


def ranks(trainer: Any) -> Ranks:
    """How the processes of this Trainer talk."""
    if trainer.world_size == 1 or not torch.distributed.is_initialized():
        return Ranks()
    return Ranks.of_process_group(trainer.strategy.broadcast)


def refuses_patches(trainer: Any) -> str | None:
    """Why this Trainer's strategy cannot take new parameters in mid-run; None where it can."""
    for kind in type(trainer.strategy).__mro__:
        if kind.__name__ in _REFUSALS:
            return f"{_REFUSALS[kind.__name__]}; {_REMEDY}"
    mesh = getattr(trainer.strategy, "_device_mesh", None)  # of ModelParallelStrategy: FSDP2, tensor parallelism
    if mesh is not None and "tensor_parallel" in (mesh.mesh_dim_names or ()) and mesh["tensor_parallel"].size() > 1:
        return f"tensor parallelism spreads the heads of a layer over ranks; {_REMEDY}"
    if mesh is not None and mesh.size() > 1 and not shards(trainer.lightning_module):
        return f"no part of the model is sharded by fully_shard, so nothing would average its gradients; {_REMEDY}"
    return None


def loads_by_itself(trainer: Any) -> bool:
    """Whether the strategy fills model and optimizers from the file, once both are set up (FSDP2)."""
    return any(kind.__name__ == "ModelParallelStrategy" for kind in type(trainer.strategy).__mro__)


def averaged_models(trainer: Any) -> list[nn.Module]:
    """The copies that callbacks keep of the model: WeightAveraging, EMAWeightAveraging, StochasticWeightAveraging,
    and any other that holds it in an `AveragedModel`.

    They pair parameters with the model's by position, so whatever happens to one must happen to the other.
    """
    own = own_class(trainer.lightning_module)
    held = [(name, value) for callback in trainer.callbacks for name, value in vars(callback).items()]
    copies = [averaged(v) for name, v in held if name == "_average_model" or isinstance(v, AveragedModel)]
    return [model for model in copies if isinstance(model, nn.Module) and own_class(model) is own]


def loss_of(trainer: Any, outputs: Any) -> torch.Tensor | None:
    """The loss that a training step returned, still on its device; None where it returned none.

    Under automatic optimization it comes divided by the number of batches that a step accumulates.
    """
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        return None
    parts = trainer.accumulate_grad_batches if trainer.lightning_module.automatic_optimization else 1
    return loss.detach() if parts == 1 else loss.detach() * parts


def log(pl_module: Any, figures: dict[str, float]) -> None:
    """Into the Trainer's callback metrics; the loggers get theirs from the panels. The same on every rank."""
    for name, value in figures.items():
        reduce = "min" if name.endswith("min_entropy") else "max"
        pl_module.log(name, value, on_step=True, on_epoch=True, logger=False, batch_size=1, reduce_fx=reduce)
