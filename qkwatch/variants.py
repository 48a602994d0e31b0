"""The QK-norm variants by the system that uses them, and gains that keep a trained layer's function.

Plain data and arithmetic; `norms.py` makes modules of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

import torch
from torch import Tensor

from qkwatch.errors import QKWatchError, unknown

CHOICES: dict[str, tuple[object, ...]] = {
    "norm": ("l2", "rms", "layer"),
    "axis": ("head", "full"),
    "gain": ("none", "scalar", "per_head", "per_channel", "per_head_channel", "full_channel"),
    "offset": (0, 1),
    "bias": (False, True),
    "cast": ("norm_fp32_then_cast", "gain_in_fp32"),
    "scale": ("keep", "replace", "exp"),
    "side": ("both", "q"),
}
CLIP = "qkclip"
"""Named where a variant is, but no norm: it shrinks weights (`qkwatch.clip`)."""
Calibrate = bool | Literal["raised", "needed"]
"""How gains start: as measured; likewise, but at least as the variant's system starts them ("raised"); as that starts
them (False); likewise, but measured where that could pass the cap ("needed")."""
CALIBRATE: tuple[Calibrate, ...] = (True, "raised", False, "needed")
GAIN_FLOOR = 1e-3
"""The smallest calibrated gain: a dead head starts small, and can still learn."""


@dataclass(frozen=True)
class Variant:
    """One kind of QK-norm, as orthogonal choices. Names of the axes: H heads, D channels of a head.

    norm    "l2" (unit length), "rms" (unit mean square), "layer" (mean 0, variance 1)
    axis    "head" (the D channels of each head) or "full" (all H·D channels at once, as OLMo 2)
    gain    "none", "scalar" [1], "per_head" [H], "per_channel" [D], "per_head_channel" [H, D],
            "full_channel" [H·D]
    offset  1: the gain is stored as its distance from 1 (Gemma)
    bias    a learned bias of the gain's shape is added
    eps     added to the mean square or variance; for "l2" the shortest length that is divided by
    cast    for half-precision inputs: the statistics are always fp32; the downcast comes before the gain
            ("norm_fp32_then_cast", Qwen3) or after it ("gain_in_fp32", Gemma)
    scale   "keep" the softmax scale; "replace" it by the gain, which is then in logit units; "exp": the
            same, and the gain is stored as its logarithm (SwinV2)
    side    "both" q and k carry a gain, or "q" only
    start   stored gain of a layer that is not calibrated; None: log2(L² − L), L the sequence length (Henry)
    ceiling the system's own bound on the effective gain, or None

    Raises QKWatchError for an unknown choice or a combination that has no meaning.

    >>> Variant("mine", norm="rms", gain="per_head").gain_shape(heads=8, head_dim=64)
    (8,)
    """

    name: str
    norm: str = "rms"
    axis: str = "head"
    gain: str = "per_channel"
    offset: int = 0
    bias: bool = False
    eps: float = 1e-6
    cast: str = "gain_in_fp32"
    scale: str = "keep"
    side: str = "both"
    start: float | None = 1.0
    ceiling: float | None = None
    source: str = ""

    def __post_init__(self) -> None:
        for field, known in CHOICES.items():
            if getattr(self, field) not in known:
                raise unknown(f"{field} of variant {self.name!r}", getattr(self, field), known)
        one_per_head = self.gain in ("scalar", "per_head")
        channels = self.gain in ("per_channel", "per_head_channel", "full_channel")
        wrong = {
            "eps must be positive and finite": not (math.isfinite(self.eps) and self.eps > 0),
            "ceiling must be positive": self.ceiling is not None and not self.ceiling > 0,
            "start must be finite": self.start is not None and not math.isfinite(self.start),
            "axis 'full' takes gain 'none', 'scalar' or 'full_channel'": self.axis == "full"
            and self.gain not in ("none", "scalar", "full_channel"),
            "gain 'full_channel' needs axis 'full'": self.axis == "head" and self.gain == "full_channel",
            "bias needs a gain with channels": self.bias and not channels,
            "offset needs a gain": bool(self.offset) and self.gain == "none",
            "a gain in logit units needs norm 'l2', axis 'head', side 'q', gain 'scalar' or 'per_head'": (
                self.scale != "keep"
                and ((self.norm, self.axis, self.side, self.offset) != ("l2", "head", "q", 0) or not one_per_head)
            ),
        }
        for what, bad in wrong.items():
            if bad:
                raise QKWatchError(f"variant {self.name!r}: {what}; got {self}")

    def gain_shape(self, heads: int, head_dim: int) -> tuple[int, ...] | None:
        """Shape of the stored gain of one side, None for "none"."""
        shapes: dict[str, tuple[int, ...] | None] = {
            "none": None,
            "scalar": (1,),
            "per_head": (heads,),
            "per_channel": (head_dim,),
            "per_head_channel": (heads, head_dim),
            "full_channel": (heads * head_dim,),
        }
        return shapes[self.gain]

    def start_value(self, seq_len: int = 512) -> float:
        """Stored gain without calibration; `seq_len` matters for Henry et al. only (L, about the longest).

        >>> round(get_variant("henry").start_value(seq_len=64), 2)
        11.98
        """
        return math.log2(seq_len * seq_len - seq_len) if self.start is None else self.start

    def start_bound(self, head_dim: int, scale: float, seq_len: int = 512) -> float:
        """Largest |logit| that uncalibrated gains allow, of a head of `head_dim` channels and a softmax scale.

        A norm over all heads bounds the mean over heads only.

        >>> get_variant("l2").start_bound(64, 0.125), get_variant("qwen3").start_bound(64, 0.125)
        (10.0, 8.0)
        """
        start = self.start_value(seq_len)
        if self.scale != "keep":
            return math.exp(start) if self.scale == "exp" else start
        gain = 1.0 if self.gain == "none" else abs(start + self.offset)
        square = 1 if self.norm == "l2" else head_dim  # of a normed vector's length
        return abs(scale) * square * (gain if self.side == "q" else gain * gain)

    def stored(self, effective: Tensor) -> Tensor:
        """What the gain parameter must hold for this effective gain."""
        return effective.log() if self.scale == "exp" else effective - self.offset

    def describe(self) -> str:
        """One line: what is normalised, with which gain, on which scale."""
        over = "each head's channels" if self.axis == "head" else "all heads' channels"
        gain = f"gain {self.gain}" + (" (1 + w)" if self.offset else "") + (" with bias" if self.bias else "")
        side = " on q only" if self.side == "q" and self.gain != "none" else ""
        scale = {"keep": "kept", "replace": "replaced by the gain", "exp": "replaced by exp(gain)"}[self.scale]
        return f"{self.norm} over {over}, eps {self.eps:g}, {gain}{side}, softmax scale {scale}"

    def to_dict(self) -> dict[str, Any]:
        """Primitives only, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Variant:
        """The inverse of `to_dict`; raises QKWatchError for an unknown field."""
        known = [f.name for f in fields(cls)]
        for key in data:
            if key not in known:
                raise unknown("field of a variant", key, known)
        if "name" not in data:
            raise QKWatchError(f"a variant needs a name; got {dict(data)}")
        return cls(**data)


_UNIT: dict[str, Any] = {"norm": "l2", "eps": 1e-12, "side": "q"}
_EARLY = "norm_fp32_then_cast"
_PRESETS = (
    Variant("l2", **_UNIT, gain="per_head", scale="replace", start=10.0,
            source="unit q and k times a learned gain per head: |logit| <= gain; start: x-transformers' 10"),
    Variant("henry", **_UNIT, gain="scalar", scale="replace", start=None,
            source="Henry et al. 2020, Query-Key Normalization for Transformers: one g for all heads"),
    Variant("vit22b", norm="layer", source="ViT-22B, arXiv 2302.05442 (flax normalize_qk)"),
    Variant("idefics", cast=_EARLY, source="Idefics 1, gated cross-attention (IdeficsRMSNorm)"),
    Variant("chameleon", norm="layer", gain="per_head_channel", bias=True, eps=1e-5, cast=_EARLY,
            source="Chameleon, arXiv 2405.09818 (ChameleonLayerNorm)"),
    Variant("cohere", norm="layer", gain="per_head_channel", eps=1e-5, source="Command R+ (CohereLayerNorm)"),
    Variant("qwen3", cast=_EARLY, source="Qwen3, GLM-4-MoE, EXAONE 4 (Qwen3RMSNorm)"),
    Variant("gemma3", offset=1, start=0.0, source="Gemma 3 (Gemma3RMSNorm): gain 1 + w, all in fp32"),
    Variant("olmo2", axis="full", gain="full_channel",
            source="OLMo 2 and 3, OLMoE (Olmo2RMSNorm), before the head split"),
    Variant("llama4", gain="none", source="Llama 4 (Llama4TextL2Norm, an RMS norm in fact), nanochat"),
    Variant("swinv2", **_UNIT, gain="per_head", scale="exp", start=math.log(10.0), ceiling=100.0,
            source="Swin V2: cosine attention, logit_scale = exp(min(w, ln 100))"),
    Variant("sd3", cast=_EARLY, source="Stable Diffusion 3.5, Flux (diffusers RMSNorm)"),
)  # fmt: skip
PRESETS: dict[str, Variant] = {variant.name: variant for variant in _PRESETS}


def get_variant(variant: str | Variant) -> Variant:
    """A preset by its name; a Variant is given back. Unknown names raise QKWatchError with the known ones.

    >>> get_variant("gemma3").offset
    1
    """
    if isinstance(variant, Variant):
        return variant
    if variant == CLIP:
        raise QKWatchError(f"{CLIP!r} shrinks weights and adds no norm: pass it to QKWatch or retrofit_ by its name")
    if not isinstance(variant, str) or variant not in PRESETS:
        raise unknown("variant", variant, [*PRESETS, CLIP])
    return PRESETS[variant]


def _grouped(values: Tensor, groups: int, how: str) -> Tensor:
    """(H,) -> (G,) over consecutive query heads of a key head."""
    if values.numel() % groups:
        raise QKWatchError(f"{values.numel()} query heads cannot share {groups} key heads")
    values = values.view(groups, -1)
    return values.amin(-1) if how == "min" else values.pow(2).mean(-1).sqrt()


def _shaped(variant: Variant, per_head: Tensor, head_dim: int) -> Tensor:
    """Effective gains (heads,) -> stored gains in the variant's shape; heads that share a gain meet in the
    geometric mean, which stays under any cap that each of them keeps and moves no head more than it must."""
    per_head = per_head.clamp_min(GAIN_FLOOR)
    if variant.gain in ("scalar", "per_channel"):
        mean = per_head.log().mean().exp()
        per_head = mean.expand(1 if variant.gain == "scalar" else head_dim)
    elif variant.gain == "per_head_channel":
        per_head = per_head.unsqueeze(-1).expand(-1, head_dim)
    elif variant.gain == "full_channel":
        per_head = per_head.repeat_interleave(head_dim)
    return variant.stored(per_head).to(torch.float32).contiguous()


def calibrated_gains(
    variant: str | Variant,
    q_rms: Tensor,
    k_rms: Tensor,
    max_logit: Tensor,
    head_dim: int,
    scale: float,
    cap: float = 20.0,
    *,
    k_heads: int | None = None,
    floor: float = 0.0,
) -> dict[str, Tensor]:
    """Stored gains with which the normed layer starts as the trained one, each head's logits at most `cap`.

    q_rms (H,), k_rms (G,) or (H,), max_logit (H,): as a Reading has them (root mean square over the D
    channels, mean over tokens; largest |logit|); `k_heads` is G where k_rms is given per query head
    (consecutive heads share a key). A head's typical size is g0 = |scale|·D·q_rms·k_rms; normed, no logit can be
    larger, so it keeps f = min(1, cap/g0) of it. Under a norm over all heads one head's vectors may be longer than
    typical: there f is at most cap/max_logit too. Heads below the `floor` (a logit, up to the cap) are raised to it.

    - a gain in logit units is g0·f on q;
    - else q gets q_rms·sqrt(f) and k gets k_rms·sqrt(f), the smallest f of the query heads that share the
      key; a norm over all heads keeps their proportions: there it is the mean over heads times sqrt(f).
      Where only q carries a gain it carries k's too.

    Heads that share one gain get the geometric mean. A head without finite figures starts at the cap.
    Returns the "q.gain" and "k.gain" that the variant has, float32, for `QKNorm.set_gains`.

    >>> one = torch.ones(1)
    >>> calibrated_gains("l2", 4 * one, 4 * one, 64 * one, head_dim=16, scale=0.25, cap=20.0)
    {'q.gain': tensor([20.])}
    """
    variant = get_variant(variant)
    if not cap > 0 or not math.isfinite(cap):
        raise QKWatchError(f"cap must be positive and finite, got {cap}")
    if variant.gain == "none":
        return {}
    q_rms, k_rms, max_logit = (t.detach().to("cpu", torch.float64) for t in (q_rms, k_rms, max_logit))
    heads = q_rms.numel()
    groups = k_heads or k_rms.numel()
    if k_rms.numel() != groups:
        k_rms = _grouped(k_rms, groups, "rms")
    per_query = k_rms.repeat_interleave(heads // groups)
    if per_query.numel() != heads:
        raise QKWatchError(f"{heads} query heads cannot share {groups} key heads")
    width = abs(float(scale)) * head_dim
    known = (q_rms * per_query).isfinite()
    typical = torch.where(known, width * q_rms * per_query, cap).clamp_min(1e-9)
    longer = known & max_logit.isfinite() & (variant.axis == "full")
    raised = (floor / typical).clamp(min=1)
    keep = torch.minimum(cap / torch.maximum(torch.where(longer, max_logit, 0), typical), raised)
    if variant.scale != "keep":
        return {"q.gain": _shaped(variant, typical * keep, head_dim)}
    even = math.sqrt(cap / width) if width else 1.0
    q_rms, k_rms = torch.where(q_rms.isfinite(), q_rms, even), torch.where(k_rms.isfinite(), k_rms, even)
    q_gain = _lengthened(variant, q_rms, head_dim) * keep.sqrt()
    k_gain = _lengthened(variant, k_rms, head_dim) * _grouped(keep, groups, "min").sqrt()
    if variant.side == "q":
        return {"q.gain": _shaped(variant, q_gain * k_gain.repeat_interleave(heads // groups), head_dim)}
    return {"q.gain": _shaped(variant, q_gain, head_dim), "k.gain": _shaped(variant, k_gain, head_dim)}


def _lengthened(variant: Variant, rms: Tensor, head_dim: int) -> Tensor:
    """(heads,) RMS -> the gain with which normed vectors are as long: a unit vector is shorter than one of unit RMS."""
    full = variant.axis == "full"
    if full:
        rms = rms.pow(2).mean().sqrt().expand_as(rms)
    return rms * math.sqrt(head_dim * (rms.numel() if full else 1)) if variant.norm == "l2" else rms
