"""Which module's forward are we in, and what does the user call it?"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

# Wrappers put these segments into module names; a user has never typed them.
_WRAPPER_SEGMENTS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_forward_module")


def clean_name(name: str) -> str:
    """The user's own name of a module or parameter: without the segments that wrappers add.

    >>> clean_name("_orig_mod.h.0._checkpoint_wrapped_module.attn")
    'h.0.attn'
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPER_SEGMENTS)


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside DataParallel / DistributedDataParallel (the only wrappers whose segment is ambiguous)."""
    while isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        model = model.module
    return model


def named_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Every module of ``model`` once, by its clean name; where a wrapper and its content share one, the content."""
    named: dict[str, nn.Module] = {}
    for name, module in unwrap(model).named_modules():
        named[clean_name(name)] = module
    return named


def all_names(model: nn.Module) -> dict[str, str]:
    """Every name that a module of ``model`` has (one that is used twice has several) -> that in `named_modules`."""
    first = {id(module): name for name, module in named_modules(model).items()}
    every = unwrap(model).named_modules(remove_duplicate=False)
    return {clean_name(name): first[id(module)] for name, module in every if id(module) in first}


def in_backward() -> bool:
    """Whether autograd is running: what is computed now is a recomputation (activation checkpointing)."""
    return torch._C._current_graph_task_id() != -1


@functools.cache
def _spare_a_warning() -> None:
    """A compiled module warns of global hooks, which would fire for its wrapper too: ours know it by its clean name."""
    warnings.filterwarnings("ignore", r"Using .torch\.compile\(module\). when there are global hooks")


class ModuleStack:
    """While entered, keeps the stack of modules whose forward is running.

    The hooks are PyTorch's global ones, so nothing is ever attached to a module: the model can be pickled,
    copied and exported meanwhile, and the fast paths of ``nn.TransformerEncoderLayer``, which look for hooks on
    the modules themselves, are taken as they would be without us.

    ``on_exit(module, args, kwargs)`` is called as each forward returns.
    """

    def __init__(self, on_exit: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None] | None = None):
        self.frames: list[nn.Module] = []
        self.on_exit = on_exit
        self.ran: set[int] = set()  # identities of all modules that have run
        self._handles: list[Any] = []

    def __enter__(self) -> ModuleStack:
        _spare_a_warning()
        self._handles = [
            register_module_forward_pre_hook(self._push),
            register_module_forward_hook(self._pop, with_kwargs=True, always_call=True),
        ]
        return self

    def __exit__(self, *exc: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.frames.clear()

    def _push(self, module: nn.Module, args: Any) -> None:
        if not in_backward():
            self.frames.append(module)
            self.ran.add(id(module))

    def _pop(self, module: nn.Module, args: Any, kwargs: Any, *output: Any) -> None:
        if in_backward() or module not in self.frames:
            return
        # after an exception PyTorch calls global hooks without the kwargs, and there is no output
        if self.on_exit is not None and output:
            self.on_exit(module, args, kwargs)
        while self.frames and self.frames.pop() is not module:
            pass
