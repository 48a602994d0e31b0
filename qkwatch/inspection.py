"""`qkwatch inspect`: what a checkpoint says of qkwatch: patches and their gains, optimizer groups, alerts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import get_console
from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from torch import Tensor

from qkwatch.alerts import Level
from qkwatch.names import abbreviate, short_sites, site_label
from qkwatch.norms import CHILD, QKNorm, site_of
from qkwatch.optim import GROUP_KEY
from qkwatch.plan import SitePlan
from qkwatch.report import STYLES
from qkwatch.stored import load, stored_keys, weights_of
from qkwatch.variants import Variant

_ALERTS_SHOWN = 40


@dataclass(frozen=True)
class Patch:
    """One patched site in a state_dict. ``q``, ``k``: gains as they multiply, under the ceiling; None without."""

    site: str
    plan: SitePlan
    q: Tensor | None
    k: Tensor | None

    @property
    def ceiling(self) -> float | None:
        """The smaller of the user's and the variant's own."""
        return min((c for c in (self.plan.max_gain, self.plan.variant.ceiling) if c is not None), default=None)


def patches(state_dict: Mapping[str, Any]) -> list[Patch]:
    """The patches that a state_dict's own keys tell of. Raises `QKWatchError` for a damaged plan."""
    found = []
    for key, value in state_dict.items():
        if not f".{key}".endswith(f".{CHILD}.plan") or not isinstance(value, Tensor):
            continue
        plan, prefix = SitePlan.from_dict(QKNorm.decode_plan(value)), key.removesuffix("plan")
        gains = [_effective(plan, state_dict.get(f"{prefix}{side}.gain")) for side in ("q", "k")]
        found.append(Patch(site_of(key), plan, *gains))
    return found


def _effective(plan: SitePlan, stored: Tensor | None) -> Tensor | None:
    if stored is None:
        return None
    variant: Variant = plan.variant
    gain = stored.float().exp() if variant.scale == "exp" else stored.float() + variant.offset
    limit = Patch("", plan, None, None).ceiling
    return gain if limit is None else gain.clamp(-limit, limit)


# -- in words -----------------------------------------------------------------------------------------------


def print_inspection(path: str | os.PathLike[str]) -> None:
    """Print what is in a checkpoint: a file of torch's, safetensors, or a folder of either.

    Raises:
        QKWatchError: as `load`, `stored_keys` and `weights_of`.
    """
    whole = not (Path(path).is_dir() or Path(path).suffix == ".safetensors")
    checkpoint = load(path) if whole else stored_keys(path)
    get_console().print(render(checkpoint))


def render(checkpoint: Mapping[str, Any]) -> RenderableType:
    """A Lightning checkpoint or a bare state_dict, in words."""
    state = weights_of(checkpoint)
    lightning = state is checkpoint.get("state_dict")
    found = patches(state)
    weights = sum(value is None or isinstance(value, Tensor) for value in state.values())  # None: stored, not read
    head = f"{'Lightning checkpoint' if lightning else 'state_dict'} of {weights:,} tensors"
    if "global_step" in checkpoint:
        head += f", step {checkpoint['global_step']:,}"
    parts: list[RenderableType] = [Text(head, style="bold")]
    if found:
        sites = f"{len(found)} site{'' if len(found) == 1 else 's'} patched"
        parts += [Text(f"{sites}: {', '.join(abbreviate([site_label(p.site) for p in found]))}")]
        parts.append(patch_table(found))
    else:
        parts.append(Text("no qkwatch patch"))
    optimizers = checkpoint.get("optimizer_states") if lightning else None
    parts += [_group_line(i, j, g) for i, o in enumerate(optimizers or ()) for j, g in enumerate(o["param_groups"])]
    parts += _alerts(checkpoint)
    return Group(*parts)


def patch_table(found: Sequence[Patch]) -> Table:
    """A row per patched site: gains as min / mean / max."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for name in ("site", "variant", "heads\nq / k", "gain q\nmin / mean / max", "gain k\nmin / mean / max", "ceiling"):
        table.add_column(name, justify="left" if name in ("site", "variant") else "right", no_wrap=True)
    names, note = short_sites([p.site for p in found])
    for name, p in zip(names, found, strict=True):
        heads = f"{p.plan.q_heads} / {p.plan.k_heads}"
        ceiling = "none" if p.ceiling is None else f"{p.ceiling:g}"
        table.add_row(Text(name), p.plan.variant.name, heads, _spread(p.q), _spread(p.k), ceiling)
    table.caption = Text(note) if note else None
    return table


def _spread(gain: Tensor | None) -> str:
    if gain is None or not gain.numel():
        return "none"
    return " / ".join(f"{float(value):.3g}" for value in (gain.min(), gain.mean(), gain.max()))


def _group_line(optimizer: int, index: int, group: Mapping[str, Any]) -> Text:
    source = group.get(GROUP_KEY)
    ours = f", qkwatch's gains beside group {source}" if source is not None else ""
    figures = ", ".join(f"{key} {group[key]:.3g}" for key in ("lr", "weight_decay") if _is_number(group.get(key)))
    count = len(group["params"])
    held = f"{count} parameter{'' if count == 1 else 's'}"
    return Text(f"optimizer {optimizer}, group {index}: {held}, {figures}{ours}")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)


def _alerts(checkpoint: Mapping[str, Any]) -> list[RenderableType]:
    """The alert history in the callback's own state; checkpoints of weights only hold none."""
    callbacks = checkpoint.get("callbacks")
    state = callbacks.get("QKWatch") if isinstance(callbacks, Mapping) else None
    if not state:
        return []
    alerts, lines = state.get("run", {}).get("alerts", []), list[RenderableType]()
    if not alerts:
        return [Text("QKWatch was watching: no alerts so far")]
    for level, step, _, _, _, message, *_ in alerts[:_ALERTS_SHOWN]:
        known = Level(level)
        lines.append(Text(f"step {step:,} ").append(known.name, style=STYLES[known]).append(f" {message}"))
    if len(alerts) > _ALERTS_SHOWN:
        lines.append(Text(f"and {len(alerts) - _ALERTS_SHOWN} more alerts"))
    return lines
