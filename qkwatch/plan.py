"""A retrofit as plain data: which sites, which taps, which variant, which gains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from qkwatch.errors import QKWatchError
from qkwatch.layout import Channels
from qkwatch.reclass import own_class
from qkwatch.variants import Variant

VERSION = 1


@dataclass(frozen=True)
class TapPlan:
    """A projection by its name, with what is needed to recognise it, and its channels per head."""

    module: str
    kind: str
    weight: tuple[int, ...]
    channels: Channels

    @classmethod
    def of(cls, name: str, module: nn.Module, channels: Channels) -> TapPlan:
        return cls(name, kind_of(module), weight_shape(module), channels)

    def named(self, module: str) -> TapPlan:
        """The same tap under another name."""
        return replace(self, module=module)

    def mismatch(self, modules: Mapping[str, nn.Module]) -> str | None:
        """What in a model does not fit; None where all does."""
        module = modules.get(self.module)
        if module is None:
            return f"it has no module {self.module!r}"
        if kind_of(module) != self.kind:
            return f"{self.module!r} is a {kind_of(module)}, not a {self.kind}"
        if weight_shape(module) != self.weight:
            return f"{self.module!r} has a weight of shape {weight_shape(module)}, not {self.weight}"
        return None

    def to_dict(self) -> dict[str, Any]:
        return {
            "module": self.module,
            "kind": self.kind,
            "weight": list(self.weight),
            "channels": self.channels.to_dict(),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TapPlan:
        channels = Channels.from_dict(data["channels"])
        return cls(data["module"], data["kind"], tuple(data["weight"]), channels)


@dataclass(frozen=True)
class CorePlan:
    """A site that is normed at its fused softmax: its class, by which it is recognised, and the heads' axis."""

    kind: str
    axis: int

    def mismatch(self, name: str, site: nn.Module) -> str | None:
        """What does not fit; None where all does."""
        return None if kind_of(site) == self.kind else f"{name!r} is a {kind_of(site)}, not a {self.kind}"


def kind_of(module: nn.Module) -> str:
    """The name of a module's own class."""
    return own_class(module).__name__


def weight_shape(module: nn.Module) -> tuple[int, ...]:
    """The shape of a module's first parameter."""
    parameter = next(module.parameters(), None)
    return () if parameter is None else tuple(parameter.shape)


@dataclass(frozen=True)
class SitePlan:
    """One site, normed at its projections (``taps``) or where its fused softmax takes queries and keys (``core``).

    Both are None for `torch.nn.MultiheadAttention`, which has no projection modules.

    ``q_factor`` and ``k_factor`` are the constants that a norm whose gain replaces the softmax scale multiplies
    queries and keys with, so that the gain is in logit units; ``gains`` holds the starting values as nested lists.
    """

    site: str
    q_heads: int
    k_heads: int
    head_dim: int
    variant: Variant
    max_gain: float | None
    q_factor: float = 1.0
    k_factor: float = 1.0
    taps: tuple[TapPlan, TapPlan] | None = None
    core: CorePlan | None = None
    gains: dict[str, Any] = field(default_factory=dict)

    def moved(self, name: str) -> SitePlan:
        """The same plan for the same site in a model where it is called ``name``."""
        if name == self.site:
            return self
        old, new = self.site.split(".") if self.site else [], name.split(".") if name else []
        while old and new and old[-1] == new[-1]:
            old.pop()
            new.pop()

        def move(module: str) -> str:
            parts = module.split(".") if module else []
            return ".".join([*new, *parts[len(old) :]]) if parts[: len(old)] == old else module

        taps = self.taps and (
            self.taps[0].named(move(self.taps[0].module)),
            self.taps[1].named(move(self.taps[1].module)),
        )
        return replace(self, site=name, taps=taps)

    def to_dict(self, gains: bool = True) -> dict[str, Any]:
        """JSON-able; without the gains where they are stored beside it."""
        data: dict[str, Any] = {
            "version": VERSION,
            "site": self.site,
            "q_heads": self.q_heads,
            "k_heads": self.k_heads,
            "head_dim": self.head_dim,
            "variant": self.variant.to_dict(),
            "max_gain": self.max_gain,
            "q_factor": self.q_factor,
            "taps": None if self.taps is None else [tap.to_dict() for tap in self.taps],
        }
        if self.k_factor != 1.0:
            data["k_factor"] = self.k_factor
        if self.core is not None:
            data["core"] = {"kind": self.core.kind, "axis": self.core.axis}
        if gains:
            data["gains"] = self.gains
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SitePlan:
        """Raises `QKWatchError` where the data is of another version or not a plan."""
        try:
            if data["version"] != VERSION:
                raise QKWatchError(f"the plan is of version {data['version']!r}, this qkwatch reads {VERSION}")
            taps, core = data["taps"], data.get("core")
            return cls(
                site=data["site"],
                q_heads=data["q_heads"],
                k_heads=data["k_heads"],
                head_dim=data["head_dim"],
                variant=Variant.from_dict(data["variant"]),
                max_gain=data["max_gain"],
                q_factor=data["q_factor"],
                k_factor=data.get("k_factor", 1.0),
                taps=None if taps is None else (TapPlan.from_dict(taps[0]), TapPlan.from_dict(taps[1])),
                core=None if core is None else CorePlan(core["kind"], core["axis"]),
                gains=dict(data.get("gains", {})),
            )
        except (KeyError, TypeError, IndexError) as error:
            raise QKWatchError(f"not a retrofit plan: {type(error).__name__} {error}") from error


@dataclass(frozen=True)
class RetrofitPlan:
    """The sites of one retrofit; `to_dict` and `from_dict` are each other's inverse and JSON-able."""

    sites: tuple[SitePlan, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {"version": VERSION, "sites": [site.to_dict() for site in self.sites]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RetrofitPlan:
        if not isinstance(data, Mapping) or "sites" not in data:
            raise QKWatchError("not a retrofit plan: it has no 'sites'")
        return cls(tuple(SitePlan.from_dict(site) for site in data["sites"]))
