"""Take readings while a model runs: `watch` for plain loops, `Observer` for everything else."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from qkwatch.capture import CoreCapture
from qkwatch.core import Core
from qkwatch.errors import QKWatchError
from qkwatch.fastpath import fast_path_core
from qkwatch.measure import Rows, measure_at
from qkwatch.modules import ModuleStack
from qkwatch.options import check_rows
from qkwatch.probe import Call
from qkwatch.reading import Packed, Reading, reading_from
from qkwatch.scout import Scout
from qkwatch.sites import Site, select


class Observer:
    """While entered, measures each core of the given sites as it runs.

    Nothing is attached to the model: the hooks are PyTorch's global ones and the operations are seen by a
    dispatch mode, both gone on exit. Results stay on their device until `readings` moves all of them at once.

    Args:
        sites: what to measure.
        rows: "all", "auto" (exact where it is cheap beside the layer itself, otherwise a sample) or a number.
        on_fault: called with (site name, exception) when a measurement fails; the forward pass goes on.
        keep_calls: keep each site's first inputs (for a retrofit), in ``site.call``.
        known: sites that are not to be measured, but are no news either.
        root: the model; what runs outside of any module's forward is its own then, and what runs in modules that
            are none of its is no news.
    """

    def __init__(
        self,
        sites: Sequence[Site],
        rows: Rows = "auto",
        on_fault: Callable[[str, Exception], None] | None = None,
        keep_calls: bool = False,
        known: Sequence[Site] = (),
        root: nn.Module | None = None,
    ):
        self._sites = {id(site.module): site for site in sites}
        self._known = {id(site.module) for site in known} | set(self._sites)
        self._rows, self._on_fault, self._root = rows, on_fault, root
        self._stack = ModuleStack(self._left if keep_calls else None)
        self._capture = CoreCapture(
            self._saw,
            on_confirm=self._confirm,
            on_unseen=self._unseen,
            on_fault=self._fault,
            fast_path=self._fast_path,
        )
        self._kept: set[int] = set()
        self.packs: list[tuple[Site, Packed]] = []
        self.unseen: dict[str, str] = {}
        self.strangers = False  # a core ran in none of the known sites

    def __enter__(self) -> Observer:
        self._stack.__enter__()
        self._capture.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._capture.__exit__(*exc)
        self._stack.__exit__(*exc)

    def take_over(self, stack: ModuleStack, capture: CoreCapture) -> None:
        """Go on with a stack and a capture that are entered already, and whose owner exits them.

        (Leaving one dispatch mode for another half-way would pop whichever mode the user entered meanwhile.)
        """
        stack.on_exit = self._stack.on_exit
        capture.redirect(self._capture)
        self._stack, self._capture = stack, capture

    @property
    def ran(self) -> set[int]:
        """Identities of the modules that have run."""
        return self._stack.ran

    def _frames(self) -> list[nn.Module]:
        """The modules that are running, innermost first."""
        return [*reversed(self._stack.frames)] or ([] if self._root is None else [self._root])

    def _site(self) -> Site | None:
        return next((self._sites[id(m)] for m in self._frames() if id(m) in self._sites), None)

    def _saw(self, core: Core) -> object:
        site = self._site()
        if site is not None:
            self.packs.append((site, measure_at(site, core, self._rows)))
        elif not self.strangers and self._is_news():
            self.strangers = core.fused
            return self  # otherwise it has yet to prove to be attention
        return None

    def _is_news(self) -> bool:
        frames = self._frames()
        if any(id(m) in self._known for m in frames):
            return False
        own = None if self._root is None else {id(m) for m in self._root.modules()}
        return own is None or any(id(m) in own for m in frames)

    def _confirm(self, token: object) -> None:
        self.strangers |= token is self

    def _fast_path(self, op: Any, args: tuple[Any, ...]) -> None:
        core, chain, _ = fast_path_core(op, args, list(reversed(self._stack.frames)))
        site = self._sites.get(id(chain[0]))
        if site is not None:
            self.packs.append((site, measure_at(site, core, self._rows)))

    def _unseen(self, operation: str) -> None:
        site = self._site()
        if site is not None:
            self.unseen.setdefault(site.name, operation)

    def _fault(self, fault: Exception) -> None:
        if self._on_fault is None:
            raise fault
        site = self._site()
        self._on_fault(site.name if site else "", fault)

    def _left(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        site = self._sites.get(id(module))
        if site is not None and id(module) not in self._kept:
            self._kept.add(id(module))
            try:
                site.call = Call.of(args, kwargs)
            except Exception as fault:
                self._fault(fault)

    def readings(self, step: int | None = None) -> list[Reading]:
        """One `Reading` per core call, in one transfer from the device."""
        return readings_of(self.packs, step)


def readings_of(packs: Sequence[tuple[Site, Packed]], step: int | None = None) -> list[Reading]:
    """One `Reading` per core call, in one transfer from the device."""
    moved = to_cpu([packed for _, packed in packs])
    return [reading_from(packed, site.name, step) for (site, _), packed in zip(packs, moved, strict=True)]


def to_cpu(packs: Sequence[Packed]) -> list[Packed]:
    """Packed figures to the CPU: one transfer per device they are on, whatever their number."""
    values: dict[int, Tensor] = {}
    by_device: dict[torch.device, list[int]] = {}
    for i, packed in enumerate(packs):
        by_device.setdefault(packed.values.device, []).append(i)
    for members in by_device.values():
        joined = torch.cat([packs[i].values for i in members]).cpu()
        sizes = [len(packs[i].values) for i in members]
        values.update(zip(members, joined.split(sizes), strict=True))
    return [Packed(values[i], packed.exact) for i, packed in enumerate(packs)]


class Watcher:
    """What `watch` yields.

    Attributes:
        sites: the sites it watches; known after the first forward where none were given.
    """

    def __init__(self) -> None:
        self.sites: list[Site] = []
        self._first: list[Reading] = []
        self._live: Observer | None = None

    @property
    def readings(self) -> list[Reading]:
        """All readings so far, one per core call."""
        live = self._live.readings() if self._live is not None else []
        return [*self._first, *live]


@contextlib.contextmanager
def watch(
    model: nn.Module,
    sites: Sequence[Site] | None = None,
    layers: str | Sequence[str] | None = None,
    rows: Rows = "all",
) -> Iterator[Watcher]:
    """Measure every attention core that runs inside the block. Outputs and gradients are bit for bit the same.

    Args:
        model: any module; only its own forward passes are measured.
        sites: from `find_sites`; None: found during the first forward pass inside the block.
        layers: glob or globs over the sites' names; a leading "!" excludes.
        rows: "all", "auto" or a number of query rows per core.

    Raises:
        QKWatchError: sites of another model, a glob that matches no site, or rows that are none of these.

    Example:
        >>> model = nn.TransformerEncoderLayer(32, 4, batch_first=True)
        >>> with watch(model) as watcher:
        ...     _ = model(torch.randn(2, 7, 32))
        >>> watcher.readings[0].site, tuple(watcher.readings[0].max_logit.shape)
        ('self_attn', (4,))
    """
    check_rows("watch", rows)
    watcher = Watcher()
    if sites is not None:
        own = {id(module) for module in model.modules()}
        for site in sites:
            if id(site.module) not in own:
                raise QKWatchError(f"watch: {site.name!r} is no module of this model; call find_sites on this one")
        watcher.sites = select(sites, layers)
        with Observer(watcher.sites, rows, _warn_faults()) as watcher._live:
            yield watcher
        _warn_unseen(watcher._live.unseen)
        return
    with _FirstForward(model, layers, rows, watcher):
        yield watcher


class _FirstForward:
    """Scout during the model's first forward pass, observe from the second on."""

    def __init__(self, model: nn.Module, layers: str | Sequence[str] | None, rows: Rows, watcher: Watcher):
        self._layers, self._rows, self._watcher = layers, rows, watcher
        self._scout = Scout(model, rows, on_done=self._resolve)
        self._resolved, self._on_fault = False, _warn_faults()

    def __enter__(self) -> None:
        self._scout.__enter__()

    def _resolve(self) -> None:
        scout, watcher = self._scout, self._watcher
        self._resolved = scout.capture.paused = True
        if scout.fault is not None:
            self._on_fault("", scout.fault)
        try:
            found = scout.sites()
        except Exception as fault:  # we are in the model's own forward pass
            self._on_fault("", fault)
            return
        watcher.sites = select(found, self._layers)
        kept = {id(site) for site in watcher.sites}
        watcher._first = readings_of([(site, packed) for site, packed in scout.packs if id(site) in kept])
        _warn_unseen(scout.unseen)
        watcher._live = Observer(watcher.sites, self._rows, self._on_fault)
        watcher._live.take_over(scout.stack, scout.capture)

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        try:
            if not self._resolved and kind is None:
                self._resolve()  # only parts of the model ran
        finally:
            self._scout.__exit__(None, None, None)
        if self._watcher._live is not None:
            _warn_unseen(self._watcher._live.unseen)


def _warn_faults() -> Callable[[str, Exception], None]:
    """A fault of a measurement is one warning for each site; the model's forward pass goes on."""
    told: set[str] = set()

    def warn(site: str, fault: Exception) -> None:
        if site not in told:
            told.add(site)
            what = f"{site or 'the model'} could not be measured ({type(fault).__name__}: {fault})"
            warnings.warn(f"qkwatch: {what}", stacklevel=2)

    return warn


def _warn_unseen(unseen: dict[str, str]) -> None:
    for name, operation in unseen.items():
        warnings.warn(
            f"qkwatch: {name or 'the model'} runs {operation}, which cannot be looked into: not measured",
            stacklevel=3,
        )
