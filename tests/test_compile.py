"""Compiled models and recomputed activations: measured steps run eagerly, the others as they would without us."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch._dynamo
from tiny import LENGTH, Tiny, assert_same, data, trainer, weights
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint

from qkwatch import QKWatch
from qkwatch import watch as watching
from qkwatch.modules import _spare_a_warning
from qkwatch.surgery import norm_parameters

pytestmark = pytest.mark.filterwarnings("ignore")
SITES = ["net.blocks.0.attn", "net.blocks.1.attn"]


@pytest.fixture(autouse=True)
def _fresh() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def watch(**options: Any) -> QKWatch:
    return QKWatch(**{"every_n_steps": 3, "console": False, "on_error": "raise", **options})


def compiled(how: str, kind: str = "sdpa") -> tuple[Tiny, Any, CompileCounter]:
    """The module, what to give to `fit`, and the counter of compiled frames."""
    module, counter = Tiny(kind), CompileCounter()
    if how == "the LightningModule":
        return module, torch.compile(module, backend=counter), counter
    if how == "torch.compile of blocks":
        module.net.blocks = nn.ModuleList(torch.compile(b, backend=counter) for b in module.net.blocks)
    elif how == "torch.compile of the net":
        module.net = torch.compile(module.net, backend=counter)
    elif how == "net.compile()":
        module.net.compile(backend=counter)
    elif how == "attn.compile()":
        for block in module.net.blocks:
            block.attn.compile(backend=counter)
    return module, module, counter


WAYS = ["the LightningModule", "torch.compile of blocks", "torch.compile of the net", "net.compile()", "attn.compile()"]


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("kind", ["sdpa", "eager"])
def test_readings_of_a_compiled_model(how: str, kind: str) -> None:
    """The same readings as of the model that is not compiled, and not one frame compiled more than without us."""
    frames = {}
    for watched in (False, True):
        torch._dynamo.reset()
        _, model, counter = compiled(how, kind)
        callback = watch()
        trainer(*([callback] if watched else []), max_steps=10).fit(model, data(64))
        frames[watched] = counter.frame_count, counter.op_count
    assert frames[True][0] > 0
    if how != "the LightningModule":  # it compiles training_step and its logging, with and without a first eager step
        assert frames[True] == frames[False]
    assert [step for step, _ in callback.history] == [0, 3, 6, 9]
    assert [r.site for r in callback.readings] == SITES
    plain = watch()
    trainer(plain, max_steps=10).fit(Tiny(kind), data(64))
    for (_, ours), (_, theirs) in zip(callback.history, plain.history, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert a.rows == b.rows
            torch.testing.assert_close(a.max_logit, b.max_logit, rtol=1e-3, atol=1e-5)


def test_a_ramp_is_compiled_once() -> None:
    """How far it has come is a tensor: its steps are no reason to compile again, only its end is."""

    class Frames(QKWatch):
        def on_train_batch_end(self, *args: Any) -> None:
            super().on_train_batch_end(*args)
            frames.append(counter.frame_count)

    frames: list[int] = []
    _, model, counter = compiled("net.compile()")
    callback = Frames(every_n_steps=100, console=False, on_error="raise", retrofit="now", ramp_steps=12)
    trainer(callback, max_steps=20).fit(model, data(64))
    assert callback.retrofits[0].step == 0
    assert frames == [0, *[1] * 11, *[2] * 8]  # the first step was measured


@pytest.mark.parametrize("how", WAYS)
def test_steps_between_readings_run_compiled(how: str) -> None:
    """Compiled code runs on every step that is not measured: counted by a backend that counts its calls."""
    calls: list[int] = []
    step = [0]

    def backend(graph: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            calls.append(step[0])
            return graph.forward(*args)

        return run

    class Steps(QKWatch):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, index: int) -> None:
            step[0] = index
            super().on_train_batch_start(trainer, pl_module, batch, index)

    module = Tiny()
    if how == "the LightningModule":
        model = torch.compile(module, backend=backend)
    else:
        model = module
        if how == "torch.compile of blocks":
            module.net.blocks = nn.ModuleList(torch.compile(b, backend=backend) for b in module.net.blocks)
        elif how == "torch.compile of the net":
            module.net = torch.compile(module.net, backend=backend)
        elif how == "net.compile()":
            module.net.compile(backend=backend)
        else:
            for block in module.net.blocks:
                block.attn.compile(backend=backend)
    trainer(Steps(every_n_steps=3, console=False, on_error="raise"), max_steps=8).fit(model, data(64))
    assert set(calls) == {1, 2, 4, 5, 7}


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("kind", ["sdpa", "mha"])
def test_a_patch_takes_effect_in_compiled_code(how: str, kind: str) -> None:
    if kind == "mha" and how == "attn.compile()":
        pytest.skip("compiled with keyword-only inputs: the same path as the others")
    module, model, counter = compiled(how, kind)
    callback = watch(retrofit="now")
    trainer(callback, max_steps=8).fit(model, data(64))
    [entry] = callback.retrofits
    assert entry.report.applied == SITES, entry.report.refused
    other = Tiny(kind)
    eager = watch(retrofit="now")
    trainer(eager, max_steps=8).fit(other, data(64))
    gains, expected = norm_parameters(module), norm_parameters(other)
    assert len(gains) == len(expected) > 0
    starts = [torch.tensor(p.gains["q.gain"]) for p in entry.report.plan.sites]
    for (_, ours), (_, theirs), start in zip(gains, expected, starts, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=1e-3)
        assert not torch.equal(ours.detach(), start)  # compiled steps trained it
    assert counter.frame_count < 12, "it recompiles on every step"


# -- recomputation ----------------------------------------------------------------------------------------------


class Recomputed(Tiny):
    def __init__(self, reentrant: bool, **options: Any) -> None:
        super().__init__(**options)
        for block in self.net.blocks:
            forward = block.forward
            block.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("kind", ["sdpa", "eager", "mha"])
@pytest.mark.parametrize("retrofit", ["off", "now"])
def test_recomputed_activations_count_once(reentrant: bool, kind: str, retrofit: str) -> None:
    plain, callback = watch(every_n_steps=1, retrofit=retrofit), watch(every_n_steps=1, retrofit=retrofit)
    simple, module = Tiny(kind), Recomputed(reentrant, kind=kind)
    trainer(plain, max_steps=4).fit(simple, data())
    trainer(callback, max_steps=4).fit(module, data())
    assert [(s, [r.site for r in rs]) for s, rs in callback.history] == [(s, SITES) for s in range(4)]
    for (_, ours), (_, theirs) in zip(callback.history, plain.history, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert a.rows == b.rows == 4 * LENGTH
            torch.testing.assert_close(a.max_logit, b.max_logit)
            torch.testing.assert_close(a.entropy, b.entropy)
    assert_same(weights(module), weights(simple))
    assert bool(norm_parameters(module)) == (retrofit == "now")


def test_no_warning_of_torch_about_our_hooks() -> None:
    """A compiled part of a watched model warns of global hooks that fire for its wrapper too: ours mind that."""
    torch.compile(nn.Linear(2, 2), backend="eager")(torch.randn(1, 2))
    net = nn.Sequential(torch.compile(nn.TransformerEncoderLayer(16, 2, 16, batch_first=True), backend="eager"))
    _spare_a_warning.cache_clear()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with watching(net) as watcher:
            net(torch.randn(2, 5, 16))
    assert watcher.readings
    assert not [w for w in said if "global hooks" in str(w.message)]


def test_measured_steps_force_eager_and_the_stance_of_the_user_comes_back() -> None:
    class Stances(Tiny):
        def training_step(self, batch: Any, index: int) -> Any:
            seen.append(torch._dynamo.eval_frame._stance.stance)
            return super().training_step(batch, index)

    seen: list[str] = []
    with torch.compiler.set_stance("eager_on_recompile"):
        trainer(watch(every_n_steps=2), max_steps=4).fit(Stances(), data())
        assert torch._dynamo.eval_frame._stance.stance == "eager_on_recompile"
    assert seen == ["force_eager", "eager_on_recompile"] * 2
    assert torch._dynamo.eval_frame._stance.stance == "default"
