"""What is read out of checkpoints of every make, and what a wrong one says."""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from tiny import HEADS, WIDTH, Net
from torch import Tensor, nn

import qkwatch
from qkwatch.errors import QKWatchError
from qkwatch.inspection import render
from qkwatch.surgery import patched_sites

SITES = ["blocks.0.attn", "blocks.1.attn"]


def ids() -> Tensor:
    return torch.randint(0, 17, (2, 8), generator=torch.Generator().manual_seed(0))


def patched(variant: str = "l2", net: nn.Module | None = None, **options: Any) -> nn.Module:
    net = Net() if net is None else net
    qkwatch.retrofit_(net, qkwatch.find_sites(net, ids()), variant=variant, **options)
    return net


pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

CONTAINERS = {
    "itself": lambda state: state,
    "state_dict": lambda state: {"state_dict": state, "global_step": 3},
    "model": lambda state: {
        "model": state,
        "optimizer": {"state": {0: {"step": torch.tensor(1.0)}}, "param_groups": []},
    },
    "among tensors": lambda state: {"model_state_dict": state, "step": torch.tensor(7), "args": {"lr": 0.1}},
}


@pytest.mark.parametrize("name", CONTAINERS)
@pytest.mark.parametrize("stored", [False, True])
def test_a_state_dict_is_found_wherever_it_is(name: str, stored: bool, tmp_path: Path) -> None:
    model = patched()
    checkpoint: Any = CONTAINERS[name](model.state_dict())
    if stored:
        torch.save(checkpoint, tmp_path / "x.pt")
        checkpoint = tmp_path / "x.pt"
    fresh = Net()
    assert qkwatch.restore_(fresh, checkpoint) == SITES
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh(ids()), model(ids()))


def test_what_holds_no_weights_leaves_a_patched_model_as_it_was(tmp_path: Path) -> None:
    model = patched()
    state = model.state_dict()
    torch.save([state], tmp_path / "list.pt")
    torch.save({"state_dict": state, "args": argparse.Namespace(lr=0.1)}, tmp_path / "code.pt")
    (tmp_path / "text.pt").write_text("no checkpoint")
    for checkpoint, says in (
        ({"model": state, "ema": state}, "several sets of weights, 'model', 'ema'"),
        ({"optimizer": {"state": {}, "param_groups": []}, "epoch": 3}, "no weights, but 'optimizer', 'epoch'"),
        (tmp_path / "none.pt", "no file"),
        (tmp_path / "list.pt", "holds a list"),
        (tmp_path / "code.pt", "weights_only=True"),
        (tmp_path / "text.pt", "not a checkpoint"),
    ):
        with pytest.raises(QKWatchError, match=says):
            qkwatch.restore_(model, checkpoint)
    assert patched_sites(model) == SITES


@pytest.mark.parametrize("root", ["", "state_dict."])
def test_folders_of_shards_with_and_without_a_root(root: str, tmp_path: Path) -> None:
    from torch.distributed.checkpoint import FileSystemWriter, save

    state = {f"{root}{key}": value for key, value in patched().state_dict().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(state, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    assert qkwatch.restore_(Net(), tmp_path) == SITES


def test_inspect_finds_them_too() -> None:
    console = Console(width=120)
    with console.capture() as shown:
        console.print(render({"model": patched().state_dict(), "epoch": 3}))
    assert "2 sites patched" in shown.get()


def test_weights_of_another_variant_do_not_load_into_a_patched_model() -> None:
    """The keys and shapes fit; the function would be another."""
    state, other = patched("l2").state_dict(), patched("swinv2")
    with pytest.raises(RuntimeError, match=r"blocks\.0\.attn\.qk_norm\.plan.*restore_"):
        other.load_state_dict(state)
    with pytest.raises(RuntimeError, match="restore_"):
        patched("l2", max_gain=50.0).load_state_dict(state)
    same = patched("l2", cap=5.0)
    same.load_state_dict(state)
    qkwatch.restore_(other, state)
    other.load_state_dict(state)
    torch.testing.assert_close(other(ids()), same(ids()))


class Scaled(nn.Module):
    """Queries have a learned scale behind their projection: normed where the softmax takes them."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.scale = nn.Linear(WIDTH, 3 * WIDTH), nn.Parameter(torch.full((WIDTH // HEADS,), 1.5))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q * self.scale, k, v).transpose(1, 2).flatten(2)


class Aliased(Net):
    """A part of the model has a second name."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = self.blocks


class Repeated(Net):
    """One block, used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.blocks[0]] * 2)


class AliasedMHA(Net):
    def __init__(self) -> None:
        super().__init__("mha")
        self.first = self.blocks[0]


def test_a_patch_at_the_softmax_is_exchanged_like_any_other() -> None:
    def scaled(variant: str) -> nn.Module:
        model, x = nn.Sequential(Scaled()), torch.randn(2, 9, WIDTH, generator=torch.Generator().manual_seed(1))
        report = qkwatch.retrofit_(model, qkwatch.find_sites(model, x), variant=variant)
        assert report.applied == ["0"]
        assert report.plan.sites[0].core is not None
        return model

    state, other = scaled("l2").state_dict(), scaled("henry")
    assert qkwatch.restore_(other, state) == ["0"]
    other.load_state_dict(state)


@pytest.mark.parametrize("kind", [Aliased, Repeated, AliasedMHA])
def test_modules_with_two_names(kind: type[Net], tmp_path: Path) -> None:
    """A state_dict has each of their keys twice, plans among them."""
    model = patched(net=kind())
    fresh = kind()
    assert qkwatch.restore_(fresh, model.state_dict()) == patched_sites(model)
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh(ids()), model(ids()))
    assert qkwatch.restore_(fresh, model.state_dict()) == patched_sites(model)


def test_undo_lets_optimizers_go() -> None:
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    before = optimizer.state_dict()["param_groups"]
    patched(net=net)
    qkwatch.adopt_(net, optimizer, scheduler)
    net(ids()).sum().backward()
    optimizer.step()
    assert len(optimizer.param_groups) == 2
    assert qkwatch.undo_(net, optimizer, scheduler) == SITES
    assert optimizer.state_dict()["param_groups"] == before
    assert len(scheduler.base_lrs) == len(scheduler.lr_lambdas) == 1
    assert len(optimizer.state) == len(list(net.parameters()))
    torch.optim.AdamW(net.parameters()).load_state_dict(optimizer.state_dict())
    optimizer.step()
    scheduler.step()
