"""A monitor must not end what it watches: faults of ours become one warning each."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeVar, cast

from qkwatch.errors import QKWatchError
from qkwatch.monitor import Monitor

Hook = TypeVar("Hook", bound=Callable[..., Any])


def guarded(hook: Hook) -> Hook:
    """A fault in a hook never stops training: one warning, and the watch is over.

    A `QKWatchError` is bad input and does stop it, and so does any fault under ``on_error="raise"``. Whatever
    happens (KeyboardInterrupt too), nothing stays attached.
    """

    @functools.wraps(hook)
    def run(self: Guard, *args: Any, **kwargs: Any) -> Any:
        if self._stood_down:
            return None
        try:
            return hook(self, *args, **kwargs)
        except BaseException as fault:
            self._detach()
            if isinstance(fault, QKWatchError) or not isinstance(fault, Exception) or self.on_error == "raise":
                raise
            self._stand_down(fault)
            return None

    return cast(Hook, run)


class Guard:
    """What a callback needs so that its hooks can be `guarded`."""

    on_error: str
    _monitor: Monitor | None
    _stood_down: bool
    _step: int
    _warned: set[str]

    def _detach(self) -> None:
        if self._monitor is not None:
            self._monitor.discard()

    def _stand_down(self, fault: Exception) -> None:
        """With several ranks the others learn of it at the next measured step; until then this one keeps step."""
        monitor = self._monitor
        self._stood_down = monitor is None or monitor.ranks.size == 1 or monitor.told
        if monitor is not None and not self._stood_down:
            monitor.broken = monitor.broken or fault
        shown = (
            f"stopped watching at step {self._step:,} ({text_of(fault)}); training goes on, no more readings or "
            'patches; on_error="raise" shows where'
        )
        self._warn_once("fault", shown)

    def _fault(self, site: str, fault: Exception) -> None:
        """One measurement failed; the others go on."""
        if self.on_error == "raise":
            raise fault
        where = f" at {site}" if site else ""
        self._warn_once("measure", f"a measurement failed ({text_of(fault)}){where}: not measured")

    def _aside(self, what: str, work: Callable[[], object]) -> None:
        """What is not ours, a logger or the console: a fault of it is one warning, and the watch goes on."""
        try:
            work()
        except Exception as fault:
            if self.on_error == "raise":
                raise
            self._warn_once(what, f"{what} failed ({text_of(fault)}); the watch goes on")

    def _unseen(self, site: str, operation: str) -> None:
        self._warn_once(site, f"{site or 'the model'} runs {operation}, which cannot be looked into: not measured")

    def _first_time(self, key: str) -> bool:
        known = key in self._warned
        self._warned.add(key)
        return not known

    def _warn_once(self, key: str, text: str) -> None:
        if self._first_time(key):
            warnings.warn(f"QKWatch: {text}", stacklevel=4)


def text_of(fault: BaseException) -> str:
    return f"{type(fault).__name__}: {fault}"
