"""One run's watch without Lightning: the monitor itself, plain loops, Fabric."""

from __future__ import annotations

import copy
from typing import Any

import lightning as fabric_package
import pytest
import torch
from tiny import LENGTH, Net, assert_same, data, loss_of, sharpen, weights
from torch import nn
from torch.optim import lr_scheduler as sched

import qkwatch
from qkwatch import Level, QKWatchError, Thresholds
from qkwatch.monitor import Monitor
from qkwatch.progress import Progress
from qkwatch.ranks import Broken, Ranks
from qkwatch.surgery import norm_parameters

SITES = ["blocks.0.attn", "blocks.1.attn"]
IDS = data(8).dataset.tensors[0]


def monitor(model: nn.Module, **options: Any) -> Monitor:
    faults: list[Any] = []
    settings = {
        "every_n_steps": 2,
        "layers": None,
        "rows": "all",
        "thresholds": Thresholds(),
        "on_fault": lambda site, fault: faults.append((site, fault)),
        "on_unseen": lambda site, operation: faults.append((site, operation)),
        "ranks": Ranks(),
    }
    built = Monitor(model, **{**settings, **options})
    built.faults = faults  # type: ignore[attr-defined]
    return built


def step(watch: Monitor, model: nn.Module, number: int, **options: Any) -> Any:
    watch.begin(number, **options)
    loss_of(model, IDS[:4])
    watch.end_forward()
    return watch.collect(number)


def test_due() -> None:
    watch = monitor(Net(), every_n_steps=3)
    assert [n for n in range(8) if watch.due(n)] == [0, 3, 6]
    step(watch, watch.model, 3)
    assert not watch.due(3)  # once per step, however many micro-batches it has


def test_the_first_pass_finds_the_sites_and_the_others_agree_with_it() -> None:
    model = Net()
    watch = monitor(model)
    first, second = (step(watch, model, number)[0] for number in (0, 2))
    assert [site.name for site in watch.sites] == SITES
    for a, b in zip(first, second, strict=True):
        assert (a.site, a.rows, a.exact) == (b.site, b.rows, b.exact)
        assert_same(a.max_logit, b.max_logit)
        torch.testing.assert_close(a.entropy, b.entropy)


def test_collect_without_begin_and_end_without_begin_do_nothing() -> None:
    watch = monitor(Net())
    watch.end_forward()
    assert watch.collect(0) == ([], [])
    watch.discard()


def test_a_pass_that_is_discarded_leaves_nothing() -> None:
    model = Net()
    watch = monitor(model)
    watch.begin(0)
    loss_of(model, IDS[:4])
    watch.discard()
    assert torch._dynamo.eval_frame._stance.stance == "default"
    assert step(watch, model, 2)[0]


def test_a_step_that_is_measured_again_for_its_inputs_reports_once() -> None:
    model = Net()
    sharpen(model)
    watch = monitor(model)
    readings, alerts = step(watch, model, 0)
    assert readings
    assert max(a.level for a in alerts) >= Level.WARN
    assert not watch.kept
    assert watch.keep_due(0)
    assert step(watch, model, 0, keep_calls=True) == ([], [])
    assert watch.kept
    assert not watch.keep_due(0)
    assert all(site.call is not None for site in watch.sites)
    watch.drop_calls()
    assert all(site.call is None for site in watch.sites)


def test_a_site_that_appears_later_is_found_later() -> None:
    class Grows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.late, self.use = Net(), Net(), False

        def forward(self, ids: Any) -> Any:
            return self.net(ids) + (self.late(ids) if self.use else 0)

    model = Grows()
    watch = monitor(model)
    assert len(step(watch, model, 0)[0]) == 2
    model.use = True
    step(watch, model, 2)  # sees cores that run in none of the sites it knows
    assert len(step(watch, model, 4)[0]) == 4


def test_no_attention_is_looked_for_ever_more_rarely() -> None:
    model = nn.Linear(2, 2)
    watch = monitor(model)
    for number in range(0, 6, 2):
        assert watch.due(number)
        watch.begin(number)
        model(torch.ones(1, 2))
        assert watch.collect(number) == ([], [])
        assert watch.empty
    assert not watch.due(6)
    assert not watch.keep_due(6)
    searched = []
    for number in range(6, 1000):
        if watch.due(number):
            searched.append(number)
            watch.begin(number)
            model(torch.ones(1, 2))
            watch.collect(number)
    assert searched == [7, 12, 21, 38, 71, 136, 265, 522]


class Some(nn.Module):
    """Blocks of which each pass runs some only."""

    def __init__(self, blocks: int = 2, runs: Any = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Net() for _ in range(blocks))
        self.runs = [0] if runs is None else runs

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return sum(self.blocks[i](ids) for i in self.runs)


def watched(watch: Monitor) -> list[str]:
    return sorted({site.name.split(".")[1] for site in watch.sites})


@pytest.mark.parametrize("several", [False, True])
def test_a_search_forgets_no_site_that_did_not_run_in_it(several: bool) -> None:
    model = Some(3)
    watch = monitor(model, ranks=Echo().ranks() if several else Ranks())
    for number, runs in enumerate([[0, 1], [0, 2], [2]]):
        model.runs = runs
        step(watch, model, 2 * number)
    assert watched(watch) == ["0", "1", "2"]
    order = [site.name for site in watch.sites]
    assert order == sorted(order)
    model.runs = [1]
    assert {r.site.split(".")[1] for r in step(watch, model, 8)[0]} == {"1"}


@pytest.mark.parametrize("kind", ["sdpa", "eager"])
@pytest.mark.parametrize(("period", "every"), [(2, 10), (4, 4), (3, 2)])
def test_what_alternates_with_the_cadence_is_read_too(period: int, every: int, kind: str) -> None:
    model = Some(period)
    model.blocks = nn.ModuleList(Net(kind) for _ in range(period))
    watch = monitor(model, every_n_steps=every)
    last: dict[str, int] = {}
    for number in range(600):
        model.runs = [number % period]
        if watch.due(number):
            last |= {r.site.split(".")[1]: number for r in step(watch, model, number)[0]}
    assert sorted(last) == [str(i) for i in range(period)]
    assert min(last.values()) > 200  # and not once only


def test_a_model_that_runs_whole_is_measured_on_the_cadence_only() -> None:
    model = Net()
    watch = monitor(model)
    assert [n for n in range(20) if watch.due(n) and step(watch, model, n)] == list(range(0, 20, 2))


def test_attention_outside_of_any_forward_is_read_and_says_so() -> None:
    model = Net()
    watch = monitor(model)
    q = torch.randn(2, 3, 4, 8)
    for number in (0, 2):
        watch.begin(number)
        model.head(torch.zeros(1, 16))
        nn.functional.scaled_dot_product_attention(q, q, q)
        watch.end_forward()
        readings, _ = watch.collect(number)
        assert [(r.site, r.heads) for r in readings] == [("", 3)]
    assert "outside of any module" in watch.sites[0].reason


def test_attention_of_another_model_is_no_news() -> None:
    model, other = Net(), Net()
    watch = monitor(model)
    step(watch, model, 0)
    for number in (2, 4):
        watch.begin(number)
        loss_of(other, IDS[:4])
        watch.collect(number)
        assert not watch._strangers
    assert [site.name for site in watch.sites] == SITES


def test_globs() -> None:
    watch = monitor(Net(), layers="decoder*")
    watch.begin(0)
    loss_of(watch.model, IDS)
    with pytest.raises(QKWatchError, match=r"decoder.*blocks\.0\.attn"):
        watch.end_forward()


def test_a_glob_may_wait_for_what_has_not_run() -> None:
    model = Some(2)
    watch = monitor(model, layers="blocks.1.*")
    step(watch, model, 0)
    assert (watch.sites, watch.waiting) == ([], ["blocks.1.*"])
    model.runs = [0, 1]
    step(watch, model, 2)
    step(watch, model, 4)
    model.runs = [0]
    step(watch, model, 6)
    assert watched(watch) == ["1"]
    assert not watch.waiting
    watch.reset_sites()  # as after a retrofit: what has run once may be missing from the next pass
    step(watch, model, 8)
    assert not watch.waiting
    wrong = monitor(model, layers=["blocks.1.*", "blocks.0.*.mlp"])
    with pytest.raises(QKWatchError, match=r"mlp"):
        step(wrong, model, 0)


class Echo:
    """A second rank that sends what it is told to."""

    def __init__(self) -> None:
        self.sent: list[torch.Tensor] = []
        self.change: Any = lambda values: values

    def ranks(self) -> Ranks:
        def gather(values: torch.Tensor) -> torch.Tensor:
            self.sent.append(values)
            return torch.stack([values, self.change(values.clone())])

        return Ranks(2, 0, lambda value: [value, value], gather, lambda value: value)


def test_ranks_are_put_together_in_one_tensor() -> None:
    model, echo = Net(), Echo()
    alone = step(monitor(model), model, 0)[0]
    watch = monitor(model, ranks=echo.ranks())
    readings, _ = step(watch, model, 0)
    assert len(echo.sent) == 1
    for ours, single in zip(readings, alone, strict=True):
        assert ours.rows == 2 * single.rows == 2 * 4 * LENGTH
        for key in ("max_logit", "entropy", "entropy_nats", "q_rms", "grad_signal"):
            torch.testing.assert_close(getattr(ours, key), getattr(single, key))


def test_a_fault_is_told_to_all_ranks_and_raised_on_all() -> None:
    model, echo = Net(), Echo()
    watch = monitor(model, ranks=echo.ranks())
    step(watch, model, 0)

    def failing(values: torch.Tensor) -> torch.Tensor:
        values[-1, 1] = 1.0
        return values

    echo.change = failing
    with pytest.raises(Broken):
        step(watch, model, 2)
    assert watch.told

    watch = monitor(model, ranks=Echo().ranks())
    step(watch, model, 0)
    watch.broken = ZeroDivisionError("here")
    with pytest.raises(ZeroDivisionError):
        step(watch, model, 2)


def test_agree() -> None:
    Ranks().agree(None)
    with pytest.raises(ZeroDivisionError):
        Ranks().agree(ZeroDivisionError("x"))
    with pytest.raises(Broken, match="rank 1"):
        Ranks(2, 0, lambda value: [value, "KeyError: 3"]).agree(None)


def test_progress_is_primitives_and_comes_back() -> None:
    model = Net()
    sharpen(model)
    watch = monitor(model)
    run = Progress(alerts=step(watch, model, 0)[1], pending="why", steps=3)
    assert run.alerts
    assert any(alert.forecast is not None for alert in run.alerts)
    import io

    file = io.BytesIO()
    torch.save(run.state_dict(), file)
    file.seek(0)
    assert Progress.from_state_dict(torch.load(file, weights_only=True)) == run


# -- plain loops and Fabric -------------------------------------------------------------------------------------


def _retrofit(model: nn.Module) -> Any:
    return qkwatch.retrofit_(model, qkwatch.find_sites(model, IDS[:4, :-1]))


@pytest.mark.parametrize("several", [False, True])
def test_a_plain_loop(several: bool) -> None:
    """Old parameters go on to the bit where the gains stand still; each gain is in one group, without decay."""
    torch.manual_seed(1)
    model = Net()
    if several:
        inner = [p for p in model.blocks.parameters() if p.ndim == 2]
        ids = {id(p) for p in inner}
        optimizers: Any = [
            torch.optim.Muon(inner, lr=1e-2),
            torch.optim.AdamW([p for p in model.parameters() if id(p) not in ids], lr=1e-2),
        ]
    else:
        optimizers = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    live = optimizers if several else [optimizers]
    plans = [sched.LambdaLR(o, lambda step: 0.9**step) for o in live]

    def train(steps: int) -> None:
        for _ in range(steps):
            loss_of(model, IDS).backward()
            for optimizer, plan in zip(live, plans, strict=True):
                optimizer.step()
                optimizer.zero_grad()
                plan.step()

    train(3)
    report = _retrofit(model)
    assert report.applied == SITES
    new = qkwatch.adopt_(model, optimizers, plans if several else plans[0])
    assert [name for name, _ in new] == [f"{site}.qk_norm.q.gain" for site in SITES]
    assert qkwatch.adopt_(model, optimizers, plans) == []
    before = {name: p.detach().clone() for name, p in new}
    train(3)
    for name, gain in new:
        homes = [g for o in live for g in o.param_groups if any(p is gain for p in g["params"])]
        assert len(homes) == 1
        assert homes[0]["weight_decay"] == 0
        assert homes[0]["lr"] == pytest.approx(1e-2 * 0.9**6)
        assert not torch.equal(before[name], gain)


@pytest.mark.parametrize("fault", ["add_param_group", "late"])
def test_adopt_changes_nothing_where_it_fails(fault: str) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    plan = sched.LambdaLR(optimizer, lambda step: 0.9**step)
    loss_of(model, IDS).backward()
    optimizer.step()
    _retrofit(model)
    state, groups = copy.deepcopy(optimizer.state_dict()), list(optimizer.param_groups)
    lists = {k: list(v) for k, v in vars(plan).items() if isinstance(v, list)}
    original = optimizer.add_param_group

    def failing(group: Any) -> None:
        if fault == "late":
            original(group)
        raise ZeroDivisionError

    optimizer.add_param_group = failing  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        qkwatch.adopt_(model, optimizer, plan)
    assert_same(optimizer.state_dict(), state)
    assert all(a is b for a, b in zip(optimizer.param_groups, groups, strict=True))
    assert {k: v for k, v in vars(plan).items() if isinstance(v, list)} == lists


def test_adopt_needs_an_optimizer_that_can() -> None:
    model = Net()
    _retrofit(model)
    with pytest.raises(QKWatchError, match="optimizer"):
        qkwatch.adopt_(model, [])
    matrices = [p for p in model.parameters() if p.ndim == 2 and p.shape[0] == 16]
    with pytest.raises(QKWatchError, match="Muon"):
        qkwatch.adopt_(model, torch.optim.Muon(matrices))
    assert qkwatch.adopt_(Net(), torch.optim.SGD(Net().parameters(), lr=0.1)) == []


def test_fabric() -> None:
    """As in a plain loop, and the same to the bit."""

    def run(with_fabric: bool) -> tuple[Any, Any]:
        torch.manual_seed(1)
        model: Any = Net()
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        fabric = fabric_package.Fabric(accelerator="cpu", devices=1)
        wrapped: Any = model
        if with_fabric:
            wrapped, optimizer = fabric.setup(model, optimizer)
        for number in range(6):
            if number == 3:
                with qkwatch.watch(wrapped) as watcher:
                    wrapped(IDS[:4, :-1])
                assert [r.site for r in watcher.readings] == SITES
                report = qkwatch.retrofit_(wrapped, qkwatch.find_sites(wrapped, IDS[:4, :-1]))
                assert report.applied == SITES, report.refused
                assert len(qkwatch.adopt_(wrapped, optimizer)) == 2
            loss = loss_of(wrapped, IDS)
            if with_fabric:
                fabric.backward(loss)
            else:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer

    (ours, fabric_optimizer), (plain, optimizer) = run(True), run(False)
    assert_same(weights(ours), weights(plain))
    assert_same(fabric_optimizer.state_dict(), optimizer.state_dict())
    assert len(norm_parameters(ours)) == 2


@pytest.mark.parametrize("held", [True, False])
def test_gains_of_a_frozen_block_are_adopted_with_its_weights(held: bool) -> None:
    net = Net()
    net.requires_grad_(False)
    net.head.requires_grad_(True)
    optimizer = torch.optim.AdamW([p for p in net.parameters() if held or p.requires_grad], lr=1e-2)
    _retrofit(net)
    gain = net.blocks[0].attn.qk_norm.q.gain
    assert not gain.requires_grad
    assert bool(qkwatch.adopt_(net, optimizer)) == held
    assert any(gain is p for group in optimizer.param_groups for p in group["params"]) == held
    loss_of(net, IDS).backward()
    optimizer.step()
    net.requires_grad_(True)
    before = gain.detach().clone()
    loss_of(net, IDS).backward()
    optimizer.step()
    assert torch.equal(gain, before) != held
