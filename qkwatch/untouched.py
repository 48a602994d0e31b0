"""Let modules run without a trace: afterwards their tensors, attributes and caches are what they were.

A backward pass that is still to come may have saved these tensors, so they keep their version counters, too. Copies of
most take their places meanwhile: what is asked of autograd afterwards finds the values that it saw.
"""

from __future__ import annotations

import collections
import contextlib
import random
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_INTERNAL = frozenset(vars(nn.Module())) - {"training", "_non_persistent_buffers_set"}
_CONTAINERS = (list, set, collections.deque, tuple)
# what belongs to a run rather than to a model: its threads may be at work meanwhile
_FOREIGN = {"torch", "lightning", "pytorch_lightning", "lightning_fabric", "qkwatch", "numpy", "wandb", "tensorboardX"}
_DEPTH = 5  # an attribute, its list of layers, a layer, its list of tensors, a tensor
_MANY, _LARGE = 1000, 2**27  # entries and elements: into larger ones (a data set) no forward writes


@contextlib.contextmanager
def untouched(module: nn.Module, *inputs: Any, weights: bool = True) -> Iterator[None]:
    """Whatever the block runs of ``module`` on ``inputs`` leaves no trace on either.

    That holds for buffers, parameters (without ``weights`` not for what is written into them), attributes of every
    submodule, the containers and objects these hold, and Python's and numpy's random state. What a forward builds
    (lazy modules) stays.
    """
    state = _State(weights)
    for inner in module.modules():
        state.keep_module(inner)
    state.keep_inputs(inputs)
    state.keep_random()
    try:
        with state.versions():
            yield
    finally:
        state.restore()


class _State:
    def __init__(self, weights: bool):
        self._weights, self._exchanging = weights, True
        self._seen: dict[int, Any] = {}  # by identity; kept alive, or another object could take the place
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}  # a tensor in two places stays one
        self._tensors: list[tuple[Tensor, Tensor]] = []
        self._undo: list[Callable[[], None]] = []

    def keep_module(self, module: nn.Module) -> None:
        for parameter in module._parameters.values():
            if self._weights and parameter is not None and parameter.is_floating_point():
                self._keep_tensor(parameter)
        if isinstance(module, torch.jit.ScriptModule):
            for buffer in module.buffers(recurse=False):
                self._keep_tensor(buffer)
            return
        built = (type(module), *module._modules, *module._parameters)
        self._keep_table(module._buffers)
        self._keep_table(
            vars(module), _INTERNAL, lambda: (type(module), *module._modules, *module._parameters) == built
        )

    def keep_inputs(self, inputs: tuple[Any, ...]) -> None:
        self._exchanging = False  # they may be part of the caller's graph
        self.keep(inputs, _DEPTH + 2)

    def keep(self, value: Any, depth: int) -> None:
        """An attribute's value, an input, or something inside one."""
        kind = type(value)  # not isinstance, which asks a proxy for what it stands for
        if depth == 0 or id(value) in self._seen:
            return
        if issubclass(kind, Tensor):
            self._keep_tensor(value)
        elif issubclass(kind, dict) or (_is_own(kind) and hasattr(value, "__dict__")):
            self._seen[id(value)] = value
            self._keep_table(value if issubclass(kind, dict) else vars(value), depth=depth - 1)
        elif issubclass(kind, _CONTAINERS):
            self._seen[id(value)] = value
            self._keep_container(value, depth - 1)

    def _keep_table(
        self,
        table: dict[Any, Any],
        but: frozenset[str] = frozenset(),
        still: Callable[[], bool] = lambda: True,
        depth: int = _DEPTH,
    ) -> None:
        saved = {key: value for key, value in table.items() if key not in but}
        self._undo.append(lambda: _put_back(table, saved, but) if still() else None)
        for key, value in saved.items() if len(saved) <= _MANY else ():
            if (copy := self._copy_of(value)) is not None:
                table[key] = copy
            else:
                self.keep(value, depth)

    def _keep_container(self, value: Any, depth: int) -> None:
        inner = list(value)

        def undo() -> None:
            if isinstance(value, list):
                value[:] = inner
            else:
                value.clear()
                (value.update if isinstance(value, set) else value.extend)(inner)

        if not isinstance(value, tuple):
            self._undo.append(lambda: None if _same(list(value), inner) else undo())
        for i, one in enumerate(inner if len(inner) <= _MANY else ()):
            if isinstance(value, list) and (copy := self._copy_of(one)) is not None:
                value[i] = copy
            else:
                self.keep(one, depth)

    def _copy_of(self, value: Any) -> Tensor | None:
        """What takes the place of a tensor in a table or list; None for anything else."""
        kind = type(value)
        if not (self._exchanging and issubclass(kind, Tensor)) or issubclass(kind, nn.Parameter):
            return None
        if not _is_plain(value):
            return None
        if id(value) not in self._copies:
            self._copies[id(value)] = value, value.detach().clone().requires_grad_(value.requires_grad)
        return self._copies[id(value)][1]

    def _keep_tensor(self, tensor: Tensor) -> None:
        if id(tensor) not in self._seen and _is_plain(tensor):
            self._seen[id(tensor)] = tensor
            self._tensors.append((tensor, tensor.detach().clone()))

    def keep_random(self) -> None:
        state = random.getstate()
        self._undo.append(lambda: random.setstate(state))
        if "numpy" in sys.modules:
            import numpy as np

            numbers = np.random.get_state()
            self._undo.append(lambda: np.random.set_state(numbers))

    def versions(self) -> contextlib.AbstractContextManager[None]:
        """Inside, what is written into the tensors does not count; ``restore`` writes after it, uncounted as well."""
        counted = tuple(tensor for tensor, _ in self._tensors)
        return _unsafe_preserve_version_counter(counted) if counted else contextlib.nullcontext()

    def restore(self) -> None:
        with self.versions(), torch.no_grad():
            for tensor, value in self._tensors:
                if (tensor.shape, tensor.dtype, tensor.device) != (value.shape, value.dtype, value.device):
                    tensor.data = value
                elif not _equal(tensor, value):
                    tensor.detach().copy_(value)
        for undo in self._undo:
            undo()


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is one block of memory that could be written into, and be put back."""
    if is_traceable_wrapper_subclass(tensor) or nn.parameter.is_lazy(tensor) or tensor.is_inference():
        return False
    whole = tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized
    learned = isinstance(tensor, nn.Parameter)
    return whole and tensor.device.type != "meta" and (learned or tensor.numel() <= _LARGE)


def _equal(a: Tensor, b: Tensor) -> bool:
    a = a.detach()
    if a.is_floating_point() and a.element_size() == 1:
        return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())  # NaN is as good as NaN


def _is_own(kind: type) -> bool:
    """Whether objects of a class are the model's own keeping: a cache, a store of maps, a counter."""
    if kind is types.SimpleNamespace:
        return True
    packages = [base.__module__.partition(".")[0] for base in kind.__mro__]
    return packages[0] not in sys.stdlib_module_names and _FOREIGN.isdisjoint(packages)


def _same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))


def _put_back(table: dict[Any, Any], saved: dict[Any, Any], but: frozenset[str] = frozenset()) -> None:
    """``table`` with the entries it had, ``but`` some; where nothing changed, nothing is written."""
    keys = [key for key in table if key not in but]
    if keys != list(saved) or not _same([table[key] for key in keys], list(saved.values())):
        for key in keys:
            del table[key]
        table.update(saved)
