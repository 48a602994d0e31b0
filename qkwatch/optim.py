"""Put parameters born in mid-run into live optimizers and schedulers, take them out, regroup on resume.

A new parameter joins a *new* group, cloned without weight decay from the group that trains its block. Old
groups, parameters and state are never touched: an old group would decay the newcomer, and fused SGD with
momentum could not take it there. The clone's ``GROUP_KEY`` is the index of the group it was cloned from;
``Optimizer.state_dict`` keeps that key, so it outlives a checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from qkwatch.errors import QKWatchError
from qkwatch.modules import clean_name
from qkwatch.schedulers import remap, twin, unwrap

GROUP_KEY = "qkwatch_source"
Group = dict[str, Any]
Named = Sequence[tuple[str, nn.Parameter]]
Place = tuple[int, int]  # (index of the optimizer, index of the group)

_DECAY = re.compile(r"weight_decay|^(wd|l1|l2|l1_lambda|l2_lambda)$")


def add_parameters(
    optimizers: Sequence[Any],
    new: Named,
    *,
    beside: Mapping[str, Sequence[nn.Parameter]] | Sequence[nn.Parameter] = (),
    schedulers: Iterable[object] = (),
) -> list[Place]:
    """Let each new parameter be trained by exactly one optimizer, as its block is but without weight decay.

    Args:
        optimizers: live optimizers; wrappers with an ``optimizer`` or ``_optimizer`` are looked through.
        new: ``(name, parameter)`` pairs; the name goes where the optimizer names its parameters.
        beside: the old parameters of the same block (per name, or one list for all). The group that trains
            them is cloned, by preference one that holds their 1-D parameters; if none is trained (a frozen
            block), a group of the optimizer that owns most parameters.
        schedulers: all schedulers of these optimizers, or objects and dicts that hold one. Their per-group
            lists grow too: old groups keep their learning rates to the bit, a new one follows its source.

    Returns:
        Per new parameter, the index of its optimizer and of its group. One that was in training before stays
        where it is, unless it is decayed there or updated as a matrix (Muon): then it moves likewise.

    Raises:
        QKWatchError: no optimizer can take the parameter (there is none; LBFGS; only Muon or SparseAdam).

    >>> layer, gain = nn.Linear(2, 2), nn.Parameter(torch.zeros(2))
    >>> optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, weight_decay=0.1)
    >>> add_parameters([optimizer], [("gain", gain)], beside=list(layer.parameters()))
    [(0, 1)]
    >>> optimizer.param_groups[1]["lr"], optimizer.param_groups[1]["weight_decay"]
    (0.1, 0.0)
    """
    live, schedulers = [unwrap(o) for o in optimizers], list(schedulers)
    if not live:
        raise QKWatchError("no optimizer to train the new parameters; pass the optimizers of the run")
    where = _index(live)
    moves: list[tuple[str, nn.Parameter, Place]] = []
    for name, param in new:  # choose for all before changing anything
        here = where.get(id(param))
        group = live[here[0]].param_groups[here[1]] if here else {}
        suits = here is not None and _takes(live[here[0]], group)
        if here and not any(decays(group)) and (suits or isinstance(live[here[0]], torch.optim.LBFGS)):
            continue
        kin = beside.get(name, ()) if isinstance(beside, Mapping) else beside
        where[id(param)] = goal = here if here and suits else _choose(live, kin, name)
        moves.append((name, param, goal))
    buckets: dict[tuple[int, int, bool], list[tuple[str, nn.Parameter]]] = {}
    for name, param, (i, j) in moves:
        for k, optimizer in enumerate(live):
            _take_out(optimizer, {id(param)}, forget=k != i)
        # Fused SGD can't mix parameters with and without state in one group.
        buckets.setdefault((i, j, bool(live[i].state.get(param))), []).append((name, param))
    for (i, j, stepped), members in buckets.items():
        at = i, _join(live[i], j, members, stepped, schedulers)
        where.update({id(param): at for _, param in members})
    return [where[id(param)] for _, param in new]


def remove_parameters(
    optimizers: Sequence[Any], params: Iterable[nn.Parameter], schedulers: Iterable[object] = ()
) -> None:
    """Undo :func:`add_parameters`: drop parameters (by identity), their state, and cloned groups left empty.

    The user's own groups stay, even when empty. Parameters that no optimizer holds are passed over.
    """
    gone, schedulers = {id(p) for p in params}, list(schedulers)
    for optimizer in map(unwrap, optimizers):
        _take_out(optimizer, gone, forget=True)
        groups = optimizer.param_groups
        keep = [j for j, group in enumerate(groups) if group["params"] or GROUP_KEY not in group]
        marks = [groups[j].get(GROUP_KEY) for j in keep]
        _arrange(optimizer, keep, [keep.index(m) if m in keep else m for m in marks], schedulers)


def group_names(optimizer: Any, model: nn.Module) -> list[dict[str, Any]]:
    """Which parameters, by name, each group holds: primitives, to be saved beside the optimizer's state.

    Returns:
        Per group ``{"params": [name, ...], "source": index}``. ``source`` is the group it was cloned from,
        None for the user's own groups. A parameter that the model doesn't hold is named None.

    >>> model = nn.Linear(2, 2)
    >>> group_names(torch.optim.SGD(model.parameters()), model)
    [{'params': ['weight', 'bias'], 'source': None}]
    """
    names = {id(p): clean_name(n) for n, p in model.named_parameters()}
    return [
        {"params": [names.get(id(p)) for p in group["params"]], "source": group.get(GROUP_KEY)}
        for group in unwrap(optimizer).param_groups
    ]


def regroup(
    optimizers: Sequence[Any],
    model: nn.Module,
    saved: Sequence[Sequence[Mapping[str, Any]]],
    schedulers: Iterable[object] = (),
) -> None:
    """Give every optimizer the groups that were saved, so that its state can be loaded by index.

    Call it on resume, on a model patched like the saved one, before optimizers and schedulers load their
    state. Membership and order come from the names; missing groups are cloned, schedulers' lists follow.

    Args:
        optimizers: the fresh optimizers, as many and in the same order as when saved.
        model: the model that the names refer to.
        saved: per optimizer what :func:`group_names` returned.
        schedulers: as in :func:`add_parameters`.

    Raises:
        QKWatchError: a saved name is not in the model, or a parameter in training is not among the saved;
            nothing is changed then.
    """
    live, schedulers = [unwrap(o) for o in optimizers], list(schedulers)
    if len(live) != len(saved):
        raise QKWatchError(f"the checkpoint has {len(saved)} optimizers, this run {len(live)}; use as many")
    known = {clean_name(n): p for n, p in model.named_parameters(remove_duplicate=False)}
    names = {id(p): n for n, p in known.items()}
    wanted = [_resolve(i, optimizer, saved[i], known) for i, optimizer in enumerate(live)]
    kept = {id(p) for groups in wanted for members in groups for p in members}
    lost = [names[i] for i in _index(live) if i not in kept]
    if lost:
        raise QKWatchError(
            f"{_some(lost)}: trained now, but not in the checkpoint's optimizer; "
            "build the model and the optimizers as they were when it was saved"
        )
    for optimizer, records, groups in zip(live, saved, wanted, strict=True):
        _rebuild(optimizer, [r["source"] for r in records], groups, names, schedulers)


def _index(optimizers: Sequence[Any]) -> dict[int, Place]:
    """Where each parameter is trained, by identity; the first place counts."""
    where: dict[int, Place] = {}
    for i, optimizer in enumerate(optimizers):
        for j, group in enumerate(optimizer.param_groups):
            for param in group["params"]:
                where.setdefault(id(param), (i, j))
    return where


def _takes(optimizer: Any, group: Group) -> bool:
    """Can a gain be trained there? Not by Muon: even a gain of shape (H, D) is no matrix to orthogonalise."""
    if isinstance(optimizer, torch.optim.LBFGS | torch.optim.SparseAdam) or group.get("use_muon"):
        return False
    if "muon" not in type(optimizer).__name__.lower():
        return True
    return "fallback_lr_scale" in group or "use_muon" in group or any(p.ndim < 2 for p in group["params"])


def _choose(optimizers: Sequence[Any], kin: Sequence[nn.Parameter], name: str) -> Place:
    """The group to clone for a parameter that lives beside `kin`."""
    ids = {id(p) for p in kin}
    hits: dict[Place, list[nn.Parameter]] = {}
    places: list[Place] = []
    for i, optimizer in enumerate(optimizers):
        for j, group in enumerate(optimizer.param_groups):
            hits.setdefault((i, group.get(GROUP_KEY, j)), []).extend(p for p in group["params"] if id(p) in ids)
            if GROUP_KEY not in group and _takes(optimizer, group):
                places.append((i, j))
    if any(found and isinstance(optimizers[i], torch.optim.LBFGS) for (i, _), found in hits.items()):
        raise QKWatchError(f"{name}: LBFGS trains its block and takes one group only; use another optimizer")
    if not places:
        kinds = ", ".join(type(o).__name__ for o in optimizers)
        raise QKWatchError(f"{name}: {kinds} can't train a gain; add an optimizer that can (AdamW, SGD)")
    size = [sum(len(g["params"]) for g in o.param_groups) for o in optimizers]

    def rank(place: Place) -> tuple[bool, int, bool, int]:
        found, group = hits[place], optimizers[place[0]].param_groups[place[1]]
        flat = any(p.ndim < 2 for p in found), any(p.ndim < 2 for p in group["params"])
        return flat[0], len(found) or size[place[0]] - sum(size), flat[1], place[1]

    return max(places, key=rank)


def _join(optimizer: Any, source: int, members: Named, stepped: bool, schedulers: Sequence[object]) -> int:
    """Put members into the newest clone of `source` if it has made no step yet, else into a new clone."""
    groups = optimizer.param_groups
    marks = [g.get(GROUP_KEY) for g in groups]
    last = max((j for j, mark in enumerate(marks) if mark == source), default=None)
    if last is not None and not stepped and not any(optimizer.state.get(p) for p in groups[last]["params"]):
        groups[last]["params"].extend(param for _, param in members)
        groups[last].get("param_names", []).extend(name for name, _ in members)
        return last
    _arrange(optimizer, [*range(len(groups)), source], [*marks, source], schedulers, members)
    if isinstance(optimizer, torch.optim.Adagrad) and not stepped:  # older releases start it in __init__ only
        options = {key: groups[-1].get(key, value) for key, value in optimizer.defaults.items()}
        optimizer.state.update(torch.optim.Adagrad(groups[-1]["params"], **options).state)
    return len(marks)


def _arrange(
    optimizer: Any,
    origin: Sequence[int],
    marks: Sequence[int | None],
    schedulers: Sequence[object],
    members: Named = (),
) -> None:
    """Make group k the present group ``origin[k]``, or a clone of it (with `members`) if an earlier k is."""
    groups, count, order = optimizer.param_groups, len(optimizer.param_groups), list(origin)
    for k, i in enumerate(origin):
        if i in origin[:k]:
            order[k] = len(groups)
            optimizer.add_param_group(_clone(groups, i, members))
    groups[:] = [groups[i] for i in order]
    for group, mark in zip(groups, marks, strict=True):
        if mark is None:
            group.pop(GROUP_KEY, None)
            continue
        if GROUP_KEY not in group:
            _exempt(group)
        group[GROUP_KEY] = mark
    remap(schedulers, optimizer, origin, count)


def _clone(groups: Sequence[Group], index: int, members: Named) -> Group:
    """A group with the options of group `index`, and its own name (LearningRateMonitor insists on it)."""
    fresh = {key: twin(value) for key, value in groups[index].items()}
    fresh["params"] = [param for _, param in members]
    if "param_names" in fresh:
        fresh["param_names"] = [name for name, _ in members]
    if "name" in fresh:
        taken = {group.get("name") for group in groups}
        options = (f"{fresh['name']}_qk_norm{i or ''}" for i in range(len(taken) + 1))
        fresh["name"] = next(name for name in options if name not in taken)
    return fresh


def _exempt(group: Group) -> None:
    """Make a clone fit for gains."""
    for key in list(decays(group)):
        group[key] = torch.zeros_like(group[key]) if isinstance(group[key], Tensor) else 0.0
    if "fallback_lr_scale" in group:  # timm's Muon would take a (H, D) gain for a matrix
        group["use_fallback"] = True


def decays(group: Group) -> Iterator[str]:
    """Options that pull weights to zero and are on; a flag such as ``decoupled_weight_decay`` is none."""
    for key, value in group.items():
        number = isinstance(value, int | float | Tensor) and not isinstance(value, bool)
        if number and _DECAY.search(key) and bool(value != 0):
            yield key


def _take_out(optimizer: Any, gone: set[int], forget: bool) -> None:
    """Drop parameters from their groups, with their state if `forget`."""
    for group in optimizer.param_groups:
        left = [k for k, p in enumerate(group["params"]) if id(p) not in gone]
        for param in group["params"] if forget and len(left) < len(group["params"]) else ():
            if id(param) in gone:
                optimizer.state.pop(param, None)
        for key in ("params", "param_names"):
            if key in group and len(left) < len(group[key]):
                group[key][:] = [group[key][k] for k in left]


def _resolve(
    index: int, optimizer: Any, records: Sequence[Mapping[str, Any]], known: Mapping[str, nn.Parameter]
) -> list[list[nn.Parameter]]:
    """The parameters of each saved group; those saved without a name are taken in the order they have now."""
    saved = [name for record in records for name in record["params"]]
    missing = [name for name in saved if name is not None and name not in known]
    if missing:
        raise QKWatchError(
            f"{_some(missing)}: in optimizer {index} of the checkpoint, but not in the model; "
            "patch the model as it was when saved (qkwatch.restore_) before the optimizer is loaded"
        )
    named = {id(p) for p in known.values()}
    nameless = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in named]
    if saved.count(None) != len(nameless):
        raise QKWatchError(
            f"optimizer {index} trains {len(nameless)} parameters from outside the model, the checkpoint's "
            f"{saved.count(None)}; build it as it was when saved"
        )
    outside = iter(nameless)
    return [[next(outside) if n is None else known[n] for n in record["params"]] for record in records]


def _match(groups: Sequence[Group], marks: Sequence[int | None], wanted: list[list[nn.Parameter]]) -> list[int]:
    """Per saved group the present one it comes from: the largest overlap, for a clone its source's."""
    origin: list[int] = []
    free = [i for i, group in enumerate(groups) if GROUP_KEY not in group]
    for j, members in enumerate(wanted):
        mark, ids = marks[j], {id(p) for p in members}
        overlap = {i: (sum(id(p) in ids for p in groups[i]["params"]), i == j) for i in free}
        best = max(free, key=overlap.__getitem__, default=None)
        if mark is not None:
            origin.append(origin[mark])
        elif best is not None and any(overlap[best]):
            origin.append(best)
            free.remove(best)
        else:
            origin.append(origin[-1] if origin else 0)
    return origin


def _rebuild(
    optimizer: Any,
    marks: Sequence[int | None],
    wanted: list[list[nn.Parameter]],
    names: Mapping[int, str],
    schedulers: Sequence[object],
) -> None:
    """Rewrite an optimizer's groups; names that the user gave to its parameters are kept."""
    labels = dict(names)
    for group in optimizer.param_groups:
        labels.update(zip(map(id, group["params"]), group.get("param_names", ()), strict=False))
    _take_out(optimizer, set(_index([optimizer])) - {id(p) for ps in wanted for p in ps}, forget=True)
    _arrange(optimizer, _match(optimizer.param_groups, marks, wanted), marks, schedulers)
    for group, members in zip(optimizer.param_groups, wanted, strict=True):
        group["params"][:] = members
        if "param_names" in group:
            group["param_names"][:] = [labels[id(p)] for p in members]


def _some(names: Sequence[str]) -> str:
    """The first five names, and how many more there are."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
