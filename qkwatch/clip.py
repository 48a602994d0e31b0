"""QK-Clip: shrink the projections of heads whose logits pass a bound. Weights only, no new parameter.

Kimi K2 (arXiv 2507.20534), section 2.1: after a step in which head h reached S_h > tau, its part of W_q and W_k is
multiplied by sqrt(tau / S_h) each. Where query heads share a key head, or the keys cannot be told head by head
(latent attention), the keys are left alone and the query takes the whole factor, as K2 does with shared key parts.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from qkwatch.errors import QKWatchError
from qkwatch.layout import Channels
from qkwatch.probe import Refusal, Tap, isolated, replay
from qkwatch.reading import Reading
from qkwatch.sites import Site
from qkwatch.trace import find_query_tap


@dataclass
class _Rows:
    """Which slices of which parameters make a head's output: parameter, axis, index (heads, D)."""

    parts: list[tuple[Tensor, int, Tensor]] = field(default_factory=list)

    def without(self, other: _Rows) -> _Rows:
        """Less what ``other`` scales already: tied weights are shrunk once."""
        theirs = [(id(p), index) for p, _, index in other.parts]
        return _Rows([part for part in self.parts if not any(id(part[0]) == p and part[2].equal(i) for p, i in theirs)])

    @torch.no_grad()
    def scale_(self, factors: Tensor) -> None:
        """Multiply each head's slices by its factor, (heads,)."""
        for parameter, axis, index in self.parts:
            full = torch.ones(parameter.shape[axis], dtype=torch.float32, device=parameter.device)
            spread = factors.to(full)[:, None].expand(index.shape).flatten()
            full[index.flatten().to(full.device)] = spread
            parameter.mul_(full.to(parameter.dtype).reshape([-1 if a == axis else 1 for a in range(parameter.ndim)]))


class QKClip:
    """Clips the sites it was made for, whenever it is shown their readings.

    An additive bias (ALiBi, a mask of -100) is no matter of the projections: heads are clipped by `product_logit`.

    Args:
        sites: from `find_sites`, with the inputs that found them.
        tau: the largest logit a head may reach before it is clipped.

    Attributes:
        applied: names of the sites it can clip.
        refused: site name -> why it cannot.

    >>> layer, x = nn.MultiheadAttention(32, 4, batch_first=True), torch.randn(2, 7, 32) * 30
    >>> from qkwatch import find_sites
    >>> site = find_sites(layer, x, x, x)[0]
    >>> bool(site.reading.max_logit.max() > 20), QKClip([site], tau=20.0).clip_([site.reading])
    (True, {'': [0, 1, 2, 3]})
    >>> bool(find_sites(layer, x, x, x)[0].reading.max_logit.max() < 20.1)
    True
    """

    def __init__(self, sites: Sequence[Site], tau: float):
        if not tau > 0:
            raise QKWatchError(f"the clipping bound must be positive, got {tau!r}")
        self.tau = tau
        self.refused: dict[str, str] = {}
        self._sites: dict[str, tuple[_Rows, _Rows | None]] = {}
        owners = Counter(module for site in sites for module in {id(tap.module) for tap in site.taps or ()})
        for site in sites:
            try:
                if any(owners[id(tap.module)] > 1 for tap in site.taps or ()):
                    raise Refusal("it shares a projection with another site, whose heads would shrink too")
                self._sites[site.name] = _rows_of(site)
            except Refusal as refusal:
                self.refused[site.name] = refusal.reason

    @property
    def applied(self) -> list[str]:
        return list(self._sites)

    def keep(self, names: Collection[str]) -> None:
        """Clip no other sites than these from now on."""
        self._sites = {name: rows for name, rows in self._sites.items() if name in names}

    def clip_(self, readings: Iterable[Reading]) -> dict[str, list[int]]:
        """Shrink the weights of every head whose reading is above tau; returns site -> heads that were clipped."""
        clipped: dict[str, list[int]] = {}
        for site, largest in _largest(readings).items():
            entry = self._sites.get(site)
            if entry is None:
                continue
            q, k = entry
            above = torch.isfinite(largest) & (largest > self.tau)
            if not bool(above.any()):
                continue
            factors = torch.where(above, self.tau / largest, 1.0)
            q.scale_(factors if k is None else factors.sqrt())
            if k is not None:
                k.scale_(factors.sqrt())
            clipped[site] = above.nonzero().flatten().tolist()
        return clipped


def _largest(readings: Iterable[Reading]) -> dict[str, Tensor]:
    """Site -> the heads' largest logits (H,) over all its readings: a head is shrunk once for all of them."""
    found: dict[str, Tensor] = {}
    for reading in readings:
        known = found.get(reading.site)
        found[reading.site] = reading.product_logit if known is None else known.fmax(reading.product_logit)
    return found


def _rows_of(site: Site) -> tuple[_Rows, _Rows | None]:
    """What to shrink for queries and for keys (None: leave them alone)."""
    if site.normed:
        raise Refusal("its queries and keys are normed: shrinking the projections would change nothing")
    if isinstance(site.module, nn.MultiheadAttention):
        return _rows_of_mha(site.module)
    if site.call is None:
        raise Refusal(site.reason or "the inputs of its forward are not known")
    own_keys = site.taps is not None and site.k_heads == site.q_heads
    taps = site.taps if own_keys and site.taps else [site.taps[0] if site.taps else _query_tap(site)]
    found: dict[nn.Module, tuple[Tensor, Tensor]] = {}
    for tap in taps:
        _catch(site, tap, found)
    rows = [_rows_of_tap(tap, *found[tap.module]) for tap in taps]
    return rows[0], rows[1].without(rows[0]) if own_keys else None


def _query_tap(site: Site) -> Tap:
    assert site.call is not None
    try:
        tap = find_query_tap(site.module, site.call)
    except Refusal:
        raise
    except Exception as error:
        raise Refusal(f"its queries could not be followed ({type(error).__name__}: {error})") from error
    if tap.channels.heads != site.q_heads or tap.normed:
        raise Refusal(site.reason or "the projection of its queries is not known")
    return tap


def _catch(site: Site, tap: Tap, found: dict[nn.Module, tuple[Tensor, Tensor]]) -> None:
    """The input and, in its graph, the output of a projection."""

    def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        found.setdefault(module, (args[0].detach(), output))

    assert site.call is not None
    handle = tap.module.register_forward_hook(hook)
    try:
        replay(site.module, site.call)
    finally:
        handle.remove()
    if tap.module not in found:
        raise Refusal("its projections did not run")


def _rows_of_tap(tap: Tap, source: Tensor, output: Tensor) -> _Rows:
    """By autograd: the slices that one output channel alone depends on. Tried out on a copy before it is believed."""
    channels = tap.channels
    if channels.head_axis is not None:
        raise Refusal("its projection splits the heads itself")
    named = [(name, p) for name, p in tap.module.named_parameters() if p.is_floating_point()]
    if not output.requires_grad:
        raise Refusal("its projections are frozen")
    index = channels.index()
    probe = int(index[0, 0])
    one = output.select(channels.axis, probe).float().sum()
    grads = torch.autograd.grad(one, [p for _, p in named], retain_graph=True, allow_unused=True)
    rows = {name: axis for (name, _), g in zip(named, grads, strict=True) if (axis := _axis(g, probe)) is not None}
    found = _Rows([(p, rows[name], index) for name, p in named if name in rows])
    if not found.parts or not _doubles(tap.module, rows, source, channels):
        raise Refusal("the weights of a head cannot be told apart in its projection")
    return found


def _axis(grad: Tensor | None, channel: int) -> int | None:
    """The axis on which a gradient is confined to one index, that of the channel."""
    if grad is None or not bool(grad.count_nonzero()):
        return None
    where = grad.nonzero()
    axes = [a for a in range(grad.ndim) if grad.shape[a] > 1 and bool((where[:, a] == channel).all())]
    return axes[0] if axes else None


@torch.no_grad()
def _doubles(module: nn.Module, rows: dict[str, int], source: Tensor, channels: Channels) -> bool:
    """Whether doubling the first head's slices doubles its channels and leaves all others."""
    trial = copy.deepcopy(module)
    index = channels.index()
    factors = torch.ones(channels.heads)
    factors[0] = 2.0
    with isolated(trial, {}), torch.no_grad():
        before = trial(source)
        _Rows([(p, rows[name], index) for name, p in trial.named_parameters() if name in rows]).scale_(factors)
        after = trial(source)
    expected = before.clone()
    expected.index_copy_(
        channels.axis, index[0].to(before.device), 2 * before.index_select(channels.axis, index[0].to(before.device))
    )
    return bool((after - expected).norm() <= 1e-2 * before.norm())


def _rows_of_mha(mha: nn.MultiheadAttention) -> tuple[_Rows, _Rows]:
    index = torch.arange(mha.embed_dim).unflatten(0, (mha.num_heads, mha.head_dim))
    rows = []
    for side, offset in (("q", 0), ("k", mha.embed_dim)):
        part = _Rows()
        if mha.in_proj_weight is not None:
            part.parts.append((mha.in_proj_weight, 0, index + offset))
        else:
            part.parts.append((getattr(mha, f"{side}_proj_weight"), 0, index))
        if mha.in_proj_bias is not None:
            part.parts.append((mha.in_proj_bias, 0, index + offset))
        if side == "k" and mha.bias_k is not None:
            part.parts.append((mha.bias_k, 2, index))
        rows.append(part)
    return rows[0], rows[1]
