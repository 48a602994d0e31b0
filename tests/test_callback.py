"""QKWatch in a Trainer: what it reads, what it leaves alone, what it changes, and that it never ends a run."""

from __future__ import annotations

import copy
import csv
import io
import math
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import pytorch_lightning
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateFinder, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.tuner import Tuner
from rich.console import Console
from tiny import HEADS, LENGTH, Tiny, assert_same, data, loss_of, trainer, weights
from torch import nn
from torch.nn.modules import module as torch_module
from torch.optim import lr_scheduler as sched
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import qkwatch
from qkwatch import Level, QKWatch, QKWatchError, Thresholds
from qkwatch.surgery import patched_sites
from qkwatch.watching import HISTORY

pytestmark = pytest.mark.filterwarnings("ignore")
SITES = ["net.blocks.0.attn", "net.blocks.1.attn"]


def watch(**options: Any) -> QKWatch:
    return QKWatch(**{"every_n_steps": 2, "console": False, "on_error": "raise", **options})


def fit(*callbacks: Any, module: Any = None, steps: int = 8, loader: Any = None, **options: Any) -> tuple[Any, Any]:
    module = module if module is not None else Tiny()
    run = trainer(*callbacks, max_steps=steps, **options)
    torch.manual_seed(5)
    run.fit(module, loader if loader is not None else data(count=4 * steps))
    return run, module


@contextmanager
def only_warning(match: str) -> Iterator[None]:
    """Exactly one warning of ours."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        yield
    ours = [str(w.message) for w in seen if "QKWatch" in str(w.message)]
    assert len(ours) == 1, ours
    assert match in ours[0]


def nothing_is_attached(model: nn.Module) -> None:
    tables = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks")
    assert not any(getattr(torch_module, table) for table in tables)
    assert not _get_current_dispatch_mode_stack()
    assert torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is None
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert not module._backward_hooks
    assert torch._dynamo.eval_frame._stance.stance == "default"


# -- readings ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sdpa", "eager", "mha"])
def test_readings_every_n_steps(kind: str) -> None:
    callback = watch(every_n_steps=3)
    fit(callback, module=Tiny(kind), steps=10)
    assert [step for step, _ in callback.history] == [0, 3, 6, 9]
    assert [site.name for site in callback.sites] == SITES
    assert [reading.site for reading in callback.readings] == SITES
    reading = callback.readings[0]
    assert reading.step == 9
    assert reading.heads == HEADS
    assert reading.exact
    assert reading.rows == 4 * LENGTH
    assert bool((reading.max_logit > 0).all())


def test_a_reading_is_of_the_weights_that_ran() -> None:
    """Of the step's own batch and weights, in logits that a dense float64 pass agrees with."""
    callback, module = watch(every_n_steps=1), Tiny()
    attention, seen = module.net.blocks[0].attn, []

    class Dense(L.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, index: int) -> None:
            x = pl_module.net.embed(batch[0][:, :-1])
            h = pl_module.net.blocks[0].norm(x).double()
            q, k = (
                (h @ p.weight.double().T + p.bias.double()).unflatten(-1, (HEADS, -1)).transpose(1, 2)
                for p in (attention.q_proj, attention.k_proj)
            )
            logits = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).tril()  # hidden ones at 0 never are the largest
            seen.append(logits.detach().abs().amax((0, 2, 3)))

    fit(Dense(), callback, module=module, steps=4)
    for (_, readings), dense in zip(callback.history, seen, strict=True):
        torch.testing.assert_close(readings[0].max_logit.double(), dense, rtol=1e-5, atol=1e-6)


def test_accumulation_reads_one_micro_batch_per_step_and_each_sample_once() -> None:
    callback = watch(every_n_steps=2)
    fit(callback, steps=4, loader=data(count=48), accumulate_grad_batches=3)
    assert [(step, r[0].rows) for step, r in callback.history] == [(0, 4 * LENGTH), (2, 4 * LENGTH)]


def test_layers_choose() -> None:
    callback = watch(layers=["net.*", "!*.0.*"])
    fit(callback)
    assert [site.name for site in callback.sites] == SITES[1:] == [r.site for r in callback.readings]


def test_history_is_bounded() -> None:
    callback = watch(every_n_steps=1, layers="*.0.attn")
    fit(callback, steps=HISTORY + 6, loader=data(count=HISTORY + 6, batch_size=1))
    assert len(callback.history) == HISTORY
    assert callback.history[0][0] == 6


class Nothing(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(9, 1)

    def training_step(self, batch: Any, index: int) -> Any:
        return self.layer(batch[0].float()).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


@pytest.mark.parametrize("retrofit", ["off", "now"])
def test_a_model_without_attention(retrofit: str, capsys: Any) -> None:
    callback = watch(every_n_steps=1, retrofit=retrofit, console=True)
    run, _ = fit(callback, module=Nothing(), steps=12)
    assert "no softmax attention" in capsys.readouterr().out
    assert callback.sites == [] == callback.readings == callback.retrofits
    assert not any("qkwatch" in key for key in run.callback_metrics)  # not measured is not zero
    assert not callback._monitor.due(11)  # for the most part it lets the run alone


# -- leaves alone -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sdpa", "eager", "mha"])
def test_watching_changes_no_bit(kind: str) -> None:
    runs = []
    for callbacks in ([], [watch(every_n_steps=1)], [watch(every_n_steps=3, rows=2)]):
        run, module = fit(*callbacks, module=Tiny(kind, dropout=0.2))
        runs.append((weights(module), run.optimizers[0].state_dict(), torch.get_rng_state()))
    assert_same(runs[0], runs[1])
    assert_same(runs[0], runs[2])


def test_nothing_is_on_the_model_between_measured_steps() -> None:
    class Inspect(L.Callback):
        def look(self, pl_module: Any) -> None:
            nothing_is_attached(pl_module)
            twin = copy.deepcopy(pl_module)
            assert_same(weights(twin), weights(pl_module))
            pickle.loads(pickle.dumps(pl_module))

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            self.look(pl_module)

        def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
            nothing_is_attached(pl_module)

        def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
            nothing_is_attached(pl_module)

    for retrofit in ("off", "now"):
        _, module = fit(watch(every_n_steps=1, retrofit=retrofit), Inspect(), steps=3)
        nothing_is_attached(module)
        assert not module._load_state_dict_pre_hooks
        torch.export.export(module.net, (torch.zeros(1, LENGTH, dtype=torch.long),))


def test_the_callback_itself_can_be_copied_and_pickled() -> None:
    """Before a fit (spawned processes) and after one."""
    callback = watch(retrofit="now")
    pickle.loads(pickle.dumps(callback))
    fit(callback)
    again = pickle.loads(pickle.dumps(callback))
    assert_same(again.state_dict(), callback.state_dict())
    copy.deepcopy(callback)


@pytest.mark.parametrize("fault", [RuntimeError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_no_hook_outlives_an_exception(fault: type[BaseException], where: str) -> None:
    class Falls(Tiny):
        def training_step(self, batch: Any, index: int) -> Any:
            loss = super().training_step(batch, index)
            if where == "forward" and index == 2:
                raise fault("now")
            return loss

        def on_after_backward(self) -> None:
            if where == "backward" and self.global_step == 2:
                raise fault("now")

    module = Falls()
    with pytest.raises((fault, SystemExit)):  # Lightning turns KeyboardInterrupt into an exit
        fit(watch(every_n_steps=1), module=module)
    nothing_is_attached(module)
    assert not module._load_state_dict_pre_hooks


# -- retrofits --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sdpa", "eager", "mha"])
def test_now_patches_at_the_first_batch_and_the_gains_train(kind: str) -> None:
    callback, module = watch(retrofit="now"), Tiny(kind)
    run, _ = fit(callback, module=module)
    [entry] = callback.retrofits
    assert entry.step == 0
    assert entry.report.applied == SITES
    assert not entry.report.refused
    assert entry.loss_before is not None
    assert entry.loss_after is not None
    gains = dict(qkwatch.retrofit.norm_parameters(module))
    where = {
        name: [g for g in run.optimizers[0].param_groups if any(p is gain for p in g["params"])]
        for name, gain in gains.items()
    }
    for name, groups in where.items():
        assert len(groups) == 1 and groups[0]["weight_decay"] == 0.0, name
        assert sum(p is gains[name] for p in groups[0]["params"]) == 1
        start = torch.tensor(entry.report.plan.sites[SITES.index(name.rsplit(".qk_norm", 1)[0])].gains[name[-6:]])
        assert not torch.equal(gains[name].detach().cpu(), start), "it did not move"
        assert run.optimizers[0].state[gains[name]]["step"] == 7  # not in the step of the first batch
    assert run.optimizers[0].param_groups[0]["weight_decay"] == 0.1


@pytest.mark.parametrize(
    ("options", "measured"),
    [
        ({"calibrate": True}, True),
        ({"calibrate": False}, False),
        ({"calibrate": "needed"}, False),
        ({}, True),
        ({"retrofit": "auto"}, False),
        ({"retrofit": "auto", "calibrate": True}, True),
        ({"retrofit": "auto", "cap": 5.0}, True),  # never above the cap
        ({"retrofit": "auto", "variant": "qwen3"}, False),
        ({"retrofit": "auto", "variant": "qwen3", "cap": 1.0}, True),
    ],
)
def test_gains_start_as_measured_or_as_the_variant_has_them(options: dict[str, Any], measured: bool) -> None:
    low = Thresholds(early_logit=1e-3, warn_logit=1e-3, double_logit=1e-3, info_logit=1e-3, over_100_share=0.0)
    callback, module = watch(**{"retrofit": "now", "thresholds": low, **options}), Tiny(sharp=True)
    fit(callback, module=module, steps=8)
    [entry] = callback.retrofits
    plan = entry.report.plan.sites
    assert [bool(site.gains) for site in plan] == [measured] * len(SITES)
    if options.get("cap") == 5.0:
        assert max(max(site.gains["q.gain"]) for site in plan) <= 5.0


def test_now_raises_the_gains_of_a_model_that_has_learned_nothing() -> None:
    """As measured they would be of about 1, and grow by the learning rate a step."""
    for options, least, most in (({}, 10.0, 10.0), ({"calibrate": True}, 0.0, 5.0), ({"cap": 4.0}, 4.0, 4.0)):
        callback = watch(**{"retrofit": "now", **options})
        fit(callback, module=Tiny(), steps=2)
        gains = torch.tensor([site.gains["q.gain"] for site in callback.retrofits[0].report.plan.sites])
        assert least <= gains.min() <= gains.max() <= most


def test_old_parameters_keep_identity_state_and_learning_rate() -> None:
    class Around(L.Callback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            self.old = list(pl_module.parameters()) if trainer.global_step == 0 else self.old

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            group = trainer.optimizers[0].param_groups[0]
            assert len(group["params"]) == len(self.old)
            assert all(a is b for a, b in zip(group["params"], self.old, strict=True))
            assert all(trainer.optimizers[0].state[p]["step"] == trainer.global_step for p in self.old)

    fit(watch(retrofit="now"), Around())


def test_auto_waits_for_an_alert() -> None:
    calm, sharp = watch(retrofit="auto"), watch(retrofit="auto")
    fit(calm)
    assert calm.retrofits == []
    assert not any(a.level >= Level.WARN for a in calm.alerts)
    _, _module = fit(sharp, module=Tiny(sharp=True))
    assert sharp.alerts
    assert len(sharp.retrofits) == 1
    assert sharp.retrofits[0].step == min(a.step for a in sharp.alerts if a.level >= Level.WARN) + 1
    assert sharp.retrofits[0].report.applied == SITES
    before, after = (max(float(r.max_logit.max()) for r in sharp.history[i][1]) for i in (0, -1))
    assert before > 20 and after < 25, (before, after)


@pytest.mark.parametrize("start", [0, 1, 2])
def test_never_inside_an_accumulation_window(start: int) -> None:
    class Watch(L.Callback):
        changed: list[int]

        def on_train_start(self, *args: Any) -> None:
            self.changed, self.count = [], 0

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, index: int) -> None:
            now = len(list(pl_module.parameters()))
            if self.count and now != self.count:
                self.changed.append(index)
            self.count = now

    callback, seen = watch(retrofit="auto", every_n_steps=1 + start), Watch()
    _run, _ = fit(callback, seen, module=Tiny(sharp=True), steps=5, loader=data(60), accumulate_grad_batches=3)
    assert seen.changed == [2]
    assert len(callback.retrofits) == 1
    assert [step for step, _ in callback.history] == sorted({step for step, _ in callback.history})


def test_one_watcher_with_a_ramp_keeps_the_function_at_first() -> None:
    class Losses(L.Callback):
        def __init__(self) -> None:
            self.losses: list[float] = []

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            with torch.no_grad():
                self.losses.append(float(loss_of(pl_module.net, args[1][0])))

    plain, ramped, jumped = Losses(), Losses(), Losses()
    fit(plain, module=Tiny(sharp=True))
    callback = watch(retrofit="now", ramp_steps=4)
    _, module = fit(callback, ramped, module=Tiny(sharp=True))
    fit(watch(retrofit="now"), jumped, module=Tiny(sharp=True))
    assert ramped.losses[0] == plain.losses[0] != jumped.losses[0]
    norms = [m for m in module.modules() if type(m).__name__ == "HeadNorm"]
    assert norms
    assert all(m.ramp is None for m in norms)


def test_what_cannot_be_patched_is_watched_and_says_why() -> None:
    class Once(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(16, 16)

        def forward(self, x: Any) -> Any:
            q = self.proj(x)
            return (q @ q.transpose(-1, -2)).softmax(-1) @ x

    module = Tiny()
    module.net.blocks[1].attn = Once()
    callback = watch(retrofit="now")
    fit(callback, module=module)
    [entry] = callback.retrofits
    assert entry.report.applied == SITES[:1]
    assert list(entry.report.refused) == SITES[1:]
    assert {r.site for r in callback.readings} == set(SITES)


# -- optimizers and schedulers ----------------------------------------------------------------------------------

SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "OneCycleLR": lambda o: sched.OneCycleLR(o, [0.1, 0.02], total_steps=20),
    "SequentialLR": lambda o: sched.SequentialLR(
        o, [sched.LinearLR(o, 0.1, total_iters=3), sched.CosineAnnealingLR(o, 10)], milestones=[3]
    ),
    "LambdaLR": lambda o: sched.LambdaLR(o, [lambda step: 0.9**step, lambda step: 1 / (1 + step)]),
    "ReduceLROnPlateau": lambda o: sched.ReduceLROnPlateau(o, patience=1, threshold=1.0),
    "CyclicLR": lambda o: sched.CyclicLR(o, [0.01, 0.002], [0.1, 0.02], 3, cycle_momentum=False),
}
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=0.1),
    "AdamW fused": lambda groups: torch.optim.AdamW(groups, lr=0.1, fused=True),
    "SGD momentum fused": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, fused=True),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_old_groups_keep_their_learning_rates(schedule: str, optimizer: str) -> None:
    class Planned(Tiny):
        def configure_optimizers(self) -> Any:
            flat = [p for p in self.parameters() if p.ndim < 2]
            deep = [p for p in self.parameters() if p.ndim >= 2]
            built = OPTIMIZERS[optimizer]([{"params": deep, "weight_decay": 0.1}, {"params": flat, "lr": 0.02}])
            plan = SCHEDULES[schedule](built)
            return {"optimizer": built, "lr_scheduler": {"scheduler": plan, "interval": "step", "monitor": "loss"}}

    class Rates(L.Callback):
        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            seen.append([g["lr"] for g in trainer.optimizers[0].param_groups])

    runs = []
    for callbacks in ([], [watch(retrofit="now")]):
        seen: list[list[float]] = []
        fit(*callbacks, Rates(), module=Planned(), steps=12)
        runs.append(seen)
    plain, patched = runs
    assert [rates[:2] for rates in patched] == plain
    assert [len(rates) for rates in patched] == [2] + [3] * 11
    assert [rates[2] for rates in patched[1:]] == [rates[1] for rates in patched[1:]]  # as the block's 1-D parameters


def test_clipping_sees_the_gains() -> None:
    class Norms(L.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, o: Any, b: Any, index: int) -> None:
            if index % 2:
                grads = [p.grad for p in pl_module.parameters() if p.grad is not None]
                norms.append(float(torch.stack([g.norm() for g in grads]).norm()))

    norms: list[float] = []
    callback = watch(retrofit="now")
    fit(callback, Norms(), steps=9, loader=data(80), gradient_clip_val=1e-3, accumulate_grad_batches=2)
    assert callback.retrofits[0].report.applied == SITES
    assert norms == pytest.approx([1e-3] * 9, rel=1e-3)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "16-mixed", "64-true"])
@pytest.mark.parametrize("kind", ["sdpa", "eager", "mha"])
def test_other_precisions(precision: str, kind: str) -> None:
    callback, module = watch(retrofit="now"), Tiny(kind, sharp=True)
    run, _ = fit(callback, module=module, precision=precision, gradient_clip_val=1.0)
    assert callback.retrofits[0].report.applied == SITES, callback.retrofits[0].report.refused
    expected = {"bf16-true": torch.bfloat16, "64-true": torch.float64}.get(precision, torch.float32)
    assert {p.dtype for p in module.parameters()} == {expected}
    assert math.isfinite(run.callback_metrics["loss"])
    assert all(r.max_logit.dtype == torch.float32 for r in callback.readings)
    assert max(float(r.max_logit.max()) for r in callback.readings) < 25


# -- metrics and loggers ----------------------------------------------------------------------------------------


def test_early_stopping_and_checkpoints_may_monitor(tmp_path: Path) -> None:
    stop = EarlyStopping(
        "qkwatch/max_logit", mode="min", patience=50, divergence_threshold=5.0, check_on_train_epoch_end=True
    )
    by_epoch = ModelCheckpoint(tmp_path / "epoch", monitor="qkwatch/max_logit", mode="min", filename="{step}")
    by_step = ModelCheckpoint(
        tmp_path / "step",
        monitor="qkwatch/max_logit",
        mode="min",
        every_n_train_steps=3,
        save_top_k=-1,
        filename="{step}",
    )
    callback = watch(every_n_steps=4)
    run, _ = fit(callback, stop, by_epoch, by_step, module=Tiny(sharp=True), steps=100, loader=data(48))
    assert run.current_epoch == 1 and run.global_step == 12, "saturated from the start: stopped after one epoch"
    assert by_epoch.best_model_path
    assert len(by_step.best_k_models) == 4
    assert by_step.best_model_score == min(max(float(r.max_logit.max()) for r in rs) for _, rs in callback.history)
    assert run.callback_metrics["qkwatch/max_logit_epoch"] == max(
        float(r.max_logit.max()) for _, rs in callback.history for r in rs
    )
    assert 0 <= run.callback_metrics["qkwatch/min_entropy"] < 1
    assert run.callback_metrics["qkwatch/alert_level_epoch"] >= Level.WARN


def test_a_resumed_epoch_without_a_reading_can_be_monitored(tmp_path: Path) -> None:
    def callbacks() -> list[Any]:
        return [watch(every_n_steps=10), EarlyStopping("qkwatch/max_logit", mode="min", patience=100)]

    keep = ModelCheckpoint(tmp_path, save_top_k=-1, filename="{epoch}")
    trainer(*callbacks(), keep, max_epochs=4).fit(Tiny(), data(), data(4))
    for epoch in range(4):  # of 8 steps each, so that the last, 24 to 31, has a reading at 30 only, and epoch 4 none
        best = ModelCheckpoint(tmp_path / "best", monitor="qkwatch/max_logit")
        run = trainer(*callbacks(), best, max_epochs=6)
        run.fit(Tiny(), data(), data(4), ckpt_path=tmp_path / f"epoch={epoch}.ckpt")
        assert run.current_epoch == 6
        assert best.best_model_score > 0


def test_the_alert_level_is_that_of_what_holds_not_of_what_begins() -> None:
    class Levels(L.Callback):
        def __init__(self) -> None:
            self.seen: list[float] = []

        def on_train_batch_end(self, run: Any, *args: Any) -> None:
            self.seen.append(float(run.callback_metrics["qkwatch/alert_level_step"]))

    levels, callback = Levels(), watch(every_n_steps=1)
    fit(callback, levels, module=Tiny(sharp=True, lr=0.0), steps=6)
    assert {alert.step for alert in callback.alerts if alert.level >= Level.WARN} != set(range(6))
    assert min(levels.seen) >= Level.WARN
    fit(callback := watch(every_n_steps=1), levels := Levels(), module=Tiny(lr=0.0), steps=6)
    assert max(levels.seen) <= Level.INFO


def test_the_max_falls_after_a_calm_step() -> None:
    callback = watch(retrofit="now")
    run, _ = fit(callback, module=Tiny(sharp=True), loader=data(16), steps=8)
    assert run.callback_metrics["qkwatch/max_logit"] < callback.history[0][1][0].max_logit.max()


def logged_rows(path: Path) -> list[dict[str, str]]:
    with next(path.glob("csv/*/metrics.csv")).open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("count", [0, 1, 2])
def test_loggers(count: int, tmp_path: Path) -> None:
    loggers = [CSVLogger(tmp_path, "csv"), TensorBoardLogger(tmp_path, "tb")][:count]
    callback = watch(retrofit="now")
    fit(callback, LearningRateMonitor() if count else L.Callback(), logger=loggers or False, steps=8)
    assert len(callback.history) == 4
    if count:
        loggers[0].save()
        rows = logged_rows(tmp_path)
        logged = {int(row["step"]): float(row["qkwatch/max_logit"]) for row in rows if row["qkwatch/max_logit"]}
        expected = {step: max(float(r.max_logit.max()) for r in rs) for step, rs in callback.history}
        assert logged == pytest.approx(expected, rel=1e-5)
    if count == 2:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        log = EventAccumulator(str(next(tmp_path.glob("tb/*")))).Reload()
        assert [e.step for e in log.Scalars("qkwatch/max_logit")] == [0, 2, 4, 6]


# -- faults -----------------------------------------------------------------------------------------------------


def _raise(*args: Any, **kwargs: Any) -> Any:
    raise ZeroDivisionError("injected")


FAULTS: dict[str, tuple[str, str]] = {
    "statistics, in the search": ("qkwatch.scout.measure", "measurement"),
    "statistics": ("qkwatch.observe.measure_at", "measurement"),
    "search": ("qkwatch.scout.find_taps", "stopped watching at step"),
    "merging": ("qkwatch.monitor.merge", "stopped watching at step"),
    "rules": ("qkwatch.rules.Rules.update", "stopped watching at step"),
    "panels": ("qkwatch.panels.Panels.readings", "a logger failed"),
    "metrics": ("qkwatch.trainers.log", "logging the figures failed"),
    "attaching": ("qkwatch.monitor.Monitor._attach", "stopped watching at step"),
    "right after attaching": ("qkwatch.intervene.Intervention.ramp", "stopped watching at step"),
    "keeping inputs": ("qkwatch.scout.Call.of", "measurement"),
    "summary": ("qkwatch.watching.summary", "stopped watching at step"),
}


class Clean(L.Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        nothing_is_attached(pl_module)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_one_warning_and_the_run_goes_on(name: str, monkeypatch: Any) -> None:
    _, plain = fit(module=Tiny(dropout=0.1))
    target, message = FAULTS[name]
    monkeypatch.setattr(target, _raise)
    callback = watch(on_error="warn")
    with only_warning(message):
        run, module = fit(callback, Clean(), module=Tiny(dropout=0.1))
    assert run.global_step == 8
    assert_same(weights(module), weights(plain))
    nothing_is_attached(module)
    for _, readings in callback.history:  # what was not measured has no reading at all
        assert all(r.rows > 0 for r in readings)
    with pytest.raises(ZeroDivisionError):
        fit(watch(on_error="raise"))


class Hiccup(CSVLogger):
    """Fails once, or always."""

    def __init__(self, folder: Any, always: bool) -> None:
        super().__init__(folder)
        self.always, self.asked = always, 0

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        ours = any("qkwatch" in key for key in metrics)
        self.asked += ours
        if ours and (self.always or self.asked == 1):
            raise ConnectionError("the network is down")
        super().log_metrics(metrics, step)


@pytest.mark.parametrize("where", ["once", "always", "console"])
def test_a_logger_or_console_that_fails_stops_neither_the_watch_nor_the_patch(
    where: str, tmp_path: Path, monkeypatch: Any
) -> None:
    callback = watch(retrofit="auto", every_n_steps=2, on_error="warn", console=True)
    if where == "console":
        monkeypatch.setattr("qkwatch.callback.say", _raise)
    loggers = [] if where == "console" else [Hiccup(tmp_path, where == "always")]
    with only_warning("printing failed" if where == "console" else "a logger failed"):
        fit(callback, module=(module := Tiny(sharp=True)), logger=loggers or False)
    assert patched_sites(module) == SITES
    assert callback._run.measured >= 4


def test_a_console_of_few_characters(monkeypatch: Any) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr("rich._console", Console(file=io.TextIOWrapper(raw, encoding="ascii", write_through=True)))
    callback = watch(retrofit="auto", every_n_steps=2, console=True)
    fit(callback, module=(module := Tiny(sharp=True)))
    assert patched_sites(module) == SITES
    text = raw.getvalue().decode("ascii")
    assert "qkwatch WARN step 0" in text
    assert "qkwatch watched 2 sites" in text


@pytest.mark.parametrize(
    "target",
    [
        "qkwatch.retrofit.install",
        "qkwatch.optim._join",
        "qkwatch.schedulers.twin",
        "qkwatch.adopt.add_parameters",
    ],
)
@pytest.mark.parametrize("late", [0, 1])
def test_a_retrofit_that_fails_midway_leaves_everything_as_it_was(target: str, late: int, monkeypatch: Any) -> None:
    """The first call passes where `late`: one site is patched already when the second fails."""

    class Scheduled(Tiny):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    run_plain, plain = fit(module=Scheduled(dropout=0.1))
    module_name, attribute = target.rsplit(".", 1)
    import importlib

    original, calls = getattr(importlib.import_module(module_name), attribute), []

    def faulty(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) > late:
            raise ZeroDivisionError("injected")
        return original(*args, **kwargs)

    monkeypatch.setattr(target, faulty)
    callback, module = watch(retrofit="now", on_error="warn"), Scheduled(dropout=0.1)
    before = {name: (p, id(type(m))) for name, m in module.named_modules() for p in [m]}
    happened = True
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run, _ = fit(callback, module=module)
    happened = len(calls) > late
    if not happened:
        return  # this function is called once only
    assert sum("QKWatch" in str(w.message) for w in seen) == 1
    assert qkwatch.retrofit.patched_sites(module) == []
    assert {name: (m, id(type(m))) for name, m in module.named_modules()} == before
    assert_same(weights(module), weights(plain))
    assert_same(run.optimizers[0].state_dict(), run_plain.optimizers[0].state_dict())
    assert_same(
        _primitive(run.lr_scheduler_configs[0].scheduler), _primitive(run_plain.lr_scheduler_configs[0].scheduler)
    )
    assert callback.retrofits[0].report.refused
    assert len(callback.history) == 4


def _primitive(scheduler: Any) -> dict[str, Any]:
    return {k: v for k, v in vars(scheduler).items() if isinstance(v, (int, float, list)) and k != "lr_lambdas"}


def test_a_site_whose_verification_fails_is_refused_with_the_reason(monkeypatch: Any) -> None:
    monkeypatch.setattr("qkwatch.retrofit.calibrate_and_verify", _raise)
    callback = watch(retrofit="now", on_error="warn")
    _, module = fit(callback)
    assert "injected" in callback.retrofits[0].report.refused[SITES[0]]
    assert_same(weights(module), weights(fit()[1]))


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("kind", ["sdpa", "eager"])
def test_logits_that_are_not_finite(value: float, kind: str, tmp_path: Path) -> None:
    module = Tiny(kind)
    with torch.no_grad():
        module.net.blocks[0].attn.q_proj.weight[0, 0] = value
    logger, callback = CSVLogger(tmp_path, "csv"), watch(every_n_steps=1)
    run, _ = fit(callback, module=module, steps=4, logger=logger)
    assert any(alert.level == Level.FATAL for alert in callback.alerts)
    assert float(callback.history[0][1][0].nonfinite.sum()) > 0
    logger.save()
    rows = logged_rows(tmp_path)
    figures = [float(v) for row in rows for k, v in row.items() if "qkwatch" in k and v]
    assert figures
    assert all(math.isfinite(figure) for figure in figures)
    assert all(math.isfinite(v) for k, v in run.callback_metrics.items() if "qkwatch" in k)
    assert run.callback_metrics["qkwatch/max_logit"] > 1e38  # the monitors see that it is bad


# -- bad input --------------------------------------------------------------------------------------------------

BAD: list[tuple[dict[str, Any], str]] = [
    ({"retrofit": "always"}, "'off', 'auto', 'now'"),
    ({"on_error": "ignore"}, "'warn', 'raise'"),
    ({"variant": "l3"}, "'l2'"),
    ({"every_n_steps": 0}, "every_n_steps"),
    ({"every_n_steps": 2.0}, "every_n_steps"),
    ({"every_n_steps": True}, "every_n_steps"),
    ({"ramp_steps": -1}, "ramp_steps"),
    ({"calibrate": "no"}, "calibrate"),
    ({"cap": 0}, "cap"),
    ({"cap": math.nan}, "cap"),
    ({"cap": "20"}, "cap"),
    ({"max_gain": -1.0}, "max_gain"),
    ({"rows": "some"}, "rows"),
    ({"rows": 0}, "rows"),
    ({"rows": True}, "rows"),
    ({"thresholds": {"saturated": 1}}, "Thresholds"),
    ({"thresholds": {}}, "Thresholds"),
    ({"layers": [3]}, "layers"),
    ({"layers": 3}, "layers"),
    ({"layers": [None]}, "layers"),
]


@pytest.mark.parametrize(("options", "message"), BAD)
def test_bad_options_are_refused_at_construction(options: dict[str, Any], message: str) -> None:
    with pytest.raises(QKWatchError, match=message):
        QKWatch(**options)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"variant": "qwen3"}, "variant='qwen3'"),
        ({"budget": 0.1, "ramp_steps": 5}, "ramp_steps=5, budget=0.1"),
        ({}, ""),
    ],
)
def test_options_of_a_patch_that_is_not_asked_for_are_named(options: dict[str, Any], named: str) -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        QKWatch(**options)
        QKWatch(**options, retrofit="auto")
    assert [str(w.message) for w in said] == ([f'QKWatch: {named} has no effect with retrofit="off"'] if named else [])


@pytest.mark.parametrize("on_error", ["warn", "raise"])
def test_a_glob_that_matches_nothing_stops_before_any_weight_changes(on_error: str) -> None:
    module = Tiny()
    before = weights(module)
    with pytest.raises(QKWatchError, match=r"decoder.*net\.blocks\.0\.attn.*net\.blocks\.1\.attn"):
        fit(watch(layers="decoder.*", on_error=on_error), module=module)
    assert_same(before, weights(module))
    nothing_is_attached(module)


class Sneaks(L.Callback):
    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        trainer.callbacks.append(watch())


def test_a_second_watcher_is_refused() -> None:
    with pytest.raises(RuntimeError, match="QKWatch"):  # Lightning's own, as they would share their saved state
        fit(watch(), watch())

    with pytest.raises(QKWatchError, match="one QKWatch"):
        fit(L.Callback(), Sneaks(), watch())


# -- other ways to run ------------------------------------------------------------------------------------------


class TwoNets(Tiny):
    """Manual optimization: two networks, two optimizers, two backward passes in a step."""

    def __init__(self) -> None:
        super().__init__(dropout=0.1)
        self.automatic_optimization = False
        self.other = copy.deepcopy(self.net)

    def training_step(self, batch: Any, index: int) -> None:
        for net, optimizer in zip((self.net, self.other), self.optimizers(), strict=True):
            optimizer.zero_grad()
            self.manual_backward(loss_of(net, batch[0]))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(net.parameters(), lr=1e-2) for net in (self.net, self.other)]


def test_manual_optimization_of_two_networks() -> None:
    callback = watch()
    _, watched = fit(callback, module=TwoNets(), steps=8)
    _, plain = fit(module=TwoNets(), steps=8)
    assert_same(weights(watched), weights(plain))
    both = [*SITES, *(site.replace("net", "other", 1) for site in SITES)]
    assert [r.site for r in callback.readings] == both
    assert [step for step, _ in callback.history] == [0, 2]  # batches; each optimizer counts in global_step
    callback = watch(retrofit="now")
    run, module = fit(callback, module=TwoNets(), steps=8)
    assert callback.retrofits[0].report.applied == both
    for optimizer, net in zip(run.optimizers, (module.net, module.other), strict=True):
        gains = {id(p) for _, p in qkwatch.retrofit.norm_parameters(net)}
        assert gains == {id(p) for p in optimizer.param_groups[-1]["params"]}


def test_both_names_of_lightning() -> None:
    class Old(pytorch_lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Tiny().net

        def training_step(self, batch: Any, index: int) -> Any:
            return loss_of(self.net, batch[0])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    assert issubclass(QKWatch, (L.Callback,))
    assert issubclass(QKWatch, pytorch_lightning.Callback)
    callback = watch(retrofit="now")
    fit(callback, module=Old(), package=pytorch_lightning)
    assert callback.retrofits[0].report.applied == SITES
    assert len(callback.history) == 4


@pytest.mark.parametrize(
    "options",
    [{"fast_dev_run": 3}, {"overfit_batches": 2, "max_epochs": 3}, {"limit_train_batches": 3, "max_epochs": 2}],
)
def test_short_runs(options: dict[str, Any]) -> None:
    callback = watch(every_n_steps=1, retrofit="now")
    run = trainer(callback, **options)
    run.fit(Tiny(), data(), data(8))
    assert callback.retrofits[0].report.applied == SITES
    assert len(callback.history) == run.global_step


def test_the_sanity_check_and_validation_are_not_read() -> None:
    callback = watch(every_n_steps=1)
    run = trainer(callback, max_epochs=2, num_sanity_val_steps=2, val_check_interval=3)
    run.fit(Tiny(), data(), data(8))
    assert [step for step, _ in callback.history] == list(range(16))
    assert run.callback_metrics["val_loss"] > 0


def test_one_callback_for_two_fits() -> None:
    """The same Trainer goes on; another Trainer starts afresh."""
    callback, module = watch(retrofit="now"), Tiny()
    run = trainer(callback, max_epochs=1)
    run.fit(module, data())
    run.fit_loop.max_epochs = 2
    run.fit(module, data())
    assert [step for step, _ in callback.history] == [0, 2, 4, 6, 8, 10, 12, 14]
    assert len(callback.retrofits) == 1
    group = run.optimizers[0].param_groups[-1]
    assert len(group["params"]) == 2
    assert group["weight_decay"] == 0.0
    fit(callback, module=Tiny())
    assert [step for step, _ in callback.history] == [0, 2, 4, 6]
    assert len(callback.retrofits) == 1


@pytest.mark.parametrize("first", [True, False])
def test_the_learning_rate_finder(first: bool) -> None:
    callback, finder = watch(retrofit="now", every_n_steps=1), LearningRateFinder(num_training_steps=4)
    for _ in range(2):
        fit(*([callback, finder] if first else [finder, callback]), steps=5)
        assert [step for step, _ in callback.history] == [0, 1, 2, 3, 4]
        assert callback.retrofits[0].report.applied == SITES


def test_the_batch_size_finder() -> None:
    class Data(L.LightningDataModule):
        batch_size = 2

        def train_dataloader(self) -> Any:
            return data(64, batch_size=self.batch_size)

        def val_dataloader(self) -> Any:
            return data(8)

    callback, source, module = watch(retrofit="now", every_n_steps=1), Data(), Tiny()
    run = trainer(callback, max_steps=5)
    Tuner(run).scale_batch_size(module, datamodule=source, max_trials=2, steps_per_trial=2)
    assert not callback.history
    assert not callback.retrofits
    run.fit(module, source)
    assert [step for step, _ in callback.history] == [0, 1, 2, 3, 4]
    assert callback.retrofits[0].report.applied == SITES


YAML = """
model:
  class_path: tiny.Tiny
  init_args: {lr: 0.01}
trainer:
  max_steps: 2
  accelerator: cpu
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
  callbacks:
    - class_path: %s
      init_args:
        every_n_steps: 1
        retrofit: now
        variant: qwen3
        layers: [net.*]
        console: false
        thresholds:
          window: 40
"""


@pytest.mark.parametrize("name", ["QKWatch", "qkwatch.QKWatch", "qkwatch.callback.QKWatch"])
@pytest.mark.parametrize("package", ["lightning", "pytorch_lightning"])
def test_the_command_line_interface(name: str, package: str, tmp_path: Path) -> None:
    import importlib

    if package == "pytorch_lightning" and name != "QKWatch":
        pytest.skip("once is enough")
    cli_class = importlib.import_module(
        "lightning.pytorch.cli" if package == "lightning" else "pytorch_lightning.cli"
    ).LightningCLI
    text = YAML % name
    if package == "pytorch_lightning":
        text = text.replace("tiny.Tiny", "test_callback.Old2")
    (tmp_path / "config.yaml").write_text(text)
    cli = cli_class(
        run=False,
        save_config_callback=None,
        args=["--config", str(tmp_path / "config.yaml"), "--trainer.callbacks.every_n_steps=2"],
    )
    [callback] = [c for c in cli.trainer.callbacks if isinstance(c, QKWatch)]
    assert callback.thresholds == Thresholds(window=40)
    assert callback.every_n_steps == 2
    assert callback.retrofit == "now"
    assert callback.layers == ["net.*"]
    assert callback.variant.name == "qwen3"
    cli.trainer.fit(cli.model, data())
    assert callback.retrofits[0].report.applied == SITES


class Old2(pytorch_lightning.LightningModule):
    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.net = Tiny().net

    def training_step(self, batch: Any, index: int) -> Any:
        return loss_of(self.net, batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("steps", [300, pytest.param(3000, marks=pytest.mark.slow)])
def test_memory_stays_flat(steps: int) -> None:
    """Python objects and tensors alive do not grow with the number of readings."""
    import gc

    class Count(L.Callback):
        def __init__(self) -> None:
            self.counts: list[tuple[int, int]] = []

        def on_train_batch_end(self, trainer: Any, pl_module: Any, o: Any, b: Any, index: int) -> None:
            if trainer.global_step in (steps // 2, steps - 1):
                gc.collect()
                alive = gc.get_objects()
                self.counts.append((len(alive), sum(1 for x in alive if type(x) is torch.Tensor)))

    count, callback = Count(), watch(every_n_steps=1, layers="*.0.attn")
    run = trainer(callback, count, max_steps=steps)
    run.fit(Tiny(), data(count=steps, batch_size=1))
    (objects, tensors), (later, later_tensors) = count.counts
    assert later - objects < 400 and later_tensors - tensors < 20, count.counts
