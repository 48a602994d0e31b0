"""The one exception type of the package."""

from __future__ import annotations

from collections.abc import Iterable


class QKWatchError(ValueError):
    """Raised for bad input; says what is wrong, where, and what to do."""


def unknown(what: str, got: object, known: Iterable[object]) -> QKWatchError:
    """An error for an option that does not exist: names it and lists the known ones.

    >>> str(unknown("variant", "l3", ["l2", "qwen3"]))
    "unknown variant 'l3'; known: 'l2', 'qwen3'"
    """
    return QKWatchError(f"unknown {what} {got!r}; known: {', '.join(repr(k) for k in known)}")
