"""One training run's watch, step by step, without knowing who trains: the core of every integration.

monitor.begin(step)      before a forward pass: attaches, on measured steps only
monitor.end_forward()    before backward: nothing is left on the model
monitor.collect(step)    after the step: readings and alerts
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qkwatch.layout import HeadLayout
from qkwatch.measure import Rows
from qkwatch.modules import named_modules
from qkwatch.observe import Observer, readings_of
from qkwatch.rules import Alert, Rules, Thresholds
from qkwatch.scout import Scout
from qkwatch.sites import Site, select
from qkwatch.stats import COLUMNS, MAXIMA, Packed, Reading, merge

_RESCOUTS = 3  # how often cores of unknown sites may make the monitor look for sites anew


@dataclass
class Ranks:
    """How a process talks to the others of its run; the defaults are those of a run of one.

    Attributes:
        size: number of processes.
        gather_objects: one small picklable object -> all ranks' objects, in rank order.
        gather: one tensor (same shape everywhere) -> (size, ...).
        broadcast: rank zero's object to all.
    """

    size: int = 1
    gather_objects: Callable[[Any], list[Any]] = lambda value: [value]
    gather: Callable[[Tensor], Tensor] = lambda value: value[None]
    broadcast: Callable[[Any], Any] = lambda value: value


class Monitor:
    """Readings and alerts of one model.

    Args:
        model: the model in training.
        every_n_steps: optimizer steps between readings.
        layers: glob or globs over site names.
        rows: as in `watch`.
        thresholds: constants of the rules.
        on_fault: called with a text when something of ours failed; the run goes on.
        on_unseen: called with (module, operation) for attention that cannot be looked into.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        every_n_steps: int,
        layers: str | Sequence[str] | None,
        rows: Rows,
        thresholds: Thresholds,
        on_fault: Callable[[str, Exception], None],
        on_unseen: Callable[[str, str], None],
        ranks: Ranks,
    ):
        self.model, self.every_n_steps, self.ranks = model, every_n_steps, ranks
        self.rules = Rules(thresholds)
        self.sites: list[Site] = []
        self.last_measured: int | None = None
        self._layers, self._rows = layers, rows
        self._on_fault, self._on_unseen = on_fault, on_unseen
        self._known: list[Site] = []  # also those that `layers` leaves out
        self._active: Scout | Observer | None = None
        self._finished: Scout | Observer | None = None
        self._stance: Any = None
        self._scouts = 0
        self._strangers = False
        self.found_nothing = False  # the last search saw no attention at all

    # -- the three calls of a step --------------------------------------------------------------------------

    def due(self, step: int) -> bool:
        """Whether ``step`` is to be measured, and was not yet (gradient accumulation)."""
        return step % self.every_n_steps == 0 and step != self.last_measured

    def begin(self, step: int, *, keep_calls: bool = False) -> None:
        """Attach for one forward pass. ``keep_calls``: the sites' inputs will be wanted (for a retrofit)."""
        self.end_forward()
        self.last_measured = step
        if not self._known or (self._strangers and self._scouts < _RESCOUTS):
            self._scouts += 1
            self._strangers = False
            self._active = Scout(self.model, self._rows)
        else:
            self._active = Observer(
                self.sites, self._rows, on_fault=self._on_fault, keep_calls=keep_calls, known=self._known
            )
        # a compiled model runs eagerly in this step: hooks and modes do not reach into compiled code
        self._stance = torch.compiler.set_stance("force_eager")
        self._active.__enter__()

    def end_forward(self) -> None:
        """Detach. Nothing happens where nothing is attached."""
        if self._active is None:
            return
        active, self._active = self._active, None
        try:
            active.__exit__(None, None, None)
        finally:
            stance, self._stance = self._stance, None
            stance.__exit__(None, None, None)
        self._finished = active
        if isinstance(active, Scout):
            self._settle(active)

    def collect(self, step: int) -> tuple[list[Reading], list[Alert]]:
        """The readings of the pass that ended, one per site, reduced over ranks, and what the rules say."""
        finished, self._finished = self._finished, None
        if finished is None:
            return [], []
        for name, operation in finished.unseen.items():
            self._on_unseen(name, operation)
        if isinstance(finished, Observer):
            self._strangers |= finished.strangers
        readings = self._reduce(finished.packs, step)
        return readings, self.rules.update(step, readings)

    def discard(self) -> None:
        """Detach and forget the pass, after an exception."""
        with contextlib.suppress(Exception):
            self.end_forward()
        self._finished = None

    def drop_calls(self) -> None:
        """Let go of the inputs that sites keep for a retrofit."""
        for site in self._known:
            site.call = None

    def reset_sites(self) -> None:
        """The model has changed: find the sites anew at the next measured step."""
        self._known, self.sites, self._scouts = [], [], 0

    # -- sites ----------------------------------------------------------------------------------------------

    def _settle(self, scout: Scout) -> None:
        """Agree with all ranks on the sites."""
        if scout.fault is not None:
            self._on_fault("", scout.fault)
        found = scout.sites()
        if self.ranks.size > 1:
            found = self._agree(found)
        self._known, self.found_nothing = found, not found
        self.sites = select(found, self._layers) if found else []

    def _agree(self, found: list[Site]) -> list[Site]:
        """Every rank's sites in one order; one that did not run here is known by another rank's description."""
        mine = {site.name: site for site in found}
        described = [(s.name, s.q_heads, s.k_heads, s.head_dim, s.layout, s.self_attention) for s in found]
        modules = named_modules(self.model)
        for part in self.ranks.gather_objects(described):
            for name, q_heads, k_heads, head_dim, layout, is_self in part:
                if name not in mine and name in modules:
                    assert isinstance(layout, HeadLayout)
                    mine[name] = Site(
                        name,
                        q_heads,
                        k_heads,
                        head_dim,
                        reason="it did not run on this rank",
                        module=modules[name],
                        layout=layout,
                        self_attention=is_self,
                    )
        order = {name: i for i, name in enumerate(modules)}
        return sorted(mine.values(), key=lambda site: order.get(site.name, len(order)))

    # -- readings -------------------------------------------------------------------------------------------

    def _reduce(self, packs: Sequence[tuple[Site, Packed]], step: int) -> list[Reading]:
        """One reading per site: several calls of a site merged, all ranks in one collective."""
        merged: list[tuple[Site, Packed]] = []
        for site in self.sites:
            mine = [packed for owner, packed in packs if owner is site]
            if mine:
                merged.append((site, merge(mine)))
            elif self.ranks.size > 1:
                merged.append((site, _nothing(site, packs)))
        if not merged:
            return []
        if self.ranks.size > 1:
            merged = self._over_ranks(merged)
        readings = readings_of(merged, step)
        return [r for r in readings if r.rows or r.excluded_rows]

    def _over_ranks(self, merged: list[tuple[Site, Packed]]) -> list[tuple[Site, Packed]]:
        values = torch.cat([packed.values for _, packed in merged])
        gathered = self.ranks.gather(values)  # (ranks, all heads, C)
        cut = len(MAXIMA)
        total = torch.cat([gathered[..., :cut].amax(0), gathered[..., cut:].sum(0)], -1)
        parts = total.split([len(packed.values) for _, packed in merged])
        # whether a reading is exact travels in its "sampled" column
        return [(site, Packed(part, True)) for (site, _), part in zip(merged, parts, strict=True)]


def _nothing(site: Site, packs: Sequence[tuple[Site, Packed]]) -> Packed:
    """What a site that did not run adds to a reduction."""
    like = packs[0][1].values if packs else torch.zeros(0, dtype=torch.float64, device=_device(site))
    values = like.new_zeros(site.layout.heads, len(COLUMNS))
    values[:, : len(MAXIMA)] = -torch.inf
    return Packed(values, True)


def _device(site: Site) -> torch.device:
    parameter = next(site.module.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device
