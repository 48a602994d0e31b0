"""A checkpoint goes on with other options than it was made with, or comes from another version."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Tiny, data, trainer

from qkwatch import QKWatch
from qkwatch.surgery import patched_sites

pytestmark = pytest.mark.filterwarnings("ignore")
SITES = ["net.blocks.0.attn", "net.blocks.1.attn"]
REFUSES = "qkwatch.callback.trainers.refuses_patches"


def watch(**options: Any) -> QKWatch:
    return QKWatch(**{"every_n_steps": 2, "on_error": "raise", **options})


def saved(folder: Path, steps: int = 6, pending: str | None = None, **options: Any) -> Path:
    callback = watch(console=False, **options)
    run = trainer(callback, max_steps=steps)
    run.fit(Tiny(sharp=True), data())
    callback._run.pending = pending or callback._run.pending
    run.save_checkpoint(folder / "a.ckpt")
    return folder / "a.ckpt"


def resumed(path: Path, **options: Any) -> tuple[QKWatch, Tiny]:
    callback, module = watch(**options), Tiny(sharp=True)
    trainer(callback, max_steps=16).fit(module, data(), ckpt_path=path)
    return callback, module


@pytest.mark.parametrize("retrofit", ["now", "auto"])
def test_what_was_refused_is_decided_anew(retrofit: Any, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(REFUSES, lambda trainer: "not here")
        path = saved(tmp_path, retrofit=retrofit)
    callback, module = resumed(path, retrofit=retrofit)
    assert patched_sites(module) == SITES
    assert len(callback.retrofits) == 1
    assert "decided anew" in capsys.readouterr().out.replace("\n", " ")


@pytest.mark.parametrize("retrofit", ["now", "auto", "off"])
def test_from_clipping_to_norms(retrofit: Any, tmp_path: Path, capsys: Any) -> None:
    path = saved(tmp_path, retrofit="now", variant="qkclip", cap=1e3)
    callback, module = resumed(path, retrofit=retrofit)
    assert patched_sites(module) == ([] if retrofit == "off" else SITES)
    assert not callback._run.clipping
    assert "QK-clip, which was in force" in capsys.readouterr().out.replace("\n", " ")


def test_more_layers_and_another_variant(tmp_path: Path, capsys: Any) -> None:
    path = saved(tmp_path, retrofit="now", variant="qwen3", layers="*.0.attn")
    callback, module = resumed(path, retrofit="now")
    assert patched_sites(module) == SITES
    assert callback.retrofits[0].report.applied == SITES[1:]
    assert "stays patched to 'qwen3'" in capsys.readouterr().out.replace("\n", " ")


@pytest.mark.parametrize(("first", "then"), [("auto", "off"), ("now", "off"), ("now", "auto")])
def test_a_retrofit_that_was_due_is_not_made_where_it_is_no_longer_asked_for(
    first: Any, then: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(QKWatch, "_patch", lambda *args: None)
    module = Tiny()
    callback = watch(console=False, retrofit=first)
    run = trainer(callback, max_steps=2)
    run.fit(module, data())
    callback._run.pending = callback._run.pending or "alert at step 0"
    run.save_checkpoint(tmp_path / "a.ckpt")
    monkeypatch.undo()
    again, module = watch(console=False, retrofit=then), Tiny()
    trainer(again, max_steps=8).fit(module, data(), ckpt_path=tmp_path / "a.ckpt")
    assert patched_sites(module) == []


@pytest.mark.parametrize("other", [{}, {"variant": "henry"}, {"budget": 1e9}])
def test_what_was_taken_back_stays_so_under_the_same_options(other: dict[str, Any], tmp_path: Path) -> None:
    path = saved(tmp_path, retrofit="now", budget=0.1)
    state = torch.load(path, weights_only=True)
    fresh = trainer(watch(console=False, budget=0.1), max_steps=6)
    fresh.fit(Tiny(sharp=True), data())
    fresh.save_checkpoint(tmp_path / "b.ckpt")
    bare = torch.load(tmp_path / "b.ckpt", weights_only=True)
    bare["callbacks"]["QKWatch"] = state["callbacks"]["QKWatch"]  # weights without the patch, and the decision
    bare["callbacks"]["QKWatch"]["run"] |= {"outcome": "taken back", "comparing": False}
    torch.save(bare, path)
    _, module = resumed(path, console=False, **{"retrofit": "now", "budget": 0.1, **other})
    assert bool(patched_sites(module)) == bool(other)


@pytest.mark.parametrize("change", ["rules", "field", "run", "alerts"])
def test_the_state_of_another_version_is_one_warning(change: str, tmp_path: Path) -> None:
    path = saved(tmp_path)
    whole = torch.load(path, weights_only=True)
    state = whole["callbacks"]["QKWatch"]
    if change == "rules":
        state["rules"]["version"] = 99
    elif change == "field":
        state["run"]["mood"] = "good"
    elif change == "run":
        del state["run"], state["rules"]
    else:
        state["run"]["alerts"] = [[1, 2]]
    torch.save(whole, path)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        callback, _ = resumed(path, console=False)
    [text] = [str(w.message) for w in seen if "QKWatch" in str(w.message)]
    assert "of another qkwatch version" in text
    assert callback._run.steps == 16
    assert [step for step, _ in callback.history] == [6, 8, 10, 12, 14]
