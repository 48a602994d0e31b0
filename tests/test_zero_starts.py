"""Projections that start at zero (or next to it) are not normed; they can be, and start as the variant does."""

from __future__ import annotations

import pytest
import torch
from families import TEXT, hf, token_ids
from tiny import HEADS, WIDTH, Attention
from torch import nn

import qkwatch
from qkwatch.variants import get_variant


def zeros(layer: nn.Module, *names: str, size: float = 0.0) -> nn.Module:
    with torch.no_grad():
        for name in names:
            getattr(layer, name).weight.mul_(size)
            getattr(layer, name).bias.mul_(size)
    return layer


CASES = {
    "queries": (["q_proj"], 0.0, 1.0),
    "keys": (["k_proj"], 0.0, 1.0),
    "both": (["q_proj", "k_proj"], 0.0, 1.0),
    "next to zero": (["q_proj"], 1e-20, 1.0),
    "both next to zero": (["q_proj", "k_proj"], 1e-25, 1.0),
    "all, on zeros": (["q_proj", "k_proj", "v_proj"], 0.0, 0.0),
}


@pytest.mark.parametrize("kind", ["sdpa", "eager"])
@pytest.mark.parametrize("variant", ["l2", "qwen3"])
@pytest.mark.parametrize("case", CASES)
def test_zeros_can_be_patched(case: str, variant: str, kind: str):
    names, size, scale = CASES[case]
    layer, x = zeros(Attention(kind, 0.0), *names, size=size), scale * torch.randn(2, 8, WIDTH)
    before = layer(x)
    site = qkwatch.find_sites(layer, x)[0]
    assert (site.normed, site.retrofittable, site.q_heads, site.reason) == (False, True, HEADS, None)
    report = qkwatch.retrofit_(layer, [site], variant=variant)
    assert report.applied == [""]
    assert torch.allclose(layer(x), before, atol=1e-6)
    start = get_variant(variant).start_value()
    assert torch.allclose(layer.qk_norm.q.gain, torch.full_like(layer.qk_norm.q.gain, start))
    with torch.no_grad():
        for name in names:
            getattr(layer, name).weight.normal_()
    with qkwatch.watch(layer) as watcher:
        layer(torch.randn(2, 8, WIDTH) * 100)
    assert bool((watcher.readings[0].max_logit > 0.1).all())
    assert bool((watcher.readings[0].max_logit < 1.01 * get_variant(variant).start_bound(8, 8**-0.5)).all())


def test_the_module_of_pytorch_too():
    layer, x = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True), torch.randn(2, 8, WIDTH)
    with torch.no_grad():
        layer.in_proj_weight[:WIDTH] = 0
    assert qkwatch.retrofit_(layer, qkwatch.find_sites(layer, x, x, x)).applied == [""]


def test_a_start_above_the_cap_is_the_cap():
    layer, x = zeros(Attention("sdpa", 0.0), "q_proj"), torch.randn(2, 8, WIDTH)
    assert qkwatch.retrofit_(layer, qkwatch.find_sites(layer, x), cap=2.0).applied == [""]
    assert torch.allclose(layer.qk_norm.q.gain, torch.full_like(layer.qk_norm.q.gain, 2.0))


def test_norms_of_zeros_are_still_norms():
    model = hf("Qwen3ForCausalLM", "Qwen3Config", **{**TEXT, "num_key_value_heads": 2, "head_dim": 8})
    for layer in model.model.layers:
        nn.init.zeros_(layer.self_attn.q_proj.weight)
    sites = qkwatch.find_sites(model, token_ids())
    assert [(site.q_heads, site.normed) for site in sites] == [(4, True)] * 2
