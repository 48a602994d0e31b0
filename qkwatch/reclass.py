"""Change what a module does by changing its class in place, and change it back.

The module keeps its name, its parameters and its place in the model. Unlike a hook, a changed class survives
``deepcopy``, pickling, ``torch.compile`` (it makes it compile again) and fast paths that look for hooks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch.fx
from torch import nn

from qkwatch.errors import QKWatchError

_SHARDED = "torch.distributed.fsdp"  # where `fully_shard` makes its classes


class Changed:
    """To be mixed in before a module's own class; what subclasses define takes the place of the module's own."""

    _qkwatch_base: type[nn.Module]  # the module's own class
    _qkwatch_mixin: type[Changed]

    def __init_subclass__(cls, **options: Any) -> None:
        """Nothing of what a module's own class does with its subclasses: ours is none of its author's."""

    @classmethod
    def members(cls, base: type[nn.Module]) -> dict[str, Any]:
        """Further members, made for this class."""
        return {}

    def __reduce_ex__(self, protocol: Any) -> Any:
        # a class made at run time has no importable name: pickle the recipe instead
        kind = type(self)
        return _rebuild, (kind._qkwatch_mixin, kind._qkwatch_base), self.__getstate__()


def change_class(module: nn.Module, mixin: type[Changed]) -> None:
    """From now on the module's class is its own with ``mixin`` before it. Raises `QKWatchError` where it cannot be."""
    if isinstance(module, torch.fx.GraphModule):
        raise QKWatchError(f"a torch.fx graph ({type(module).__name__}) makes each copy of it a class of its own")
    set_plainly(module, "__class__", _class_of(mixin, type(module)))


def restore_class(module: nn.Module) -> None:
    """A changed module's own class again. Raises as `check_unchanged`."""
    check_unchanged(module, "")
    kind: Any = type(module)
    set_plainly(module, "__class__", kind._qkwatch_base)


def set_plainly(module: nn.Module, name: str, value: Any) -> None:
    """Set an attribute, whatever the module's own class has to say about it."""
    object.__setattr__(module, name, value)


@contextlib.contextmanager
def as_before_on_error(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Whatever ends the block early, these modules have the classes, attributes and submodules that they had."""
    saved = [
        (module, type(module), dict(vars(module)), [(v, dict(v)) for v in vars(module).values() if type(v) is dict])
        for module in modules
    ]
    try:
        yield
    except BaseException:
        for module, kind, attributes, tables in saved:
            set_plainly(module, "__class__", kind)
            for table, entries in [*tables, (vars(module), attributes)]:
                table.clear()
                table.update(entries)
        raise


def check_unchanged(module: nn.Module, name: str) -> None:
    """Raise `QKWatchError` where somebody has changed the class once more, so that it could not be restored."""
    kind: Any = type(module)
    if isinstance(module, Changed) and kind is not _class_of(kind._qkwatch_mixin, kind._qkwatch_base):
        raise QKWatchError(
            f"the class of {name or 'a module'!r}, which is patched, was changed afterwards, to {kind.__name__}: "
            "take that change back first (parametrizations, for instance, with remove_parametrizations)"
        )


def own_class(module: nn.Module) -> type[nn.Module]:
    """A module's class as its author knows it, also while we or `fully_shard` have changed it."""
    kinds = (kind for kind in type(module).__mro__ if issubclass(kind, nn.Module))
    return next(k for k in kinds if "_qkwatch_base" not in vars(k) and not k.__module__.startswith(_SHARDED))


_CLASSES: dict[tuple[type[Changed], type[nn.Module]], type[nn.Module]] = {}


def _class_of(mixin: type[Changed], base: type[nn.Module]) -> type[nn.Module]:
    if (mixin, base) not in _CLASSES:
        own = {"_qkwatch_base": base, "_qkwatch_mixin": mixin, "__module__": __name__}
        _CLASSES[mixin, base] = type(f"QKNormed{base.__name__}", (mixin, base), {**mixin.members(base), **own})
    return _CLASSES[mixin, base]


def _rebuild(mixin: type[Changed], base: type[nn.Module]) -> nn.Module:
    kind = _class_of(mixin, base)
    return kind.__new__(kind)
