"""QK-normed nn.MultiheadAttention: the old forward in every option, and no way around the norm."""

from __future__ import annotations

import copy
import itertools
import pickle
import random
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qkwatch.errors import QKWatchError
from qkwatch.mha import QKNormMultiheadAttention, normed_mha_forward, patch_mha_, unpatch_mha_
from qkwatch.norms import QKNorm
from qkwatch.variants import get_variant

E, H = 12, 4
pytestmark = [pytest.mark.filterwarnings("ignore:.*(nested|mismatched).*:UserWarning")]


class NoNorm(nn.Module):
    """Stands for a QKNorm that changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Identity()
        self.k = nn.Identity()


def random_norm(variant: str = "qwen3", heads: int = H, head_dim: int = E // H, **kwargs) -> QKNorm:
    norm = QKNorm(variant, heads, heads, head_dim, **kwargs)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.uniform_(0.5, 3.0)
    return norm


def patch_all_(model: nn.Module, variant: str = "qwen3") -> nn.Module:
    for module in list(model.modules()):
        if type(module) is nn.MultiheadAttention:
            patch_mha_(module, random_norm(variant, module.num_heads, module.head_dim))
    return model


def make_mha(rng: random.Random) -> nn.MultiheadAttention:
    widths = rng.choice([(None, None), (None, None), (7, 9), (E, 5)])
    mha = nn.MultiheadAttention(
        E,
        H,
        dropout=rng.choice([0.0, 0.3]),
        bias=rng.random() < 0.7,
        add_bias_kv=rng.random() < 0.4,
        add_zero_attn=rng.random() < 0.4,
        kdim=widths[0],
        vdim=widths[1],
        batch_first=rng.random() < 0.5,
    ).train(rng.random() < 0.6)
    with torch.no_grad():
        for parameter in mha.parameters():
            parameter.normal_(std=0.4)
    return mha


def make_mask(shape: tuple[int, ...], kind: str) -> Tensor:
    """Never hides the first key, so that no row is fully masked."""
    if kind == "float":
        return torch.randn(shape)
    hidden = torch.rand(shape) < 0.4
    hidden[..., 0] = False
    return hidden


def make_call(mha: nn.MultiheadAttention, rng: random.Random) -> tuple[list[Tensor], dict[str, object]]:
    batched = rng.random() < 0.75
    rows, batch, kind = rng.choice([1, 4, 5]), 3, rng.choice(["bool", "float"])
    shared = mha.kdim == E and mha.vdim == E and rng.random() < 0.5
    columns = rows if shared else rng.choice([rows, 6])
    lengths, widths = (rows, columns, columns), (E, mha.kdim, mha.vdim)
    tensors = []
    for length, width in zip(lengths, widths, strict=True):
        sizes = (batch, length, width) if mha.batch_first else (length, batch, width)
        tensors.append(torch.randn(sizes if batched else (length, width), requires_grad=True))
    if shared:
        tensors = [tensors[0]] * 3
    causal = rng.random() < 0.3
    options: dict[str, object] = {
        "need_weights": rng.random() < 0.5,
        "average_attn_weights": rng.random() < 0.5,
        "is_causal": causal,
    }
    if causal:
        options["attn_mask"] = nn.Transformer.generate_square_subsequent_mask(columns)[:rows]
    elif rng.random() < 0.6:
        lead = rng.choice([(), (H * (batch if batched else 1),)])
        options["attn_mask"] = make_mask((*lead, rows, columns), kind)
    if rng.random() < 0.5:
        options["key_padding_mask"] = make_mask((batch, columns) if batched else (columns,), kind)
    return tensors, options


def run(call, tensors: list[Tensor], options: dict[str, object], parameters: list[Tensor]):
    torch.manual_seed(7)  # the same dropout
    output, weights = call(*tensors, **options)
    probe = torch.linspace(-1, 1, output.numel()).view(output.shape)
    loss = (output * probe).sum() + (0 if weights is None else weights.square().sum())
    wanted = list(dict.fromkeys(tensors)) + parameters
    return output, weights, torch.autograd.grad(loss, wanted, allow_unused=True)


@pytest.mark.parametrize("block", range(8))
def test_identity_norm_equals_the_original(block):
    """400 random draws from the table of all constructor and call options: outputs, weights, gradients."""
    for case in range(50):
        seed = block * 1000 + case
        torch.manual_seed(seed)
        rng = random.Random(seed)
        mha = make_mha(rng)
        tensors, options = make_call(mha, rng)
        parameters = list(mha.parameters())
        old = run(mha, tensors, options, parameters)
        new = run(lambda *a, m=mha, **k: normed_mha_forward(m, NoNorm(), *a, **k), tensors, options, parameters)
        assert old[0].shape == new[0].shape
        assert (old[1] is None) == (new[1] is None)
        for before, after in zip((*old[:2], *old[2]), (*new[:2], *new[2]), strict=True):
            if before is None or after is None:
                assert before is after, options
                continue
            torch.testing.assert_close(after, before, rtol=1e-5, atol=2e-6, msg=lambda m, o=options: f"{m} {o}")


def test_fast_path_and_dtypes_equal_the_original():
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.float64, 1e-12), (torch.bfloat16, 3e-2)):
        mha = nn.MultiheadAttention(E, H, batch_first=True, dtype=dtype).eval()
        x = torch.randn(2, 5, E, dtype=dtype)
        with torch.no_grad():
            old, new = mha(x, x, x), normed_mha_forward(mha, NoNorm(), x, x, x)
        for before, after in zip(old, new, strict=True):
            assert after.dtype == dtype
            torch.testing.assert_close(after, before, rtol=0, atol=tolerance)


def test_autocast_keeps_the_dtype():
    mha = nn.MultiheadAttention(E, H)
    patched = copy.deepcopy(mha)
    patch_mha_(patched, random_norm())
    x = torch.randn(5, 2, E)
    for need_weights in (True, False):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            expected = mha(x, x, x, need_weights=need_weights)[0]
            got = patched(x, x, x, need_weights=need_weights)[0]
        assert got.dtype == expected.dtype


def by_hand(mha: nn.MultiheadAttention, norm: QKNorm, x: Tensor) -> Tensor:
    """Dense float64 reference of batch-first self-attention: bias_k is normed, the zero key stays zero."""
    mha, norm, x = copy.deepcopy(mha).double(), copy.deepcopy(norm).double(), x.double()
    q, k, v = F.linear(x, mha.in_proj_weight, mha.in_proj_bias).chunk(3, -1)
    if mha.bias_k is not None:
        k, v = (torch.cat([t, b.expand(len(t), -1, -1)], 1) for t, b in ((k, mha.bias_k), (v, mha.bias_v)))
    q, k, v = (t.unflatten(-1, (mha.num_heads, mha.head_dim)) for t in (q, k, v))
    q, k = norm.q(q), norm.k(k)
    if mha.add_zero_attn:
        k, v = (torch.cat([t, torch.zeros_like(t[:, :1])], 1) for t in (k, v))
    logits = torch.einsum("blhd,bshd->bhls", q, k) / mha.head_dim**0.5
    return mha.out_proj(torch.einsum("bhls,bshd->blhd", logits.softmax(-1), v).flatten(2))


@pytest.mark.parametrize("variant", ["l2", "qwen3", "chameleon", "olmo2", "gemma3", "swinv2"])
@pytest.mark.parametrize("extra", [{}, {"add_bias_kv": True}, {"add_bias_kv": True, "add_zero_attn": True}])
def test_norm_sits_between_projection_and_product(variant, extra):
    mha = nn.MultiheadAttention(E, H, batch_first=True, **extra)
    norm = random_norm(variant)
    x = torch.randn(2, 5, E)
    expected = by_hand(mha, norm, x)
    patch_mha_(mha, norm)
    for need_weights in (True, False):
        got = mha(x, x, x, need_weights=need_weights)[0].double()
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("extra", [{}, {"add_bias_kv": True}, {"add_zero_attn": True}])
def test_bound_holds_for_appended_keys(extra):
    """With l2 no logit passes the gain, however large the projection and bias_k grow."""
    mha = nn.MultiheadAttention(E, H, batch_first=True, **extra)
    norm = QKNorm("l2", H, H, E // H, max_gain=None, q_factor=(E // H) ** 0.5)
    patch_mha_(mha, norm)
    with torch.no_grad():
        norm.q.gain.fill_(2.0)
        for parameter in (mha.in_proj_weight, mha.bias_k):
            if parameter is not None:
                parameter.mul_(1e3)
    x = torch.randn(2, 5, E)
    weights = mha(x, x, x, average_attn_weights=False)[1].log()
    assert (weights.amax(-1) - weights.amin(-1)).max() <= 4.0 + 1e-5  # 2 − (−2)


def test_logits_do_not_move_when_the_projection_grows():
    mha = nn.MultiheadAttention(E, H, bias=False, batch_first=True)
    patch_mha_(mha, random_norm("l2"))
    x = torch.randn(2, 5, E)
    before = mha(x, x, x)[1]
    with torch.no_grad():
        mha.in_proj_weight[: 2 * E] *= 1000
    torch.testing.assert_close(mha(x, x, x)[1], before, rtol=0, atol=1e-6)


MODELS = {
    "layer": lambda first: nn.TransformerEncoderLayer(E, H, 16, 0.0, batch_first=True, norm_first=first),
    "layer gelu": lambda first: nn.TransformerEncoderLayer(E, H, 16, 0.0, "gelu", batch_first=True, norm_first=first),
    "encoder": lambda first: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(E, H, 16, 0.0, batch_first=True, norm_first=first), 2
    ),
    "seq first": lambda first: nn.TransformerEncoder(nn.TransformerEncoderLayer(E, H, 16, 0.0, norm_first=first), 2),
    "decoder layer": lambda first: nn.TransformerDecoderLayer(E, H, 16, 0.0, batch_first=True, norm_first=first),
    "transformer": lambda first: nn.Transformer(E, H, 1, 1, 16, 0.0, batch_first=True, norm_first=first),
}


def call_model(name: str, model: nn.Module, x: Tensor, padded: bool, causal: bool) -> Tensor:
    length = x.shape[0] if name == "seq first" else x.shape[1]
    batch = x.shape[1] if name == "seq first" else x.shape[0]
    hidden = torch.arange(length) >= torch.tensor([length, length - 2, 1])[:batch, None]
    mask = nn.Transformer.generate_square_subsequent_mask(length, dtype=x.dtype) if causal else None
    if name == "transformer" and padded:
        pads = {f"{part}_key_padding_mask": hidden for part in ("src", "tgt", "memory")}
        return model(x, x, tgt_mask=mask, **pads)
    if name in ("decoder layer", "transformer"):
        pads = {"tgt_key_padding_mask": hidden, "memory_key_padding_mask": hidden} if padded else {}
        return model(x, x, tgt_mask=mask, **pads)
    return model(x, mask, hidden if padded else None)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("norm_first", [False, True])
def test_no_fast_path_leaves_out_the_norm(name, norm_first):
    """Train and eval agree with no hook attached, whatever the grad mode; and the norm does something."""
    model = MODELS[name](norm_first)
    plain = copy.deepcopy(model)
    patch_all_(model, "l2")
    x = torch.randn(3, 5, E)
    x = x.transpose(0, 1).contiguous() if name == "seq first" else x
    visible = torch.arange(5) < torch.tensor([5, 3, 1])[:, None]
    visible = visible.T if name == "seq first" else visible
    for padded, causal in itertools.product([False, True], [False, True]):
        keep = visible if padded and name not in ("decoder layer", "transformer") else torch.ones_like(visible)
        expected = call_model(name, model.train(), x, padded, causal)[keep]
        untouched = call_model(name, plain.train(), x, padded, causal)[keep]
        assert (expected - untouched).abs().max() > 1e-2
        for context in (torch.no_grad, torch.inference_mode, torch.enable_grad):
            with context():
                got = call_model(name, model.eval(), x, padded, causal)[keep]
            torch.testing.assert_close(got, expected, rtol=0, atol=2e-6)
    frozen = model.eval().requires_grad_(False)  # the fast path is also open with grad on and nothing to train
    got, expected = (call_model(name, m, x, True, False)[keep] for m in (frozen, copy.deepcopy(frozen).train()))
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-6)


def test_the_parity_test_can_fail():
    """A naive forward override is bypassed: this is what the class has to prevent."""

    class Naive(nn.MultiheadAttention):
        def forward(self, *args, **kwargs):
            raise AssertionError("called")

    layer = nn.TransformerEncoderLayer(E, H, 16, 0.0, batch_first=True).eval()
    layer.self_attn.__class__ = Naive
    with torch.no_grad():
        layer(torch.randn(1, 3, E))


def test_unpatched_gives_the_original_back():
    encoder = MODELS["encoder"](False).eval()
    keys, x = list(encoder.state_dict()), torch.randn(3, 5, E)
    hidden = torch.arange(5) >= torch.tensor([5, 3, 1])[:, None]
    with torch.no_grad():
        before = encoder(x, None, hidden)
        patch_all_(encoder)
        for layer in encoder.layers:
            assert not layer.self_attn._qkv_same_embed_dim
            unpatch_mha_(layer.self_attn)
            unpatch_mha_(layer.self_attn)
            assert type(layer.self_attn) is nn.MultiheadAttention
            assert layer.self_attn._qkv_same_embed_dim
        assert torch.equal(encoder(x, None, hidden), before)
    assert list(encoder.state_dict()) == keys
    separate = nn.MultiheadAttention(E, H, kdim=7)
    patch_mha_(separate, random_norm())
    unpatch_mha_(separate)
    assert not separate._qkv_same_embed_dim


def test_state_dict_both_ways():
    mha, other = nn.MultiheadAttention(E, H), nn.MultiheadAttention(E, H)
    plain = list(mha.state_dict())
    identity = mha.in_proj_weight
    for module in (mha, other):
        patch_mha_(module, random_norm("chameleon"))
    mha.qk_norm.set_plan({"site": "a", "variant": "chameleon"})
    assert mha.in_proj_weight is identity
    assert set(mha.state_dict()) - set(plain) == {
        "qk_norm.plan", "qk_norm.q.gain", "qk_norm.q.bias", "qk_norm.k.gain", "qk_norm.k.bias"}  # fmt: skip
    other.load_state_dict(mha.state_dict())
    x = torch.randn(5, 2, E)
    assert torch.equal(other(x, x, x)[0], mha(x, x, x)[0])
    assert other.qk_norm.get_plan() == {"site": "a", "variant": "chameleon"}
    unpatch_mha_(other)
    other.load_state_dict({key: mha.state_dict()[key] for key in plain})


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_and_print(clone):
    layer = patch_all_(MODELS["layer"](False), "gemma3").eval()
    x = torch.randn(3, 5, E)
    twin = clone(layer)
    assert isinstance(twin.self_attn, QKNormMultiheadAttention)
    with torch.no_grad():
        assert torch.equal(twin(x), layer(x))
    assert "qk_norm" in repr(layer)
    assert "gemma3" in repr(layer)


@pytest.mark.parametrize("name", ["layer", "encoder"])
@pytest.mark.parametrize("train", [True, False])
def test_compiles_without_a_break(name, train):
    model = patch_all_(MODELS[name](False), "l2").train(train)
    x = torch.randn(3, 5, E)
    torch._dynamo.reset()
    with torch.set_grad_enabled(train):
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=1e-6)


def test_exports():
    model = patch_all_(MODELS["layer"](False), "l2").eval()
    x = torch.randn(3, 5, E)
    for strict in (False, True):
        exported = torch.export.export(model, (x,), strict=strict)
        torch.testing.assert_close(exported.module()(x), model(x), rtol=0, atol=1e-6)


def test_nested_input():
    layer = patch_all_(MODELS["layer"](False), "l2").eval()
    rows = [torch.randn(n, E) for n in (4, 1, 3)]
    with torch.no_grad():
        got = layer(torch.nested.nested_tensor(rows)).unbind()
        for row, out in zip(rows, got, strict=True):
            torch.testing.assert_close(out, layer(row[None])[0], rtol=0, atol=1e-6)


def test_refusals():
    mha = nn.MultiheadAttention(E, H, batch_first=True)
    with pytest.raises(QKWatchError, match="4 heads of 5 channels"):
        patch_mha_(mha, QKNorm("l2", H, H, 5))
    assert type(mha) is nn.MultiheadAttention
    patch_mha_(mha, random_norm())
    with pytest.raises(QKWatchError, match="can be patched"):
        patch_mha_(mha, random_norm())
    x, ragged = torch.randn(2, 5, E), torch.nested.nested_tensor([torch.randn(2, E), torch.randn(3, E)])
    jagged = torch.nested.nested_tensor([torch.randn(2, E), torch.randn(3, E)], layout=torch.jagged)
    for text, tensors, options in [
        ("nested", (ragged,) * 3, {}),
        ("nested", (jagged,) * 3, {"need_weights": False}),
        ("nested", (x, ragged, ragged), {"need_weights": False}),
        ("causal", (x, x, x), {"is_causal": True}),
        ("attn_mask must be", (x, x, x), {"attn_mask": torch.zeros(5, 1)}),
        ("key_padding_mask must be", (x, x, x), {"key_padding_mask": torch.zeros(1, 5)}),
        ("boolean or floating", (x, x, x), {"attn_mask": torch.zeros(5, 5, dtype=torch.int64)}),
        ("2-D or all 3-D", (x[0], x, x), {}),
        ("2-D or all 3-D", (x, x, x[:, :3]), {}),
        ("batch size", (x, x[:1], x[:1]), {}),
    ]:
        with pytest.raises(QKWatchError, match=text):
            mha(*tensors, **options)


@pytest.mark.parametrize("fused", [True, False])
def test_parity_with_timm(fused):
    """timm's Attention(qk_norm=True) with LayerNorm is "vit22b" with a bias: same weights, random gains."""
    timm = pytest.importorskip("timm.layers.attention")
    attention = timm.Attention(E, H, qkv_bias=True, qk_norm=True, norm_layer=partial(nn.LayerNorm, eps=1e-6))
    attention.fused_attn = fused
    mha = nn.MultiheadAttention(E, H, batch_first=True)
    norm = QKNorm(replace(get_variant("vit22b"), name="timm", bias=True), H, H, E // H)
    with torch.no_grad():
        for ours, theirs in ((norm.q, attention.q_norm), (norm.k, attention.k_norm)):
            theirs.weight.uniform_(-2, 2)
            theirs.bias.uniform_(-1, 1)
            ours.gain.copy_(theirs.weight)
            ours.bias.copy_(theirs.bias)
        mha.in_proj_weight.copy_(attention.qkv.weight)
        mha.in_proj_bias.copy_(attention.qkv.bias.normal_())
        mha.out_proj.load_state_dict(attention.proj.state_dict())
    patch_mha_(mha, norm)
    x = torch.randn(2, 7, E)
    for need_weights in (True, False):
        torch.testing.assert_close(mha(x, x, x, need_weights=need_weights)[0], attention(x), rtol=0, atol=1e-6)
