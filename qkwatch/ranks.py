"""How the processes of one run agree. Every call here is collective: all ranks make it, or none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

T = TypeVar("T")


class Broken(RuntimeError):
    """The monitor failed on some rank; all ranks learn of it in the same step and stand down together."""


def _alone(value: Any) -> list[Any]:
    return [value]


def _first_of_one(values: Tensor) -> Tensor:
    return values[None]


def _same(value: Any) -> Any:
    return value


@dataclass
class Ranks:
    """The processes of a run; the defaults are those of a run of one.

    Attributes:
        size: number of processes.
        rank: this one's number.
        gather_objects: one small picklable object -> all ranks' objects, in rank order.
        gather: one tensor (same shape everywhere) -> (size, ...).
        broadcast: rank zero's object to all.
    """

    size: int = 1
    rank: int = 0
    gather_objects: Callable[[Any], list[Any]] = _alone
    gather: Callable[[Tensor], Tensor] = _first_of_one
    broadcast: Callable[[Any], Any] = _same

    @classmethod
    def of_process_group(cls, broadcast: Callable[[Any], Any] | None = None) -> Ranks:
        """The ranks of the default process group."""
        size, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()

        def gather_objects(value: Any) -> list[Any]:
            parts: list[Any] = [None] * size
            torch.distributed.all_gather_object(parts, value)
            return parts

        def gather(values: Tensor) -> Tensor:
            parts = [torch.empty_like(values) for _ in range(size)]
            torch.distributed.all_gather(parts, values.contiguous())
            return torch.stack(parts)

        def from_first(value: Any) -> Any:
            box = [value]
            torch.distributed.broadcast_object_list(box, 0)
            return box[0]

        return cls(size, rank, gather_objects, gather, broadcast or from_first)

    def first(self, value: T | None) -> T | None:
        """The first rank's value that is not None, on every rank."""
        return next((v for v in self.gather_objects(value) if v is not None), None)

    def agree(self, fault: BaseException | None) -> None:
        """Raise on every rank if there is a fault on one: its own there, `Broken` elsewhere."""
        faults = self.gather_objects(None if fault is None else f"{type(fault).__name__}: {fault}")
        if fault is not None:
            raise fault
        first = next(((i, text) for i, text in enumerate(faults) if text is not None), None)
        if first is not None:
            raise Broken(f"rank {first[0]} failed: {first[1]}")


def average_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Mean over ranks of gradients that DistributedDataParallel, which wrapped before, knows nothing of."""
    kinds: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    for parameter in parameters:
        kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    for members in kinds.values():
        grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in members]
        flat = torch.cat([g.flatten() for g in grads])
        torch.distributed.all_reduce(flat)
        flat /= torch.distributed.get_world_size()
        for parameter, part in zip(members, flat.split([g.numel() for g in grads]), strict=True):
            parameter.grad = part.view_as(parameter)
