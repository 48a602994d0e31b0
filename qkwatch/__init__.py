"""Watch attention while it trains; patch it to QK-norm in place when it saturates.

from lightning.pytorch import Trainer
from qkwatch import QKWatch

Trainer(callbacks=[QKWatch()])
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qkwatch.adopt import adopt_
    from qkwatch.alerts import Alert, Level, Thresholds
    from qkwatch.callback import QKWatch
    from qkwatch.checkpoints import load_from_checkpoint
    from qkwatch.clip import QKClip
    from qkwatch.errors import QKWatchError
    from qkwatch.find import find_sites
    from qkwatch.observe import watch
    from qkwatch.plan import RetrofitPlan
    from qkwatch.reading import Reading
    from qkwatch.retrofit import RetrofitReport, restore_, retrofit_, undo_
    from qkwatch.sites import Site
    from qkwatch.variants import Variant

__version__ = "0.1.0"

# name -> where it lives; imported at first use, so that `qkwatch --help` needs no torch
_HOMES = {
    "Alert": "alerts",
    "Level": "alerts",
    "QKClip": "clip",
    "QKWatch": "callback",
    "QKWatchError": "errors",
    "Reading": "reading",
    "RetrofitPlan": "plan",
    "RetrofitReport": "retrofit",
    "Site": "sites",
    "Thresholds": "alerts",
    "Variant": "variants",
    "adopt_": "adopt",
    "find_sites": "find",
    "load_from_checkpoint": "checkpoints",
    "restore_": "retrofit",
    "retrofit_": "retrofit",
    "undo_": "retrofit",
    "watch": "observe",
}

__all__ = [
    "Alert",
    "Level",
    "QKClip",
    "QKWatch",
    "QKWatchError",
    "Reading",
    "RetrofitPlan",
    "RetrofitReport",
    "Site",
    "Thresholds",
    "Variant",
    "adopt_",
    "find_sites",
    "load_from_checkpoint",
    "restore_",
    "retrofit_",
    "undo_",
    "watch",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'qkwatch' has no attribute {name!r}")
    return getattr(import_module(f"qkwatch.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
