"""An independent witness of a forward pass: which attention ran, and what float64 makes of it.

It shares no code with qkwatch, and goes by another rule, so that it can testify about it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from qkwatch.reading import Reading

HIDING = -9999.0  # the mask of old half-precision models
COPIES = {"view", "_unsafe_view", "permute", "transpose", "t", "unsqueeze", "expand", "clone", "as_strided", "detach"}
MIXING = 256  # elements of a weight that may mix heads; larger ones are projections, and what they give is no logit


@dataclass
class Seen:
    """One attention as float64 sees it: per-head figures where the heads are an axis, else the mean over all."""

    nats: Tensor
    saturated: Tensor
    shape: torch.Size
    overall: tuple[Tensor, Tensor]  # both, over all rows alike

    @classmethod
    def of(cls, p: Tensor, visible: Tensor | None = None) -> Seen:
        """From probabilities (..., Tq, Tk); rows that see nothing, and rows of padding, do not count."""
        p, shape = p.detach().double(), p.shape
        visible = (p > 0) if visible is None else visible.expand(shape)
        p, visible = (t if t.ndim == 4 else t.reshape(-1, 1, *shape[-2:]) for t in (p, visible))
        live = visible.any(-1)
        if shape[-2] == shape[-1]:  # a token that no other one sees is padding
            live = live & visible.any(-2)
        nats = -(p * p.clamp_min(1e-300).log()).sum(-1)
        several = live & (visible.sum(-1) >= 2)
        sharp = (p.amax(-1) > 0.99) & several
        rows = nats[live].mean(), sharp[several].double().mean()
        return cls(_mean(nats, live), _mean(sharp.double(), several), shape, rows)

    def distance(self, reading: Reading) -> float:
        """Largest difference of a reading's figures, per head where both have the same heads."""
        worst = 0.0
        pairs = ((self.nats, reading.entropy_nats), (self.saturated, reading.saturated))
        for (mine, theirs), overall in zip(pairs, self.overall, strict=True):
            theirs = theirs.double()
            if mine.shape != theirs.shape:
                mine, theirs = overall, theirs.nanmean()
            gap = (mine - theirs).abs()
            gap = torch.where(mine.isnan() & theirs.isnan(), 0.0, gap).nan_to_num(torch.inf)
            worst = max(worst, float(gap.max()))
        return worst


def _mean(x: Tensor, where: Tensor) -> Tensor:
    return torch.where(where, x, 0.0).sum((0, 2)) / where.sum((0, 2))


class Witness(TorchDispatchMode):
    """Lists attention in its own way: whatever descends from a product of two activations, passes a softmax and is
    multiplied once more; and every fused call. It keeps all tensors of a forward pass alive, so that none is lost.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Seen | _Entry] = []
        self._weights: dict[int, Tensor] = {}  # views and copies of parameters
        self._mixes: dict[int, Tensor] = {}  # and of softmaxes over no product of activations
        self._marks: dict[int, tuple[Tensor, _Entry | None]] = {}  # None: a product that no softmax has seen yet
        self._weighed: set[int] = set()  # of these, what small weights have mixed since

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = str(getattr(func, "overloadpacket", func)).removeprefix("aten.")
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if name in COPIES and inputs:
            outputs = {id(t): t for t in tree_leaves(out) if isinstance(t, Tensor)}
            if all(map(self._is_weight, inputs)):
                self._weights |= outputs
            if all(id(t) in self._mixes for t in inputs):
                self._mixes |= outputs
        marks = [self._marks[id(t)][1] for t in inputs if id(t) in self._marks]
        entries = [mark for mark in marks if mark is not None]
        if name.startswith("_scaled_dot_product"):
            self.found.append(_dense(*args[:2], kwargs or {}, args))
        elif name in ("bmm", "mm", "baddbmm", "addmm"):
            factors = [t for t in args if isinstance(t, Tensor)][-2:]
            for entry in entries:
                entry.used = True
            weights = [t for t in factors if self._is_weight(t)]
            mixes_heads = bool(marks) and all(weight.numel() <= MIXING for weight in weights)
            mixed = any(id(t) in self._mixes for t in factors)
            if not entries and not mixed and (mixes_heads or not weights):
                self._mark(out, None)
                self._weighed |= {id(out)} if weights else set()
        elif name in ("_softmax", "_safe_softmax") and marks and not entries and not self._is_router(args[0]):
            logits = args[0].detach().movedim(args[1], -1)
            visible = logits > max(HIDING, torch.finfo(logits.dtype).min / 2)
            self.found.append(entry := _Entry(Seen.of(torch.softmax(logits.double(), -1), visible)))
            self._mark(out, entry)
        elif name in ("_softmax", "_safe_softmax") and not marks:
            self._mixes[id(out)] = out  # weights of something else, as a learned mix over depth: no logits to come
        elif marks and "_norm" not in name and (name != "convolution" or args[1].numel() <= MIXING):
            self._mark(out, entries[0] if entries else None)
            if any(id(t) in self._weighed for t in inputs):
                self._weighed |= {id(t) for t in tree_leaves(out) if isinstance(t, Tensor)}
        return out

    def _is_router(self, logits: Tensor) -> bool:
        """Two axes, and small weights made them: a score for each token and expert."""
        return logits.ndim == 2 and id(logits) in self._weighed

    def _is_weight(self, tensor: Tensor) -> bool:
        return isinstance(tensor, nn.Parameter) or id(tensor) in self._weights

    def _mark(self, out: Any, mark: _Entry | None) -> None:
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                self._marks[id(tensor)] = (tensor, mark)

    @property
    def seen(self) -> list[Seen]:
        both = [found if isinstance(found, Seen) else found.seen if found.used else None for found in self.found]
        return [seen for seen in both if seen is not None]


@dataclass
class _Entry:
    seen: Seen
    used: bool = False


def _dense(q: Tensor, k: Tensor, kwargs: dict[str, Any], args: Any) -> Seen:
    """A fused call in float64."""
    q, k = q.detach().double(), k.detach().double()
    scale = kwargs.get("scale") or q.shape[-1] ** -0.5
    k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
    logits = q @ k.transpose(-1, -2) * scale
    mask = kwargs.get("attn_mask")
    causal = kwargs.get("is_causal", args[4] if len(args) > 4 else False)
    if causal:
        logits = logits.masked_fill(~torch.ones(logits.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    if mask is not None:
        mask = mask.detach()
        hidden = ~mask if mask.dtype == torch.bool else mask < torch.finfo(mask.dtype).min / 2
        logits = logits + (0.0 if mask.dtype == torch.bool else mask.double())
        logits = logits.masked_fill(hidden, -torch.inf)
    return Seen.of(torch.softmax(logits, -1).nan_to_num(0.0))
