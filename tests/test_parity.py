"""A patched model is the model that was built with QK-norm: against other packages' own implementations.

Each case has a plain module and its twin with the norm. Weights and random gains are copied from the twin; the
patched plain module must then give the twin's output. Unit gains would prove little: with them a norm before and
after the rotation agree, and so do a gain per head and a gain per channel.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from families import first_tensor, token_ids
from torch import Tensor, nn

import qkwatch
from qkwatch.norms import HeadNorm, QKNorm
from qkwatch.variants import Variant, get_variant

B, T, DIM, H, G, D = 2, 11, 32, 4, 2, 8
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
LAYERNORM = Variant("layernorm", norm="layer", bias=True, eps=1e-5)
Inputs = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass
class Parity:
    """A plain module, its normed twin, and how they relate.

    norms: from the twin, the norm modules of q and k of each site, in the order of the sites.
    state: the twin's state_dict under the plain module's names (norms left over).
    """

    plain: nn.Module
    twin: nn.Module
    variant: str | Variant
    norms: Callable[[nn.Module], list[tuple[Any, Any]]]
    inputs: Callable[[], Inputs]
    state: Callable[[dict[str, Tensor]], dict[str, Tensor]] = lambda state: state
    extra: list[Callable[[nn.Module, Inputs], Tensor]] = field(default_factory=list)


# -- weights across -------------------------------------------------------------------------------------------


@torch.no_grad()
def randomise_(model: nn.Module) -> None:
    """Weights large enough for sharp attention, biases and norms anything but their starts."""
    for name, p in model.named_parameters():
        if p.ndim >= 2 and "norm" not in name:
            p.normal_(0, 1.2 * p.shape[-1] ** -0.5)
        elif p.ndim == 1 and "norm" not in name:
            p.normal_(0, 0.5)
        else:
            p.uniform_(0.4, 1.8)


def stored(norm: Any, name: str) -> Tensor | None:
    """Weight or bias of a norm module, whatever it is made of."""
    if isinstance(norm, Tensor):
        return norm if name == "weight" else None
    if hasattr(norm, "norms"):  # one LayerNorm per head
        parts = [getattr(n, name, None) for n in norm.norms]
        return None if parts[0] is None else torch.stack(parts)
    return getattr(norm, name, None)


@torch.no_grad()
def copy_norms_(patch: QKNorm, q: Any, k: Any) -> None:
    for side, norm in ((patch.q, q), (patch.k, k)):
        assert isinstance(side, HeadNorm)
        for ours, theirs in (("gain", "weight"), ("bias", "bias")):
            mine, value = getattr(side, ours), None if norm is None else stored(norm, theirs)
            assert (mine is None) == (value is None), (ours, mine, value)
            if mine is not None:
                mine.copy_(value.reshape(mine.shape))


def patched_twin(case: Parity) -> tuple[nn.Module, Inputs]:
    randomise_(case.twin)
    case.plain.eval()
    case.twin.eval()
    own = case.plain.state_dict()
    state = {key: value for key, value in case.state(case.twin.state_dict()).items() if key in own}
    assert sorted(state) == sorted(own)
    case.plain.load_state_dict(state)
    inputs = case.inputs()
    args, kwargs = inputs
    sites = qkwatch.find_sites(case.plain, *args, **kwargs)
    report = qkwatch.retrofit_(case.plain, sites, variant=case.variant, calibrate=False, max_gain=None)
    assert not report.refused, report.refused
    pairs = case.norms(case.twin)
    assert len(report.applied) == len(pairs)
    for name, (q, k) in zip(report.applied, pairs, strict=True):
        copy_norms_(case.plain.get_submodule(name).qk_norm, q, k)
    return case.plain, inputs


def run(model: nn.Module, inputs: Inputs) -> Tensor:
    args, kwargs = inputs
    return first_tensor(model(*args, **kwargs))


def assert_close(a: Tensor, b: Tensor, tolerance: float = 1e-6) -> None:
    scale = float(b.detach().float().abs().max())
    error = float((a.detach().float() - b.detach().float()).abs().max())
    assert error <= tolerance * scale, f"off by {error / scale:.2e} of the output's scale"


# -- transformers ---------------------------------------------------------------------------------------------


def text_config(name: str, **options: Any) -> Any:
    import transformers

    base = {
        "vocab_size": 100,
        "hidden_size": DIM,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": H,
        "num_key_value_heads": G,
        "head_dim": D,
        "rms_norm_eps": 1e-6,
        "rope_parameters": dict(ROPE),
        "attn_implementation": "eager",
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return getattr(transformers, name)(**{**base, **options})


def causal_lm(name: str, config: Any) -> nn.Module:
    import transformers

    return getattr(transformers, name)(config)


def tokens() -> Inputs:
    """Token ids of which one row is padded on the left."""
    mask = torch.ones(B, T, dtype=torch.long)
    mask[0, :3] = 0
    return (token_ids(B, T),), {"attention_mask": mask}


def attention_inputs(rotary: int = D, mask: bool = True) -> Callable[[], Inputs]:
    """Hidden states, cos and sin, and a causal mask with a padded row, for one attention module."""

    def make() -> Inputs:
        angles = torch.arange(T)[:, None] * 100.0 ** (-torch.arange(0, rotary, 2) / rotary)
        cos, sin = (f(torch.cat([angles, angles], -1))[None].expand(B, -1, -1) for f in (torch.cos, torch.sin))
        hidden = torch.full((B, 1, T, T), torch.finfo(torch.float32).min).triu(1)
        hidden[0, :, 4:, :2] = torch.finfo(torch.float32).min
        kwargs: dict[str, Any] = {"position_embeddings": (cos, sin), "attention_mask": hidden if mask else None}
        return (torch.randn(B, T, DIM),), kwargs

    return make


def _norms(path: str, q: str, k: str, count: int = 2) -> Callable[[nn.Module], list[tuple[Any, Any]]]:
    def find(model: nn.Module) -> list[tuple[Any, Any]]:
        layers = [model.get_submodule(path.format(i)) for i in range(count)]
        return [(getattr(layer, q), getattr(layer, k)) for layer in layers]

    return find


def _generated(model: nn.Module, inputs: Inputs) -> Tensor:
    """Logits of greedy decoding with a key-value cache, (B, 6, V); the tokens are in them."""
    args, kwargs = inputs
    out = model.generate(
        *args, **kwargs, max_new_tokens=6, min_new_tokens=6, do_sample=False, use_cache=True,
        output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    return torch.stack(out.logits, 1)


def llama_qwen3() -> Parity:
    return Parity(
        causal_lm("LlamaForCausalLM", text_config("LlamaConfig")),
        causal_lm("Qwen3ForCausalLM", text_config("Qwen3Config")),
        "qwen3",
        _norms("model.layers.{}.self_attn", "q_norm", "k_norm"),
        tokens,
        extra=[_generated],
    )


def qwen2_qwen3() -> Parity:
    """Qwen2 has biases on q, k and v only; Qwen3's attention_bias also puts one on the output: zeroed."""

    def state(twin: dict[str, Tensor]) -> dict[str, Tensor]:
        for key, value in twin.items():
            if key.endswith("o_proj.bias"):
                value.zero_()
        return twin

    return Parity(
        causal_lm("Qwen2ForCausalLM", text_config("Qwen2Config")),
        causal_lm("Qwen3ForCausalLM", text_config("Qwen3Config", attention_bias=True)),
        "qwen3",
        _norms("model.layers.{}.self_attn", "q_norm", "k_norm"),
        tokens,
        state,
        [_generated],
    )


def same_class(
    model: str, config: str, flag: str, q: str, k: str, variant: str | Variant, **options: Any
) -> Callable[[], Parity]:
    """A model class against itself, with its own flag on."""

    def make() -> Parity:
        plain, twin = (causal_lm(model, text_config(config, **{**options, flag: value})) for value in (False, True))
        return Parity(plain, twin, variant, _norms("model.layers.{}.self_attn", q, k), tokens)

    return make


def phi3_qwen3() -> Parity:
    from transformers.models.phi3.modeling_phi3 import Phi3Attention
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

    def state(twin: dict[str, Tensor]) -> dict[str, Tensor]:
        fused = torch.cat([twin[f"{name}_proj.weight"] for name in "qkv"])
        return {"qkv_proj.weight": fused, "o_proj.weight": twin["o_proj.weight"]}

    return Parity(
        Phi3Attention(text_config("Phi3Config"), 0),
        Qwen3Attention(text_config("Qwen3Config"), 0),
        "qwen3",
        lambda twin: [(twin.q_norm, twin.k_norm)],
        attention_inputs(),
        state,
    )


def llama_olmo2() -> Parity:
    """OLMo 2 also norms after the attention, not before: the attention modules are compared."""
    from transformers.models.llama.modeling_llama import LlamaAttention
    from transformers.models.olmo2.modeling_olmo2 import Olmo2Attention

    return Parity(
        LlamaAttention(text_config("LlamaConfig"), 0),
        Olmo2Attention(text_config("Olmo2Config"), 0),
        "olmo2",
        lambda twin: [(twin.q_norm, twin.k_norm)],
        attention_inputs(),
    )


def gemma2_gemma3() -> Parity:
    from transformers.models.gemma2.modeling_gemma2 import Gemma2Attention
    from transformers.models.gemma3.modeling_gemma3 import Gemma3Attention

    options = {"query_pre_attn_scalar": 20, "layer_types": ["full_attention"] * 2, "attn_logit_softcapping": None}
    return Parity(
        Gemma2Attention(text_config("Gemma2Config", **options), 0),
        Gemma3Attention(text_config("Gemma3TextConfig", **{**options, "rope_parameters": None}), 0),
        "gemma3",
        lambda twin: [(twin.q_norm, twin.k_norm)],
        attention_inputs(),
    )


def llama_chameleon() -> Parity:
    from transformers.models.chameleon.modeling_chameleon import ChameleonAttention
    from transformers.models.llama.modeling_llama import LlamaAttention

    return Parity(
        LlamaAttention(text_config("LlamaConfig"), 0),
        ChameleonAttention(text_config("ChameleonConfig", vq_config=None), 0),
        "chameleon",
        lambda twin: [(twin.q_norm, twin.k_norm)],
        attention_inputs(),
    )


def neox_persimmon() -> Parity:
    """Fused and interleaved per head, and half of each head rotates."""
    from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXAttention
    from transformers.models.persimmon.modeling_persimmon import PersimmonAttention

    rope = {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}}
    neox = text_config("GPTNeoXConfig", **rope, num_key_value_heads=H)
    return Parity(
        GPTNeoXAttention(neox, 0),
        PersimmonAttention(text_config("PersimmonConfig", **rope, qk_layernorm=True, layer_norm_eps=1e-5), 0),
        LAYERNORM,
        lambda twin: [(twin.q_layernorm, twin.k_layernorm)],
        attention_inputs(rotary=D // 2),
    )


def idefics(cross: bool) -> Callable[[], Parity]:
    def make() -> Parity:
        import transformers
        from transformers.models.idefics.modeling_idefics import IdeficsAttention

        config = transformers.IdeficsConfig(
            vocab_size=100, hidden_size=DIM, num_hidden_layers=1, num_attention_heads=H, intermediate_size=48,
            rms_norm_eps=1e-6, vision_config={"embed_dim": 24}, attn_implementation="eager",
        )  # fmt: skip

        def inputs() -> Inputs:
            # in self-attention this class builds its own rotary embedding
            kwargs = {"key_value_states": torch.randn(B, 7, 24)} if cross else {"position_ids": torch.arange(T)[None]}
            return (torch.randn(B, T, DIM),), kwargs

        plain, twin = (
            IdeficsAttention(DIM, H, is_cross_attention=cross, config=config, qk_layer_norms=flag, layer_idx=0)
            for flag in (False, True)
        )

        def norms(twin: nn.Module) -> list[tuple[Any, Any]]:
            if not cross:
                # its self-attention norms behind the rotation, which mixes channels: the same as before it only
                # where all channels have one gain (Idefics itself norms in cross-attention alone)
                twin.q_layer_norm.weight.data.fill_(1.7)
                twin.k_layer_norm.weight.data.fill_(0.6)
            return [(twin.q_layer_norm, twin.k_layer_norm)]

        return Parity(plain, twin, "idefics", norms, inputs)

    return make


# -- timm, torch, diffusers, x-transformers -------------------------------------------------------------------


def _images() -> Inputs:
    return (torch.randn(B, 16, DIM),), {}


def timm_attention(norm: str, fused: bool) -> Callable[[], Parity]:
    def make() -> Parity:
        import timm.layers
        from timm.layers.attention import Attention

        kind = {"layer": nn.LayerNorm, "rms": timm.layers.RmsNorm}[norm]
        plain, twin = Attention(DIM, H, qkv_bias=True), Attention(DIM, H, qkv_bias=True, qk_norm=True, norm_layer=kind)
        plain.fused_attn = twin.fused_attn = fused
        variant = LAYERNORM if norm == "layer" else replace(get_variant("qwen3"), name="rms", cast="gain_in_fp32")
        return Parity(plain, twin, variant, lambda t: [(t.q_norm, t.k_norm)], _images)

    return make


def mha_timm(need_weights: bool) -> Callable[[], Parity]:
    def make() -> Parity:
        from timm.layers.attention import Attention

        class SelfAttention(nn.Module):
            def __init__(self):
                super().__init__()
                self.mha = nn.MultiheadAttention(DIM, H, batch_first=True)

            def forward(self, x):
                return self.mha(x, x, x, need_weights=need_weights)[0]

        def state(twin: dict[str, Tensor]) -> dict[str, Tensor]:
            names = {"in_proj_weight": "qkv.weight", "in_proj_bias": "qkv.bias",
                     "out_proj.weight": "proj.weight", "out_proj.bias": "proj.bias"}  # fmt: skip
            return {f"mha.{ours}": twin[theirs] for ours, theirs in names.items()}

        twin = Attention(DIM, H, qkv_bias=True, qk_norm=True, norm_layer=nn.LayerNorm)
        return Parity(SelfAttention(), twin, LAYERNORM, lambda t: [(t.q_norm, t.k_norm)], _images, state)

    return make


def timm_swinv2() -> Parity:
    """Cosine attention; the last position-bias layer is zero, which adds the same to every logit."""
    from timm.layers.attention import Attention
    from timm.models.swin_transformer_v2 import WindowAttention

    class Zeroed(WindowAttention):
        def forward(self, x, mask=None):
            with torch.no_grad():
                self.cpb_mlp[2].weight.zero_()
            return super().forward(x, mask)

    def state(twin: dict[str, Tensor]) -> dict[str, Tensor]:
        bias = torch.cat([twin["q_bias"], torch.zeros(DIM), twin["v_bias"]])
        return {"qkv.weight": twin["qkv.weight"], "qkv.bias": bias,
                "proj.weight": twin["proj.weight"], "proj.bias": twin["proj.bias"]}  # fmt: skip

    def norms(twin: nn.Module) -> list[tuple[Any, Any]]:
        with torch.no_grad():
            twin.logit_scale.copy_(torch.tensor([-1.0, 1.0, 3.0, 9.0]).view(H, 1, 1))  # the last is clamped at ln 100
        return [(twin.logit_scale, None)]

    return Parity(Attention(DIM, H, qkv_bias=True), Zeroed(DIM, (4, 4), H), "swinv2", norms, _images, state)


def diffusers_attention(kind: str, cross: bool) -> Callable[[], Parity]:
    def make() -> Parity:
        from diffusers.models.attention_processor import Attention, AttnProcessor2_0

        variant = {
            "layer_norm": LAYERNORM,
            "rms_norm": replace(get_variant("sd3"), eps=1e-5),
            "l2": Variant("unit", norm="l2", gain="none", eps=1e-5),
        }[kind]
        plain, twin = (
            Attention(DIM, cross_attention_dim=24 if cross else None, heads=H, dim_head=D, bias=True, eps=1e-5,
                      qk_norm=norm, processor=AttnProcessor2_0())
            for norm in (None, kind)
        )  # fmt: skip
        norms = (lambda t: [(None, None)]) if kind == "l2" else (lambda t: [(t.norm_q, t.norm_k)])

        def inputs() -> Inputs:
            kwargs = {"encoder_hidden_states": torch.randn(B, 7, 24)} if cross else {}
            return (torch.randn(B, T, DIM),), kwargs

        return Parity(plain, twin, variant, norms, inputs)

    return make


def x_transformers(flash: bool) -> Callable[[], Parity]:
    """Its qk_norm with the default: unit vectors times a fixed 10, where the l2 variant starts."""

    def make() -> Parity:
        from x_transformers.x_transformers import Attention

        plain, twin = (
            Attention(DIM, dim_head=D, heads=H, flash=flash, causal=True, qk_norm=flag) for flag in (False, True)
        )
        return Parity(plain, twin, "l2", lambda t: [(torch.full((H,), 10.0), None)], _images)

    return make


CASES: dict[str, Callable[[], Parity]] = {
    "llama+qwen3=qwen3": llama_qwen3,
    "qwen2+qwen3=qwen3 with biases": qwen2_qwen3,
    "phi3+qwen3=qwen3": phi3_qwen3,
    "llama+olmo2=olmo2": llama_olmo2,
    "gemma2+gemma3=gemma3": gemma2_gemma3,
    "llama+chameleon=chameleon": llama_chameleon,
    "neox+layernorm=persimmon": neox_persimmon,
    "idefics": idefics(cross=False),
    "idefics-cross": idefics(cross=True),
    "cohere": same_class(
        "CohereForCausalLM", "CohereConfig", "use_qk_norm", "q_norm", "k_norm", "cohere", layer_norm_eps=1e-5
    ),
    "persimmon": same_class(
        "PersimmonForCausalLM", "PersimmonConfig", "qk_layernorm", "q_layernorm", "k_layernorm", LAYERNORM
    ),
    "phi": same_class("PhiForCausalLM", "PhiConfig", "qk_layernorm", "q_layernorm", "k_layernorm", LAYERNORM),
    "stablelm": same_class(
        "StableLmForCausalLM",
        "StableLmConfig",
        "qk_layernorm",
        "q_layernorm",
        "k_layernorm",
        replace(get_variant("cohere"), name="stablelm"),
    ),
    "timm-layer-fused": timm_attention("layer", True),
    "timm-layer-unfused": timm_attention("layer", False),
    "timm-rms-fused": timm_attention("rms", True),
    "timm-rms-unfused": timm_attention("rms", False),
    "mha+layernorm=timm": mha_timm(False),
    "mha+layernorm=timm, weights": mha_timm(True),
    "timm+swinv2=swinv2": timm_swinv2,
    **{
        f"diffusers-{kind}{'-cross' if cross else ''}": diffusers_attention(kind, cross)
        for kind, cross in itertools.product(("layer_norm", "rms_norm", "l2"), (False, True))
    },
    "x-transformers": x_transformers(False),
    "x-transformers-flash": x_transformers(True),
}


def llama4() -> Parity:
    options = {
        "use_qk_norm": None,
        "num_local_experts": 1,
        "interleave_moe_layer_step": 1,
        "moe_layers": [],
        "intermediate_size_mlp": 48,
        "no_rope_layers": [1, 1],
        "attn_temperature_tuning": False,
        "attention_chunk_size": 64,
    }
    plain, twin = (
        causal_lm("Llama4ForCausalLM", text_config("Llama4TextConfig", **{**options, "use_qk_norm": flag}))
        for flag in (False, True)
    )
    return Parity(plain, twin, "llama4", lambda t: [(None, None)] * 2, tokens)


CASES["llama4"] = llama4


@pytest.mark.parametrize("name", CASES)
def test_float32(name):
    case = CASES[name]()
    unpatched = copy.deepcopy(case.plain)
    model, inputs = patched_twin(case)
    with torch.no_grad():
        assert_close(run(model, inputs), run(case.twin, inputs))
        for measure in case.extra:
            assert_close(measure(model, inputs), measure(case.twin, inputs))
        unpatched.load_state_dict({k: v for k, v in model.state_dict().items() if "qk_norm" not in k})
        difference = (run(unpatched, inputs) - run(model, inputs)).abs().max()
        assert float(difference) > 1e-3 * float(run(model, inputs).abs().max())  # the norm matters here


@pytest.mark.parametrize("name", [n for n in CASES if n != "timm+swinv2=swinv2"])
def test_gradients(name):
    """The backward passes agree too, down to the projections."""
    case = CASES[name]()
    model, inputs = patched_twin(case)
    grads = []
    for m in (model, case.twin):
        run(m, inputs).square().mean().backward()
        grads.append(case.state({n: p.grad for n, p in m.named_parameters() if p.grad is not None}) if m is case.twin
                     else {n: p.grad for n, p in m.named_parameters() if p.grad is not None})  # fmt: skip
    shared = [key for key in grads[0] if key in grads[1]]
    assert len(shared) >= 2
    for key in shared:
        if key.endswith("o_proj.bias"):
            continue
        assert_close(grads[0][key], grads[1][key], 2e-5)


HALF = [
    "llama+qwen3=qwen3", "phi3+qwen3=qwen3", "llama+olmo2=olmo2", "gemma2+gemma3=gemma3", "llama+chameleon=chameleon",
    "idefics-cross", "cohere", "stablelm", "llama4", "diffusers-rms_norm",
]  # fmt: skip


@pytest.mark.parametrize("name", HALF)
def test_bfloat16(name):
    """In half precision the order of casts shows: the patched module rounds where its twin does."""
    case = CASES[name]()
    model, (args, kwargs) = patched_twin(case)
    model, twin = model.bfloat16(), case.twin.bfloat16()
    half = lambda x: x.bfloat16() if isinstance(x, Tensor) and x.is_floating_point() else x  # noqa: E731
    args = tuple(half(a) for a in args)
    kwargs = {k: tuple(map(half, v)) if isinstance(v, tuple) else half(v) for k, v in kwargs.items()}
    with torch.no_grad():
        ours, theirs = run(model, (args, kwargs)), run(twin, (args, kwargs))
    assert ours.dtype == theirs.dtype == torch.bfloat16
    if name == "llama4":  # norms what the rotation has rounded, we what it has not: two roundings of one thing
        assert_close(ours, theirs, 0.05)
    else:
        assert torch.equal(ours, theirs), float((ours.float() - theirs.float()).abs().max())


def test_the_comparison_can_fail():
    """Unit gains on our side, another variant, or the gain of another head: each is seen."""
    case = llama_qwen3()
    model, inputs = patched_twin(case)
    norm = model.model.layers[0].self_attn.qk_norm
    with torch.no_grad():
        norm.q.gain[3] *= 1.01
        with pytest.raises(AssertionError, match="off by"):
            assert_close(run(model, inputs), run(case.twin, inputs))
