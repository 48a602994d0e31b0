"""QK-Clip: the logits of the heads that pass the bound come down to it, all else stays."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2Model, GPTNeoXConfig, GPTNeoXModel, LlamaConfig, LlamaModel

from qkwatch import find_sites
from qkwatch.clip import QKClip

SMALL = {"vocab_size": 90, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, batch_first=True)


CASES = {
    "separate, grouped": lambda: LlamaModel(LlamaConfig(**SMALL, num_key_value_heads=2)),
    "separate": lambda: LlamaModel(LlamaConfig(**SMALL, num_key_value_heads=4)),
    "fused Conv1D": lambda: GPT2Model(GPT2Config(vocab_size=90, n_embd=32, n_layer=2, n_head=4)),
    "fused, interleaved": lambda: GPTNeoXModel(GPTNeoXConfig(**SMALL)),
    "MultiheadAttention": encoder,
}


@pytest.mark.parametrize("name", CASES)
def test_only_heads_above_the_bound_come_down_to_it(name: str) -> None:
    model = CASES[name]().eval()
    batch = torch.randn(2, 9, 32) if name == "MultiheadAttention" else torch.randint(0, 90, (2, 9))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    sites = find_sites(model, batch)
    first = sites[0]
    assert first.reading is not None
    before = first.reading.max_logit
    tau = float(before.sort().values[1:3].mean())  # two heads above, two below
    others = {n: p.clone() for n, p in model.named_parameters()}
    clip = QKClip(sites[:1], tau)
    assert clip.applied == [first.name]
    clipped = clip.clip_([first.reading])
    assert clipped == {first.name: (before > tau).nonzero().flatten().tolist()}
    reading = find_sites(model, batch)[0].reading
    assert reading is not None
    torch.testing.assert_close(reading.max_logit, torch.where(before > tau, tau, before), rtol=1e-4, atol=1e-4)
    changed = {n for n, p in model.named_parameters() if not torch.equal(p, others[n])}
    assert changed
    assert all(n.startswith(first.name) for n in changed)
    assert clip.clip_([reading]) == {} or float(reading.max_logit.max()) > tau


class Linear(nn.Module):
    """Attention with linear biases (ALiBi), which reach far below any logit of its products."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused, self.qkv = fused, nn.Linear(32, 96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        steps = torch.arange(x.shape[1], dtype=x.dtype)
        bias = 10.0 * (steps - steps[:, None]).clamp(max=0).expand(4, -1, -1)
        if self.fused:
            out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        else:
            out = (q @ k.transpose(-1, -2) * 8**-0.5 + bias).softmax(-1) @ v
        return out.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("fused", [True, False])
def test_a_bias_is_no_reason_to_shrink_projections(fused: bool) -> None:
    torch.manual_seed(0)
    model, x = Linear(fused), torch.randn(2, 40, 32)
    sites = find_sites(model, x)
    assert sites[0].reading is not None
    assert float(sites[0].reading.max_logit.min()) > 300
    clip = QKClip(sites, 20.0)
    assert clip.applied == [sites[0].name]
    assert clip.clip_([sites[0].reading]) == {}
    with torch.no_grad():
        model.qkv.weight[:16].mul_(100)  # queries of the first two heads
        model.qkv.weight[32:64].mul_(2)
    sites = find_sites(model, x)
    assert sites[0].reading is not None
    assert clip.clip_([sites[0].reading]) == {sites[0].name: [0, 1]}


def test_a_normed_site_is_refused() -> None:
    from qkwatch import retrofit_

    model, x = encoder(), torch.randn(2, 9, 32)
    retrofit_(model, find_sites(model, x))
    clip = QKClip(find_sites(model, x), 20.0)
    assert clip.applied == []
    assert "normed" in next(iter(clip.refused.values()))
