"""Let live optimizers train the norms that a retrofit brought. Plain torch: for loops, Fabric and the callback."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import nn

from qkwatch.modules import clean_name, named_modules
from qkwatch.norms import site_of
from qkwatch.optim import GROUP_KEY, add_parameters, decays, group_names, regroup
from qkwatch.schedulers import several, unwrap, walk
from qkwatch.surgery import norm_parameters, patched_sites


def adopt_(model: nn.Module, optimizers: Any, schedulers: Any = ()) -> list[tuple[str, nn.Parameter]]:
    """After `retrofit_`, `restore_` or a loaded plan: let the optimizers train the new gains, without weight decay.

    Old groups, parameters, state and learning rates stay as they are to the bit; each gain joins the optimizer
    that holds its block, in a group of its own, at that block's learning rate. Calling it again changes nothing.

    Args:
        model: the patched model; may be wrapped (DistributedDataParallel, Fabric, compile).
        optimizers: one or several live optimizers; Fabric's and Lightning's wrappers are looked through.
        schedulers: their learning-rate schedulers, one or several.

    Returns:
        Name and parameter of each gain or bias that no optimizer held before.

    Raises:
        QKWatchError: none of the optimizers can train a gain; they, and the schedulers, are as before then.

    In a process group, `DistributedDataParallel` must be built again afterwards: it does not know the newcomers.

    >>> import torch, qkwatch
    >>> layer, x = nn.MultiheadAttention(32, 4, batch_first=True), torch.randn(2, 7, 32)
    >>> optimizer = torch.optim.AdamW(layer.parameters())
    >>> _ = qkwatch.retrofit_(layer, qkwatch.find_sites(layer, x, x, x))
    >>> [name for name, _ in adopt_(layer, optimizer)], adopt_(layer, optimizer)
    (['qk_norm.q.gain'], [])
    """
    live, plans = several(optimizers), several(schedulers)
    known = {id(p) for o in map(unwrap, live) for group in o.param_groups for p in group["params"]}
    beside = _beside(model)
    # those of a frozen block whose weights an optimizer holds all the same: they may be thawed later
    held = {name for name, kin in beside.items() if any(id(p) in known for p in kin)}
    trained = [(name, p) for name, p in norm_parameters(model) if p.requires_grad or name in held]
    if not trained:
        return []
    with unchanged_on_error(live, plans):
        add_parameters(live, trained, beside=beside, schedulers=plans)
    return [(name, p) for name, p in trained if id(p) not in known]


def _beside(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """For each gain the other parameters of its site."""
    modules, gains = named_modules(model), norm_parameters(model)
    own = {id(p) for _, p in gains}
    beside: dict[str, list[nn.Parameter]] = {}
    for site in patched_sites(model):
        kin = [p for p in modules[site].parameters() if id(p) not in own]
        beside |= {name: kin for name, _ in gains if site_of(name) == site}
    return beside


def like_fresh(optimizer: Any, model: nn.Module, schedulers: Iterable[object] = ()) -> None:
    """Put the newcomers where an optimizer made anew for the patched model would have them, if one can tell.

    That is: into the last of the user's groups that has no weight decay and otherwise the same options, in the
    model's order. A state saved from then on fits such an optimizer by index. Where there is no such group,
    nothing is done.
    """
    live, order = unwrap(optimizer), {clean_name(n): i for i, (n, _) in enumerate(model.named_parameters())}
    records = group_names(live, model)

    def options(group: dict[str, Any]) -> dict[str, Any]:
        return {k: v for k, v in group.items() if k not in ("params", "param_names", GROUP_KEY)}

    new = [j for j, record in enumerate(records) if record["source"] is not None]
    wanted = [options(live.param_groups[j]) for j in new]  # may have more keys: add_param_group fills in defaults
    homes = [
        j
        for j, group in enumerate(live.param_groups)
        if j not in new and not any(decays(group)) and all({**one, **options(group)} == one for one in wanted)
    ]
    if not new or not homes:
        return
    names = [name for j in (homes[-1], *new) for name in records[j]["params"]]
    if None not in names:
        records[homes[-1]]["params"] = sorted(names, key=order.__getitem__)
        regroup([live], model, [[record for record in records if record["source"] is None]], schedulers)


@contextlib.contextmanager
def unchanged_on_error(optimizers: Sequence[Any], schedulers: Sequence[Any]) -> Iterator[None]:
    """If the block raises, optimizers' groups and state and the schedulers' fields are put back."""
    live = [unwrap(o) for o in optimizers]
    seen: set[int] = set()
    groups = [(o, [(g, _fields(g)) for g in o.param_groups], dict(o.state)) for o in live]
    plans = [(s, _fields(vars(s))) for root in schedulers for s in walk(root, seen)]
    try:
        yield
    except BaseException:
        for optimizer, saved, state in groups:
            for group, fields in saved:
                group.clear()
                group.update(fields)
            optimizer.param_groups[:] = [group for group, _ in saved]
            optimizer.state.clear()
            optimizer.state.update(state)
        for scheduler, fields in plans:
            vars(scheduler).clear()
            vars(scheduler).update(fields)
        raise


def _fields(mapping: Any) -> dict[str, Any]:
    return {key: list(value) if type(value) is list else value for key, value in mapping.items()}
