"""What a forward writes (buffers, weights, attributes, caches) is written once, whoever watches; and backward runs."""

from __future__ import annotations

import copy
import pickle
import random
from collections import deque

import pytest
import torch
import torch.nn.functional as F
from tiny import WIDTH, Attention, Tiny, assert_same, data, loss_of, trainer, weights
from torch import Tensor, nn

import qkwatch
from qkwatch import QKWatch


class Normalising(Attention):
    """Batch norm, a weight normed in place, running means written in place and anew."""

    def __init__(self, kind: str = "eager", dropout: float = 0.0) -> None:
        super().__init__(kind, dropout)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("square", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.v_proj.weight.copy_(F.normalize(self.v_proj.weight, dim=-1) * 1.1)
            self.mean.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
            self.square = 0.9 * self.square + 0.1 * x.detach().square().mean()
        return super().forward(self.norm(x.transpose(1, 2)).transpose(1, 2) - self.mean) / (1 + self.square)


class Store:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.maps: list[list[Tensor]] = []
        self.calls = 0


class Keeping(Attention):
    """Keeps things as plain attributes: maps for a plot, keys for the next call, losses, counts."""

    calls = 0

    def __init__(self, kind: str = "eager", dropout: float = 0.0) -> None:
        super().__init__(kind, dropout)
        self.losses, self.recent, self.kinds = [], deque(maxlen=3), set()
        self.store, self.past, self.slots = Store(), None, torch.zeros(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        keys = self.k_proj(x)
        self.calls += 1
        self.store.calls += 1
        self.store.maps.append([keys])
        self.losses.append(keys.square().mean())
        self.recent.append(self.calls)
        self.kinds.add(self.calls)
        self.past = keys if self.past is None else torch.cat([self.past.detach(), keys], 1)
        self.slots[self.calls] = keys[0, 0]
        self.last, self.drawn = keys.softmax(-1), random.random()
        return super().forward(x) + self.slots.sum() + self.past.mean()


def plain(module: nn.Module) -> dict:
    own = {k: v for k, v in vars(module).items() if not k.startswith("_")}
    return {**own, "store": vars(own["store"]), "recent": list(own["recent"]), "kinds": sorted(own["kinds"])}


@pytest.mark.parametrize("kind", ["eager", "sdpa"])
@pytest.mark.parametrize("layer", [Normalising, Keeping])
def test_a_watched_step_is_an_unwatched_one(layer: type[Attention], kind: str):
    model, x = layer(kind), torch.randn(3, 8, WIDTH)
    twin = copy.deepcopy(model)
    random.seed(5)
    twin(x).square().mean().backward()
    random.seed(5)
    with qkwatch.watch(model) as watcher:
        loss = model(x).square().mean()
    loss.backward()
    assert watcher.readings
    assert_same(weights(model), weights(twin))
    assert_same([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])
    if layer is Keeping:
        assert_same(plain(model), plain(twin))


def test_found_and_patched_it_keeps_what_it_had():
    model, x = Keeping(), torch.randn(3, 8, WIDTH)
    with torch.no_grad():
        model(x)
    before, slots = copy.deepcopy(plain(model)), model.slots
    sites = qkwatch.find_sites(model, x)
    assert sites[0].retrofittable
    assert qkwatch.retrofit_(model, sites).applied
    after = plain(model)
    assert_same({k: v for k, v in after.items() if k != "qk_norm"}, before)
    assert model.slots is slots
    assert not slots.requires_grad
    copy.deepcopy(model)
    pickle.loads(pickle.dumps(model))


def test_a_cache_kept_on_the_module_grows_by_one_a_step():
    class Decoder(Attention):
        past: tuple[Tensor, Tensor] | None = None

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (p(x).unflatten(-1, (2, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
            if self.past is not None:
                k, v = (torch.cat(pair, 2) for pair in zip(self.past, (k, v), strict=True))
            self.past = k, v
            return self.o_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    model = Decoder("sdpa", 0.0)
    twin, tokens = copy.deepcopy(model), torch.randn(1, 6, WIDTH)
    with torch.no_grad():
        for t in range(6):
            with qkwatch.watch(model):
                out = model(tokens[:, t : t + 1])
            assert torch.equal(out, twin(tokens[:, t : t + 1]))
            assert model.past[0].shape[2] == t + 1


@pytest.mark.parametrize("retrofit", ["off", "now"])
def test_a_run_with_batch_norm_and_auxiliary_losses(retrofit: str):
    class Both(Normalising):
        def forward(self, x: Tensor) -> Tensor:
            self.losses.append(self.q_proj(x).square().mean())
            return super().forward(x)

    class Model(Tiny):
        def __init__(self) -> None:
            super().__init__()
            self.losses: list[Tensor] = []
            for block in self.net.blocks:
                block.attn = Both("sdpa")
                block.attn.losses = self.losses

        def training_step(self, batch, index):
            loss = loss_of(self.net, batch[0])
            assert len(self.losses) == 2
            loss = loss + 0.1 * sum(self.losses)
            self.losses.clear()
            return loss

    runs = []
    for callbacks in ([], [QKWatch(every_n_steps=2, retrofit=retrofit, console=False, on_error="raise")]):
        model = Model()
        trainer(*callbacks, max_steps=5).fit(model, data())
        runs.append(weights(model))
    if retrofit == "off":
        assert_same(*runs)
    assert int(runs[1]["net.blocks.0.attn.norm.num_batches_tracked"]) == 5


def test_an_input_written_into_stays_the_callers():
    class InPlace(Attention):
        def __init__(self) -> None:
            super().__init__("sdpa", 0.0)
            self.position = nn.Parameter(torch.randn(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            x += self.position
            return super().forward(x)

    model, embed, x = InPlace(), nn.Linear(WIDTH, WIDTH), torch.randn(2, 8, WIDTH)
    twin = copy.deepcopy(model)
    with qkwatch.watch(model):
        loss = model(embed(x)).square().mean()
    loss.backward()
    twin(embed(x)).square().mean().backward()
    assert_same([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])


def test_what_a_first_forward_builds_stays():
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = None
            self.lazy = nn.LazyLinear(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            x = self.lazy(x)
            if self.attn is None:
                self.attn = Attention("sdpa", 0.0)
            return self.attn(x)

    model, x = Late(), torch.randn(2, 8, 5)
    qkwatch.find_sites(model, x)
    built = model.attn
    assert qkwatch.retrofit_(model, qkwatch.find_sites(model, x)).applied == ["attn"]
    assert model.attn is built
    assert model(x).shape == (2, 8, WIDTH)
