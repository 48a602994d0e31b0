"""Stop anywhere, go on from the checkpoint: the run that never stopped must not be told apart from it."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import pytorch_lightning
import torch
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from tiny import VOCAB, Tiny, assert_same, loss_of, trainer, weights
from torch.optim import lr_scheduler as sched
from torch.utils.data import DataLoader, TensorDataset

import qkwatch
from qkwatch import QKWatch, QKWatchError
from qkwatch.surgery import norm_parameters, patched_sites

pytestmark = pytest.mark.filterwarnings("ignore")
SITES = ["net.blocks.0.attn", "net.blocks.1.attn"]


def watch(**options: Any) -> QKWatch:
    return QKWatch(**{"every_n_steps": 3, "console": False, "on_error": "raise", **options})


def same_batch(count: int = 5) -> DataLoader[Any]:
    """Lightning does not wind a plain DataLoader forward when it resumes in mid-epoch: let all batches be one."""
    ids = torch.randint(0, VOCAB, (4, 9), generator=torch.Generator().manual_seed(3))
    return DataLoader(TensorDataset(ids.repeat(count, 1)), batch_size=4)


class Scheduled(Tiny):
    """Two groups, the decay on the matrices only, and a scheduler with a list per group; or what `opt` says."""

    def configure_optimizers(self) -> Any:
        flat = [p for p in self.parameters() if p.ndim < 2]
        deep = [p for p in self.parameters() if p.ndim >= 2]
        groups = [{"params": deep, "weight_decay": 0.1}, {"params": flat, "weight_decay": 0.0, "lr": 2e-3}]
        kinds: dict[str, Any] = {
            "adamw": lambda: torch.optim.AdamW(groups, lr=1e-2),
            "fused": lambda: torch.optim.AdamW(groups, lr=1e-2, fused=True),
            "amsgrad": lambda: torch.optim.AdamW(self.parameters(), lr=1e-2, amsgrad=True),
            "sgd": lambda: torch.optim.SGD(groups, lr=1e-2, momentum=0.9, fused=True),
        }
        optimizer = kinds[self.hparams.opt]()
        plan: dict[str, Any] = {
            "adamw": lambda: sched.OneCycleLR(optimizer, [1e-2, 2e-3], total_steps=200),
            "fused": lambda: sched.SequentialLR(
                optimizer,
                [sched.LinearLR(optimizer, 0.1, total_iters=4), sched.CosineAnnealingLR(optimizer, 50)],
                milestones=[4],
            ),
            "amsgrad": lambda: sched.LambdaLR(optimizer, lambda step: 0.95**step),
            "sgd": lambda: sched.StepLR(optimizer, 3, 0.5),
        }
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plan[self.hparams.opt](), "interval": "step"}}


class Manual(Tiny):
    """Muon for the matrices inside the blocks, AdamW for the rest; manual optimization."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> Any:
        loss = loss_of(self.net, batch[0])
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
        for schedule in self.lr_schedulers():
            schedule.step()
        return loss

    def configure_optimizers(self) -> Any:
        inner = [p for p in self.net.blocks.parameters() if p.ndim == 2]
        ids = {id(p) for p in inner}
        muon = torch.optim.Muon(inner, lr=1e-2)
        adam = torch.optim.AdamW([p for p in self.parameters() if id(p) not in ids], lr=1e-3)
        return [muon, adam], [sched.StepLR(muon, 2, 0.9), sched.LambdaLR(adam, lambda step: 0.9**step)]


def state_of(run: Any, module: Any, callback: QKWatch) -> dict[str, Any]:
    """All that a resumed run has to have in common with one that never stopped."""
    plans = [
        {k: v for k, v in config.scheduler.state_dict().items() if k not in ("lr_lambdas", "_schedulers")}
        for config in run.lr_scheduler_configs
    ]
    return {
        "weights": weights(module),
        "optimizers": [optimizer.state_dict() for optimizer in run.optimizers],
        "names": [qkwatch.optim.group_names(optimizer, module) for optimizer in run.optimizers],
        "schedulers": plans,
        "callback": callback.state_dict(),
    }


def train(module: Any, callback: QKWatch, folder: Path, *more: Any, steps: int = 8, path: Any = None) -> Any:
    save = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, save_last=True, filename="{step}")
    run = trainer(callback, save, *more, max_steps=steps, val_check_interval=1.0)
    run.fit(module, same_batch(), same_batch(1), ckpt_path=path)
    return run


MODELS: dict[str, Any] = {
    "AdamW, OneCycleLR": lambda: Scheduled(sharp=True),
    "AdamW fused, SequentialLR": lambda: Scheduled(sharp=True, opt="fused", kind="eager"),
    "AdamW amsgrad, LambdaLR": lambda: Scheduled(sharp=True, opt="amsgrad", kind="mha"),
    "SGD momentum fused, StepLR": lambda: Scheduled(sharp=True, opt="sgd"),
    "Muon beside AdamW, manual": lambda: Manual(sharp=True),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("variant", ["l2", "qwen3"])
def test_resume_from_any_step_is_bit_identical(name: str, variant: str, tmp_path: Path) -> None:
    """The alert comes with step 0, the patch after step 1: so one checkpoint lies between the two."""
    if variant == "qwen3" and name != "AdamW, OneCycleLR":
        pytest.skip("once is enough")
    module, callback = MODELS[name](), watch(retrofit="auto", variant=variant)
    per_step = 2 if isinstance(module, Manual) else 1  # optimizers, each of which counts in global_step
    run = train(module, callback, tmp_path, steps=8 * per_step)
    assert [entry.step for entry in callback.retrofits] == [1]
    assert callback.retrofits[0].report.applied == SITES
    straight = state_of(run, module, callback)
    for stop in (1, 2, 3, 5, 7):  # 1: an alert, not patched yet; 5: the end of an epoch
        module, callback = MODELS[name](), watch(retrofit="auto", variant=variant)
        path = tmp_path / f"step={stop * per_step}.ckpt"
        run = train(module, callback, tmp_path / f"again{stop}", path=path, steps=8 * per_step)
        assert_same(state_of(run, module, callback), straight, f"from {stop}")
        assert [e.step for e in callback.retrofits] == ([1] if stop == 1 else [])


def test_patch_save_resume_save_resume(tmp_path: Path) -> None:
    module, callback = Scheduled(sharp=True), watch(retrofit="now")
    straight = state_of(train(module, callback, tmp_path, steps=12), module, callback)
    path: Any = None
    for leg, steps in enumerate((3, 5, 9, 12)):
        module, callback = Scheduled(sharp=True), watch(retrofit="now")
        run = train(module, callback, tmp_path / str(leg), steps=steps, path=path)
        path = tmp_path / str(leg) / "last.ckpt"
    assert_same(state_of(run, module, callback), straight)


def test_a_checkpoint_that_another_callback_saves_before_our_turn(tmp_path: Path) -> None:
    """The optimizer has stepped, we have not yet counted it."""

    class Saves(L.Callback):
        def on_train_batch_end(self, run: Any, pl_module: Any, *args: Any) -> None:
            run.save_checkpoint(tmp_path / f"early{run.global_step}.ckpt")

    module, callback = Scheduled(sharp=True), watch(retrofit="auto")
    run = trainer(Saves(), callback, max_steps=8)
    run.fit(module, same_batch(), same_batch(1))
    straight = state_of(run, module, callback)
    for step in (3, 5, 6):  # the step before was not a measured one
        module, callback = Scheduled(sharp=True), watch(retrofit="auto")
        run = trainer(callback, max_steps=8)
        run.fit(module, same_batch(), same_batch(1), ckpt_path=tmp_path / f"early{step}.ckpt")
        assert_same(state_of(run, module, callback), straight)


def test_a_ramp_goes_on(tmp_path: Path) -> None:
    module, callback = Scheduled(sharp=True), watch(retrofit="now", ramp_steps=6)
    straight = state_of(train(module, callback, tmp_path, steps=10), module, callback)
    module, callback = Scheduled(sharp=True), watch(retrofit="now", ramp_steps=6)
    run = train(module, callback, tmp_path / "b", steps=10, path=tmp_path / "step=3.ckpt")
    assert_same(state_of(run, module, callback), straight)
    module, callback = Scheduled(sharp=True), watch()  # that it is under way is the run's business, no option's
    run = train(module, callback, tmp_path / "c", steps=10, path=tmp_path / "step=3.ckpt")
    assert_same(weights(module), straight["weights"])


def test_best_from_before_the_patch_and_last_from_after_it(tmp_path: Path) -> None:
    class Ages(Tiny):
        def training_step(self, batch: Any, index: int) -> Any:
            self.log("age", float(self.global_step))
            return super().training_step(batch, index)

    def saving() -> ModelCheckpoint:
        return ModelCheckpoint(tmp_path, monitor="age", mode="min", save_last=True, every_n_train_steps=1)

    ends = []
    for steps in (8, 4):
        module, callback = Ages(sharp=True), watch(retrofit="auto")
        run = trainer(callback, saving(), max_steps=steps)
        run.fit(module, same_batch(), same_batch(1))
        ends.append((weights(module), callback.state_dict()))
    run.validate(module, same_batch(1), ckpt_path="best", verbose=False)
    assert patched_sites(module) == []
    run.test(module, same_batch(1), ckpt_path="last", verbose=False)
    assert_same(weights(module), ends[1][0])
    module, callback = Ages(sharp=True), watch(retrofit="auto")
    trainer(callback, saving(), max_steps=8).fit(module, same_batch(), same_batch(1), ckpt_path="last")
    assert_same((weights(module), callback.state_dict()), ends[0])


@pytest.mark.parametrize("step", [1, 2, 4])
def test_the_checkpoint_of_a_run_that_broke_in_a_measured_step(step: int, tmp_path: Path) -> None:
    class Breaks(Tiny):
        broken = False

        def training_step(self, batch: Any, index: int) -> Any:
            loss = super().training_step(batch, index)
            if self.broken and self.global_step == step:
                raise ZeroDivisionError
            return loss

    ends = []
    for broken in (False, True):
        module, callback = Breaks(sharp=True), watch(retrofit="auto", every_n_steps=1)
        module.broken = broken
        run = trainer(callback, OnExceptionCheckpoint(tmp_path), max_steps=8)
        with pytest.raises(ZeroDivisionError) if broken else contextlib.nullcontext():
            run.fit(module, same_batch(8), same_batch(1))
        ends.append((weights(module), callback.state_dict()))
    module, callback = Tiny(sharp=True), watch(retrofit="auto", every_n_steps=1)
    run = trainer(callback, max_steps=8)
    run.fit(module, same_batch(8), same_batch(1), ckpt_path=tmp_path / "on_exception.ckpt")
    assert_same((weights(module), callback.state_dict()), ends[0])


@pytest.mark.parametrize("verb", ["validate", "test"])
def test_a_checkpoint_from_the_middle_of_a_ramp_evaluates_as_it_was(verb: str, tmp_path: Path) -> None:
    module, callback = Scheduled(sharp=True), watch(retrofit="now", ramp_steps=6)
    run = train(module, callback, tmp_path, steps=4)
    [live] = getattr(run, verb)(module, same_batch(1), verbose=False)
    other = watch(ramp_steps=6)
    evaluate = getattr(trainer(other), verb)
    fresh = Scheduled()
    for path, ramped in ((tmp_path / "step=4.ckpt", True), (tmp_path / "step=1.ckpt", False)):
        [loss] = evaluate(fresh, same_batch(1), ckpt_path=path, verbose=False)
        assert (loss == live) == ramped
    train(module, callback := watch(ramp_steps=6), tmp_path / "b", steps=10, path=tmp_path / "step=4.ckpt")
    [done] = getattr(trainer(), verb)(module, same_batch(1), verbose=False)
    evaluate(fresh, same_batch(1), ckpt_path=tmp_path / "step=4.ckpt", verbose=False)
    assert evaluate(fresh, same_batch(1), ckpt_path=tmp_path / "b" / "step=10.ckpt", verbose=False) == [done]


def test_an_old_checkpoint_goes_on_patched_with_its_optimizer_state(tmp_path: Path) -> None:
    """A run that never knew of us: the callback is added when it is resumed."""
    save = ModelCheckpoint(tmp_path, save_last=True)
    run = trainer(save, max_steps=5)
    run.fit(Scheduled(), same_batch(), same_batch(1))
    module, callback = Scheduled(), watch(retrofit="now")
    run = trainer(callback, max_steps=9)
    run.fit(module, same_batch(), same_batch(1), ckpt_path=tmp_path / "last.ckpt")
    assert [e.step for e in callback.retrofits] == [5]
    steps = {name: int(run.optimizers[0].state[p]["step"]) for name, p in module.named_parameters()}
    gains = {name for name, _ in norm_parameters(module)}
    assert gains
    assert {steps[name] for name in gains} == {3}
    assert {steps[name] for name in steps if name not in gains} == {9}


def test_the_checkpoint_of_a_model_that_was_patched_before_the_trainer_saw_it(tmp_path: Path) -> None:
    """Its optimizer holds the gains in the model's own order, and no names were saved."""

    def patched() -> Tiny:
        module = Tiny()
        qkwatch.retrofit_(module.net, qkwatch.find_sites(module.net, torch.arange(8)[None]))
        return module

    save = ModelCheckpoint(tmp_path, save_last=True)
    trainer(save, max_steps=5).fit(patched(), same_batch(), same_batch(1))
    module, callback = Tiny(), watch()
    run = trainer(callback, max_steps=8)
    run.fit(module, same_batch(), same_batch(1), ckpt_path=tmp_path / "last.ckpt")
    assert patched_sites(module) == SITES
    assert {int(run.optimizers[0].state[p]["step"]) for p in module.parameters()} == {8}
    exempt = [g for g in run.optimizers[0].param_groups if g["weight_decay"] == 0]
    assert {id(p) for g in exempt for p in g["params"]} == {id(p) for _, p in norm_parameters(module)}


# -- structure follows the weights ------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """A run that was patched after step 1; its last checkpoint, one from before, and the weights only."""
    module, callback = Tiny(sharp=True), watch(retrofit="auto")
    run = train(module, callback, tmp_path, steps=5)
    run.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    ids = next(iter(same_batch()))[0]
    return {
        "folder": tmp_path,
        "run": run,
        "module": module,
        "old": tmp_path / "step=1.ckpt",
        "last": tmp_path / "last.ckpt",
        "weights": tmp_path / "weights.ckpt",
        "logits": module.eval().net(ids).detach(),
        "ids": ids,
    }


@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
def test_evaluating_a_checkpoint_from_before_the_patch_and_going_on(verb: str, saved: dict[str, Any]) -> None:
    run, module = saved["run"], saved["module"]
    evaluate = getattr(run, verb)
    expected = torch.load(saved["old"], weights_only=True)["state_dict"]
    evaluate(module, same_batch(1), ckpt_path=saved["old"])
    assert_same(weights(module), dict(expected))
    evaluate(module, same_batch(1), ckpt_path=saved["last"])
    assert patched_sites(module) == SITES
    assert torch.equal(module.eval().net(saved["ids"]), saved["logits"])
    evaluate(module, same_batch(1), ckpt_path=saved["old"])
    [callback] = [c for c in run.callbacks if isinstance(c, QKWatch)]
    module.train()
    run.fit_loop.epoch_loop.max_steps = 12
    run.fit(module, same_batch(), same_batch(1))  # unpatched, saturated: it is patched once more
    assert patched_sites(module) == SITES
    assert len(callback.retrofits) == 2
    new = {id(p) for _, p in norm_parameters(module)}
    holders = [g for g in run.optimizers[0].param_groups if any(id(p) in new for p in g["params"])]
    assert {id(p) for g in holders for p in g["params"]} == new


def test_fit_from_either_side_of_the_patch_in_one_process(saved: dict[str, Any]) -> None:
    run, module = saved["run"], saved["module"]
    run.fit_loop.epoch_loop.max_steps = 8
    run.fit(module, same_batch(), same_batch(1), ckpt_path=saved["old"])
    assert patched_sites(module) == SITES
    fresh, callback = Tiny(sharp=True), watch(retrofit="auto")
    other = train(fresh, callback, saved["folder"] / "b", steps=8, path=saved["old"])
    [first] = [c for c in run.callbacks if isinstance(c, QKWatch)]
    assert_same(state_of(run, module, first), state_of(other, fresh, callback))


def test_without_the_callback_the_error_names_the_keys(saved: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match=r"Unexpected key.*qk_norm"):
        trainer(max_steps=8).fit(Tiny(sharp=True), same_batch(), ckpt_path=saved["last"])


@pytest.mark.parametrize("kind", ["last", "weights", "old"])
def test_inference_without_a_trainer(kind: str, saved: dict[str, Any]) -> None:
    module = qkwatch.load_from_checkpoint(Tiny, saved[kind], lr=0.5)
    assert type(module) is Tiny
    assert module.hparams.lr == 0.5
    assert module.hparams.sharp
    assert patched_sites(module) == ([] if kind == "old" else SITES)
    assert "load_state_dict" not in vars(module)
    if kind != "old":
        assert torch.equal(module.eval().net(saved["ids"]), saved["logits"])
        plain = Tiny()
        qkwatch.restore_(plain, saved[kind])
        plain.load_state_dict(torch.load(saved[kind], weights_only=True)["state_dict"], strict=True)
        assert torch.equal(plain.eval().net(saved["ids"]), saved["logits"])


def test_loading_for_another_model_says_what_does_not_fit(saved: dict[str, Any]) -> None:
    class Other(Tiny):
        def __init__(self, **options: Any) -> None:
            super().__init__()
            self.net.blocks[1].attn = torch.nn.Identity()

    with pytest.raises(QKWatchError, match=r"net\.blocks\.1\.attn"):
        qkwatch.load_from_checkpoint(Other, saved["last"])
    with pytest.raises(QKWatchError, match=r"net\.blocks\.1\.attn"):
        trainer(watch(), max_steps=8).fit(Other(), same_batch(), ckpt_path=saved["last"])


def test_the_other_name_of_lightning_too(tmp_path: Path) -> None:
    class Old(pytorch_lightning.LightningModule):
        def __init__(self, wide: int = 1) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = Tiny().net

        def training_step(self, batch: Any, index: int) -> Any:
            return loss_of(self.net, batch[0])

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    module = Old(wide=3)
    run = trainer(watch(retrofit="now"), package=pytorch_lightning, max_steps=2)
    run.fit(module, same_batch())
    run.save_checkpoint(tmp_path / "a.ckpt")
    again = qkwatch.load_from_checkpoint(Old, tmp_path / "a.ckpt")
    assert again.hparams.wide == 3
    assert_same(weights(again), weights(module))


# -- averages ---------------------------------------------------------------------------------------------------

AVERAGES: dict[str, Any] = {
    "EMA": lambda: EMAWeightAveraging(decay=0.8),
    "mean, no buffers": lambda: WeightAveraging(use_buffers=False),
    "SWA": lambda: StochasticWeightAveraging(swa_lrs=5e-3, swa_epoch_start=1, device=None),
}


@pytest.mark.parametrize("name", AVERAGES)
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("early", [True, False])
def test_weight_averages_take_part(name: str, first: bool, early: bool, tmp_path: Path) -> None:
    """In either order, patched before the average begins or in its midst; and on resume."""

    def build() -> tuple[Any, QKWatch, list[Any]]:
        callback, average = watch(retrofit="auto", every_n_steps=1 if early else 7), AVERAGES[name]()
        if not early:

            def due(run: Any, module: Any) -> None:
                if run.current_epoch == 2 and not callback._run.decided:
                    callback._run.pending = "test"

            callback.on_train_epoch_start = due  # type: ignore[method-assign]
        return Tiny(sharp=early), callback, [callback, average] if first else [average, callback]

    module, callback, order = build()
    gains: dict[str, list[Any]] = {}

    class Follow(L.Callback):
        def on_train_batch_end(self, run: Any, pl_module: Any, *args: Any) -> None:
            for key, gain in norm_parameters(pl_module):
                gains.setdefault(key, []).append(gain.detach().clone())

    save = ModelCheckpoint(tmp_path, every_n_epochs=1, save_top_k=-1, filename="{epoch}")
    run = trainer(*order, Follow(), save, max_epochs=4)
    run.fit(module, same_batch(3), same_batch(1))
    [average] = [c for c in order if c is not callback]
    copy = average._average_model
    inner = copy.module if hasattr(copy, "n_averaged") else copy
    assert patched_sites(inner) == patched_sites(module) == SITES
    assert [n for n, _ in inner.named_parameters()] == [n for n, _ in module.named_parameters()]
    if name == "EMA":  # each average is that of its own parameter, from the start on
        for key, values in gains.items():
            mean = torch.full_like(values[0], 10.0)
            for value in values if first else values[1:]:
                mean = mean.lerp(value, 0.2)
            torch.testing.assert_close(dict(inner.named_parameters())[key].detach(), mean, rtol=1e-4, atol=1e-4)
    straight = weights(module)

    module, callback, order = build()
    again = trainer(*order, max_epochs=4)
    again.fit(module, same_batch(3), same_batch(1), ckpt_path=tmp_path / "epoch=2.ckpt")
    assert_same(weights(module), straight)


# -- kill -9 ----------------------------------------------------------------------------------------------------


def run_on(folder: Path, steps: int) -> None:
    """From the newest checkpoint there is."""
    found = sorted(folder.glob("*.ckpt"), key=lambda path: int(path.stem.split("=")[1]))
    save = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    run = trainer(watch(retrofit="auto", every_n_steps=4), save, max_steps=steps)
    run.fit(Tiny(sharp=True), same_batch(steps), same_batch(1), ckpt_path=found[-1] if found else None)


def forked(folder: Path, steps: int) -> int:
    """In a process of its own; returns its id."""
    process = os.fork()
    if process == 0:
        code = 1
        try:
            run_on(folder, steps)
            code = 0
        finally:
            os._exit(code)
    return process


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_at_any_moment_the_run_goes_on(kills: int, tmp_path: Path) -> None:
    """Killed while it patches or saves: the newest checkpoint that is there loads, and the end is the same."""
    chance, steps, folder = random.Random(kills), 20 + 3 * kills, tmp_path / "ckpt"
    for _ in range(kills):
        before, process = len(list(folder.glob("*.ckpt"))), forked(folder, steps)
        deadline = time.monotonic() + 60
        while len(list(folder.glob("*.ckpt"))) == before and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.02))  # some steps take as long
        os.kill(process, signal.SIGKILL)
        assert os.waitpid(process, 0)[1] == signal.SIGKILL
        for file in folder.glob("*.ckpt"):
            torch.load(file, weights_only=True)
    assert os.waitpid(forked(tmp_path / "ckpt", steps), 0)[1] == 0
    run_on(tmp_path / "straight", steps)
    ends = [torch.load(tmp_path / f / f"step={steps}.ckpt", weights_only=True) for f in ("ckpt", "straight")]
    assert_same(dict(ends[0]["state_dict"]), dict(ends[1]["state_dict"]))


@pytest.mark.slow
def test_the_example_tells_its_story() -> None:
    """Four processes, real text: the validation loss that training ended with is that of the loaded model."""
    root = Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    command = [sys.executable, str(root / "examples" / "midproject.py")]
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=300).stdout
    assert "patched blocks.0, blocks.1 after step 150" in output
    assert "patched once more: 0 times" in output
    losses = [line.rsplit("loss ", 1)[1] for line in output.splitlines() if "validation loss" in line]
    assert losses[2] == losses[3]
