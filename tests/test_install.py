"""A patch goes in whole or not at all, whatever a module's class thinks of being changed."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.fx
from test_sites import assert_unchanged, snapshot
from tiny import WIDTH, Attention
from torch import nn

import qkwatch
from qkwatch.errors import QKWatchError

X = torch.randn(2, 8, WIDTH)


class Keyword(nn.Linear):
    """Wants a keyword of each subclass."""

    def __init_subclass__(cls, *, tag: str) -> None:
        cls.tag = tag


class Locked(nn.Linear):
    def __setattr__(self, name: str, value: object) -> None:
        if getattr(self, "locked", False):
            raise AttributeError(f"{name} is locked")
        super().__setattr__(name, value)

    def lock(self) -> Locked:
        self.locked = True
        return self


class Final(type):
    def __new__(cls, name: str, bases: tuple, members: dict, **options: object) -> type:
        if any(isinstance(base, Final) for base in bases):
            raise TypeError("no subclasses")
        return super().__new__(cls, name, bases, members)


class Sealed(nn.Linear, metaclass=Final):
    pass


def model_with(k_proj: nn.Module) -> nn.Module:
    model = nn.ModuleDict({"a": Attention("sdpa", 0.0), "b": Attention("eager", 0.0)})
    model["b"].k_proj = k_proj
    model.forward = lambda x: model["b"](model["a"](x))
    return model


@pytest.mark.parametrize("build", [Keyword, lambda *size: Locked(*size).lock()], ids=["keyword", "locked"])
def test_a_class_that_minds_its_subclasses_is_patched_and_comes_back(build):
    layer = Attention("sdpa", 0.0)
    layer.k_proj = build(WIDTH, WIDTH)
    kind, before = type(layer.k_proj), layer(X)
    assert qkwatch.retrofit_(layer, qkwatch.find_sites(layer, X)).applied == [""]
    patched = layer(X)
    assert torch.equal(pickle.loads(pickle.dumps(layer))(X), patched)
    assert torch.equal(copy.deepcopy(layer)(X), patched)
    qkwatch.undo_(layer)
    assert type(layer.k_proj) is kind
    assert torch.equal(layer(X), before)


def graph(*size: int) -> nn.Module:
    return torch.fx.symbolic_trace(nn.Sequential(nn.Linear(*size)))


@pytest.mark.parametrize(("build", "reason"), [(Sealed, "no subclasses"), (graph, "torch.fx graph")])
def test_what_cannot_be_changed_is_refused_and_left_whole(build, reason):
    model = model_with(build(WIDTH, WIDTH))
    sites, before, output = qkwatch.find_sites(model, X), snapshot(model), model(X)
    report = qkwatch.retrofit_(model, [sites[1]])
    assert report.applied == []
    assert reason in report.refused["b"]
    assert_unchanged(model, before)
    assert torch.equal(model(X), output)
    assert qkwatch.retrofit_(model, sites).applied == ["a"]


def test_a_plan_that_fails_half_way_is_taken_back(monkeypatch):
    model, plain = (model_with(nn.Linear(WIDTH, WIDTH)) for _ in range(2))
    plan = qkwatch.retrofit_(plain, qkwatch.find_sites(plain, X)).plan
    model["b"].k_proj = Sealed(WIDTH, WIDTH)
    monkeypatch.setattr("qkwatch.plan.kind_of", lambda module: "Linear")
    before, output = snapshot(model), model(X)
    with pytest.raises(QKWatchError, match="'b' could not be patched: TypeError: no subclasses"):
        qkwatch.retrofit_(model, plan=plan)
    assert_unchanged(model, before)
    assert torch.equal(model(X), output)


def test_an_interrupted_patch_is_taken_back(monkeypatch):
    layer = Attention("sdpa", 0.0)
    layer.qk_norm = "a setting"
    sites, before, output = qkwatch.find_sites(layer, X), snapshot(layer), layer(X)

    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("qkwatch.surgery.add_part", interrupted)
    with pytest.raises(KeyboardInterrupt):
        qkwatch.retrofit_(layer, sites)
    assert_unchanged(layer, before)
    assert layer.qk_norm == "a setting"
    assert torch.equal(layer(X), output)
