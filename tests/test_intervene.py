"""What the callback does besides patching: QK-clip, and the way back from a retrofit that costs too much."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from test_resume import same_batch, state_of, train
from tiny import Tiny, assert_same, trainer, weights
from torch import Tensor

import qkwatch
from qkwatch import QKWatch, QKWatchError
from qkwatch.surgery import patched_sites
from qkwatch.wayback import LossLine

pytestmark = pytest.mark.filterwarnings("ignore")
SITES = ["net.blocks.0.attn", "net.blocks.1.attn"]


def watch(**options: Any) -> QKWatch:
    return QKWatch(**{"every_n_steps": 3, "console": False, "on_error": "raise", **options})


def largest(callback: QKWatch) -> list[tuple[int, float]]:
    return [(step, max(float(r.max_logit.max()) for r in readings)) for step, readings in callback.history]


# -- QK-clip ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sdpa", "eager", "mha"])
def test_clip_holds_the_logits_and_adds_nothing(kind: str) -> None:
    module, callback = Tiny(kind, sharp=True, lr=1e-4), watch(retrofit="auto", variant="qkclip", cap=15.0)
    keys = list(module.state_dict())
    trainer(callback, max_steps=11).fit(module, same_batch(20), same_batch(1))
    assert list(module.state_dict()) == keys
    assert patched_sites(module) == []
    assert callback.retrofits[0].report.applied == SITES
    figures = dict(largest(callback))
    assert figures[0] > 100
    assert all(value < 15.0 * 1.1 for step, value in figures.items() if step > 1)


def test_clip_leaves_heads_below_the_bound_alone() -> None:
    module, callback = Tiny(lr=0.0), watch(retrofit="now", variant="qkclip", cap=1e4)
    before = weights(module)
    trainer(callback, max_steps=5).fit(module, same_batch(), same_batch(1))
    assert_same(weights(module), before)


def test_clip_resumes_to_the_bit(tmp_path: Any) -> None:
    options = {"retrofit": "auto", "variant": "qkclip", "cap": 15.0}
    module, callback = Tiny(sharp=True), watch(**options)
    straight = state_of(train(module, callback, tmp_path, steps=11), module, callback)
    assert straight
    for stop in (1, 2, 4, 5):
        module, callback = Tiny(sharp=True), watch(**options)
        run = train(module, callback, tmp_path / f"again{stop}", path=tmp_path / f"step={stop}.ckpt", steps=11)
        assert_same(state_of(run, module, callback), straight, f"from {stop}")


def test_clip_once() -> None:
    module = Tiny(sharp=True)
    ids = torch.randint(0, 17, (2, 8))
    sites = qkwatch.find_sites(module.net, ids)
    report = qkwatch.retrofit_(module.net, sites, variant="qkclip", cap=10.0)
    assert report.applied == [s.name for s in sites]
    assert report.clip
    assert not report.plan.sites
    assert set(report.drift) == set(report.applied)
    assert max(float(s.reading.max_logit.max()) for s in qkwatch.find_sites(module.net, ids)[:1]) < 10.01
    assert qkwatch.undo_(module.net) == []


def test_clip_takes_no_ramp() -> None:
    with pytest.raises(QKWatchError, match="ramp_steps must be 0"):
        QKWatch(variant="qkclip", ramp_steps=5)


# -- the way back -------------------------------------------------------------------------------------------


class Ledger(L.Callback):
    """Weights, optimizer state and group sizes at the end of each step, before the watcher's turn."""

    def __init__(self) -> None:
        self.at: dict[int, tuple[Any, Any]] = {}

    def on_train_batch_end(self, run: Any, pl_module: Any, *args: Any) -> None:
        state = [{n: dict(run.optimizers[0].state[p]) for n, p in pl_module.named_parameters()}]
        copy = [{n: {k: v.clone() for k, v in s.items()} for n, s in state[0].items()}]
        self.at[run.global_step - 1] = weights(pl_module), copy


class Spoiled(Tiny):
    """From step 12 on the loss is three higher: whatever was done there must look guilty."""

    spoiled = True

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = super().training_step(batch, index)
        return loss + 3.0 if self.spoiled and self.global_step > 12 else loss


class PatchAt(QKWatch):
    """Wants its retrofit at step 12."""

    def on_train_batch_start(self, run: Any, pl_module: Any, batch: Any, index: int) -> None:
        if run.global_step == 12:
            self._run.pending = "asked for"
        super().on_train_batch_start(run, pl_module, batch, index)


@pytest.mark.parametrize("variant", ["l2", "qkclip"])
@pytest.mark.parametrize("ramp", [0, 3])
def test_over_budget_it_is_taken_back(variant: str, ramp: int) -> None:
    if variant == "qkclip" and ramp:
        pytest.skip("no ramp")
    module, ledger = Spoiled(sharp=True), Ledger()
    options = {"every_n_steps": 3, "console": False, "on_error": "raise", "variant": variant, "ramp_steps": ramp}
    callback = PatchAt(**options, budget=0.3, budget_steps=5)
    run = trainer(ledger, callback, max_steps=13 + ramp + 5)
    run.fit(module, same_batch(40), same_batch(1))
    entry = callback.retrofits[0]
    assert (entry.step, entry.undone) == (12, 12 + ramp + 5)
    assert entry.report.applied == SITES
    alert = callback.alerts[-1]
    assert (alert.rule, alert.step) == ("budget", entry.undone)
    assert "taken back" in alert.message
    assert patched_sites(module) == []
    optimizer = run.optimizers[0]
    assert len(optimizer.param_groups) == 1
    assert_same(weights(module), ledger.at[12][0])
    state = {n: dict(optimizer.state[p]) for n, p in module.named_parameters()}
    assert_same(state, ledger.at[12][1][0])
    assert len(optimizer.state) == len(list(module.parameters()))


def test_within_budget_it_stays_and_the_run_goes_on() -> None:
    module = Spoiled()
    module.spoiled = False
    callback = PatchAt(every_n_steps=3, console=False, on_error="raise", budget=0.3, budget_steps=5)
    trainer(callback, max_steps=20).fit(module, same_batch(40), same_batch(1))
    assert patched_sites(module) == SITES
    assert callback.retrofits[0].undone is None
    assert "budget" not in {a.rule for a in callback.alerts}


def test_after_the_way_back_the_run_trains_and_nothing_is_patched_again() -> None:
    module = Spoiled(sharp=True)
    callback = PatchAt(every_n_steps=3, console=False, on_error="raise", budget=0.3, budget_steps=5)
    before = weights(module)
    trainer(callback, max_steps=30).fit(module, same_batch(40), same_batch(1))
    assert len(callback.retrofits) == 1
    assert patched_sites(module) == []
    assert any(not torch.equal(v, before[k]) for k, v in weights(module).items())
    assert callback.history[-1][0] == 27


@pytest.mark.parametrize("manual", [False, True])
def test_losses_are_those_of_whole_batches_however_many_a_step_accumulates(manual: bool) -> None:
    class Accumulates(Tiny):
        def __init__(self) -> None:
            super().__init__(lr=1e-5)
            self.automatic_optimization, self.true = not manual, 0.0

        def training_step(self, batch: Any, index: int) -> Tensor:
            loss = super().training_step(batch, index)
            self.true = float(loss)
            if manual:
                self.manual_backward(loss / 4)
                if index % 4 == 3:
                    self.optimizers().step()
                    self.optimizers().zero_grad()
            return loss

    module, callback = Accumulates(), watch(retrofit="now")
    options = {} if manual else {"accumulate_grad_batches": 4}
    trainer(callback, max_steps=2, **options).fit(module, same_batch(40), same_batch(1))
    assert callback.retrofits[0].loss_before == pytest.approx(module.true, rel=0.05)


@pytest.mark.parametrize(("cost", "schedule"), [(0.3, {0: 8}), (0.0, {0: 4, 1: 1}), (0.0, {0: 1, 1: 4})])
def test_the_budget_is_of_whole_losses_and_is_judged_between_steps(cost: float, schedule: dict[int, int]) -> None:
    class Costs(Tiny):
        def training_step(self, batch: Any, index: int) -> Tensor:
            return super().training_step(batch, index) + (cost if patched_sites(self) else 0.0)

    callback = watch(retrofit="auto", budget=0.1, budget_steps=9)
    undone: list[bool] = []

    class Follow(L.Callback):
        def on_train_batch_end(self, run: Any, pl_module: Any, outputs: Any, batch: Any, index: int) -> None:
            if index == 55 and not callback.retrofits and run.current_epoch == 0:
                callback._run.pending = "asked for"
            if callback.retrofits and callback.retrofits[0].undone is not None and not undone:
                undone.append((index + 1) % run.accumulate_grad_batches == 0)

    run = trainer(callback, Follow(), L.callbacks.GradientAccumulationScheduler(schedule), max_epochs=2)
    run.fit(Costs(lr=1e-5), same_batch(80), same_batch(1))
    assert len(callback.retrofits) == 1
    assert undone == ([True] if cost else [])


def test_where_there_is_no_way_back_it_says_so(monkeypatch: Any) -> None:
    monkeypatch.setattr("qkwatch.intervene.shards", lambda model: [model])  # as if it were sharded
    module, callback = Spoiled(), PatchAt(every_n_steps=3, console=False, on_error="raise", budget=0.3, budget_steps=5)
    with pytest.warns(
        UserWarning, match=r"budget= has no effect on a model sharded by FSDP2: this retrofit will not be taken back"
    ):
        trainer(callback, max_steps=20).fit(module, same_batch(40), same_batch(1))
    assert patched_sites(module) == SITES
    assert callback.retrofits[0].undone is None
    assert not callback._intervention.can_go_back


def told(run: Any, *args: Any, **options: Any) -> list[str]:
    """What the watcher warns of."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run.fit(*args, **options)
    return [str(w.message) for w in seen if "QKWatch" in str(w.message)]


class Manual(Tiny):
    """Tells its loss, or not."""

    tells = False

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> Any:
        loss = super().training_step(batch, index)
        self.manual_backward(loss)
        self.optimizers().step()
        self.optimizers().zero_grad()
        return loss if self.tells else None


@pytest.mark.parametrize("tells", [False, True])
def test_a_retrofit_that_cannot_be_judged_says_so_once(tells: bool) -> None:
    callback, module = PatchAt(console=False, on_error="raise", budget=0.3, budget_steps=5), Manual()
    module.tells = tells
    seen = told(trainer(callback, max_steps=30), module, same_batch(40), same_batch(1))
    assert [("no effect here" in text) for text in seen] == ([] if tells else [True])
    assert not callback._intervention.can_go_back
    early = QKWatch(retrofit="now", budget=0.3, console=False)  # no losses are seen before it
    assert len(told(trainer(early, max_steps=30), Tiny(), same_batch(40), same_batch(1))) == 1


def test_a_comparison_that_is_cut_short_says_so_and_frees_its_copy(tmp_path: Any) -> None:
    callback = PatchAt(console=False, on_error="raise", budget=0.3, budget_steps=10)
    run = trainer(callback, max_steps=16)
    callback_end, sizes = callback.on_train_batch_end, []

    def on_train_batch_end(run: Any, *args: Any) -> None:
        callback_end(run, *args)
        if run.global_step == 15:
            run.save_checkpoint(tmp_path / "within.ckpt")
            del callback.on_train_batch_end
            sizes.append(len(pickle.dumps(callback)))
            copy.deepcopy(callback)

    callback.on_train_batch_end = on_train_batch_end  # type: ignore[method-assign]
    module = Spoiled()
    [text] = told(run, module, same_batch(40), same_batch(1))
    assert "the retrofit stays" in text
    assert sizes
    assert not callback._intervention.can_go_back
    run.fit_loop.epoch_loop.max_steps = 40
    assert told(run, module, same_batch(40), same_batch(1)) == []  # it was said before
    again = watch(retrofit="auto", budget=0.3, budget_steps=10)
    [text] = told(
        trainer(again, max_steps=40), Spoiled(), same_batch(40), same_batch(1), ckpt_path=tmp_path / "within.ckpt"
    )
    assert "the retrofit stays" in text


@pytest.mark.parametrize("budget", [0, -1.0, float("nan"), "much"])
def test_bad_budgets(budget: Any) -> None:
    with pytest.raises(QKWatchError, match="budget"):
        QKWatch(budget=budget)


@pytest.mark.parametrize("slope", [-0.01, 0.0, 0.01])
def test_the_forecast_is_level_or_rises(slope: float) -> None:
    generator = torch.Generator().manual_seed(0)
    line = LossLine()
    for step in range(40):
        line.note(step, torch.tensor(3.0 + slope * step) + 0.02 * torch.randn((), generator=generator))
    line.turned = 39
    for step in range(40, 60):
        forecast = 3.0 + 40 * slope + max(slope, 0.0) * (step - 40)
        line.note(step, torch.tensor(forecast + 0.2) + 0.02 * torch.randn((), generator=generator))
    found = line.excess(line.table())
    assert found is not None
    assert found[0] == pytest.approx(0.2, abs=0.06)
    assert 0 < found[1] < 0.06


def test_too_few_losses_give_no_forecast() -> None:
    line = LossLine()
    line.note(0, torch.tensor(3.0))
    line.turned = 0
    line.note(1, torch.tensor(9.0))
    assert line.excess(line.table()) is None
