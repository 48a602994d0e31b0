"""What the callback needs to know of Lightning's Trainer, its strategies and its loops. Lightning 2.5 and 2.6."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from qkwatch.modules import named_modules
from qkwatch.monitor import Ranks
from qkwatch.optim import add_parameters
from qkwatch.retrofit import norm_parameters, patched_sites
from qkwatch.rules import Alert
from qkwatch.stats import Reading


def callback_bases() -> tuple[type, ...]:
    """The Callback classes of ``lightning`` and ``pytorch_lightning``: two different ones, ours is both."""
    bases = []
    for package in ("lightning.pytorch", "pytorch_lightning"):
        try:
            bases.append(importlib.import_module(package).Callback)
        except ImportError:
            continue
    return tuple(dict.fromkeys(bases)) or (object,)


def step(trainer: Any) -> int:
    """Optimizer steps done; as LearningRateMonitor counts them."""
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def schedulers(trainer: Any) -> list[Any]:
    return [config.scheduler for config in trainer.lr_scheduler_configs]


def train_norms(trainer: Any, pl_module: nn.Module) -> list[nn.Parameter]:
    """Let the optimizers train the gains, without weight decay; returns those that were not trained before."""
    known = {id(p) for o in trainer.optimizers for g in o.param_groups for p in g["params"]}
    named = norm_parameters(pl_module)
    modules = named_modules(pl_module)
    beside = {}
    for site in patched_sites(pl_module):
        own = {id(p) for _, p in named}
        kin = [p for p in modules[site].parameters() if id(p) not in own]
        beside |= {name: kin for name, _ in named if name.startswith(f"{site}.qk_norm." if site else "qk_norm.")}
    trained = [(name, p) for name, p in named if p.requires_grad]
    add_parameters(trainer.optimizers, trained, beside=beside, schedulers=schedulers(trainer))
    return [p for _, p in trained if id(p) not in known]


def is_rank_zero() -> bool:
    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0


def ranks(trainer: Any) -> Ranks:
    """How the processes of this Trainer talk."""
    if trainer.world_size == 1 or not torch.distributed.is_initialized():
        return Ranks()

    def gather_objects(value: Any) -> list[Any]:
        parts: list[Any] = [None] * trainer.world_size
        torch.distributed.all_gather_object(parts, value)
        return parts

    def gather(values: Tensor) -> Tensor:
        parts = [torch.empty_like(values) for _ in range(trainer.world_size)]
        torch.distributed.all_gather(parts, values.contiguous())
        return torch.stack(parts)

    return Ranks(trainer.world_size, gather_objects, gather, trainer.strategy.broadcast)


def average_gradients(trainer: Any, parameters: Sequence[nn.Parameter]) -> None:
    """Mean over ranks of gradients that DistributedDataParallel, which wrapped before, knows nothing of."""
    grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
    if not grads:
        return
    flat = torch.cat([g.flatten() for g in grads])
    torch.distributed.all_reduce(flat)
    flat /= trainer.world_size
    for parameter, grad, part in zip(parameters, grads, flat.split([g.numel() for g in grads]), strict=True):
        parameter.grad = part.view_as(grad)


def refuses_patches(trainer: Any) -> str | None:
    """Why this Trainer's strategy cannot take new parameters in mid-run; None where it can."""
    name = type(trainer.strategy).__name__
    if "DeepSpeed" in name:
        return (
            "DeepSpeed has flattened the parameters: save a checkpoint, patch the model with qkwatch.retrofit_ or "
            "restore_ before the Trainer is built, and start from that"
        )
    if name == "FSDPStrategy":
        return (
            "FSDP1 has flattened the parameters: patch before the Trainer wraps the model (qkwatch.retrofit_), "
            "or use ModelParallelStrategy (FSDP2)"
        )
    return None


def aggregates(readings: Sequence[Reading], alerts: Sequence[Alert]) -> dict[str, float]:
    """The few figures that EarlyStopping and ModelCheckpoint may monitor; what was not measured is left out."""
    largest = torch.cat([r.max_logit for r in readings])
    entropy = torch.cat([r.entropy for r in readings])
    figures = {"qkwatch/alert_level": float(max((a.level for a in alerts), default=0))}
    if not largest.isnan().all():
        figures["qkwatch/max_logit"] = float(largest[~largest.isnan()].max())
    if not entropy.isnan().all():
        figures["qkwatch/min_entropy"] = float(entropy[~entropy.isnan()].min())
    return figures


def log(pl_module: Any, figures: dict[str, float]) -> None:
    """Into the Trainer's callback metrics; the loggers get theirs from the panels. The same on every rank."""
    for name, value in figures.items():
        reduce = "min" if name.endswith("min_entropy") else "max"
        pl_module.log(name, value, on_step=True, on_epoch=True, logger=False, batch_size=1, reduce_fx=reduce)
