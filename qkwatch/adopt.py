"""Let live optimizers train the norms that a retrofit brought. Plain torch: for loops, Fabric and the callback."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import nn

from qkwatch.modules import named_modules
from qkwatch.optim import add_parameters
from qkwatch.retrofit import norm_parameters, patched_sites
from qkwatch.schedulers import unwrap, walk


def adopt_(model: nn.Module, optimizers: Any, schedulers: Any = ()) -> list[tuple[str, nn.Parameter]]:
    """After `retrofit_`, `restore_` or a loaded plan: let the optimizers train the new gains, without weight decay.

    Old groups, parameters, state and learning rates stay as they are to the bit; each gain joins the optimizer
    that trains its block, in a group of its own, at that block's learning rate. Calling it again changes nothing.

    Args:
        model: the patched model; may be wrapped (DistributedDataParallel, Fabric, compile).
        optimizers: one or several live optimizers; Fabric's and Lightning's wrappers are looked through.
        schedulers: their learning-rate schedulers, one or several.

    Returns:
        Name and parameter of each gain or bias that no optimizer trained before.

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
    live, plans = _several(optimizers), _several(schedulers)
    known = {id(p) for o in map(unwrap, live) for group in o.param_groups for p in group["params"]}
    trained = [(name, p) for name, p in norm_parameters(model) if p.requires_grad]
    if not trained:
        return []
    with unchanged_on_error(live, plans):
        add_parameters(live, trained, beside=_beside(model), schedulers=plans)
    return [(name, p) for name, p in trained if id(p) not in known]


def _beside(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """For each gain the other parameters of its site."""
    modules, gains = named_modules(model), norm_parameters(model)
    own = {id(p) for _, p in gains}
    beside: dict[str, list[nn.Parameter]] = {}
    for site in patched_sites(model):
        kin = [p for p in modules[site].parameters() if id(p) not in own]
        prefix = f"{site}.qk_norm." if site else "qk_norm."
        beside |= {name: kin for name, _ in gains if name.startswith(prefix)}
    return beside


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


def _several(value: Any) -> list[Any]:
    """One or several; anything that is no list or tuple is one."""
    if isinstance(value, (list, tuple)):
        return list(value)
    if isinstance(value, Iterable) and not hasattr(value, "param_groups") and not hasattr(value, "step"):
        return list(value)
    return [value]
