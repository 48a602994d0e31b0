"""When to look for attention again, and for what: not every part of a model runs in every step."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from qkwatch.modules import clean_name, named_modules, unwrap


class Lookout:
    """Looks again: `at_once` times as soon as it can, then at distances that double while nothing is found.

    The distances are a step more than whole readings apart: what runs every so many steps is met in the end.

    >>> look = Lookout(every=10, at_once=1)
    >>> for step in (0, 11, 32):
    ...     look.looked(step, found=False)
    ...     print(look.due(step + 1), look.at)
    False 11
    False 32
    False 73
    """

    def __init__(self, every: int, at_once: int = 0) -> None:
        self.every, self.at_once = every, at_once
        self.vain = 0
        self.at = 0

    def due(self, step: int) -> bool:
        """Whether to look at this step."""
        return step >= self.at

    def looked(self, step: int, found: bool) -> None:
        """It was looked at this step."""
        self.vain = 0 if found else self.vain + 1
        late = self.vain - self.at_once
        self.at = step + (1 if late < 0 else self.every * 2 ** min(late, 30) + 1)

    @property
    def at_a_loss(self) -> bool:
        """Looked at once as often as it may, in vain."""
        return self.vain >= self.at_once


def unseen_parts(model: nn.Module, ran: Collection[int]) -> list[str]:
    """Names of modules of which nothing has run (``ran`` holds identities), and that are large enough to attend."""
    live: set[str] = set()
    for name, module in unwrap(model).named_modules():
        if id(module) in ran:
            parts = clean_name(name).split(".")
            live |= {".".join(parts[:depth]) for depth in range(len(parts) + 1)}
    return [name for name, module in named_modules(model).items() if name not in live and _matrices(module) >= 2]


def _matrices(module: nn.Module) -> int:
    return sum(parameter.ndim >= 2 for parameter in module.parameters())
