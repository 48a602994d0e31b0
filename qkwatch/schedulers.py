"""Learning-rate schedulers of an optimizer whose groups change: their per-group lists follow."""

from __future__ import annotations

import copy
import functools
import re
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from qkwatch.errors import QKWatchError

# Names under which schedulers (torch's, transformers', timm's and their kin) keep one value per group. Length
# alone would not do: OneCycleLR has two phases, SequentialLR as many milestones as it likes.
_PER_GROUP = re.compile(
    r"_?(base|min|max|init|initial|start|end|final|eta_min|delta|last|restore|swa)_(lrs?|momentums|values)"
    r"|lr_lambdas|warmup_steps"
)


def remap(schedulers: Iterable[object], optimizer: Any, origin: Sequence[int], count: int) -> None:
    """In every scheduler of `optimizer`, make entry k of each per-group list the old entry ``origin[k]``.

    Lists are replaced, not changed: SequentialLR shares one with its child, and a saved state may hold one.
    """
    if list(origin) == list(range(count)):
        return
    seen: set[int] = set()
    for scheduler in (s for root in schedulers for s in walk(root, seen)):
        its = unwrap(scheduler.optimizer)
        if its is not optimizer and its.param_groups is not optimizer.param_groups:
            continue
        for name, old in list(vars(scheduler).items()):
            if isinstance(old, list | tuple) and len(old) == count and _PER_GROUP.fullmatch(name):
                new = [twin(old[i]) if i in origin[:k] else old[i] for k, i in enumerate(origin)]
                setattr(scheduler, name, type(old)(new))


def walk(root: object, seen: set[int]) -> Iterator[Any]:
    """The schedulers in `root`, itself included: nested ones, and those inside a config object or dict."""
    if id(root) in seen:
        return
    seen.add(id(root))
    if _is_scheduler(root):
        yield root
    for value in (root if isinstance(root, Mapping) else getattr(root, "__dict__", {})).values():
        for child in value if isinstance(value, list | tuple) else (value,):
            if _is_scheduler(child):
                yield from walk(child, seen)


def _is_scheduler(value: object) -> bool:
    """Told by what it has; an optimizer's wrapper also has a step and an optimizer, but param_groups too."""
    if isinstance(value, nn.Module | type) or not hasattr(value, "step") or hasattr(value, "param_groups"):
        return False
    return hasattr(getattr(value, "optimizer", None), "param_groups")


def twin(value: Any) -> Any:
    """A per-group value for one more group, apart where a change to one would reach the other.

    Functions are shared; a callable object is copied (shallowly): one that counts its calls would count those
    of both groups.
    """
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, types.FunctionType | types.MethodType | functools.partial | nn.Module | type):
        return value
    own = isinstance(value, list | dict) or (callable(value) and getattr(value, "__dict__", None))
    return copy.copy(value) if own else value


def unwrap(optimizer: Any) -> Any:
    """The torch optimizer inside Lightning's, Fabric's or Accelerate's wrapper."""
    for attribute in ("_optimizer", "optimizer"):
        inner = getattr(optimizer, attribute, None)
        if inner is not None and inner is not optimizer and hasattr(inner, "param_groups"):
            return unwrap(inner)
    if not hasattr(optimizer, "param_groups"):
        raise QKWatchError(f"{type(optimizer).__name__} has no param_groups; pass torch optimizers")
    return optimizer


def several(value: Any) -> list[Any]:
    """One optimizer or scheduler, or several, as a list."""
    if isinstance(value, Iterable) and not hasattr(value, "param_groups") and not hasattr(value, "step"):
        return list(value)
    return [value]
