"""Heads are cut out of features. Frames, windows and samples are none, wherever they stand."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qkwatch

D, H = 16, 4


class Axial(nn.Module):
    """One head over the tokens of each frame, (B, frames, tokens, D)."""

    def __init__(self, fused: bool = False, norm: bool = False, bias: bool = True):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(D, D, bias=bias) for _ in range(3))
        self.norm = nn.LayerNorm(D) if norm else nn.Identity()
        self.fused = fused

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        q, k, v = self.q(x), self.k(x), self.v(x)
        if self.fused:
            return F.scaled_dot_product_attention(q, k, v)
        return (q @ k.mT * D**-0.5).softmax(-1) @ v


class Leading(Axial):
    """One head on the first axis, before the batch."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unsqueeze(0) for p in (self.q, self.k, self.v))
        return F.scaled_dot_product_attention(q, k, v)[0]


class FramesOfTokens(Axial):
    """Its own embedding of tokens (B, frames, tokens), and a position for each."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(30, D), nn.Parameter(torch.randn(5, 7, D))

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(self.embed(ids) + self.position)


@pytest.mark.parametrize(
    ("build", "x"),
    [
        (Axial, torch.randn(2, 5, 7, D)),
        (lambda: Axial(fused=True), torch.randn(2, 5, 7, D)),
        (lambda: Axial(norm=True), torch.randn(2, 5, 7, D)),
        (Leading, torch.randn(3, 7, D)),
        (FramesOfTokens, torch.randint(30, (2, 5, 7))),
    ],
    ids=["unfused", "fused", "behind a norm", "leading", "of tokens"],
)
def test_one_head_over_frames_is_one_head(build, x):
    model = build()
    site = qkwatch.find_sites(model, x)[0]
    assert (site.q_heads, site.k_heads, site.retrofittable, site.reason) == (1, 1, True, None)
    assert site.reading.heads == 1
    assert qkwatch.retrofit_(model, [site]).applied == [""]
    if x.is_floating_point():
        turned = torch.arange(x.shape[1] - 1, -1, -1) if x.ndim == 4 else slice(None)
        assert torch.allclose(model(x[:, turned]), model(x)[:, turned], atol=1e-5)
        assert model(x[:1, :1] if x.ndim == 4 else x[:1]).isfinite().all()


class Shared(nn.Module):
    """The heads are cut out of the input, and share their projections."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(D // H, D // H, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x.unflatten(-1, (H, -1))).transpose(1, 2) for p in (self.q, self.k, self.v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Scaled(nn.Module):
    """Heads of its projections, each scaled by the same weights; tokens of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.scale = nn.Embedding(30, D), nn.Linear(D // H, D // H)
        self.q, self.k, self.v = (nn.Linear(D, D) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        q, k, v = (p(self.embed(ids)).unflatten(-1, (H, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        return F.scaled_dot_product_attention(self.scale(q), self.scale(k), v)


@pytest.mark.parametrize(
    ("build", "x"), [(Shared, torch.randn(2, 7, D)), (Scaled, torch.randint(30, (2, 7)))], ids=["shared", "scaled"]
)
def test_heads_that_share_weights_are_heads(build, x):
    site = qkwatch.find_sites(build(), x)[0]
    assert (site.q_heads, site.k_heads, site.head_dim) == (H, H, D // H)


@pytest.mark.parametrize("variant", ["l2", "qwen3", "vit22b"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("build", [Axial, Leading])
def test_one_patched_head_is_found_normed(build, bias, variant):
    model, x = build(bias=bias), torch.randn(2, 7, D)
    assert qkwatch.retrofit_(model, qkwatch.find_sites(model, x), variant=variant).applied == [""]
    site = qkwatch.find_sites(model, x)[0]
    assert (site.q_heads, site.normed, site.retrofittable) == (1, True, False)
    assert site.reason == "its queries and keys are normed already"
