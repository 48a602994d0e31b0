"""Queries, keys and heads are where the product put them, whatever order and sizes the logits' axes have."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from qkwatch import Reading, Site, find_sites, retrofit_, watch

H, D = 4, 3
ORDERS = ["".join(order) for order in itertools.permutations("bhts")]
FIGURES = ("max_logit", "margin", "entropy", "saturated", "grad_signal", "q_rms", "k_rms")


class Ordered(nn.Module):
    """Attention whose logits lie in the order that an einsum gives them, like `bhts`."""

    def __init__(self, order: str = "bhts"):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = (nn.Linear(H * D, H * D) for _ in range(3))
        self.order = order
        with torch.no_grad():
            self.q.weight.mul_(torch.arange(1.0, H + 1).repeat_interleave(D)[:, None])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        q, k, v = (p(z).unflatten(-1, (H, D)) for p, z in ((self.q, x), (self.k, y), (self.v, y)))
        logits = torch.einsum(f"bthd,bshd->{self.order}", q, k) * D**-0.5
        weights = self.weigh(logits)
        return torch.einsum(f"{self.order},bshd->bthd", weights, v).flatten(2)

    def weigh(self, logits: Tensor) -> Tensor:
        return logits.softmax(self.order.index("s"))


class Regrouped(Ordered):
    """Batch and heads change places between product and softmax, and are flattened."""

    def weigh(self, logits: Tensor) -> Tensor:
        flat = logits.transpose(0, 1).flatten(0, 1)
        return flat.softmax(-1).unflatten(0, (H, -1)).transpose(0, 1)


class Reversed(Ordered):
    """The heads of the logits are not those of the queries."""

    def weigh(self, logits: Tensor) -> Tensor:
        return logits.flip(1).softmax(-1).flip(1)


def inputs(batch: int, queries: int, keys: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(batch * 100 + queries * 10 + keys)
    x = torch.randn(batch, queries, H * D, generator=generator)
    return x, x if queries == keys else torch.randn(batch, keys, H * D, generator=generator)


def read(model: nn.Module, sites: list[Site], batch: tuple[Tensor, Tensor]) -> Reading:
    with watch(model, sites) as watcher, torch.no_grad():
        model(*batch)
    return watcher.readings[0]


def same(got: Reading, want: Reading) -> None:
    for name in FIGURES:
        torch.testing.assert_close(
            getattr(got, name), getattr(want, name), rtol=1e-4, atol=1e-5, equal_nan=True, msg=name
        )
    assert (got.rows, got.excluded_rows) == (want.rows, want.excluded_rows)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("found_at", [(2, 6, 6), (4, 4, 4), (3, 5, 7)], ids=str)
def test_no_size_decides_what_an_axis_is(order: str, found_at: tuple[int, int, int]) -> None:
    plain, model = Ordered(), Ordered(order)
    (reference,), (site,) = find_sites(plain, *inputs(*found_at)), find_sites(model, *inputs(*found_at))
    assert (site.q_heads, site.k_heads, site.retrofittable) == (H, H, True)
    assert site.reading is not None
    assert reference.reading is not None
    same(site.reading, reference.reading)
    # lengths that equal the number of heads, of samples or of each other; a single query
    for shape in ((2, 9, 9), (2, H, H), (H, H, H), (3, 3, 3), (2, H, 5), (2, 5, H), (1, 5, 5), (3, 1, 6), (2, 6, 1)):
        if (found_at[1] == found_at[2]) == (shape[1] == shape[2]):
            same(read(model, [site], inputs(*shape)), read(plain, [reference], inputs(*shape)))
    assert retrofit_(model, [site]).applied


def test_heads_and_batch_that_change_places_are_followed() -> None:
    plain, model = Ordered(), Regrouped()
    for shape in ((2, 6, 6), (H, 6, 6)):
        (reference,), (site,) = find_sites(plain, *inputs(*shape)), find_sites(model, *inputs(*shape))
        assert site.q_heads == H
        same(read(model, [site], inputs(*shape)), read(plain, [reference], inputs(*shape)))
        assert site.retrofittable


def test_what_cannot_be_followed_is_not_told_apart_by_head() -> None:
    plain, model = Ordered(), Reversed()
    (reference,), (site,) = find_sites(plain, *inputs(2, 6, 6)), find_sites(model, *inputs(2, 6, 6))
    assert (site.q_heads, site.retrofittable) == (1, False)
    assert site.reason == "its logits are not laid out as the product of its queries and keys"
    got, want = read(model, [site], inputs(2, 6, 6)), read(plain, [reference], inputs(2, 6, 6))
    torch.testing.assert_close(got.max_logit, want.max_logit.amax(0, keepdim=True))
    torch.testing.assert_close(got.q_rms, want.q_rms.mean(0, keepdim=True))
    torch.testing.assert_close(got.entropy, want.entropy.mean(0, keepdim=True))


class Grouped(nn.Module):
    """Grouped keys by an einsum: the query heads of a group stand before or behind the queries."""

    def __init__(self, equation: str, groups: int):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = nn.Linear(24, 24), nn.Linear(24, groups * 4), nn.Linear(24, groups * 4)
        self.equation, self.groups = equation, groups

    def forward(self, x: Tensor) -> Tensor:
        k, v = (p(x).unflatten(-1, (self.groups, 4)).transpose(1, 2) for p in (self.k, self.v))  # b g j d
        q = self.q(x).unflatten(-1, (self.groups, -1, 4))  # b i g n d
        order = self.equation.split(",")[0]
        q = torch.einsum(f"bignd->{order}", q)
        logits = torch.einsum(self.equation, q, k) / 2
        out = self.equation.split("->")[1]
        return torch.einsum(f"{out},bgjd->bignd", logits.softmax(-1), v).flatten(2)


@pytest.mark.parametrize("groups", [2, 3])
@pytest.mark.parametrize("equation", ["bignd,bgjd->bignj", "bngid,bgjd->bngij", "bgnid,bgjd->bgnij"])
def test_grouped_keys_by_einsum_are_told_apart_by_head(equation: str, groups: int) -> None:
    x = torch.randn(2, 9, 24, generator=torch.Generator().manual_seed(1))
    model = Grouped(equation, groups)
    (site,) = find_sites(model, x)
    assert (site.q_heads, site.k_heads, site.retrofittable) == (6, groups, True)
    reading = site.reading
    assert reading is not None
    q = model.q(x).unflatten(-1, (groups, -1, 4))
    k = model.k(x).unflatten(-1, (groups, 4))
    order = "gn" if equation.index("g") < equation.index("n") or equation.startswith("bi") else "ng"
    logits = torch.einsum(f"bignd,bjgd->b{order}ij", q, k).flatten(1, 2) / 2
    torch.testing.assert_close(reading.max_logit, logits.detach().abs().amax((0, 2, 3)))
    lengths = torch.einsum(f"bignd->b{order}id", q).flatten(1, 2).square().mean(-1).sqrt().mean((0, 2))
    torch.testing.assert_close(reading.q_rms, lengths.detach())
    assert reading.rows == 18
    if order == "gn" and equation.startswith("bi"):  # as many queries as heads in a group: lumped rather than wrong
        short = x[:, : 6 // groups]
        with watch(model, [site]) as watcher:
            model(short)
        q, k = model.q(short).unflatten(-1, (groups, -1, 4)), model.k(short).unflatten(-1, (groups, 4))
        largest = torch.einsum("bignd,bjgd->bgnij", q, k).detach().abs().amax() / 2
        torch.testing.assert_close(watcher.readings[0].max_logit, largest.expand(6))


class Selecting(Ordered):
    """An index of its own product chooses the keys; positions are added with the queries as a grid."""

    def weigh(self, logits: Tensor) -> Tensor:
        index = logits.detach().mT @ logits.detach()  # a product of activations that no logit is made of
        kept = index.mean(1, keepdim=True).topk(index.shape[-1], -1).values.amin(-1, keepdim=True) > -torch.inf
        grid = logits.unflatten(2, (2, -1)) + torch.zeros(2, 1, 1)
        flat = grid.flatten(2, 3).masked_fill(~kept[:, :, :1], -torch.inf)
        return torch.cat([flat, torch.full_like(flat[..., :1], -30.0)], -1).softmax(-1)[..., :-1]


def test_the_product_that_is_laid_out_as_the_logits_is_that_of_the_queries() -> None:
    plain, model = Ordered(), Selecting()
    (reference,), (site,) = find_sites(plain, *inputs(2, 6, 6)), find_sites(model, *inputs(2, 6, 6))
    assert (site.q_heads, site.head_dim) == (H, D)
    for name in ("q_rms", "k_rms"):
        torch.testing.assert_close(getattr(site.reading, name), getattr(reference.reading, name))
