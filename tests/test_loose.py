"""Learned biases beside a projection and further terms in the queries: bounded against the projections, and noted."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import TEXT, first_tensor, hf, token_ids
from torch import Tensor, nn

import qkwatch
from qkwatch.plan import RetrofitPlan
from qkwatch.report import retrofit_text
from qkwatch.variants import Variant


class Relative(nn.Module):
    """Transformer-XL's attention: (q + u) k + (q + v) r, with r a projection of positions."""

    def __init__(self, width: int = 32, heads: int = 4, *, u: bool = True, r: bool = True):
        super().__init__()
        self.heads, self.r = heads, r
        self.q, self.k, self.v, self.pos = (nn.Linear(width, width) for _ in range(4))
        self.pos_bias_u = nn.Parameter(torch.randn(heads, width // heads)) if u else None
        self.pos_bias_v = nn.Parameter(torch.randn(heads, width // heads))
        self.register_buffer("positions", torch.randn(9, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t(x).unflatten(-1, (self.heads, -1)) for t in (self.q, self.k, self.v))  # (B, T, H, D)
        content = q if self.pos_bias_u is None else q + self.pos_bias_u
        logits = torch.einsum("bthd,bshd->bhts", content, k)
        if self.r:
            r = self.pos(self.positions).unflatten(-1, (self.heads, -1))
            logits = logits + torch.einsum("bthd,shd->bhts", q + self.pos_bias_v, r)
        probs = (logits / q.shape[-1] ** 0.5).softmax(-1)
        return torch.einsum("bhts,bshd->bthd", probs, v).flatten(2)


def _toy() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    return Relative().eval(), (torch.randn(2, 9, 32),), {}


def _funnel() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    sizes = {"d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 48, "vocab_size": 96, "num_decoder_layers": 1}
    sizes |= {"hidden_dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
    return hf("FunnelModel", "FunnelConfig", "eager", block_sizes=[1, 1], **sizes).eval(), (token_ids(),), {}


def _conformer() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    sizes |= {"conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 8), "num_conv_pos_embeddings": 4}
    sizes |= {"num_conv_pos_embedding_groups": 2, "position_embeddings_type": "relative", "feat_extract_norm": "group"}
    sizes |= {"attention_dropout": 0.0, "hidden_dropout": 0.0, "activation_dropout": 0.0}
    model = hf("Wav2Vec2ConformerModel", "Wav2Vec2ConformerConfig", "eager", **sizes)
    return model.eval(), (torch.randn(2, 400),), {}


def _parakeet() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    sizes |= {"num_mel_bins": 16, "subsampling_conv_channels": 8, "initializer_range": 0.3, "num_key_value_heads": 4}
    sizes |= {
        "dropout": 0.0,
        "dropout_positions": 0.0,
        "layerdrop": 0.0,
        "activation_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    model = hf("ParakeetEncoder", "ParakeetEncoderConfig", "sdpa", **sizes)
    return model.eval(), (torch.randn(2, 64, 16),), {}


KINDS: dict[str, tuple[Callable[[], tuple[nn.Module, tuple[Any, ...], dict[str, Any]]], tuple[str, ...]]] = {
    "toy": (_toy, ("'pos_bias_u'", "'pos'")),
    "funnel": (_funnel, ("'r_w_bias'", "'r_kernel'")),
    "wav2vec2-conformer": (_conformer, ("'pos_bias_u'", "'linear_pos'")),
    "parakeet": (_parakeet, ("'bias_u'", "'relative_k_proj'")),
}


@pytest.fixture(params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def _run(model: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    with torch.no_grad():
        return first_tensor(model(*inputs, **kwargs))


def _patched(kind: str, **options: Any) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any], Any]:
    model, inputs, kwargs = KINDS[kind][0]()
    with torch.no_grad():  # many start at zero, where all would be easy
        for name, p in model.named_parameters():
            if name.rsplit(".", 1)[-1] in ("bias_u", "bias_v", "pos_bias_u", "pos_bias_v", "r_w_bias", "r_r_bias"):
                p.normal_(0, 0.05)
    sites = qkwatch.find_sites(model, *inputs, **kwargs)
    report = qkwatch.retrofit_(model, sites, **options)
    assert report.refused == {}
    assert report.applied
    return model, inputs, kwargs, (report, sites)


def _logits(model: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> tuple[Tensor, Tensor]:
    with torch.no_grad(), qkwatch.watch(model) as watcher:
        model(*inputs, **kwargs)
    (reading,) = [r for r in watcher.readings if r.site == name]
    return reading.max_logit, reading.entropy_nats


def test_the_note_says_what_is_not_bounded(kind: str) -> None:
    _, _, _, (report, _) = _patched(kind)
    assert sorted(report.notes) == sorted(report.applied)
    for note in report.notes.values():
        assert note.startswith("bounded however its projections grow, but not against the growth of")
        assert all(name in note for name in KINDS[kind][1]), note
    assert "note: " in retrofit_text(report).plain


@pytest.mark.parametrize("variant", ["l2", "qwen3", "llama4", "olmo2"])
def test_logits_stay_where_they_are_as_the_projections_grow(kind: str, variant: str) -> None:
    model, inputs, kwargs, (report, sites) = _patched(kind, variant=variant)
    for site in sites:
        before = _logits(model, inputs, kwargs, site.name)
        parameters = [p for tap in site.taps for p in tap.module.parameters()]
        with torch.no_grad():
            for p in parameters:
                p.mul_(1000)
        after = _logits(model, inputs, kwargs, site.name)
        with torch.no_grad():
            for p in parameters:
                p.mul_(1e-3)
        assert torch.allclose(before[0], after[0], rtol=1e-2, atol=1e-3), (before, after)
        assert torch.allclose(before[1], after[1], atol=1e-2)
    assert report.notes


def test_the_note_is_true(kind: str) -> None:
    """What it names does carry the logits away: nothing else would be worth a note."""
    model, inputs, kwargs, (report, sites) = _patched(kind)
    site, parameters = sites[0], dict(sites[0].module.named_parameters())
    before, _ = _logits(model, inputs, kwargs, site.name)
    for name in site.loose.parameters:
        with torch.no_grad():
            parameters[name].mul_(1000)
        after, _ = _logits(model, inputs, kwargs, site.name)
        assert float(after.max()) > 10 * float(before.max())
    assert report.applied


def test_calibrated_it_keeps_the_function(kind: str) -> None:
    assert max(_patched(kind)[3][0].drift.values()) < 0.25


def test_it_needs_calibration(kind: str) -> None:
    """The system's own start knows nothing of what else the queries meet."""
    model, inputs, kwargs = KINDS[kind][0]()
    report = qkwatch.retrofit_(model, qkwatch.find_sites(model, *inputs, **kwargs), calibrate="needed")
    assert all(site.gains for site in report.plan.sites)


def test_there_and_back(kind: str) -> None:
    model, inputs, kwargs = KINDS[kind][0]()
    before, keys = _run(model, inputs, kwargs), list(model.state_dict())
    fresh = copy.deepcopy(model)
    report = qkwatch.retrofit_(model, qkwatch.find_sites(model, *inputs, **kwargs), cap=0.5)
    after, state = _run(model, inputs, kwargs), copy.deepcopy(model.state_dict())
    assert all(any(k.startswith(f"{s}.qk_norm.".lstrip(".")) for s in report.applied) for k in state if k not in keys)
    qkwatch.restore_(fresh, state)
    fresh.load_state_dict(state, strict=True)
    assert torch.equal(_run(fresh, inputs, kwargs), after)
    qkwatch.undo_(fresh)
    plan = RetrofitPlan.from_dict(json.loads(json.dumps(report.plan.to_dict())))
    assert plan == report.plan
    qkwatch.retrofit_(fresh, plan=plan)
    assert torch.equal(_run(fresh, inputs, kwargs), after)
    parametrized = any(hasattr(module, "parametrizations") for module in model.modules())  # torch pickles none of them
    for twin in (copy.deepcopy(model), model if parametrized else pickle.loads(pickle.dumps(model))):
        assert torch.equal(_run(twin, inputs, kwargs), after)
    assert qkwatch.undo_(model) == report.applied
    assert torch.equal(_run(model, inputs, kwargs), before)
    assert list(model.state_dict()) == keys


def test_train_and_eval_agree(kind: str) -> None:
    model, inputs, kwargs, (_, sites) = _patched(kind)
    after = _run(model, inputs, kwargs)
    assert torch.allclose(first_tensor(model(*inputs, **kwargs)), after, atol=1e-5)
    for site in sites:  # their surroundings have batch norms, and mask spans of their input
        site.module.train()
    assert torch.allclose(_run(model, inputs, kwargs), after, atol=1e-5)


def test_the_patch_compiles() -> None:
    model, inputs, kwargs, _ = _patched("toy")
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert torch.allclose(_run(compiled, inputs, kwargs), _run(model, inputs, kwargs), atol=1e-5)  # type: ignore[arg-type]
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("options", "named", "unnamed"),
    [({"u": False}, "'pos'", "pos_bias_u"), ({"r": False}, "'pos_bias_u'", "'pos'")],
)
def test_each_by_itself(options: dict[str, bool], named: str, unnamed: str) -> None:
    model, x = Relative(**options), torch.randn(2, 9, 32)
    report = qkwatch.retrofit_(model, qkwatch.find_sites(model, x))
    assert report.applied == [""]
    assert named in report.notes[""]
    assert unnamed not in report.notes[""]


def test_nothing_beside_no_note() -> None:
    model, x = Relative(u=False, r=False), torch.randn(2, 9, 32)
    report = qkwatch.retrofit_(model, qkwatch.find_sites(model, x))
    assert report.applied == [""]
    assert report.notes == {}
    assert all(site.k_factor == 1.0 for site in report.plan.sites)


def test_a_bias_that_is_large_is_no_norm() -> None:
    """Beside a large bias the projection hardly matters to the queries: still, they are not normed."""
    model, x = Relative(r=False), torch.randn(2, 9, 32)
    with torch.no_grad():
        model.pos_bias_u.mul_(100)  # type: ignore[union-attr]
    (site,) = qkwatch.find_sites(model, x)
    assert not site.normed
    assert site.retrofittable


def test_a_parameter_that_multiplies_is_still_refused() -> None:
    class Scaled(Relative):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (t(x).unflatten(-1, (self.heads, -1)) for t in (self.q, self.k, self.v))
            logits = torch.einsum("bthd,bshd->bhts", q * self.pos_bias_v.exp(), k)
            return torch.einsum("bhts,bshd->bthd", logits.softmax(-1), v).flatten(2)

    (site,) = qkwatch.find_sites(Scaled(r=False, u=False), torch.randn(2, 9, 32))
    assert site.reason == "the parameter 'pos_bias_v' multiplies its queries between projection and softmax"


def test_memory_keys_are_keys_of_their_own() -> None:
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(dim=32, depth=2, heads=4, attn_dim_head=8, attn_num_mem_kv=2)
    model, x = TransformerWrapper(num_tokens=96, max_seq_len=16, attn_layers=layers).eval(), token_ids()
    report = qkwatch.retrofit_(model, qkwatch.find_sites(model, x))
    assert len(report.applied) == 2
    assert all("'mem_k' beside its queries or keys" in note for note in report.notes.values())


def test_a_variant_without_gains_keeps_its_own_scale() -> None:
    model, x = Relative(), torch.randn(2, 9, 32)
    variant = Variant("plain", norm="rms", gain="none")
    report = qkwatch.retrofit_(model, qkwatch.find_sites(model, x), variant=variant)
    assert report.applied == [""]
    assert report.plan.sites[0].k_factor == 1.0


def test_known_models_without_biases_have_no_notes() -> None:
    model = hf("LlamaForCausalLM", "LlamaConfig", **TEXT)
    report = qkwatch.retrofit_(model, qkwatch.find_sites(model, token_ids()))
    assert len(report.applied) == 2
    assert report.notes == {}


@pytest.mark.parametrize("side", ["queries", "keys"])
def test_a_further_term_from_outside_is_noted(side: str) -> None:
    """Relative positions that another module made, as in SpeechT5, met by the queries or by the keys."""

    class Given(Relative):
        def forward(self, x: Tensor, r: Tensor) -> Tensor:  # type: ignore[override]
            q, k, v = (t(x).unflatten(-1, (self.heads, -1)) for t in (self.q, self.k, self.v))
            logits = torch.einsum("bthd,bshd->bhts", q, k)
            if side == "queries":
                logits = logits + torch.einsum("bthd,tsd->bhts", q, r)
            else:
                logits = logits + torch.einsum("bshd,tsd->bhts", k, r)
            return torch.einsum("bhts,bshd->bthd", (logits / 8**0.5).softmax(-1), v).flatten(2)

    model, inputs = Given(u=False, r=False), (torch.randn(2, 9, 32), torch.randn(9, 9, 8) * 0.2)
    report = qkwatch.retrofit_(model, qkwatch.find_sites(model, *inputs))
    assert report.applied == [""]
    assert "something from outside the layer, with which" in report.notes[""]
