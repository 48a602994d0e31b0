"""Models of which not every part runs in every step: all of it is watched, and patched, in the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Net, Tiny, assert_same, data, loss_of, sharpen, trainer, weights
from torch import nn
from torch.nn import functional as F

from qkwatch import QKWatch
from qkwatch.agreement import agree
from qkwatch.layout import HeadLayout
from qkwatch.midrun import ramps_of
from qkwatch.ranks import Ranks
from qkwatch.sites import Site
from qkwatch.surgery import patched_sites

pytestmark = pytest.mark.filterwarnings("ignore")


def watch(**options: Any) -> QKWatch:
    return QKWatch(**{"every_n_steps": 10, "console": False, "on_error": "raise", **options})


class Towers(Tiny):
    """Two networks that take turns, as with two kinds of batches."""

    def __init__(self, period: int = 2, **options: Any) -> None:
        super().__init__(**options)
        torch.manual_seed(4)
        self.other, self.period = Net(), period
        if options.get("sharp"):
            sharpen(self.other)

    def training_step(self, batch: Any, index: int) -> Any:
        return loss_of(self.other if index % self.period else self.net, batch[0])


ALL = [f"{tower}.blocks.{i}.attn" for tower in ("net", "other") for i in (0, 1)]


class LayerDrop(Tiny):
    """Leaves out one block in turn."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.net = Net(layers=3)
        if options.get("sharp"):
            sharpen(self.net)

    def training_step(self, batch: Any, index: int) -> Any:
        x = self.net.embed(batch[0][:, :-1])
        for i, block in enumerate(self.net.blocks):
            x = x if i == index % 3 else block(x)
        return F.cross_entropy(self.net.head(x).flatten(0, 1), batch[0][:, 1:].flatten())


@pytest.mark.parametrize("retrofit", ["now", "auto"])
@pytest.mark.parametrize("every", [10, 3])
def test_towers_that_take_turns_are_both_watched_and_patched(retrofit: Any, every: int) -> None:
    module, callback = Towers(sharp=True), watch(retrofit=retrofit, every_n_steps=every)
    trainer(callback, max_steps=60).fit(module, data(256))
    assert patched_sites(module) == ALL
    assert {r.site for _, readings in callback.history for r in readings} == set(ALL)
    applied = [name for entry in callback.retrofits for name in entry.report.applied]
    assert sorted(applied) == ALL
    assert all(entry.loss_before is not None for entry in callback.retrofits)


def test_layers_that_are_left_out_at_first_are_patched_when_they_run() -> None:
    module, callback = LayerDrop(), watch(retrofit="now", every_n_steps=3)
    trainer(callback, max_steps=30).fit(module, data(256))
    assert patched_sites(module) == [f"net.blocks.{i}.attn" for i in range(3)]


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_glob_for_a_layer_that_is_left_out_now_and_then(which: int) -> None:
    for retrofit in ("off", "now"):
        module, callback = LayerDrop(), watch(retrofit=retrofit, every_n_steps=3, layers=f"net.blocks.{which}.attn")
        trainer(callback, max_steps=30).fit(module, data(256))
        assert callback._run.measured
        assert patched_sites(module) == ([f"net.blocks.{which}.attn"] if retrofit == "now" else [])


def test_who_comes_late_waits_for_the_ramp_and_has_one_of_its_own() -> None:
    module, callback = Towers(), watch(retrofit="now", every_n_steps=5, ramp_steps=12)
    seen: list[dict[str, float]] = []
    callback_end = callback.on_train_batch_end

    def on_train_batch_end(*args: Any) -> None:
        callback_end(*args)
        seen.append(ramps_of(module))

    callback.on_train_batch_end = on_train_batch_end  # type: ignore[method-assign]
    trainer(callback, max_steps=50).fit(module, data(256))
    first, second = (set(entry.report.applied) for entry in callback.retrofits)
    assert first | second == set(ALL)
    assert {frozenset(ramps) for ramps in seen} == {frozenset(), frozenset(first), frozenset(second)}


def test_what_was_refused_is_not_tried_again_after_a_resume(tmp_path: Path) -> None:
    module, callback = Towers(), watch(retrofit="now", layers="net.*")
    run = trainer(callback, max_steps=4)
    run.fit(module, data(256))
    assert callback._run.state_dict()["outcome"] == "patched"
    run.save_checkpoint(tmp_path / "a.ckpt")
    again = watch(retrofit="now", layers="net.*")
    trainer(again, max_steps=30).fit(Towers(), data(256), ckpt_path=tmp_path / "a.ckpt")
    assert again.retrofits == []


class Late(Tiny):
    def training_step(self, batch: Any, index: int) -> Any:
        if self.global_step < 25:
            return self.net.head(self.net.embed(batch[0])).square().mean()
        return super().training_step(batch, index)


@pytest.mark.parametrize("retrofit", ["auto", "now"])
def test_attention_that_starts_late(retrofit: Any) -> None:
    module, callback = Late(sharp=True), watch(retrofit=retrofit)
    trainer(callback, max_steps=60).fit(module, data(256))
    assert patched_sites(module) == ALL[:2]


class Inline(Tiny):
    """Attention in a helper that is no forward of a module."""

    def helper(self, ids: torch.Tensor) -> torch.Tensor:
        x, attn = self.net.embed(ids), self.net.blocks[0].attn
        q, k, v = (p(x).unflatten(-1, (2, -1)).transpose(1, 2) for p in (attn.q_proj, attn.k_proj, attn.v_proj))
        return self.net.head(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))

    def training_step(self, batch: Any, index: int) -> Any:
        return loss_of(self.helper, batch[0])  # type: ignore[arg-type]


def test_attention_outside_of_any_forward_is_watched_and_refused_with_the_reason(capsys: Any) -> None:
    module, callback = Inline(), watch(retrofit="now", console=True)
    before = weights(module)
    trainer(callback, max_steps=12).fit(module, data(256))
    assert [(r.site, r.heads) for r in callback.readings] == [("", 2)]
    assert "outside of any module" in callback.retrofits[0].report.refused[""]
    assert len(callback.retrofits) == 1
    assert before.keys() == weights(module).keys()
    assert "no softmax attention" not in capsys.readouterr().out


def test_extra_looks_change_no_bit() -> None:
    plain, seen = Towers(), Towers()
    trainer(max_steps=40).fit(plain, data(256))
    trainer(watch(), max_steps=40).fit(seen, data(256))
    assert_same(weights(seen), weights(plain))


def test_a_site_that_goes_by_another_name_now_is_not_kept_twice() -> None:
    """A core that was known by the module it ran in may later be known by one that holds its projections."""
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Identity()), nn.Linear(2, 2))
    single = HeadLayout(1, "single")
    modules = {name: model.get_submodule(name) for name in ("0.1", "0", "1")}
    helper, owner, other = (Site(name, 1, 1, 2, module=module, layout=single) for name, module in modules.items())
    kept, unseen = agree(model, [owner], [helper, other], {"0.1"}, False, Ranks())
    assert ([site.name for site in kept], unseen) == (["0", "1"], False)
    kept, unseen = agree(model, [owner], [helper, other], set(), True, Ranks())
    assert ([site.name for site in kept], unseen) == (["0", "0.1", "1"], True)
