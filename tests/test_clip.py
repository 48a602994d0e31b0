"""QK-Clip: the logits of the heads that pass the bound come down to it, all else stays."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2Model, GPTNeoXConfig, GPTNeoXModel, LlamaConfig, LlamaModel

from qkwatch import find_sites, watch
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


class Tied(nn.Module):
    """Queries and keys by one weight, with biases of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(32, 32) for _ in range(3))
        self.k.weight = self.q.weight
        self.q.weight.data.mul_(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part(x).unflatten(-1, (4, 8)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def test_a_head_is_shrunk_once_for_all_that_was_read_of_it() -> None:
    """A module that runs twice in a step, or several batches in one block."""
    torch.manual_seed(0)
    model, x = encoder(), 20 * torch.randn(2, 9, 32)
    sites = find_sites(model, x)
    with watch(model, sites) as watcher, torch.no_grad():
        model(x / 10)
        model(x)
        model(x / 2)
    largest = torch.stack([r.max_logit for r in watcher.readings]).amax(0)
    tau = float(largest.min()) / 2
    assert QKClip(sites, tau).clip_(watcher.readings) == {sites[0].name: [0, 1, 2, 3]}
    reading = find_sites(model, x)[0].reading
    assert reading is not None
    torch.testing.assert_close(reading.max_logit, torch.full((4,), tau), rtol=1e-4, atol=1e-4)


def test_tied_weights_are_shrunk_once() -> None:
    torch.manual_seed(0)
    model, x = Tied(), torch.randn(2, 9, 32)
    sites = find_sites(model, x)
    assert sites[0].reading is not None
    clip = QKClip(sites, 5.0)
    assert clip.clip_([sites[0].reading]) == {sites[0].name: [0, 1, 2, 3]}
    reading = find_sites(model, x)[0].reading
    assert reading is not None
    torch.testing.assert_close(reading.max_logit, torch.full((4,), 5.0), rtol=1e-4, atol=1e-4)


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


class Difference(nn.Module):
    """Two softmaxes, one less the other; ``apart``: each has projections of its own."""

    def __init__(self, fused: bool, apart: bool) -> None:
        super().__init__()
        self.fused, widths = fused, [16, 16] if apart else [32]
        self.q, self.k = (nn.ModuleList(nn.Linear(16, width) for width in widths) for _ in range(2))
        self.v = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k = ([t for p in side for t in p(x).split(16, -1)] for side in (self.q, self.k))
        v = self.v(x).unflatten(-1, (2, 8)).transpose(1, 2)
        first, second = (self.attend(*pair, v) for pair in zip(q, k, strict=True))
        return first - 0.5 * second

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in (q, k))
        if self.fused:
            return nn.functional.scaled_dot_product_attention(q, k, v)
        return (q @ k.mT * 8**-0.5).softmax(-1) @ v


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("apart", [False, True])
def test_several_attentions_of_one_site_are_not_clipped_for_each_other(fused: bool, apart: bool) -> None:
    model, x = Difference(fused, apart), torch.randn(2, 9, 16)
    sites, before = find_sites(model, x), {k: v.clone() for k, v in model.state_dict().items()}
    reason = f"several attentions from different {'projections' if apart else 'channels of one projection'}"
    clip = QKClip(sites, 1e-3)
    assert clip.applied == []
    assert reason in clip.refused[""]
    clip.clip_([site.reading for site in sites])
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    if not fused:  # the fused ones can be normed where they take queries and keys
        assert reason in sites[0].reason
