"""A run goes on from a checkpoint with options that may be others: what becomes of what was decided before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qkwatch.progress import Progress
from qkwatch.variants import CLIP, Variant

_OPTIONS = ("retrofit", "cap", "max_gain", "ramp_steps", "calibrate", "budget", "budget_steps")


def options_of(watch: Any) -> dict[str, Any]:
    """What a retrofit depends on, as primitives."""
    variant, layers = watch.variant, watch.layers
    return {
        **{name: getattr(watch, name) for name in _OPTIONS},
        "variant": variant.to_dict() if isinstance(variant, Variant) else variant,
        "layers": [layers] if isinstance(layers, str) else layers and list(layers),
    }


def reconsider(run: Progress, asked: dict[str, Any], patched: bool) -> str | None:
    """Decide anew where the options ask for something else; returns what is done, in words, or None."""
    before, run.options = run.options, asked
    off, variant = asked["retrofit"] == "off", _name(asked)
    if run.pending is not None and (off or (asked["retrofit"] == "auto" and before.get("retrofit") == "now")):
        run.pending = None
        return f"a retrofit was due in the checkpoint; it is not made, as retrofit={asked['retrofit']!r} says"
    if run.clipping and (off or variant != CLIP):
        run.reopen()
        return f"QK-clip, which was in force in the checkpoint, ends here: {_asked(asked)}"
    if run.outcome == "refused":
        run.reopen()
        return None if off else f"no site could be patched before the checkpoint: decided anew, {_asked(asked)}"
    if run.outcome == "taken back" and not off:
        if before == asked:
            return "the retrofit was taken back over its budget before the checkpoint; it is not made again"
        run.reopen()
        return f"the retrofit was taken back before the checkpoint, under other options: decided anew, {_asked(asked)}"
    if patched and not off and before and _name(before) != variant:
        return (
            f"the model stays patched to {_name(before)!r}, as the checkpoint has it; {variant!r} changes none of that"
        )
    return None


def _name(options: Mapping[str, Any]) -> str:
    variant = options["variant"]
    return str(variant["name"] if isinstance(variant, Mapping) else variant)


def _asked(options: Mapping[str, Any]) -> str:
    return f"retrofit={options['retrofit']!r}, variant={_name(options)!r}"
