"""What all ranks take for the sites of a model, though not everything runs on each of them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from qkwatch.layout import HeadLayout
from qkwatch.modules import named_modules
from qkwatch.ranks import Ranks
from qkwatch.sites import ELSEWHERE, Site


def agree(
    model: nn.Module, found: Sequence[Site], before: Sequence[Site], gone: set[str], unseen: bool, ranks: Ranks
) -> tuple[list[Site], bool]:
    """Every rank's sites in one order, and whether parts of the model have run on no rank, or not on all. Collective.

    A site that did not run here is known from before, or by another rank's description.

    Args:
        found: this rank's, of the forward pass that ended.
        before: what was agreed on the last time.
        gone: names of former sites that go by another name now.
        unseen: whether parts of the model have not run on this rank.
    """
    modules, mine = named_modules(model), {site.name: site for site in found}
    known = {site.name: site for site in before}
    if ranks.size > 1:
        described = [(s.name, s.q_heads, s.k_heads, s.head_dim, s.layout, s.self_attention) for s in found]
        told = ranks.gather_objects((described, gone, unseen))
        unseen, gone = any(part[2] for part in told), set[str]().union(*(part[1] for part in told))
        layouts: dict[str, HeadLayout] = {}
        for name, q_heads, k_heads, head_dim, layout, is_self in (one for part in told for one in part[0]):
            layouts.setdefault(name, layout)
            if name not in mine and name in known:
                mine[name] = known[name]
            elif name not in mine and name in modules:
                mine[name] = Site(
                    name,
                    q_heads,
                    k_heads,
                    head_dim,
                    reason=ELSEWHERE,
                    module=modules[name],
                    layout=layout,
                    self_attention=is_self,
                )
        for name in mine.keys() & layouts.keys():
            if mine[name].layout.heads != layouts[name].heads:  # it is gathered in one shape
                mine[name].layout = layouts[name]
    older = {name: site for name, site in known.items() if name not in mine and name not in gone}
    sites = [*mine.values(), *older.values()]
    if older or ranks.size > 1:
        order = {name: i for i, name in enumerate(modules)}
        sites.sort(key=lambda site: order.get(site.name, len(order)))
    return sites, unseen
