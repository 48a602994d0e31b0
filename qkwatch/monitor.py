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

from qkwatch.agreement import agree
from qkwatch.alerts import Alert, Thresholds
from qkwatch.lookout import Lookout, unseen_parts
from qkwatch.measure import Rows
from qkwatch.modules import unwrap
from qkwatch.observe import Observer, readings_of
from qkwatch.pooling import pool
from qkwatch.ranks import Broken, Ranks
from qkwatch.reading import Packed, Reading, merge
from qkwatch.rules import Rules
from qkwatch.scout import Scout
from qkwatch.sharding import shards
from qkwatch.sites import Site, choose, matches, no_match, unmatched

_AT_ONCE = 3  # searches, for what there is reason to look for, before they become rare
_UNREAD = 4  # measured steps without a reading of a site, before the next is taken off the cadence
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
        waiting: patterns of `layers` that match no site yet, but parts of the model that have not run.
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
        self.waiting: list[str] = []
        self._unmatched: list[str] | None = None  # patterns that never matched a site
        self._layers, self._rows = layers, rows
        self._on_fault, self._on_unseen = on_fault, on_unseen
        self._known: list[Site] = []  # also those that `layers` leaves out
        self._active: Scout | Observer | None = None
        self._stance: Any = None
        self._searching = False  # sites are to be settled when the forward pass ends
        self._collecting = False  # figures are to be collected when the step ends
        self._packs: list[tuple[Site, Packed]] = []
        self._ran: set[int] = set()  # modules, while sites were looked for
        self._strangers = False  # attention ran in none of the known sites
        self._unseen = False  # parts of the model have not run yet
        self._unread: dict[str, int] = {}  # measured steps since a site was read
        self._lookouts()
        self._kept_at: int | None = None
        self._reported: int | None = None

    # -- the three calls of a step --------------------------------------------------------------------------

    def due(self, step: int) -> bool:
        """Whether ``step`` is to be measured, and was not yet (gradient accumulation).

        Off the cadence only where there is reason to think that something runs which the cadence misses.
        """
        if step == self.last_measured:
            return False
        on_cadence = step % self.every_n_steps == 0
        if not self._known:
            return self._missing.due(step) if self._missing.at_a_loss else on_cadence
        return on_cadence or self._must_search(step) or (self._starving and self._hunger.due(step))

    def keep_due(self, step: int) -> bool:
        """Whether the sites' inputs at ``step`` are still to be kept."""
        return step != self._kept_at and (bool(self._known) or self._missing.due(step))

    def _lookouts(self) -> None:
        self._missing = Lookout(self.every_n_steps, _AT_ONCE)  # sites that there should be
        self._hidden = Lookout(self.every_n_steps)  # sites that there may be in parts that have not run
        self._hunger = Lookout(_UNREAD * self.every_n_steps)  # sites that the cadence misses

    def _must_search(self, step: int) -> bool:
        if not self._known:
            return True
        return (self._strangers and self._missing.due(step)) or (self._unseen and self._hidden.due(step))

    @property
    def _starving(self) -> bool:
        return any(count >= _UNREAD for count in self._unread.values())

    @property
    def last_whole(self) -> int | None:
        """`last_measured`, or the one before while a step is not over: a run that breaks there measures it again."""
        return self._last_whole if self._collecting else self.last_measured

    @property
    def kept(self) -> bool:
        """Whether inputs were kept since the sites were found; the same on every rank."""
        return self._kept_at is not None

    def begin(self, step: int, *, keep_calls: bool = False) -> None:
        """Attach for one forward pass. ``keep_calls``: the sites' inputs will be wanted (for a retrofit)."""
        self.discard()
        self._last_whole, self.last_measured, self._collecting = self.last_whole, step, True
        self._kept_at = step if keep_calls else self._kept_at
        self._searching = self._must_search(step)
        self._packs = []
        if self.broken is None:
            self._locally(lambda: self._attach(keep_calls))

    def end_forward(self) -> None:
        """Detach; after a search, settle the sites. Nothing happens where nothing is attached or due.

        Raises:
            QKWatchError: a layer glob matches no site, on every rank, and nothing that has yet to run.
        """
        finished = self._detach()
        if finished is not None:
            self._ran |= finished.ran
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
        self._note_read(step, {reading.site for reading in readings})
        if step == self._reported:
            return [], []  # measured again for the sake of its inputs only
        self._reported = step if readings else self._reported
        return readings, self.rules.update(step, readings)

    def discard(self) -> None:
        """Detach and forget the pass, after an exception."""
        self._detach()
        self._packs = []

    @property
    def known(self) -> list[str]:
        """Names of the sites that are watched and of those that `layers` leaves out."""
        return [site.name for site in self._known]

    def ready(self) -> list[Site]:
        """The sites that a retrofit can deal with now; those that it could patch have to have run meanwhile."""
        return [site for site in self.sites if site.call is not None or not site.retrofittable]

    def drop_calls(self) -> None:
        """Let go of the inputs that sites keep for a retrofit."""
        for site in self._known:
            site.call = None

    def reset_sites(self) -> None:
        """The model has changed: find the sites anew at the next measured step."""
        self._known, self.sites, self._kept_at = [], [], None
        self._ran, self._strangers, self._unread = set(), False, {}
        self._lookouts()

    # -- attached or not ------------------------------------------------------------------------------------

    def _attach(self, keep_calls: bool) -> None:
        if self._searching:
            active: Scout | Observer = Scout(self.model, self._rows, outside=True)
        else:
            active = Observer(
                self.sites,
                self._rows,
                on_fault=self._on_fault,
                keep_calls=keep_calls,
                known=self._known,
                root=unwrap(self.model),
            )
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
        """Agree with all ranks on the sites: those that were found, and those known before."""
        together = self._together(scout)
        found = self._locally(lambda: scout.sites(together)) or [] if scout is not None else []
        if scout is not None and scout.fault is not None:
            self._on_fault("", scout.fault)
        before = {site.name for site in self._known}
        # a core that was known by the module it ran in may by now be known by one that holds its projections
        gone = set() if scout is None else set(scout.owners) - {site.name for site in found}
        parts = unseen_parts(self.model, self._ran)
        self._known, self._unseen = agree(self.model, found, self._known, gone, bool(parts), self.ranks)
        news = any(site.name not in before for site in self._known)
        if self._strangers or not before:
            self._missing.looked(self.last_measured or 0, news)
        self._hidden.looked(self.last_measured or 0, news)
        self._strangers &= not news
        self.empty = not self._known and (scout is None or scout.fault is None)
        self.sites = choose(self._known, self._layers)
        if self._known:
            self._check_layers(parts)

    def _check_layers(self, parts: Sequence[str]) -> None:
        """A pattern that matches no site is a mistake, unless what it speaks of has yet to run somewhere.

        That is for the first search to say: a run is not stopped later on.
        """
        missing = unmatched(self._known, self._layers)
        first, self._unmatched = self._unmatched is None, missing if self._unmatched is None else self._unmatched
        self.waiting = self._unmatched = [pattern for pattern in missing if pattern in self._unmatched]
        if not self.waiting or not first:
            return
        hopeless = [pattern for pattern in self.waiting if not matches(parts, pattern)]
        told = self.ranks.gather_objects(hopeless)
        for pattern in hopeless:
            if all(pattern in part for part in told):
                raise no_match(pattern, self._known)

    def _together(self, scout: Scout | None) -> bool:
        """Whether all ranks are about to look at the same sites, so that weights that are sharded can be gathered."""
        if self.ranks.size == 1 or not shards(self.model):
            return True
        owners = self.ranks.gather_objects(None if scout is None else scout.owners)
        return all(part is not None and part == owners[0] for part in owners)

    # -- readings -------------------------------------------------------------------------------------------

    def _note_read(self, step: int, read: set[str]) -> None:
        """Which sites go unread; where the cadence misses one, a step off it may have met it."""
        if self._starving and self._hunger.due(step):
            self._hunger.looked(step, any(self._unread.get(name, 0) >= _UNREAD for name in read))
        self._unread = {s.name: 0 if s.name in read else self._unread.get(s.name, 0) + 1 for s in self.sites}

    def _merged(self, packs: Sequence[tuple[Site, Packed]]) -> list[tuple[Site, Packed]]:
        """The calls of each site put together; sites that did not run are left out."""
        calls = {id(site): [packed for owner, packed in packs if owner is site] for site in self.sites}
        return [(site, merge(calls[id(site)])) for site in self.sites if calls[id(site)]]

    def _over_ranks(self, mine: list[tuple[Site, Packed]]) -> list[tuple[Site, Packed]]:
        """All sites over all ranks, and what every rank should know of every other."""
        parameter = next(self.model.parameters(), None)
        device = torch.device("cpu") if parameter is None else parameter.device
        merged, flags = pool(self.sites, mine, (self._strangers, self.broken is not None), self.ranks, device)
        self._strangers = flags[0]
        if flags[1]:
            self.told = True
            raise self.broken or Broken("the monitor failed on another rank")
        return merged
