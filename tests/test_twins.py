"""Copies of the network that a module keeps itself, for an average or as a target, are patched with it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from test_resume import same_batch
from tiny import Net, Tiny, assert_same, data, loss_of, sharpen, trainer, weights
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from qkwatch import QKWatch
from qkwatch.midrun import ramps_of
from qkwatch.surgery import patched_sites
from qkwatch.twins import find_twins

pytestmark = pytest.mark.filterwarnings("ignore")
SITES = ["net.blocks.0.attn", "net.blocks.1.attn"]


def watch(**options: Any) -> QKWatch:
    return QKWatch(**{"retrofit": "now", "every_n_steps": 5, "console": False, "on_error": "raise", **options})


class Own(Tiny):
    """Keeps an average of its network, in one of the usual ways."""

    def __init__(self, how: str, sharp: bool = False) -> None:
        super().__init__(sharp=sharp)
        self.how = how
        if how == "copy":
            self.ema = copy.deepcopy(self.net).requires_grad_(False)
        else:
            average = get_ema_multi_avg_fn(0.9)
            self.ema = AveragedModel(self.net, multi_avg_fn=average, use_buffers=how == "buffers")

    def on_train_batch_end(self, *args: Any) -> None:
        if self.how == "copy":
            with torch.no_grad():
                for mine, live in zip(self.ema.parameters(), self.net.parameters(), strict=True):
                    mine.lerp_(live, 0.1)
        else:
            self.ema.update_parameters(self.net)

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", loss_of(self.ema, batch[0]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.net.parameters(), lr=1e-2)

    @property
    def average(self) -> Any:
        return self.ema if self.how == "copy" else self.ema.module


@pytest.mark.parametrize("ramp", [0, 6])
@pytest.mark.parametrize("how", ["copy", "averaged", "buffers"])
def test_an_average_of_ones_own_goes_on_and_resumes(how: str, ramp: int, tmp_path: Path) -> None:
    module, callback = Own(how), watch(ramp_steps=ramp)
    run = trainer(callback, max_steps=5)
    run.fit(module, same_batch(16), same_batch(1))
    run.save_checkpoint(tmp_path / "a.ckpt")
    inside = "ema." if how == "copy" else "ema.module."
    copies = [inside + name.removeprefix("net.") for name in SITES]
    assert patched_sites(module) == SITES + copies
    assert set(ramps_of(module)) == (set(SITES + copies) if ramp else set())
    assert sorted(callback.retrofits[0].report.applied) == sorted(SITES + copies)
    assert "copy" in callback.retrofits[0].report.notes[copies[0]]
    names = [name for name, _ in module.net.named_parameters()]
    assert [name for name, _ in module.average.named_parameters()] == names

    straight = Own(how)
    trainer(watch(ramp_steps=ramp), max_steps=12).fit(straight, same_batch(16), same_batch(1))
    for name, parameter in straight.average.named_parameters():
        if "gain" in name:
            gain = straight.net.get_parameter(name)
            assert 0 < (parameter - gain).abs().max() < 0.1  # it follows
    again = Own(how)
    trainer(watch(ramp_steps=ramp), max_steps=12).fit(
        again, same_batch(16), same_batch(1), ckpt_path=tmp_path / "a.ckpt"
    )
    assert_same(weights(again), weights(straight))


@pytest.mark.parametrize("how", ["copy", "averaged"])
def test_it_is_taken_back_with_the_network(how: str) -> None:
    class Worse(Own):
        def training_step(self, batch: Any, index: int) -> Any:
            return super().training_step(batch, index) + (9.0 if patched_sites(self) else 0.0)

    class Alert(Callback):
        def on_train_batch_end(self, run: Any, *args: Any) -> None:
            if run.global_step == 15:
                callback._run.pending = "test"

    module, callback = Worse(how), watch(retrofit="auto", budget=0.5, budget_steps=4)
    keys = module.state_dict().keys()
    trainer(callback, Alert(), max_steps=30).fit(module, same_batch(32), same_batch(1))
    assert callback.retrofits[0].undone is not None
    assert module.state_dict().keys() == keys


def test_an_average_that_a_callback_of_ones_own_keeps() -> None:
    class Mean(Callback):
        def on_fit_start(self, run: Any, module: Any) -> None:
            self.mean = AveragedModel(module)

        def on_train_batch_end(self, run: Any, module: Any, *args: Any) -> None:
            self.mean.update_parameters(module)

    mean, module = Mean(), Tiny()
    trainer(watch(), mean, max_steps=6).fit(module, data())
    assert patched_sites(mean.mean.module) == patched_sites(module) == SITES


def test_what_is_no_copy_is_left_alone() -> None:
    model = torch.nn.ModuleDict({"net": Net(layers=3), "other": Net(layers=3), "same": Net(layers=3)})
    model["same"].load_state_dict(model["net"].state_dict())
    sites = ["net.blocks.0.attn"]
    assert find_twins(model, sites, sites) == {sites[0]: ["same.blocks.0.attn"]}
    assert find_twins(model, sites, [*sites, "same.blocks.0.attn"]) == {}  # it runs
    layers = torch.nn.ModuleList(copy.deepcopy(Net().blocks[0]) for _ in range(2))
    layers[1].load_state_dict(layers[0].state_dict())
    assert find_twins(layers, ["0.attn"], ["0.attn"]) == {}  # layers that start alike
    sharpen(model["same"], -1.0)  # so do most of its weights not
    assert find_twins(model, sites, sites) == {sites[0]: ["same.blocks.0.attn"]}
