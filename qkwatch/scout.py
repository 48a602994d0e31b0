"""Find every softmax-attention site of a model, and what would be needed to patch it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from qkwatch.capture import CoreCapture
from qkwatch.core import Core
from qkwatch.coretaps import installed_core_tap
from qkwatch.coretrace import find_core_tap
from qkwatch.errors import QKWatchError
from qkwatch.fastpath import fast_path_core
from qkwatch.layout import HeadLayout, default_layout
from qkwatch.measure import Rows, measure, measure_at
from qkwatch.modules import ModuleStack, named_modules, unwrap
from qkwatch.norms import CHILD
from qkwatch.probe import Call, Refusal, replay
from qkwatch.reading import Packed, gather_heads, merge, reading_from
from qkwatch.sharding import unsharded
from qkwatch.sites import Site
from qkwatch.trace import find_taps

OUTSIDE = "it runs outside of any module's forward (in training_step itself, or in a method it calls)"
_WIDEN = 3  # how many ancestors with weights may be tried for the projections that a core's own module lacks


@dataclass(eq=False)
class _Sighting:
    """One core that ran: whose forward it ran in (innermost module first), and its figures."""

    chain: list[nn.Module]
    head_dim: int
    layout: HeadLayout  # assumed while measuring
    packed: Packed | None
    confirmed: bool
    call: Call | None = None  # known from the operation itself (fast path)
    site: Site | None = None


class Scout:
    """While entered, collects the cores of a model's forward pass; `sites` then finds out whose they are.

    ``outside``: what runs outside of any module's forward (in a training step) is the model's too.
    """

    def __init__(
        self,
        model: nn.Module,
        rows: Rows = "all",
        on_done: Callable[[], None] | None = None,
        outside: bool = False,
    ):
        self._root, self._on_done, self._outside = unwrap(model), on_done, outside
        self._names = {id(m): name for name, m in reversed(named_modules(model).items())}
        self._rows = rows
        self.stack = ModuleStack(self._left)
        self._sightings: list[_Sighting] = []
        self._calls: dict[int, Call] = {}
        self._wanted: set[int] = set()
        self.capture = CoreCapture(
            self._saw,
            on_confirm=_confirm,
            on_unseen=self._unseen,
            on_fault=self._fail,
            fast_path=self._fast_path,
        )
        self.unseen: dict[str, str] = {}
        self.packs: list[tuple[Site, Packed]] = []
        self.fault: Exception | None = None

    def __enter__(self) -> Scout:
        self.stack.__enter__()
        self.capture.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self.capture.__exit__(*exc)
        self.stack.__exit__(*exc)

    def _fail(self, fault: Exception) -> None:
        self.fault = self.fault or fault

    def _chain(self) -> list[nn.Module]:
        if self._outside and not self.stack.frames:
            return [self._root]  # outside of any module's forward
        return [m for m in reversed(self.stack.frames) if id(m) in self._names]

    def _unseen(self, operation: str) -> None:
        chain = self._chain()
        if chain:
            self.unseen.setdefault(self._names[id(chain[0])], operation)

    def _saw(self, core: Core) -> _Sighting | None:
        chain = self._chain()
        return self._add(core, chain, None) if chain else None

    def _add(self, core: Core, chain: list[nn.Module], call: Call | None) -> _Sighting:
        shape = (core.q if core.fused else core.rows()).shape
        layout = default_layout(shape) if core.apart else HeadLayout(1, "single")
        if (
            len(shape) != 4 and core.apart
        ):  # the heads are not known yet: every leading index by itself, put together later
            layout = HeadLayout(shape[:-2].numel(), "minor")
        if isinstance(owner := _owner(chain), nn.MultiheadAttention) and core.apart:
            layout = HeadLayout(owner.num_heads, "minor")
        try:
            packed: Packed | None = measure(core, layout, self._rows, self_attention=True)
        except (RuntimeError, QKWatchError):
            packed = None  # this layout does not fit; it is measured again once the right one is known
        sighting = _Sighting(chain, core.queries().shape[-1], layout, packed, core.fused, call)
        self._sightings.append(sighting)
        self._wanted |= {id(m) for m in chain}
        return sighting

    def _fast_path(self, op: Any, args: tuple[Any, ...]) -> None:
        core, chain, call = fast_path_core(op, args, self._chain())
        self._add(core, chain, call)

    def _left(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.capture.paused:
            return
        if id(module) in self._wanted and id(module) not in self._calls:
            try:
                self._calls[id(module)] = Call.of(args, kwargs)
            except Exception as fault:
                self._fail(fault)
        if module is self._root and self._on_done is not None:
            self._on_done()

    def sites(self, together: bool = True) -> list[Site]:
        """Find the taps (small autograd probes on the inputs just seen) and describe each site.

        Afterwards ``packs`` holds the figures of each core that ran, with its site, in running order. Of a model
        that is sharded the weights are gathered, site by site, if all ranks do this ``together``.
        """
        sites: dict[int, Site] = {}
        faults: list[Exception] = []
        for group in self._groups():
            widest = [m for m in group[0].chain if _has_weights(m)][:_WIDEN] or group[0].chain[:1]
            with unsharded(self._root, widest[-1]) if together else contextlib.nullcontext():
                try:
                    self._describe(group, sites)
                except Exception as fault:  # not at once: other ranks may be waiting at the next site
                    faults.append(fault)
        if faults:
            raise faults[0]
        seen = [s for s in self._sightings if s.site is not None]
        self.packs = [(s.site, s.packed) for s in seen if s.site is not None and s.packed is not None]
        for site in sites.values():
            mine = [packed for owner, packed in self.packs if owner is site]
            site.reading = reading_from(merge(mine), site.name) if mine else None
        return list(sites.values())

    @property
    def ran(self) -> set[int]:
        """Identities of the modules that have run."""
        return self.stack.ran

    @property
    def owners(self) -> list[str]:
        """Whose cores ran, in the order in which `sites` will look at them."""
        return [self._names[id(_owner(group[0].chain))] for group in self._groups()]

    def _groups(self) -> list[list[_Sighting]]:
        groups: dict[int, list[_Sighting]] = {}
        for sighting in self._sightings:
            if sighting.confirmed:
                groups.setdefault(id(_owner(sighting.chain)), []).append(sighting)
        return list(groups.values())

    def _describe(self, group: list[_Sighting], sites: dict[int, Site]) -> None:
        site = self._resolve(group)
        site = sites.setdefault(id(site.module), site)
        for sighting, packed in zip(group, self._packs_of(site, group), strict=True):
            sighting.site, sighting.packed = site, packed

    def _resolve(self, group: list[_Sighting]) -> Site:
        first = group[0]
        owner = _owner(first.chain)
        call = first.call or self._calls.get(id(owner))
        if isinstance(owner, nn.MultiheadAttention):
            return self._site_of_mha(owner, call)
        if installed_core_tap(owner) is not None and (site := self._site_at_core(owner)) is not None:
            return site
        refusal: Refusal | None = None
        for module in [m for m in first.chain if _has_weights(m)][:_WIDEN]:
            call = self._calls.get(id(module))
            if call is None:
                break
            try:
                taps = find_taps(module, call)
            except Refusal as found:
                if refusal is None or not found.widen:
                    refusal = found  # what an ancestor lacks says more than that the projections are not here
                if not found.widen:
                    break
                continue
            normed, reason = taps.q.normed and taps.k.normed, None
            if taps.loose and not normed and (at_core := self._site_at_core(owner)) is not None:
                return at_core  # there nothing stays unbounded
            if normed:
                reason = "its queries and keys are normed already"
            elif taps.q.normed or taps.k.normed:
                reason = f"its {'queries' if taps.q.normed else 'keys'} are normed already, the others are not"
            return Site(
                self._names[id(module)],
                taps.layout.heads,
                taps.k.channels.heads,
                first.head_dim,
                normed,
                reason is None,
                reason,
                module=module,
                layout=taps.layout,
                taps=(taps.q, taps.k),
                loose=taps.loose,
                call=call,
                self_attention=taps.self_attention,
            )
        at_core = self._site_at_core(owner) if refusal is None or not refusal.normed else None
        if at_core is not None:
            return at_core
        reason = refusal.reason if refusal else self._without_inputs(owner)
        if refusal is not None and refusal.normed:
            reason = "its queries and keys are normed already"
        layout = first.layout if first.layout.kind == "axis" else HeadLayout(1, "single")
        return Site(
            self._names[id(owner)],
            layout.heads,
            layout.heads,
            first.head_dim,
            normed=refusal is not None and refusal.normed,
            reason=reason,
            module=owner,
            layout=layout,
            call=self._calls.get(id(owner)),
        )

    def _without_inputs(self, owner: nn.Module) -> str:
        outside = self._outside and owner is self._root and id(owner) not in self._calls
        return OUTSIDE if outside else "the inputs of its forward are not known"

    def _site_at_core(self, owner: nn.Module) -> Site | None:
        """A site that is normed where its fused softmax takes queries and keys, or could be."""
        call, tap = self._calls.get(id(owner)), installed_core_tap(owner)
        normed = tap is not None
        if tap is None and call is not None:
            with contextlib.suppress(Refusal):  # the reason why its projections cannot be normed says more
                tap = find_core_tap(owner, call)
        if tap is None:
            return None
        return Site(
            self._names[id(owner)],
            tap.layout.heads,
            tap.k_heads,
            tap.head_dim,
            normed,
            not normed,
            "its queries and keys are normed already" if normed else None,
            module=owner,
            layout=tap.layout,
            core_tap=tap,
            call=call,
            self_attention=tap.self_attention,
        )

    def _site_of_mha(self, mha: nn.MultiheadAttention, call: Call | None) -> Site:
        layout = HeadLayout(mha.num_heads, "minor")
        stock = type(mha).forward is nn.MultiheadAttention.forward
        normed = CHILD in mha._modules
        reason = "its queries and keys are normed already" if normed else None
        if not stock and not normed:
            reason = f"{type(mha).__name__} overrides the forward of nn.MultiheadAttention"
        is_self = call is None or len(call.args) < 2 or call.args[0] is call.args[1]
        return Site(
            self._names[id(mha)],
            mha.num_heads,
            mha.num_heads,
            mha.head_dim,
            normed,
            reason is None,
            reason,
            module=mha,
            layout=layout,
            call=call,
            self_attention=is_self,
        )

    def _packs_of(self, site: Site, group: list[_Sighting]) -> list[Packed | None]:
        """The figures of the forward just seen; taken anew where they rest on an assumption that proved wrong."""
        packs = [_put_together(s, site.layout) for s in group]
        odd = any(pack is None or len(pack.values) != site.layout.heads for pack in packs)
        if (odd or not site.self_attention) and site.call is not None:
            again: list[Packed | None] = []
            with contextlib.suppress(Exception):  # a forward that cannot be run again is told of by its refusal
                replay(site.module, site.call, on_core=lambda core: again.append(measure_at(site, core, self._rows)))
            if len(again) == len(packs):
                return again
        return [pack if pack is not None and len(pack.values) == site.layout.heads else None for pack in packs]


def _put_together(sighting: _Sighting, layout: HeadLayout) -> Packed | None:
    """Figures that were taken under one assumed layout, under the one that was found."""
    packed, assumed = sighting.packed, sighting.layout
    if packed is None or assumed == layout or (assumed.kind == "minor" and assumed.heads == layout.heads):
        return packed
    numbers = torch.arange(assumed.heads, device=packed.values.device)
    if layout.kind == "single":
        return gather_heads(packed, torch.zeros_like(numbers), 1)
    if assumed.kind != "minor":
        return None
    if layout.kind == "minor":
        return gather_heads(packed, numbers % layout.heads, layout.heads)
    if layout.kind == "major":
        return gather_heads(packed, numbers // (assumed.heads // layout.heads), layout.heads)
    return None


def _confirm(token: object) -> None:
    if isinstance(token, _Sighting):
        token.confirmed = True


def _has_weights(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _owner(chain: list[nn.Module]) -> nn.Module:
    """The innermost module of a chain that has weights (a core may sit in a helper that has none)."""
    return next((m for m in chain if _has_weights(m)), chain[0])
