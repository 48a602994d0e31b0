"""The figures of all sites over all ranks, in one tensor and one collective."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from qkwatch.ranks import Ranks
from qkwatch.reading import COLUMNS, MAXIMA, Packed
from qkwatch.sites import Site


def pool(
    sites: Sequence[Site],
    mine: Sequence[tuple[Site, Packed]],
    flags: Sequence[bool],
    ranks: Ranks,
    device: torch.device,
) -> tuple[list[tuple[Site, Packed]], list[bool]]:
    """The sites' figures over all ranks, and for each flag whether it is set on any of them.

    What does not fit here (two ranks took a site differently) counts as not run.
    """
    like = mine[0][1].values if mine else torch.zeros(0, dtype=torch.float64, device=device)
    ran = {id(site): packed.values for site, packed in mine}
    parts = []
    for site in sites:
        values = ran.get(id(site))
        fits = values is not None and len(values) == site.layout.heads
        parts.append(values.to(like) if fits and values is not None else _nothing(site.layout.heads, like))
    last = _nothing(1, like)  # one more row: the flags
    last[0, : len(flags)] = like.new_tensor([float(flag) for flag in flags])
    gathered = ranks.gather(torch.cat([*parts, last]))  # (ranks, all heads + 1, C)
    cut = len(MAXIMA)
    total = torch.cat([gathered[..., :cut].amax(0), gathered[..., cut:].sum(0)], -1)
    told = [bool(flag > 0) for flag in total[-1, : len(flags)].tolist()]
    totals = total[:-1].split([len(part) for part in parts]) if parts else ()
    # whether a reading is exact travels in its "sampled" column
    return [(site, Packed(values, True)) for site, values in zip(sites, totals, strict=True)], told


def _nothing(heads: int, like: torch.Tensor) -> torch.Tensor:
    """What a site that did not run adds to a reduction, (heads, C)."""
    values = like.new_zeros(heads, len(COLUMNS))
    values[:, : len(MAXIMA)] = -torch.inf
    return values
