"""What is known of one attention site, and how to choose among several."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import nn

from qkwatch.errors import QKWatchError
from qkwatch.layout import HeadLayout
from qkwatch.probe import Call, CoreTap, Loose, Tap
from qkwatch.reading import Reading

ELSEWHERE = "it did not run on this rank"  # why a site of another rank's is left


@dataclass(eq=False)
class Site:
    """A module that owns a softmax(QK^T) and the projections that feed it.

    Attributes:
        name: the module's name, as the user knows it.
        q_heads, k_heads: number of query heads H and key heads G.
        head_dim: channels of a head, D.
        normed: queries and keys are normed already.
        retrofittable: its queries and keys can be got at, so `retrofit_` can try it.
        reason: why not, where it is not.
        reading: its figures in the forward pass that found it; None where they could not be told per head.
    """

    name: str
    q_heads: int
    k_heads: int
    head_dim: int
    normed: bool = False
    retrofittable: bool = False
    reason: str | None = None
    reading: Reading | None = None
    module: nn.Module = field(repr=False, kw_only=True)
    layout: HeadLayout = field(repr=False, kw_only=True)
    taps: tuple[Tap, Tap] | None = field(default=None, repr=False, kw_only=True)
    core_tap: CoreTap | None = field(default=None, repr=False, kw_only=True)
    loose: Loose = field(default=Loose(), repr=False, kw_only=True)
    call: Call | None = field(default=None, repr=False, kw_only=True)
    self_attention: bool = field(default=True, repr=False, kw_only=True)


def select(sites: Sequence[Site], layers: str | Sequence[str] | None) -> list[Site]:
    """The sites whose names match a glob, less those that match one with a leading "!".

    Raises:
        QKWatchError: a pattern matches no site; the message lists the names.
    """
    for pattern in unmatched(sites, layers):
        raise no_match(pattern, sites)
    return choose(sites, layers)


def unmatched(sites: Sequence[Site], layers: str | Sequence[str] | None) -> list[str]:
    """The patterns that match none of the sites."""
    names = [site.name for site in sites]
    return [pattern for pattern in _patterns(layers) if not matches(names, pattern)]


def matches(names: Iterable[str], pattern: str) -> bool:
    """Whether a pattern, excluding or not, speaks of one of the names."""
    return any(fnmatchcase(name, pattern.lstrip("!")) for name in names)


def no_match(pattern: str, sites: Sequence[Site]) -> QKWatchError:
    """What is raised for a pattern that matches nothing."""
    names = ", ".join(repr(site.name) for site in sites) or "none"
    return QKWatchError(f"layers={pattern!r} matches no attention site; the sites are: {names}")


def choose(sites: Sequence[Site], layers: str | Sequence[str] | None) -> list[Site]:
    """`select` for patterns of which some may match nothing yet."""
    patterns = _patterns(layers)
    wanted = [p for p in patterns if not p.startswith("!")] or ["*"]
    unwanted = [p[1:] for p in patterns if p.startswith("!")]
    return [
        site
        for site in sites
        if any(fnmatchcase(site.name, p) for p in wanted) and not any(fnmatchcase(site.name, p) for p in unwanted)
    ]


def _patterns(layers: str | Sequence[str] | None) -> list[str]:
    if layers is None:
        return []
    return [layers] if isinstance(layers, str) else list(layers)
