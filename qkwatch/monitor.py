"""One training run's watch, step by step, without knowing who trains: the core of every integration.

monitor.begin(step)      before a forward pass: attaches, on measured steps only
monitor.end_forward()    before backward: nothing is left on the model
monitor.collect(step)    after the step: readings and alerts

With several ranks `end_forward` (of a search for sites) and `collect` are collective. Whether they are due follows
from the step alone and from what all ranks agreed on before, never from what one rank saw.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from qkwatch.measure import Rows
from qkwatch.modules import named_modules
from qkwatch.observe import Observer, readings_of
from qkwatch.ranks import Broken, Ranks
from qkwatch.reading import COLUMNS, MAXIMA, Packed, Reading, merge
from qkwatch.rules import Alert, Rules, Thresholds
from qkwatch.scout import Scout
from qkwatch.sharding import shards
from qkwatch.sites import Site, select

_SEARCHES = 3  # how often the monitor looks for sites: at first, and again while there is reason to
T = TypeVar("T")


class Monitor:
    """Readings and alerts of one model.

    Args:
        model: the model in training.
        every_n_steps: optimizer steps between readings.
        layers: glob or globs over site names.
        rows: as in `watch`.
        thresholds: constants of the rules.
        on_fault: called with (site, exception) when a measurement failed; the run goes on.
        on_unseen: called with (module, operation) for attention that cannot be looked into.
        ranks: the processes of the run.

    Attributes:
        sites: what is watched; known once the first measured forward pass has ended.
        last_measured: the step of the last `begin`.
        broken: what failed on this rank; `collect` tells the others, and raises on all of them.
        told: all ranks have been told.
        empty: the last search saw no attention.
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
        self._last_whole: int | None = None
        self.broken: Exception | None = None
        self.told = self.empty = False
        self._layers, self._rows = layers, rows
        self._on_fault, self._on_unseen = on_fault, on_unseen
        self._known: list[Site] = []  # also those that `layers` leaves out
        self._active: Scout | Observer | None = None
        self._stance: Any = None
        self._searching = False  # sites are to be settled when the forward pass ends
        self._collecting = False  # figures are to be collected when the step ends
        self._packs: list[tuple[Site, Packed]] = []
        self._searches = 0
        self._strangers = False
        self._kept_at: int | None = None
        self._reported: int | None = None

    # -- the three calls of a step --------------------------------------------------------------------------

    def due(self, step: int) -> bool:
        """Whether ``step`` is to be measured, and was not yet (gradient accumulation)."""
        return step % self.every_n_steps == 0 and step != self.last_measured and not self.found_nothing

    def keep_due(self, step: int) -> bool:
        """Whether the sites' inputs at ``step`` are still to be kept."""
        return step != self._kept_at and not self.found_nothing

    @property
    def last_whole(self) -> int | None:
        """`last_measured`, or the one before while a step is not over: a run that breaks there measures it again."""
        return self._last_whole if self._collecting else self.last_measured

    @property
    def kept(self) -> bool:
        """Whether inputs were kept since the sites were found; the same on every rank."""
        return self._kept_at is not None

    @property
    def found_nothing(self) -> bool:
        """Searched often enough, in vain."""
        return not self._known and not self._searching and self._searches >= _SEARCHES

    def begin(self, step: int, *, keep_calls: bool = False) -> None:
        """Attach for one forward pass. ``keep_calls``: the sites' inputs will be wanted (for a retrofit)."""
        self.discard()
        self._last_whole, self.last_measured, self._collecting = self.last_whole, step, True
        self._kept_at = step if keep_calls else self._kept_at
        self._searching = not self._known or (self._strangers and self._searches < _SEARCHES)
        self._searches += self._searching
        self._packs, self._strangers = [], False
        if self.broken is None:
            self._locally(lambda: self._attach(keep_calls))

    def end_forward(self) -> None:
        """Detach; after a search, settle the sites. Nothing happens where nothing is attached or due.

        Raises:
            QKWatchError: a layer glob matches no site, on every rank.
        """
        finished = self._detach()
        if finished is not None:
            for name, operation in finished.unseen.items():
                self._on_unseen(name, operation)
        if self._searching:
            self._searching = False
            self._settle(finished if isinstance(finished, Scout) else None)
        if isinstance(finished, Observer):
            self._strangers |= finished.strangers
        if finished is not None:
            self._packs = finished.packs

    def collect(self, step: int) -> tuple[list[Reading], list[Alert]]:
        """The readings of the pass that ended, one per site, reduced over ranks, and what the rules say.

        Raises:
            Broken: the monitor failed on another rank; on the rank where it did, what it failed with.
        """
        if not self._collecting:
            return [], []
        self.end_forward()
        self._collecting = False
        packs, self._packs = self._packs, []
        merged = self._locally(lambda: self._merged(packs)) or []
        if self.ranks.size > 1:
            merged = self._over_ranks(merged)
        readings = [r for r in readings_of(merged, step) if r.rows or r.excluded_rows] if merged else []
        if step == self._reported:
            return [], []  # measured again for the sake of its inputs only
        self._reported = step if readings else self._reported
        return readings, self.rules.update(step, readings)

    def discard(self) -> None:
        """Detach and forget the pass, after an exception."""
        self._detach()
        self._packs = []

    def drop_calls(self) -> None:
        """Let go of the inputs that sites keep for a retrofit."""
        for site in self._known:
            site.call = None

    def reset_sites(self) -> None:
        """The model has changed: find the sites anew at the next measured step."""
        self._known, self.sites, self._searches, self._kept_at = [], [], 0, None

    # -- attached or not ------------------------------------------------------------------------------------

    def _attach(self, keep_calls: bool) -> None:
        if self._searching:
            active: Scout | Observer = Scout(self.model, self._rows)
        else:
            active = Observer(self.sites, self._rows, on_fault=self._on_fault, keep_calls=keep_calls, known=self._known)
        # a compiled model runs eagerly in this step: hooks and modes do not reach into compiled code
        self._stance = torch.compiler.set_stance("force_eager")
        self._active = active
        active.__enter__()

    def _detach(self) -> Scout | Observer | None:
        active, self._active = self._active, None
        stance, self._stance = self._stance, None
        try:
            if active is not None:
                active.__exit__(None, None, None)
        finally:
            if stance is not None:
                stance.__exit__(None, None, None)
        return active

    def _locally(self, work: Callable[[], T]) -> T | None:
        """Work that only this rank does. With others around a fault waits until it can be told to all."""
        if self.ranks.size == 1:
            return work()
        try:
            return work()
        except Exception as fault:
            self.broken = self.broken or fault
            self.discard()
            return None

    # -- sites ----------------------------------------------------------------------------------------------

    def _settle(self, scout: Scout | None) -> None:
        """Agree with all ranks on the sites."""
        together = self._together(scout)
        found = self._locally(lambda: scout.sites(together)) or [] if scout is not None else []
        if scout is not None and scout.fault is not None:
            self._on_fault("", scout.fault)
        self._known = self._agree(found) if self.ranks.size > 1 else found
        self.empty = not self._known and (scout is None or scout.fault is None)
        self.sites = select(self._known, self._layers) if self._known else []

    def _together(self, scout: Scout | None) -> bool:
        """Whether all ranks are about to look at the same sites, so that weights that are sharded can be gathered."""
        if self.ranks.size == 1 or not shards(self.model):
            return True
        owners = self.ranks.gather_objects(None if scout is None else scout.owners)
        return all(part is not None and part == owners[0] for part in owners)

    def _agree(self, found: list[Site]) -> list[Site]:
        """Every rank's sites in one order; one that did not run here is known by another rank's description."""
        mine = {site.name: site for site in found}
        described = [(s.name, s.q_heads, s.k_heads, s.head_dim, s.layout, s.self_attention) for s in found]
        modules = named_modules(self.model)
        for part in self.ranks.gather_objects(described):
            for name, q_heads, k_heads, head_dim, layout, is_self in part:
                if name not in mine and name in modules:
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

    def _merged(self, packs: Sequence[tuple[Site, Packed]]) -> list[tuple[Site, Packed]]:
        """The calls of each site put together; sites that did not run are left out."""
        calls = {id(site): [packed for owner, packed in packs if owner is site] for site in self.sites}
        return [(site, merge(calls[id(site)])) for site in self.sites if calls[id(site)]]

    def _over_ranks(self, mine: list[tuple[Site, Packed]]) -> list[tuple[Site, Packed]]:
        """All sites over all ranks, in one collective; what does not fit here (two ranks took a site differently)
        counts as not run."""
        like = mine[0][1].values if mine else torch.zeros(0, dtype=torch.float64, device=_device(self.model))
        ran = {id(site): packed.values for site, packed in mine}
        parts = []
        for site in self.sites:
            values = ran.get(id(site))
            fits = values is not None and len(values) == site.layout.heads
            parts.append(values.to(like) if fits and values is not None else _nothing(site.layout.heads, like))
        flags = _nothing(1, like)  # one more row: what every rank should know of every other
        flags[0, 0], flags[0, 1] = float(self._strangers), float(self.broken is not None)
        gathered = self.ranks.gather(torch.cat([*parts, flags]))  # (ranks, all heads + 1, C)
        cut = len(MAXIMA)
        total = torch.cat([gathered[..., :cut].amax(0), gathered[..., cut:].sum(0)], -1)
        self._strangers = bool(total[-1, 0] > 0)
        if bool(total[-1, 1] > 0):
            self.told = True
            raise self.broken or Broken("the monitor failed on another rank")
        totals = total[:-1].split([len(part) for part in parts]) if parts else ()
        # whether a reading is exact travels in its "sampled" column
        return [(site, Packed(values, True)) for site, values in zip(self.sites, totals, strict=True)]


def _nothing(heads: int, like: torch.Tensor) -> torch.Tensor:
    """What a site that did not run adds to a reduction, (heads, C)."""
    values = like.new_zeros(heads, len(COLUMNS))
    values[:, : len(MAXIMA)] = -torch.inf
    return values


def _device(model: nn.Module) -> torch.device:
    parameter = next(model.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device
