"""Twins with and without surgery: old groups must not notice, new groups must follow their source."""

from __future__ import annotations

import copy
import io
import json
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as sched
from torch.optim.swa_utils import SWALR

from qkwatch.errors import QKWatchError
from qkwatch.optim import GROUP_KEY, add_parameters, clean_name, group_names, regroup, remove_parameters

STEPS, AT = 30, 7
Built = tuple[nn.Module, torch.optim.Optimizer]


class Counting:
    """A callable with memory, as users write for LambdaLR: sharing it between groups would speed it up."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, step: int) -> float:
        self.calls += 1
        return 0.97**self.calls


class Block(nn.Module):
    """A model whose gains sit between old parameters, as a patched one's do."""

    def __init__(self, gains: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        if gains:
            self.add_gains()
        self.norm = nn.LayerNorm(4)
        self.last = nn.Linear(4, 4, bias=False)

    def add_gains(self) -> None:
        self.first.q_gain = nn.Parameter(torch.ones(2, 2))
        self.first.k_gain = nn.Parameter(torch.ones(2, 2))

    def gains(self) -> list[tuple[str, nn.Parameter]]:
        return [(f"first.{n}", getattr(self.first, n)) for n in ("q_gain", "k_gain")]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def two_groups(model: nn.Module, named: bool = False) -> list[dict[str, Any]]:
    """Weights in a decayed group at lr 0.1, 1-D parameters in an undecayed one at lr 0.02."""
    flat = [(n, p) for n, p in model.named_parameters() if p.ndim < 2]
    deep = [(n, p) for n, p in model.named_parameters() if p.ndim >= 2]
    pick = (lambda pairs: pairs) if named else (lambda pairs: [p for _, p in pairs])
    return [
        {"params": pick(deep), "lr": 0.1, "weight_decay": 0.1},
        {"params": pick(flat), "lr": 0.02, "weight_decay": 0.0},
    ]


def one_group(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": list(model.parameters()), "lr": 0.1, "weight_decay": 0.1}]


def build(groups: Callable[[nn.Module], list[dict[str, Any]]] = two_groups, kind: str = "adamw") -> Built:
    torch.manual_seed(1)
    model = Block()
    make = {"adamw": torch.optim.AdamW, "sgd": lambda g: torch.optim.SGD(g, lr=0.1, momentum=0.9)}[kind]
    return model, make(groups(model))


def gains(count: int = 2, shape: tuple[int, ...] = (2, 2)) -> list[tuple[str, nn.Parameter]]:
    return [(f"g{i}", nn.Parameter(torch.ones(shape))) for i in range(count)]


def sequential(opt: torch.optim.Optimizer) -> sched.LRScheduler:
    warm = sched.LinearLR(opt, 0.1, total_iters=5)
    return sched.SequentialLR(opt, [warm, sched.CosineAnnealingLR(opt, 25)], milestones=[5])


def nested(opt: torch.optim.Optimizer) -> sched.LRScheduler:
    inner = sched.ChainedScheduler([sched.LambdaLR(opt, halving(opt)), sched.ExponentialLR(opt, 0.99)])
    return sched.SequentialLR(opt, [inner, sched.PolynomialLR(opt, 15)], milestones=[10])


def nested_deeper(opt: torch.optim.Optimizer) -> sched.LRScheduler:
    """As deep as torch allows: only the first child of a SequentialLR may hold others."""
    tail = sched.CosineAnnealingWarmRestarts(opt, 4)
    first = sched.SequentialLR(opt, [nested(opt), tail], milestones=[14])
    return sched.ChainedScheduler([first, sched.ChainedScheduler([sched.StepLR(opt, 5, 0.9)])])


def halving(opt: torch.optim.Optimizer) -> list[Callable[[int], float]]:
    """A different function per group."""
    return [lambda step, i=i: 1 / (1 + (i + 1) * step) for i in range(len(opt.param_groups))]


def each(opt: torch.optim.Optimizer, *values: float) -> list[float]:
    return [values[i % len(values)] for i in range(len(opt.param_groups))]


def counted(opt: torch.optim.Optimizer) -> list[Counting]:
    return [Counting() for _ in opt.param_groups]


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: sched.LambdaLR(o, halving(o)),
    "LambdaLR-one": lambda o: sched.LambdaLR(o, lambda s: 0.9**s),
    "LambdaLR-counting": lambda o: sched.LambdaLR(o, counted(o)),
    "MultiplicativeLR": lambda o: sched.MultiplicativeLR(o, halving(o)),
    "StepLR": lambda o: sched.StepLR(o, 4, 0.7),
    "MultiStepLR": lambda o: sched.MultiStepLR(o, [3, 9, 11], 0.5),
    "ConstantLR": lambda o: sched.ConstantLR(o, 0.3, total_iters=12),
    "LinearLR": lambda o: sched.LinearLR(o, 0.1, total_iters=15),
    "ExponentialLR": lambda o: sched.ExponentialLR(o, 0.95),
    "PolynomialLR": lambda o: sched.PolynomialLR(o, 25, 2.0),
    "CosineAnnealingLR": lambda o: sched.CosineAnnealingLR(o, 10, 1e-3),
    "CosineAnnealingWarmRestarts": lambda o: sched.CosineAnnealingWarmRestarts(o, 5, 2, 1e-4),
    "OneCycleLR": lambda o: sched.OneCycleLR(o, each(o, 0.3, 0.1), total_steps=STEPS + 1),
    "OneCycleLR-3": lambda o: sched.OneCycleLR(o, 0.3, total_steps=STEPS + 1, three_phase=True),
    "CyclicLR": lambda o: sched.CyclicLR(o, each(o, 0.01, 0.02), each(o, 0.1, 0.3), 4, mode="triangular2"),
    "ReduceLROnPlateau": lambda o: sched.ReduceLROnPlateau(o, patience=1, min_lr=each(o, 1e-3, 5e-3)),
    "ReduceLROnPlateau-one": lambda o: sched.ReduceLROnPlateau(o, patience=1, min_lr=1e-3),
    "SWALR": lambda o: SWALR(o, each(o, 0.05, 0.2), anneal_epochs=12),
    "SequentialLR": sequential,
    "ChainedScheduler": lambda o: sched.ChainedScheduler([sched.StepLR(o, 3), sched.LinearLR(o)]),
    "nested": nested,
    "nested-deeper": nested_deeper,
}


def hf(name: str) -> Callable[[Any], Any]:
    def make(opt: Any) -> Any:
        transformers = pytest.importorskip("transformers")
        extra = {} if name in ("constant", "constant_with_warmup") else {"num_training_steps": STEPS}
        warm = {} if name in ("constant", "greedy") else {"num_warmup_steps": 5}
        return transformers.get_scheduler(name, opt, **warm, **extra)

    return make


def greedy(opt: Any) -> Any:
    optimization = pytest.importorskip("transformers.optimization")
    if not hasattr(optimization, "GreedyLR"):
        pytest.skip("this transformers has no GreedyLR")
    return optimization.GreedyLR(opt, patience=1, min_lr=each(opt, 1e-3, 5e-3), max_lr=0.15)


def timm_scheduler(name: str, **options: Any) -> Callable[[Any], Any]:
    def make(opt: Any) -> Any:
        scheduler = pytest.importorskip("timm.scheduler")
        return getattr(scheduler, name)(opt, warmup_t=4, warmup_lr_init=1e-3, **options)

    return make


SCHEDULERS |= {
    "hf-linear": hf("linear"),
    "hf-cosine": hf("cosine"),
    "hf-polynomial": hf("polynomial"),
    "hf-constant": hf("constant"),
    "hf-greedy": greedy,
    "timm-cosine": timm_scheduler("CosineLRScheduler", t_initial=20, noise_range_t=[8, 12]),
    "timm-tanh": timm_scheduler("TanhLRScheduler", t_initial=20),
    "timm-poly": timm_scheduler("PolyLRScheduler", t_initial=20),
    "timm-step": timm_scheduler("StepLRScheduler", decay_t=6),
    "timm-multistep": timm_scheduler("MultiStepLRScheduler", decay_t=[6, 9]),
    "timm-plateau": timm_scheduler("PlateauLRScheduler", patience_t=1, noise_range_t=[8, 14]),
}


def rates(opt: torch.optim.Optimizer) -> list[tuple[Any, ...]]:
    """Everything that a scheduler may move, per group."""
    return [(g["lr"], g.get("momentum"), g.get("betas")) for g in opt.param_groups]


def tick(opt: torch.optim.Optimizer, scheduler: Any, step: int) -> list[tuple[Any, ...]]:
    """One optimizer and one scheduler step, whatever the scheduler wants to be told; the rates after it."""
    opt.step()
    metric = [5.0, 4.0, 4.0, 4.0, 3.0, 3.0][step % 6]
    if type(scheduler).__module__.startswith("timm"):
        scheduler.step(step + 1, metric)
    elif isinstance(scheduler, sched.ReduceLROnPlateau) or type(scheduler).__name__ == "GreedyLR":
        scheduler.step(metric)
    else:
        scheduler.step()
    return rates(opt)


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
@pytest.mark.parametrize("groups", [one_group, two_groups])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_do_not_notice(name: str, groups: Any, kind: str) -> None:
    for at in (0, AT, 17):
        (model, opt), (_, plain) = build(groups, kind), build(groups, kind)
        scheduler, reference = SCHEDULERS[name](opt), SCHEDULERS[name](plain)
        count, source = len(opt.param_groups), len(opt.param_groups) - 1  # the group with the 1-D parameters
        for step in range(STEPS):
            if step == at:
                places = add_parameters([opt], gains(), beside=list(model.parameters()), schedulers=[scheduler])
                assert places == [(0, count)] * 2
            if step == at + 5:  # a second patch, later
                beside = [model.first.weight]
                more = add_parameters([opt], gains(1), beside=beside, schedulers=[scheduler])
                assert more == [(0, count + source)]  # with one group only: the same, as nothing was stepped
            got, want = tick(opt, scheduler, step), tick(plain, reference, step)
            assert got[:count] == want
            assert all(g == want[source] for g in got[count : count + 1])
            assert all(g == want[0] for g in got[count + 1 :])
        assert len(opt.param_groups) == count + 1 + source


def test_every_builtin_scheduler_is_tested() -> None:
    builtin = {n for n in sched.__all__ if n not in ("LRScheduler", "_LRScheduler")} | {"SWALR"}
    assert builtin <= {name.split("-")[0] for name in SCHEDULERS}


def test_tensor_learning_rates_are_not_shared() -> None:
    model = Block()
    opt = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1), foreach=False)
    scheduler = sched.ExponentialLR(opt, 0.5)
    add_parameters([opt], gains(), beside=list(model.parameters()), schedulers=[scheduler])
    for step in range(3):
        tick(opt, scheduler, step)
    assert [g["lr"].item() for g in opt.param_groups] == [pytest.approx(0.0125)] * 2
    assert opt.param_groups[0]["lr"] is not opt.param_groups[1]["lr"]


def test_what_greedy_resets_to_grows_too() -> None:
    model, opt = build()
    scheduler = greedy(opt)
    add_parameters([opt], gains(), beside=[model.first.weight], schedulers=[scheduler])
    assert scheduler._init_lrs == [0.1, 0.02, 0.1]


def test_lists_are_replaced_so_that_a_saved_state_keeps_its_own() -> None:
    model, opt = build()
    scheduler = sequential(opt)
    saved = scheduler.state_dict()
    add_parameters([opt], gains(), beside=list(model.parameters()), schedulers=[scheduler])
    assert len(saved["_last_lr"]) == 2
    assert len(saved["_schedulers"][0]["base_lrs"]) == 2


def test_schedulers_are_found_in_configs_and_other_optimizers_left_alone() -> None:
    (model, opt), (_, other) = build(), build()
    mine, foreign = sched.LambdaLR(opt, halving(opt)), sched.LambdaLR(other, halving(other))
    roots = [
        types.SimpleNamespace(scheduler=mine, interval="step"),
        {"scheduler": foreign},
        {"scheduler": mine},
    ]
    add_parameters([opt], gains(), beside=list(model.parameters()), schedulers=roots)
    assert (len(mine.base_lrs), len(mine.lr_lambdas), len(foreign.base_lrs)) == (3, 3, 2)


def muon(params: Any, **options: Any) -> torch.optim.Optimizer:
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    return torch.optim.Muon(params, **options)


O = torch.optim  # noqa: E741
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw-loop": lambda g: O.AdamW(g, foreach=False),
    "adamw-foreach": lambda g: O.AdamW(g, foreach=True),
    "adamw-fused": lambda g: O.AdamW(g, fused=True),
    "adamw-amsgrad": lambda g: O.AdamW(g, amsgrad=True),
    "adam": lambda g: O.Adam(g),
    "adam-fused": lambda g: O.Adam(g, fused=True),
    "sgd": lambda g: O.SGD(g),
    "sgd-momentum": lambda g: O.SGD(g, momentum=0.9),
    "sgd-nesterov-foreach": lambda g: O.SGD(g, momentum=0.9, nesterov=True, foreach=True),
    "sgd-fused": lambda g: O.SGD(g, momentum=0.9, fused=True),
    "rmsprop": lambda g: O.RMSprop(g, momentum=0.5, centered=True),
    "adagrad": lambda g: O.Adagrad(g, lr_decay=0.1, initial_accumulator_value=0.1),
    "adafactor": lambda g: O.Adafactor(g),
    "nadam": lambda g: O.NAdam(g, decoupled_weight_decay=True),
    "radam": lambda g: O.RAdam(g),
    "adamax": lambda g: O.Adamax(g),
    "adadelta": lambda g: O.Adadelta(g),
    "asgd": lambda g: O.ASGD(g),
    "rprop": lambda g: O.Rprop([{k: v for k, v in d.items() if k != "weight_decay"} for d in g]),
}


def feed(params: list[nn.Parameter], step: int, offset: int = 0) -> None:
    """The same gradients for the same place and step, whatever else is trained."""
    for i, param in enumerate(params):
        param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(step * 1000 + offset + i))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_train_old_as_before_and_new_as_fresh(name: str) -> None:
    torch.manual_seed(1)
    (model, opt), (plain_model, plain) = ((m, OPTIMIZERS[name](two_groups(m))) for m in twins())
    late, late2 = gains(), gains(1)
    alone = copy.deepcopy([p for _, p in late + late2])
    old, plain_old = list(model.parameters()), list(plain_model.parameters())
    fresh: list[torch.optim.Optimizer] = []
    for step in range(16):
        if step == 5:
            identity = snapshot(opt)
            places = add_parameters([opt], late, beside=old)
            assert places == [(0, 2)] * 2
            assert {k: v for k, v in snapshot(opt).items() if k in identity} == identity
            fresh.append(OPTIMIZERS[name]([{"params": alone[:2], "lr": 0.02, "weight_decay": 0.0}]))
        if step == 9:
            add_parameters([opt], late2, beside=[model.first.weight, *(p for _, p in late)])
            fresh.append(OPTIMIZERS[name]([{"params": alone[2:], "lr": 0.02, "weight_decay": 0.0}]))
        for some, at in ((old, 0), (plain_old, 0), ([p for _, p in late + late2], 500), (alone, 500)):
            feed(some, step, at)
        for each_ in (opt, plain, *fresh):
            each_.step()
    assert all(torch.equal(p, q) for p, q in zip(old, plain_old, strict=True))
    assert all(torch.equal(p, q) for (_, p), q in zip(late + late2, alone, strict=True))
    assert not torch.equal(late[0][1], torch.ones(2, 2))


def twins() -> list[Block]:
    model = Block()
    return [model, copy.deepcopy(model)]


def snapshot(opt: torch.optim.Optimizer) -> dict[Any, Any]:
    """Identities of parameters, state tensors and group options."""
    state = {("state", id(p), k): id(v) for p, s in opt.state.items() for k, v in s.items()}
    groups = {
        ("group", j, k): [id(p) for p in v] if k == "params" else v
        for j, g in enumerate(opt.param_groups)
        for k, v in g.items()
    }
    return state | groups


def test_fused_sgd_would_not_take_a_newcomer_in_an_old_group() -> None:
    """Why there is always a new group, also for a second patch after some steps."""
    model = Block()
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    feed(list(model.parameters()), 0)
    opt.step()
    (_, gain), *_ = gains()
    opt.param_groups[0]["params"].append(gain)
    feed([gain], 0)
    with pytest.raises(TypeError):
        opt.step()


def test_patches_without_a_step_between_share_a_group() -> None:
    model, opt = build()
    scheduler = sched.LambdaLR(opt, halving(opt))
    places = [
        add_parameters([opt], gains(1), beside=list(model.parameters()), schedulers=[scheduler])[0] for _ in range(12)
    ]
    assert places == [(0, 2)] * 12
    assert len(opt.param_groups[2]["params"]) == 12
    assert len(scheduler.base_lrs) == 3


@pytest.mark.parametrize("key", ["weight_decay", "wd"])
def test_no_decay(key: str) -> None:
    model = Block()
    opt = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    opt.param_groups[0].setdefault(key, 0.1)
    late = gains()
    add_parameters([opt], late, beside=list(model.parameters()))
    for _, gain in late:
        gain.grad = torch.zeros_like(gain)
    before = model.first.weight.clone()
    feed(list(model.parameters()), 0)
    opt.step()
    assert all(torch.equal(gain, torch.ones(2, 2)) for _, gain in late)
    assert not torch.equal(before, model.first.weight)
    assert opt.param_groups[1][key] == 0
    assert opt.param_groups[0][key] == 0.1


def test_a_decay_that_the_user_gave_to_the_gains_later_stays() -> None:
    model, opt = build()
    late = gains()
    add_parameters([opt], late, beside=list(model.parameters()))
    opt.param_groups[2]["weight_decay"] = 0.5
    feed([p for _, p in late], 0)
    opt.step()
    add_parameters([opt], gains(), beside=list(model.parameters()))
    assert [g["weight_decay"] for g in opt.param_groups] == [0.1, 0, 0.5, 0]


@pytest.mark.parametrize("flag", ["capturable", "differentiable", "maximize", "foreach"])
def test_flags_are_cloned(flag: str) -> None:
    model = Block()
    opt = torch.optim.AdamW(model.parameters(), **{flag: True})
    add_parameters([opt], gains(), beside=list(model.parameters()))
    assert opt.param_groups[1][flag] is True
    assert opt.param_groups[1].keys() - {GROUP_KEY} == opt.param_groups[0].keys()


def test_flags_named_like_decay_stay() -> None:
    model = Block()
    opt = torch.optim.NAdam(model.parameters(), weight_decay=0.1, decoupled_weight_decay=True, momentum_decay=0.3)
    add_parameters([opt], gains(), beside=list(model.parameters()))
    group = opt.param_groups[1]
    assert (group["decoupled_weight_decay"], group["momentum_decay"], group["weight_decay"]) == (True, 0.3, 0)


def layerwise(model: Block) -> list[dict[str, Any]]:
    """Layer-wise learning rates, timm's way."""
    groups = [(model.first, 0.25), (model.norm, 0.5), (model.last, 1.0)]
    return [{"params": list(m.parameters()), "lr": 0.1 * s, "lr_scale": s, "name": str(s)} for m, s in groups]


def test_a_mapping_leads_each_to_its_block() -> None:
    timm = pytest.importorskip("timm.scheduler")
    model = Block()
    opt = torch.optim.AdamW(layerwise(model))
    scheduler = timm.CosineLRScheduler(opt, 20, warmup_t=4)
    new = gains(4)
    beside = {
        "g0": list(model.last.parameters()),
        "g1": list(model.first.parameters()),
        "g2": list(model.last.parameters()),
    }
    places = add_parameters([opt], new, beside=beside, schedulers=[scheduler])
    assert places[:3] == [(0, 3), (0, 4), (0, 3)]
    assert [g.get(GROUP_KEY) for g in opt.param_groups] == [
        None,
        None,
        None,
        2,
        0,
        1,
    ]  # g3: has no block: 1-D
    for step in range(20):
        now = [lr for lr, *_ in tick(opt, scheduler, step)]
        assert now[3:] == [now[2], now[0], now[1]]
    assert len({g["name"] for g in opt.param_groups}) == 6


def test_named_parameters() -> None:
    model = Block()
    opt = torch.optim.AdamW(two_groups(model, named=True))
    add_parameters([opt], gains(2), beside=list(model.parameters()))
    add_parameters([opt], [("late", nn.Parameter(torch.ones(2)))], beside=list(model.parameters()))
    assert opt.param_groups[2]["param_names"] == ["g0", "g1", "late"]
    assert opt.param_groups[1]["param_names"] == ["first.bias", "norm.weight", "norm.bias"]
    remove_parameters([opt], [opt.param_groups[2]["params"][1]])
    assert opt.param_groups[2]["param_names"] == ["g0", "late"]


def test_muon_is_passed_over_for_the_optimizer_of_the_flat_parameters() -> None:
    model = Block()
    deep = [p for p in model.parameters() if p.ndim == 2]
    flat = [p for p in model.parameters() if p.ndim < 2]
    optimizers = [muon(deep, lr=0.01), torch.optim.AdamW(flat, lr=0.02)]
    places = add_parameters(optimizers, gains(), beside=[model.last.weight])
    assert places == [(1, 1)] * 2
    with pytest.raises(QKWatchError, match="Muon can't train a gain"):
        add_parameters(optimizers[:1], gains(), beside=deep)


def test_gains_that_a_rule_gave_to_muon_or_to_decay_move() -> None:
    model = Block(gains=True)
    deep = [p for p in model.parameters() if p.ndim == 2]
    flat = [p for p in model.parameters() if p.ndim < 2]
    optimizers = [muon(deep, lr=0.01), torch.optim.AdamW(flat, lr=0.02)]
    assert add_parameters(optimizers, model.gains(), beside=list(model.first.parameters())) == [(1, 1)] * 2
    assert len(optimizers[0].param_groups[0]["params"]) == 2
    single = torch.optim.AdamW(one_group(model))
    feed(list(model.parameters()), 0)
    single.step()
    state = {n: single.state[p] for n, p in model.gains()}
    assert add_parameters([single], model.gains()) == [(0, 1)] * 2
    assert all(single.state[p] is state[n] for n, p in model.gains())
    assert add_parameters([single], model.gains()) == [(0, 1)] * 2  # once more changes nothing
    assert sum(len(g["params"]) for g in single.param_groups) == len(list(model.parameters()))


def test_mixed_muon_groups() -> None:
    """One optimizer with flagged groups; and timm's, which sorts by itself."""
    timm = pytest.importorskip("timm.optim")
    model = Block()
    opt = timm.Muon(two_groups(model), lr=0.1)
    late = gains(shape=(8, 8))
    add_parameters([opt], late, beside=[model.first.weight])
    feed([p for _, p in late], 0)
    opt.step()
    assert not opt.state[late[0][1]]["use_muon"]
    flagged = torch.optim.AdamW([{**g, "use_muon": i == 0} for i, g in enumerate(two_groups(Block()))])
    assert add_parameters([flagged], gains(), beside=flagged.param_groups[0]["params"]) == [(0, 2)] * 2
    assert flagged.param_groups[2]["use_muon"] is False


def test_refusals() -> None:
    model = Block()
    params = list(model.parameters())
    with pytest.raises(QKWatchError, match="no optimizer"):
        add_parameters([], gains(), beside=params)
    with pytest.raises(QKWatchError, match="LBFGS trains its block"):
        add_parameters([torch.optim.LBFGS(params)], gains(), beside=params)
    with pytest.raises(QKWatchError, match="g0: LBFGS can't train"):
        add_parameters([torch.optim.LBFGS(params)], gains())
    inside = nn.Parameter(torch.ones(2))  # LBFGS had it from the start: it is trained, and nothing decays it
    assert add_parameters([torch.optim.LBFGS([*params, inside])], [("g", inside)]) == [(0, 0)]
    with pytest.raises(QKWatchError, match="no param_groups"):
        add_parameters([model], gains())


def test_several_optimizers_and_frozen_blocks() -> None:
    one, two, frozen = Block(), Block(), nn.Linear(2, 2)
    opts = [torch.optim.SGD(one.norm.parameters(), lr=0.1), torch.optim.AdamW(two_groups(two))]
    assert add_parameters(opts, gains(1), beside=list(one.parameters())) == [(0, 1)]
    assert add_parameters(opts, gains(1), beside=list(two.last.parameters())) == [(1, 2)]
    assert opts[1].param_groups[2][GROUP_KEY] == 0
    assert add_parameters(opts, gains(1), beside=list(frozen.parameters())) == [(1, 3)]
    assert opts[1].param_groups[3][GROUP_KEY] == 1
    turned = [torch.optim.AdamW(one_group(two)), torch.optim.SGD(one.norm.parameters(), lr=0.1)]
    turned[1].add_param_group({"params": list(frozen.parameters())})
    assert add_parameters(turned, gains(1)) == [(0, 1)]


def test_wrappers_are_looked_through() -> None:
    fabric = pytest.importorskip("lightning.pytorch.core.optimizer")
    model, opt = build()
    wrapped = types.SimpleNamespace(optimizer=fabric.LightningOptimizer(opt))
    wrapped.param_groups = opt.param_groups
    scheduler = sched.LambdaLR(opt, halving(opt))
    late = gains()
    add_parameters([wrapped], late, beside=list(model.parameters()), schedulers=[scheduler])
    assert len(opt.param_groups) == len(scheduler.base_lrs) == 3
    remove_parameters([fabric.LightningOptimizer(opt)], [p for _, p in late], [scheduler])
    assert len(opt.param_groups) == len(scheduler.base_lrs) == 2


def plain(value: Any, memo: tuple[int, ...] = ()) -> Any:
    """A scheduler's insides as values, to compare before and after."""
    if id(value) in memo:
        return "..."
    if isinstance(value, list | tuple):
        return [plain(v, (*memo, id(value))) for v in value]
    if isinstance(value, sched.LRScheduler) or hasattr(value, "base_values"):
        return {k: plain(v, (*memo, id(value))) for k, v in vars(value).items() if k != "optimizer"}
    return value


@pytest.mark.parametrize("name", SCHEDULERS)
def test_remove_is_the_inverse(name: str) -> None:
    model, opt = build()
    old = list(model.parameters())
    scheduler = SCHEDULERS[name](opt)
    for step in range(AT):
        feed(old, step)
        tick(opt, scheduler, step)
    before, lists = snapshot(opt), plain(scheduler)
    late, later = gains(), gains(1)
    add_parameters([opt], late, beside=old, schedulers=[scheduler])
    opt.state[late[0][1]]["step"] = torch.tensor(1.0)
    add_parameters([opt], later, beside=[model.last.weight], schedulers=[scheduler])
    assert len(opt.param_groups) == 4
    remove_parameters([opt], [p for _, p in later + late], [scheduler])
    assert snapshot(opt) == before
    assert plain(scheduler) == lists
    assert late[0][1] not in opt.state


def test_remove_compares_by_identity_and_keeps_the_marks_right() -> None:
    model, opt = build()
    late, later = gains(), gains(2)
    add_parameters([opt], late, beside=list(model.parameters()))
    opt.add_param_group({"params": [nn.Parameter(torch.ones(3, 3))], "lr": 0.7, "weight_decay": 0.1})
    add_parameters([opt], later, beside=opt.param_groups[3]["params"])
    remove_parameters([opt], [late[1][1], nn.Parameter(torch.ones(2, 2))])
    assert [p is late[0][1] for p in opt.param_groups[2]["params"]] == [True]
    remove_parameters([opt], [late[0][1]])
    assert [g.get(GROUP_KEY) for g in opt.param_groups] == [None, None, None, 2]
    assert opt.param_groups[3]["lr"] == 0.7
    assert opt.param_groups[3]["params"][0] is later[0][1]


def rules(model: Block, how: str) -> list[dict[str, Any]]:
    """What a user's configure_optimizers makes of a model that is patched already."""
    patched = {id(p) for _, p in model.gains()}
    if how == "by-ndim":
        return two_groups(model)
    if how == "named":
        return two_groups(model, named=True)
    deep, flat = two_groups(model)
    if how == "by-name":  # gains end up beside the biases, in another order
        moved = [p for p in deep["params"] if id(p) in patched]
        deep["params"] = [p for p in deep["params"] if id(p) not in patched]
        flat["params"] = [*reversed(moved), *flat["params"]]
        return [deep, flat]
    deep["params"] = [p for p in deep["params"] if id(p) not in patched]  # without them, or in a group of their own
    own = [{"params": [p for _, p in model.gains()], "lr": 0.5, "weight_decay": 0.3}]
    return [deep, flat, *(own if how == "own-group" else [])]


def loaded(value: Any, weights_only: bool = True) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=weights_only)


def advance(model: Block, opt: torch.optim.Optimizer, scheduler: Any, steps: range) -> list[Any]:
    """Train on gradients that depend on the weights; the rates on the way."""
    names = sorted(n for n, _ in model.named_parameters())
    params = dict(model.named_parameters())
    seen = []
    for step in steps:
        feed([params[n] for n in names], step)
        for n in names:
            params[n].grad.add_(params[n].detach(), alpha=0.1)
        seen.append(tick(opt, scheduler, step))
    return seen


HOW = ["by-ndim", "by-name", "without", "own-group"]
RESUMED = (
    [(s, "by-ndim") for s in SCHEDULERS if s != "timm-plateau"]
    + [  # (timm doesn't save all of its state)
        (s, how) for s in ("LambdaLR", "OneCycleLR", "nested", "timm-cosine") for how in [*HOW[1:], "named"]
    ]
)


@pytest.mark.parametrize(("name", "how"), RESUMED)
@pytest.mark.parametrize("make", [torch.optim.AdamW, lambda g: torch.optim.SGD(g, momentum=0.9, fused=True)])
def test_resume_is_bit_identical(make: Any, name: str, how: str) -> None:
    torch.manual_seed(2)
    model = Block()
    opt = make(two_groups(model, named=how == "named"))
    scheduler = SCHEDULERS[name](opt)
    advance(model, opt, scheduler, range(AT))
    model.add_gains()
    beside = {"first.q_gain": list(model.parameters()), "first.k_gain": [model.first.weight]}
    places = add_parameters([opt], model.gains(), beside=beside, schedulers=[scheduler])
    assert places == [(0, 2), (0, 3)]
    for start in (AT, AT + 5):  # patch, save, resume, save, resume
        advance(model, opt, scheduler, range(start, start + 5))
        names = json.loads(json.dumps([group_names(opt, model)]))
        weights, state = loaded(model.state_dict()), loaded(opt.state_dict())
        rates_state = loaded(scheduler.state_dict(), weights_only=False)
        again = Block(gains=True)
        again.load_state_dict(weights)
        opt2 = make(rules(again, how))
        scheduler2 = SCHEDULERS[name](opt2)
        regroup([opt2], again, names, [scheduler2])
        assert group_names(opt2, again) == names[0]
        opt2.load_state_dict(state)
        scheduler2.load_state_dict(rates_state)
        ahead = range(start + 5, start + 13)
        twin = copy.deepcopy((again, opt2, scheduler2)) if start == AT and "timm" not in name else None
        want, got = advance(model, opt, scheduler, ahead), advance(again, opt2, scheduler2, ahead)
        assert want == got
        assert all(torch.equal(p, model.state_dict()[n]) for n, p in again.state_dict().items())
        assert all(g["weight_decay"] == 0 for g in opt2.param_groups[2:])
        if twin is None:
            break
        model, opt, scheduler = twin
        relink(scheduler, opt)


def relink(scheduler: Any, opt: torch.optim.Optimizer) -> None:
    assert scheduler.optimizer is opt


def test_without_regroup_the_states_are_mixed_up() -> None:
    """The silent fault that regroup is there for: equal shapes, so that nothing is raised."""
    model = Block()
    opt = torch.optim.AdamW(one_group(model))
    model.add_gains()
    add_parameters([opt], model.gains(), beside=list(model.parameters()))
    again = Block(gains=True)
    opt2 = torch.optim.AdamW(one_group(again))
    with pytest.raises(ValueError, match="number of parameter groups"):
        opt2.load_state_dict(opt.state_dict())
    regroup([opt2], again, [group_names(opt, model)])
    opt2.load_state_dict(opt.state_dict())


def test_regroup_drops_groups_that_were_not_saved() -> None:
    """Patched, then undone: the checkpoint from before the patch meets a run that still has its group."""
    model, opt = build()
    scheduler = sched.LambdaLR(opt, halving(opt))
    before = [group_names(opt, model)]
    add_parameters([opt], gains(1), beside=list(model.parameters()), schedulers=[scheduler])
    gone = opt.param_groups[2]["params"]
    with pytest.raises(QKWatchError, match="from outside the model"):
        regroup([opt], model, before, [scheduler])
    assert len(opt.param_groups) == 3
    remove_parameters([opt], list(gone), [scheduler])
    regroup([opt], model, before, [scheduler])
    assert (len(opt.param_groups), len(scheduler.lr_lambdas)) == (2, 2)


def test_regroup_moves_across_optimizers_and_keeps_outsiders() -> None:
    model, loss = Block(), nn.Linear(3, 3)
    opts = [torch.optim.SGD(model.last.parameters(), lr=0.1), torch.optim.AdamW(model.first.parameters())]
    opts[0].add_param_group({"params": list(loss.parameters())})
    model.add_gains()
    add_parameters(opts, model.gains(), beside=list(model.first.parameters()))
    names = [group_names(o, model) for o in opts]
    assert names[0][1]["params"] == [None, None]
    again, loss2 = Block(gains=True), nn.Linear(3, 3)
    deep = [again.last.weight, *(p for _, p in again.gains())]
    opts2 = [torch.optim.SGD(deep, lr=0.1), torch.optim.AdamW([again.first.weight, again.first.bias])]
    opts2[0].add_param_group({"params": list(loss2.parameters())})
    regroup(opts2, again, names)
    assert [group_names(o, again) for o in opts2] == names
    assert opts2[0].param_groups[1]["params"][0] is loss2.weight


def test_regroup_errors_change_nothing() -> None:
    model, opt = build()
    names = group_names(opt, model)
    before = snapshot(opt)
    extra = [*names, {"params": ["first.q_gain"], "source": 1}]
    with pytest.raises(QKWatchError, match=r"first\.q_gain: in optimizer 0 .*restore_"):
        regroup([opt], model, [extra])
    with pytest.raises(QKWatchError, match=r"first\.bias, norm\.weight, norm\.bias: trained now"):
        regroup([opt], model, [names[:1]])
    with pytest.raises(QKWatchError, match="2 optimizers, this run 1"):
        regroup([opt], model, [names, names])
    assert snapshot(opt) == before


def test_names_are_the_users_own() -> None:
    inner = Block()
    wrapped = nn.ModuleDict({"_orig_mod": nn.ModuleDict({"net": inner})})
    names = group_names(torch.optim.SGD(inner.parameters(), lr=0.1), wrapped)
    assert names[0]["params"][0] == "net.first.weight"
    assert clean_name("a._fsdp_wrapped_module.b") == "a.b"


def test_tied_parameters_are_named_once_and_found_under_either_name() -> None:
    model = Block()
    model.head = nn.Linear(4, 4, bias=False)
    model.head.weight = model.first.weight
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    names = group_names(opt, model)
    assert names[0]["params"][0] == "first.weight"
    names[0]["params"][0] = "head.weight"
    regroup([opt], model, [names])
    assert opt.param_groups[0]["params"][0] is model.first.weight
