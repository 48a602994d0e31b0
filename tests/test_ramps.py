"""A ramp that one run leaves unfinished: the next one ends it, and weights alone know nothing of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback
from tiny import Tiny, data, trainer

from qkwatch import QKWatch
from qkwatch.midrun import ramps_of


def watch(ramp_steps: int = 20, **options: Any) -> QKWatch:
    return QKWatch(retrofit="now", ramp_steps=ramp_steps, on_error="raise", **{"console": False, **options})


def stopped(at: int = 6, callback: QKWatch | None = None) -> Tiny:
    """Trained until it is in the middle of its ramp."""
    module = Tiny(sharp=True)
    trainer(callback or watch(), max_steps=at).fit(module, data())
    assert ramps_of(module)
    return module


@pytest.mark.parametrize(("steps", "left"), [(20, 15), (40, 30), (0, 0)])
def test_a_new_trainer_goes_on_with_the_ramp_it_finds(steps: int, left: int, capsys: Any) -> None:
    module = stopped()
    there = 0.25
    assert set(ramps_of(module).values()) == {there}
    late = watch(ramp_steps=steps, console=True)

    class Follow(Callback):
        def __init__(self) -> None:
            self.seen: list[Any] = []

        def on_train_batch_end(self, *args: Any) -> None:
            self.seen.append(max(ramps_of(module).values(), default=None))

    follow = Follow()
    trainer(late, follow, max_steps=left + 3).fit(module, data(256))
    assert (f"over the next {left} steps" if left else "at once") in capsys.readouterr().out
    assert follow.seen[left:] == [None] * 3
    assert follow.seen[:left] == pytest.approx([there + (1 - there) * i / max(left, 1) for i in range(left)])


def test_the_same_callback_in_a_new_trainer() -> None:
    callback = watch()
    module = stopped(callback=callback)
    trainer(callback, max_steps=25).fit(module, data(256))
    assert ramps_of(module) == {}
    assert max(float(reading.max_logit.max()) for reading in callback.readings) < 30.0


@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
def test_weights_alone_run_the_normed_function_whatever_was_loaded_before(verb: str, tmp_path: Path) -> None:
    run = trainer(watch(), max_steps=6)
    run.fit(Tiny(sharp=True), data())
    run.save_checkpoint(tmp_path / "whole.ckpt")
    run.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    module, options = Tiny(), {} if verb == "predict" else {"verbose": False}
    for name, ramps in (("whole", True), ("weights", False), ("whole", True)):
        run = trainer(QKWatch(console=False))
        getattr(run, verb)(module, data(), ckpt_path=tmp_path / f"{name}.ckpt", **options)
        assert bool(ramps_of(module)) == ramps
