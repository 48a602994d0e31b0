"""Watch attention while it trains; patch it to QK-norm in place when it saturates."""

from qkwatch.errors import QKWatchError
from qkwatch.norms import Variant
from qkwatch.observe import watch
from qkwatch.plan import RetrofitPlan
from qkwatch.retrofit import RetrofitReport, restore_, retrofit_, undo_
from qkwatch.rules import Alert, Level, Thresholds
from qkwatch.sites import Site, find_sites
from qkwatch.stats import Reading

__all__ = [
    "Alert",
    "Level",
    "QKWatchError",
    "Reading",
    "RetrofitPlan",
    "RetrofitReport",
    "Site",
    "Thresholds",
    "Variant",
    "find_sites",
    "restore_",
    "retrofit_",
    "undo_",
    "watch",
]
