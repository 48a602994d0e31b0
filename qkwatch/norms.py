"""QK-norm as modules: `HeadNorm` normalises the head vectors of one side, `QKNorm` holds both sides. Pure torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qkwatch.bounded import GRADIENT_FLOOR, Ceiling, Unit, squares
from qkwatch.errors import QKWatchError
from qkwatch.variants import Variant, get_variant

CHILD = "qk_norm"  # the name under which a patched site holds its norms


def site_of(key: str) -> str:
    """The site whose norms a parameter, buffer or module belongs to, by its full name.

    >>> site_of("h.0.attn.qk_norm.q.gain"), site_of("qk_norm.plan")
    ('h.0.attn', '')
    """
    return f".{key}".rpartition(f".{CHILD}.")[0][1:]


class HeadNorm(nn.Module):
    """Normalises head vectors (..., H, D) and multiplies by the gain; same shape and dtype out.

    gain, bias   parameters as stored, or None;  `effective_gain()` is what multiplies
    factor       constant multiplier (1 / softmax scale where the gain replaces the scale)
    max_gain     ceiling of |effective gain|, None for none; gradients that lower a gain above it still pass
    ramp         None, or alpha of `set_ramp`. Not in the state_dict: whoever ramps sets it from the step
    """

    def __init__(
        self,
        variant: str | Variant,
        heads: int,
        head_dim: int,
        *,
        with_gain: bool = True,
        max_gain: float | None = None,
        factor: float = 1.0,
        seq_len: int = 512,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self._max_gain: float | None = None
        self._limits: tuple[float, float] | None = None
        self.variant = variant = get_variant(variant)
        if max_gain is not None and not max_gain > 0:
            raise QKWatchError(f"max_gain must be positive or None, got {max_gain}")
        limits = [limit for limit in (max_gain, variant.ceiling) if limit is not None]
        self.heads, self.head_dim, self.seq_len = heads, head_dim, seq_len
        self.factor = float(factor)
        self.max_gain = float(min(limits)) if limits else None
        self._squares = squares(variant.eps)
        self.ramp: Tensor | None = None
        shape = variant.gain_shape(heads, head_dim) if with_gain else None
        self.gain: nn.Parameter | None = None
        self.bias: nn.Parameter | None = None
        if shape is not None:
            self.gain = nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
            if variant.bias:
                self.bias = nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Gain and bias as the variant's system starts them (also after `to_empty`)."""
        if self.gain is not None:
            nn.init.constant_(self.gain, self.variant.start_value(self.seq_len))
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    @property
    def max_gain(self) -> float | None:
        """The ceiling of |effective gain|; may be set."""
        return self._max_gain

    @max_gain.setter
    def max_gain(self, value: float | None) -> None:
        # what follows from it is settled here: with dynamic shapes Dynamo cannot do arithmetic with an attribute
        self._max_gain, self._limits = value, None
        if value is not None:
            exp = self.variant.scale == "exp"
            self._limits = (-math.inf, math.log(value)) if exp else (-value, value)

    def set_ramp(self, alpha: float | None, device: torch.device | None = None) -> None:
        """Go from the input (0, bit for bit) to the normed vectors (1); None ends the ramp.

        In between l2 and rms go geometrically, x·ratio^alpha, so that the lengths of the head vectors move
        evenly in the logarithm; "layer" and non-positive gains go linearly.
        """
        if alpha is not None and not 0.0 <= alpha <= 1.0:
            raise QKWatchError(f"ramp must lie in [0, 1] or be None, got {alpha}")
        if alpha is None:
            self.ramp = None
        elif self.ramp is None:
            self.ramp = torch.tensor(alpha, device=self.gain.device if self.gain is not None else device)
        else:
            self.ramp.fill_(alpha)  # in place: a captured graph sees the new value

    def effective_gain(self) -> Tensor | None:
        """The gain that multiplies (without `factor`), under the ceiling, in the parameter's shape."""
        if self.gain is None:
            return None
        if self.variant.scale == "exp":
            return self._limited(self.gain).exp()
        gain = self.gain
        if self.variant.offset:  # Gemma adds in fp32: 1 + w in bf16 would round the gain
            gain = gain.to(torch.promote_types(gain.dtype, torch.float32)) + self.variant.offset  # type: ignore[assignment]
        return self._limited(gain)

    def max_norm(self) -> Tensor:
        """Largest length with which a head vector can leave, (H,) float32 on the gain's device."""
        width = self.head_dim * (self.heads if self.variant.axis == "full" else 1)
        width = 1 if self.variant.norm == "l2" else width
        gain = self._multiplier(torch.float32)
        length = torch.tensor(self.factor) if gain is None else gain.detach().abs()
        length = length.expand(self.heads, self.head_dim).amax(-1) * math.sqrt(width)
        if self.bias is not None:
            length = length + self._spread(self.bias.detach()).float().expand(self.heads, -1).norm(dim=-1)
        return length

    def forward(self, x: Tensor) -> Tensor:
        """(..., H, D) -> (..., H, D), any floating dtype; statistics in at least fp32."""
        if x.shape[-2:] != (self.heads, self.head_dim):
            raise QKWatchError(f"expected (..., {self.heads}, {self.head_dim}) head vectors, got {tuple(x.shape)}")
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        if self.ramp is None and self._is_plain_layer_norm(x.dtype):
            bias = None if self.bias is None else self.bias.to(wide.dtype)
            dense = wide.contiguous()  # layer_norm would copy a slice anyway, and again in the backward pass
            gain = self._multiplier(wide.dtype)
            return F.layer_norm(dense, dense.shape[-1:], gain, bias, self.variant.eps).to(x.dtype)
        unit = self._unit(wide)
        normed = unit.to(x.dtype) if self.variant.cast == "norm_fp32_then_cast" else unit
        multiplier = self._multiplier(None if self.variant.cast == "norm_fp32_then_cast" else wide.dtype)
        if multiplier is not None:
            normed = normed * multiplier
        elif self.factor != 1.0:
            normed = normed * self.factor
        if self.bias is not None:
            normed = normed + self._spread(self.bias)
        normed = normed.to(x.dtype)
        return normed if self.ramp is None else self._ramped(self.ramp, wide, normed).to(x.dtype)

    def _is_plain_layer_norm(self, dtype: torch.dtype) -> bool:
        """Whether one fused operation does it all."""
        late = self.variant.cast != "norm_fp32_then_cast" or dtype in (torch.float32, torch.float64)
        return late and self.variant.norm == "layer" and self.variant.gain == "per_channel"

    def _unit(self, x: Tensor) -> Tensor:
        """The normalised (..., H, D), without gain."""
        full, eps = self.variant.axis == "full", self.variant.eps
        if self.variant.norm == "l2":
            return Unit.call(x, *self._squares, (-2, -1) if full else (-1,))
        if self.variant.norm == "rms":
            return x * self._ratio(x)
        rows = x.flatten(-2) if full else x
        return F.layer_norm(rows, rows.shape[-1:], eps=eps).reshape(x.shape)

    def _ratio(self, x: Tensor) -> Tensor:
        """What rms and l2 multiply x by, (..., H or 1, 1)."""
        rows = x.flatten(-2) if self.variant.axis == "full" else x  # flat: bit-equal to norms before the head split
        if self.variant.norm == "rms":
            ratio = torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + self.variant.eps)
        else:
            ratio = torch.rsqrt(rows.pow(2).sum(-1, keepdim=True).clamp_min(GRADIENT_FLOOR**2))
        return ratio.unsqueeze(-1) if self.variant.axis == "full" else ratio

    def _multiplier(self, dtype: torch.dtype | None) -> Tensor | None:
        """Effective gain times factor, to broadcast over (H, D), None without a gain; dtype None: its own."""
        gain = self.effective_gain()
        if gain is None:
            return None
        gain = self._spread(gain if dtype is None else gain.to(dtype))
        if self.factor == 1.0:
            return gain
        return gain.to(torch.promote_types(gain.dtype, torch.float32)) * self.factor

    def _ramped(self, alpha: Tensor, x: Tensor, normed: Tensor) -> Tensor:
        normed = normed.to(x.dtype)
        alpha = alpha.to(x.device)
        between = x + alpha * (normed - x)
        if self.variant.norm != "layer":
            multiplier = self._multiplier(x.dtype)
            ratio = self._ratio(x) * (self.factor if multiplier is None else multiplier)
            positive = ratio > 0
            path = x * torch.where(positive, ratio, 1.0).log().mul(alpha).exp()
            between = torch.where(positive, path, between)
        return torch.where(alpha <= 0, x, torch.where(alpha >= 1, normed, between))

    def _spread(self, stored: Tensor) -> Tensor:
        """A tensor of the gain's shape, viewed so that it broadcasts over (H, D)."""
        if self.variant.gain == "per_head":
            return stored.unsqueeze(-1)
        if self.variant.gain == "full_channel":
            return stored.view(self.heads, self.head_dim)
        return stored

    def _limited(self, gain: Tensor) -> Tensor:
        return gain if self._limits is None else Ceiling.call(gain, *self._limits)

    def extra_repr(self) -> str:
        """Heads, channels, gain shape, factor and ceiling."""
        gain = "none" if self.gain is None else tuple(self.gain.shape)
        limits = f"factor={self.factor:g}, max_gain={self.max_gain}"
        return f"heads={self.heads}, head_dim={self.head_dim}, gain={gain}, {limits}"


class QKNorm(nn.Module):
    """The norms of one attention layer: `.q` over H heads and `.k` over G.

    Its uint8 buffer `plan` holds the JSON bytes of a plan entry, so that a state_dict alone says how the
    layer was patched. The module keeps the bytes beside the buffer and saves those: weight averaging, which
    does arithmetic on every buffer, cannot spoil them.

    >>> norm = QKNorm("qwen3", 8, 2, 64, max_gain=None)
    >>> q, k = norm(torch.randn(1, 5, 8, 64), torch.randn(1, 5, 2, 64))
    >>> norm.set_plan({"site": "layers.0.attn"})
    >>> QKNorm.decode_plan(norm.state_dict()["plan"])
    {'site': 'layers.0.attn'}
    """

    plan: Tensor

    def __init__(
        self,
        variant: str | Variant,
        q_heads: int,
        k_heads: int,
        head_dim: int,
        *,
        max_gain: float | None = 100.0,
        q_factor: float = 1.0,
        k_factor: float = 1.0,
        seq_len: int = 512,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.variant = variant = get_variant(variant)
        common: dict[str, Any] = {"max_gain": max_gain, "seq_len": seq_len, "dtype": dtype, "device": device}
        self.q = HeadNorm(variant, q_heads, head_dim, factor=q_factor, **common)
        self.k = HeadNorm(variant, k_heads, head_dim, factor=k_factor, with_gain=variant.side == "both", **common)
        self._plan = b""
        self.register_buffer("plan", torch.empty(0, dtype=torch.uint8, device=device))

    def forward(self, q: Tensor, k: Tensor | None = None) -> Any:
        """(..., H, D), (..., G, D) -> a pair of the same shapes and dtypes.

        One tensor alone comes back as it is: Llama 4 calls ``self.qk_norm(x)`` wherever it finds that name, on
        queries and keys that the patch has normed at their projections.
        """
        return q if k is None else (self.q(q), self.k(k))

    def set_ramp(self, alpha: float | None) -> None:
        """`HeadNorm.set_ramp` on both sides. Averaged copies of the model (EMA, SWA) need the call too."""
        self.q.set_ramp(alpha, self.plan.device)
        self.k.set_ramp(alpha, self.plan.device)

    @torch.no_grad()
    def set_gains(self, gains: Mapping[str, Tensor]) -> None:
        """Copy stored gains ("q.gain", "k.gain", from `calibrated_gains`) in place; identity, dtype stay."""
        for key, value in gains.items():
            side, _, name = key.partition(".")
            parameter = getattr(getattr(self, side, None), name, None)
            if not isinstance(parameter, nn.Parameter) or parameter.shape != value.shape:
                own = {n: tuple(p.shape) for n, p in self.named_parameters()}
                shape = tuple(value.shape)
                raise QKWatchError(f"{self.variant.name!r} has no {key!r} of shape {shape}; it has {own}")
            parameter.copy_(value)

    def set_plan(self, plan: Mapping[str, Any]) -> None:
        """Store a JSON-able mapping with the weights."""
        try:
            self._plan = json.dumps(plan, separators=(",", ":")).encode()
        except (TypeError, ValueError) as error:
            raise QKWatchError(f"a plan entry must be JSON-able: {error}") from error
        self.plan = self._encoded()

    def get_plan(self) -> dict[str, Any]:
        """What `set_plan` stored; {} where nothing was."""
        return self._decoded(self._plan)

    @staticmethod
    def decode_plan(plan: Tensor) -> dict[str, Any]:
        """The mapping in a `...qk_norm.plan` entry of a state_dict (uint8, one dimension)."""
        if plan.dtype != torch.uint8 or plan.dim() != 1:
            raise QKWatchError(f"a plan is a 1-D uint8 tensor, got {plan.dtype} of shape {tuple(plan.shape)}")
        return QKNorm._decoded(bytes(plan.tolist()))

    @staticmethod
    def _decoded(data: bytes) -> dict[str, Any]:
        try:
            plan = json.loads(data or b"{}")
        except ValueError as error:
            raise QKWatchError(
                f"the plan entry is not JSON ({error}); was the state_dict averaged or edited?"
            ) from error
        if not isinstance(plan, dict):
            raise QKWatchError(f"a plan entry is a mapping, got {plan!r}")
        return plan

    def _encoded(self) -> Tensor:
        return torch.tensor(list(self._plan), dtype=torch.uint8, device=self.plan.device)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "plan"] = self._encoded()

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        plan = state_dict.get(prefix + "plan")
        if plan is not None and plan.shape != self.plan.shape:
            self.plan = torch.empty(plan.shape, dtype=torch.uint8, device=self.plan.device)
        super()._load_from_state_dict(state_dict, prefix, *args)
        if plan is None or plan.is_meta:
            return
        theirs = bytes(plan.tolist())
        if self._same_function(theirs):
            self._plan = theirs
        else:
            *_, errors = args
            errors.append(
                f"{prefix}plan: these weights were saved with another norm than this model is patched with "
                f"({self.variant.name}); call qkwatch.restore_(model, the checkpoint) before load_state_dict"
            )

    def _same_function(self, plan: bytes) -> bool:
        """Whether a plan about to be loaded says what this module is: equal gains would mean another function."""
        own, other = (self._decoded(data) for data in (self._plan, plan))
        names = ("variant", "max_gain", "q_heads", "k_heads", "head_dim")
        same = all(own.get(name) == other.get(name) for name in names)
        factors = [(plan.get("q_factor", 1.0), plan.get("k_factor", 1.0)) for plan in (own, other)]  # they are measured
        return not own or (same and all(math.isclose(a, b, rel_tol=1e-3) for a, b in zip(*factors, strict=True)))

    def extra_repr(self) -> str:
        """The variant in words."""
        return f"{self.variant.name}: {self.variant.describe()}"
