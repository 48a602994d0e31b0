"""Packed per-head sums, which merge over calls and ranks, and the `Reading` that they become."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .errors import QKWatchError

MIN_HEAD_LEFT = 0.05  # a head with less mass than this off its sinks is a sink, not a collapsed head

# up, down: the largest logit, and the largest of the negated ones (0 where all are positive); bias_*: of the bias alone
MAXIMA = ("up", "down", "margin", "bias_up", "bias_down", "sampled")
SUMS = (
    *("measured", "excluded", "nonfinite", "rows", "keys", "over"),  # rows: measured and finite, those in the means
    *("nats", "grad", "sink", "rows_2", "sharp"),  # rows_2, rows_16: with at least so many visible keys
    *("entropy_2", "rows_16", "entropy_16"),
    *("kept_2", "corrected_2", "kept_16", "corrected_16"),  # the same without the sink keys
    *("q_rms", "q_tokens", "k_rms", "k_tokens"),
)
COLUMNS = MAXIMA + SUMS


@dataclass(frozen=True)
class Reading:
    """One site's per-head statistics at one step.

    Tensors are float32, on the CPU, `(H,)`, one value per query head; nan is "not measured". Logits are what enters
    the softmax, of visible keys only; p are its weights.

    Attributes:
        site: name of the site.
        max_logit: largest |logit|; inf where a measured row held NaN or +inf.
        product_logit: max_logit less all that an additive bias (ALiBi, a mask of -100) can have made of it: no more
            than the largest |scale q·k|, and equal to max_logit without a bias. Alerts and QK-clip go by it.
        margin: largest row maximum - row mean.
        entropy: mean of H / ln(visible keys), 0..1, over rows with >= 16 visible keys (>= 2 where no row has 16).
        entropy_nats: mean entropy of all measured rows, in nats.
        saturated: share of the rows with >= 2 visible keys whose largest p is above .99.
        grad_signal: mean of 1 - sum p², the trace of the Jacobian of the softmax, diag(p) - p pᵀ.
        q_rms, k_rms: root mean square over the D channels of q and k as they enter the core, averaged over tokens.
        entropy_corrected: entropy without key 0 and keys with more than .3 of the mean mass, p renormalised (attention
            sinks: Gu et al., arXiv 2410.10781); nan for a head with less than 5 % of its mass elsewhere.
        sink_mass: mean mass on those keys, 0..1.
        over_100: share of the entries with |logit| > 100.
        nonfinite: measured rows that held NaN or +inf; they are in none of the means.
        rows: query rows (batch x tokens) measured.
        excluded_rows: rows left out as fully masked or padded.
        exact: all rows were measured, not a sample.
        step: the optimizer step; None outside of training.
        bias_max: largest |additive bias| on entries that it leaves visible; None where no bias was seen.
    """

    site: str
    max_logit: Tensor
    product_logit: Tensor
    margin: Tensor
    entropy: Tensor
    entropy_nats: Tensor
    saturated: Tensor
    grad_signal: Tensor
    q_rms: Tensor
    k_rms: Tensor
    entropy_corrected: Tensor
    sink_mass: Tensor
    over_100: Tensor
    nonfinite: Tensor
    rows: int
    excluded_rows: int
    exact: bool
    step: int | None = None
    bias_max: Tensor | None = None

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return self.max_logit.shape[0]


class Packed(NamedTuple):
    """Statistics that can still be merged: `values` `(H, len(COLUMNS))`, float64 (float32 on mps).

    The first `len(MAXIMA)` columns merge by max, the others by sum.
    """

    values: Tensor
    exact: bool

    def cpu(self) -> Packed:
        """The same on the CPU (waits for the device)."""
        return Packed(self.values.cpu(), self.exact)


def merge(packs: Sequence[Packed]) -> Packed:
    """One `Packed` for several core calls (or ranks) of a site: max of the maxima, sums of the rest."""
    if not packs:
        raise QKWatchError("nothing to merge: pass at least one Packed")
    shapes = {tuple(pack.values.shape) for pack in packs}
    if len(shapes) > 1:
        raise QKWatchError(f"only statistics of the same heads can be merged, got shapes {sorted(shapes)}")
    values = torch.stack([pack.values for pack in packs])
    cut = len(MAXIMA)
    merged = torch.cat([values[..., :cut].amax(0), values[..., cut:].sum(0)], dim=-1)
    return Packed(merged, all(pack.exact for pack in packs))


def gather_heads(packed: Packed, index: Tensor, heads: int) -> Packed:
    """Fold heads together: old head i goes into new head `index[i]` (`(H,)`, 0..heads-1), merged as by `merge`."""
    values = packed.values
    cut = len(MAXIMA)
    target = index.to(values.device).unsqueeze(-1)
    maxima = values.new_full((heads, cut), -torch.inf)
    maxima.scatter_reduce_(0, target.expand(-1, cut), values[:, :cut], "amax")
    sums = values.new_zeros(heads, len(SUMS)).index_add_(0, target.squeeze(-1), values[:, cut:])
    return Packed(torch.cat([maxima, sums], dim=-1), packed.exact)


def reading_from(packed: Packed, site: str, step: int | None = None) -> Reading:
    """The `Reading` of packed statistics, whose values should be on the CPU by now."""
    table = packed.values.detach().cpu().double()
    column = dict(zip(COLUMNS, table.unbind(-1), strict=True))

    def mean(total: str, count: str) -> Tensor:
        return (column[total] / column[count]).float()  # 0 / 0 is nan: not measured

    def measured(value: Tensor) -> Tensor:
        return value.masked_fill(value == -torch.inf, torch.nan).float()

    def entropy(name: str, count: str) -> Tensor:
        enough = column[f"{count}_16"] > 0
        return torch.where(enough, mean(f"{name}_16", f"{count}_16"), mean(f"{name}_2", f"{count}_2"))

    sink_mass = mean("sink", "rows")
    ends = torch.stack([column["up"], column["down"]])
    largest = ends.amax(0)
    biases = torch.stack([column["bias_up"], column["bias_down"]])
    # of a logit above 0 the bias added at most its largest, of one below 0 it took at most its lowest
    products = (ends - biases.clamp(min=0)).amax(0).clamp(min=0).where(largest > -torch.inf, largest)
    return Reading(
        site=site,
        max_logit=measured(largest),
        product_logit=measured(products),
        margin=measured(column["margin"]),
        entropy=entropy("entropy", "rows"),
        entropy_nats=mean("nats", "rows"),
        saturated=mean("sharp", "rows_2"),
        grad_signal=mean("grad", "rows"),
        q_rms=mean("q_rms", "q_tokens"),
        k_rms=mean("k_rms", "k_tokens"),
        entropy_corrected=entropy("corrected", "kept").masked_fill(sink_mass > 1 - MIN_HEAD_LEFT, torch.nan),
        sink_mass=sink_mass,
        over_100=mean("over", "keys"),
        nonfinite=column["nonfinite"].float(),
        rows=int(column["measured"].max()),
        excluded_rows=int(column["excluded"].max()),
        exact=packed.exact and not bool(column["sampled"].any()),
        step=step,
        bias_max=None if bool((biases == -torch.inf).all()) else measured(biases.amax(0) + 0.0),  # never -0
    )
