"""The norms against the systems they are named after, and what must hold for any of them."""

from __future__ import annotations

import copy
import io
import json
import math
import pickle
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from qkwatch.errors import QKWatchError
from qkwatch.norms import HeadNorm, QKNorm
from qkwatch.variants import PRESETS, Variant, calibrated_gains, get_variant

H, G, D = 6, 2, 16
ALL = sorted(PRESETS)


def randomise(module: nn.Module, low: float = 0.3, high: float = 2.5) -> nn.Module:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.uniform_(low, high)
    return module


def hf(module: str, name: str, *args, **kwargs) -> nn.Module:
    models = pytest.importorskip(f"transformers.models.{module}.modeling_{module}")
    return getattr(models, name)(*args, **kwargs)


def sd3_norm() -> nn.Module:
    return pytest.importorskip("diffusers.models.normalization").RMSNorm(D, eps=1e-6)


class Full(nn.Module):
    """OLMo 2 norms before the head split."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = hf("olmo2", "Olmo2RMSNorm", H * D, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.flatten(-2)).unflatten(-1, (H, D))


REFERENCES = {
    "vit22b": lambda: nn.LayerNorm(D, eps=1e-6, bias=False),
    "idefics": lambda: hf("idefics", "IdeficsRMSNorm", D),
    "chameleon": lambda: hf("chameleon", "ChameleonLayerNorm", (H, D)),
    "cohere": lambda: hf("cohere", "CohereLayerNorm", (H, D), eps=1e-5),
    "qwen3": lambda: hf("qwen3", "Qwen3RMSNorm", D),
    "gemma3": lambda: hf("gemma3", "Gemma3RMSNorm", D),
    "olmo2": Full,
    "llama4": lambda: hf("llama4", "Llama4TextL2Norm"),
    "sd3": sd3_norm,
}


@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_parity_with_the_system(name, dtype):
    """Random gains of both signs; float32 within 1e-6 of the output's size, half precision equal bit for bit.

    Layer norms: their fp32 kernels differ in the last bit, so one entry in a thousand may round elsewhere.
    """
    reference = randomise(REFERENCES[name](), -2.0, 2.0).to(dtype)
    norm = HeadNorm(name, H, D).to(dtype)
    sources = dict(reference.named_parameters())
    with torch.no_grad():
        for ours, kind in ((norm.gain, "weight"), (norm.bias, "bias")):
            theirs = next((p for key, p in sources.items() if key.endswith(kind)), None)
            assert (ours is None) == (theirs is None)
            if ours is not None:
                ours.copy_(theirs)
    x = (torch.randn(5, 7, H, D) * torch.logspace(-3, 3, 7)[:, None, None]).to(dtype)
    expected, got = reference(x), norm(x)
    assert got.dtype == dtype
    if dtype == torch.float32:
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
        return
    off = (got != expected).float().mean()
    assert off <= (1e-3 if PRESETS[name].norm == "layer" else 0.0)
    torch.testing.assert_close(got, expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-3)


def test_parity_with_swinv2_and_henry():
    """Logits of cosine attention, gains on both sides of Swin's ceiling; the factor replaces the scale."""
    q, k, scale = torch.randn(3, 5, H, D), torch.randn(3, 5, H, D), D**-0.5
    cosine = torch.einsum("blhd,bshd->bhls", F.normalize(q, dim=-1), F.normalize(k, dim=-1))
    swin = QKNorm("swinv2", H, H, D, max_gain=None, q_factor=1 / scale)
    with torch.no_grad():
        swin.q.gain.copy_(torch.linspace(-1.0, 6.0, H))
    stored = swin.q.gain.detach()[:, None, None]
    expected = cosine * torch.clamp(stored, max=math.log(100.0)).exp()
    for variant, wanted in (("swinv2", expected), ("henry", cosine * 7.0), ("l2", cosine * stored)):
        norm = swin if variant == "swinv2" else QKNorm(variant, H, H, D, max_gain=None, q_factor=1 / scale)
        with torch.no_grad():
            norm.q.gain.copy_({"swinv2": norm.q.gain, "henry": torch.tensor(7.0), "l2": stored.flatten()}[variant])
        hat_q, hat_k = norm(q, k)
        got = torch.einsum("blhd,bshd->bhls", hat_q, hat_k) * scale
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=2e-5)
        assert norm.k.gain is None


def test_x_transformers_l2_with_channel_gains():
    """x-transformers' qk_norm_dim_scale: unit vectors, gains (H, 1, D) on both sides, scale kept."""
    l2norm = pytest.importorskip("x_transformers.x_transformers").l2norm
    variant = Variant("x", norm="l2", gain="per_head_channel", eps=1e-12)
    norm = randomise(HeadNorm(variant, H, D))
    x = torch.randn(2, H, 5, D)
    expected = l2norm(x) * norm.gain.detach()[:, None]
    torch.testing.assert_close(norm(x.transpose(1, 2)).transpose(1, 2), expected, rtol=1e-6, atol=1e-6)


def test_torchs_own_norms_in_double():
    x = torch.randn(4, H, D, dtype=torch.float64)
    rms = HeadNorm("qwen3", H, D, dtype=torch.float64)
    layer = HeadNorm("vit22b", H, D, dtype=torch.float64)
    torch.testing.assert_close(rms(x), F.rms_norm(x, (D,), eps=1e-6), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(layer(x), F.layer_norm(x, (D,), eps=1e-6), rtol=1e-12, atol=1e-12)


def test_preset_table():
    table = {name: (v.norm, v.axis, v.gain, v.eps, v.offset, v.scale, v.side) for name, v in PRESETS.items()}
    assert table == {
        "l2": ("l2", "head", "per_head", 1e-12, 0, "replace", "q"),
        "henry": ("l2", "head", "scalar", 1e-12, 0, "replace", "q"),
        "vit22b": ("layer", "head", "per_channel", 1e-6, 0, "keep", "both"),
        "idefics": ("rms", "head", "per_channel", 1e-6, 0, "keep", "both"),
        "chameleon": ("layer", "head", "per_head_channel", 1e-5, 0, "keep", "both"),
        "cohere": ("layer", "head", "per_head_channel", 1e-5, 0, "keep", "both"),
        "qwen3": ("rms", "head", "per_channel", 1e-6, 0, "keep", "both"),
        "gemma3": ("rms", "head", "per_channel", 1e-6, 1, "keep", "both"),
        "olmo2": ("rms", "full", "full_channel", 1e-6, 0, "keep", "both"),
        "llama4": ("rms", "head", "none", 1e-6, 0, "keep", "both"),
        "swinv2": ("l2", "head", "per_head", 1e-12, 0, "exp", "q"),
        "sd3": ("rms", "head", "per_channel", 1e-6, 0, "keep", "both"),
    }
    starts = {name: v.start_value(seq_len=64) for name, v in PRESETS.items()}
    special = {"l2": 10.0, "henry": math.log2(64**2 - 64), "gemma3": 0.0, "swinv2": math.log(10)}
    assert starts == {name: special.get(name, 1.0) for name in PRESETS}


@pytest.mark.parametrize("name", ALL)
def test_variant_is_plain_data(name):
    variant = get_variant(name)
    assert variant.source
    assert Variant.from_dict(json.loads(json.dumps(variant.to_dict()))) == variant
    assert get_variant(variant) is variant
    assert name in repr(QKNorm(name, H, G, D))
    assert variant.describe() in repr(QKNorm(name, H, G, D))


@pytest.mark.parametrize(
    "changes",
    [
        {"norm": "l3"},
        {"axis": "heads"}, {"gain": "full_channel"}, {"axis": "full"}, {"offset": 2}, {"eps": 0.0},
        {"eps": math.nan}, {"cast": "x"}, {"scale": "replace"}, {"scale": "exp", "gain": "per_head"},
        {"side": "k"}, {"bias": True, "gain": "per_head"}, {"offset": 1, "gain": "none"}, {"ceiling": -1.0},
        {"start": math.inf}, {"norm": "l2", "side": "q", "scale": "replace"},
    ],
)  # fmt: skip
def test_variant_refuses(changes):
    with pytest.raises(QKWatchError, match="mine"):
        Variant("mine", **changes)


def test_unknown_names():
    with pytest.raises(QKWatchError, match=r"unknown variant 'l3'; known: .*'qwen3'"):
        get_variant("l3")
    with pytest.raises(QKWatchError, match="'gain_shape'"):
        Variant.from_dict({"name": "a", "gain_shape": 1})
    with pytest.raises(QKWatchError, match="needs a name"):
        Variant.from_dict({})
    with pytest.raises(QKWatchError, match="max_gain"):
        HeadNorm("l2", H, D, max_gain=0.0)
    with pytest.raises(QKWatchError, match="expected"):
        HeadNorm("l2", H, D)(torch.randn(2, H * D))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("gain_dtype", [torch.bfloat16, torch.float32])
def test_dtype_out_is_dtype_in(name, x_dtype, gain_dtype):
    norm = QKNorm(name, H, G, D, q_factor=3.0, dtype=gain_dtype)
    for ramp in (None, 0.0, 0.5, 1.0):
        norm.set_ramp(ramp)
        q, k = norm(torch.randn(2, 3, H, D, dtype=x_dtype), torch.randn(2, 3, G, D, dtype=x_dtype))
        assert q.dtype == k.dtype == x_dtype
        assert q.shape == (2, 3, H, D)
        assert q.isfinite().all()
        assert k.isfinite().all()


@pytest.mark.parametrize("name", ALL)
def test_gradient_is_sane_at_zero(name):
    norm = HeadNorm(name, H, D, with_gain=PRESETS[name].scale == "keep")
    for ramp in (None, 0.3):
        norm.set_ramp(ramp)
        for size in (0.0, 1e-30, 1e-8):
            x = torch.full((2, H, D), size, requires_grad=True)
            norm(x).square().sum().backward()
            assert x.grad.isfinite().all()
            x.grad = None
            norm(x).sum().backward()
            assert x.grad.abs().max() <= 1e4 * 1.001


def test_l2_is_normalize():
    """Also for tiny vectors, where only the gradient is held back."""
    norm = HeadNorm("l2", H, D, with_gain=False)
    for size in (1e3, 1.0, 1e-3, 1e-6, 1e-9):
        x = torch.randn(4, H, D).mul(size).requires_grad_()
        probe = torch.randn(4, H, D)
        (ours,) = torch.autograd.grad((norm(x) * probe).sum(), x)
        (theirs,) = torch.autograd.grad((F.normalize(x, dim=-1) * probe).sum(), x)
        torch.testing.assert_close(norm(x), F.normalize(x, dim=-1), rtol=0, atol=1e-6)
        if size >= 1e-3:
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 / size)
    assert torch.autograd.gradgradcheck(HeadNorm("l2", 2, 3, dtype=torch.float64), torch.randn(
        2, 2, 3, dtype=torch.float64, requires_grad=True))  # fmt: skip


@pytest.mark.parametrize("name", [n for n in ALL if n != "llama4"])
def test_ceiling_holds_and_lets_go(name):
    limit = 2.0
    norm = HeadNorm(name, H, D, max_gain=limit)
    assert norm.max_gain == limit
    above = norm.variant.stored(torch.tensor(5.0)).item()
    with torch.no_grad():
        norm.gain.fill_(above)
    torch.testing.assert_close(norm.effective_gain(), torch.full_like(norm.gain, limit))
    norm.effective_gain().sum().backward()  # descent would lower it: passes
    assert (norm.gain.grad > 0).all()
    norm.gain.grad = None
    (-norm.effective_gain()).sum().backward()  # descent would raise it: dropped
    assert (norm.gain.grad == 0).all()
    optimizer = torch.optim.SGD([norm.gain], 0.2 if norm.variant.scale == "exp" else 1.0)
    for _ in range(20):
        norm.gain.grad = None
        (norm.effective_gain() - 1.0).square().sum().backward()
        optimizer.step()
    torch.testing.assert_close(norm.effective_gain(), torch.ones_like(norm.gain), rtol=0, atol=0.1)


def test_ceiling_is_symmetric_and_optional():
    norm = HeadNorm("qwen3", H, D, max_gain=2.0)
    with torch.no_grad():
        norm.gain.copy_(torch.linspace(-4, 4, D))
    assert norm.effective_gain().abs().max() == 2.0
    probe = torch.ones(D)
    probe[1::2] = -1
    (grad,) = torch.autograd.grad((norm.effective_gain() * probe).sum(), norm.gain)
    outward = ((norm.gain > 2) & (probe < 0)) | ((norm.gain < -2) & (probe > 0))
    torch.testing.assert_close(grad, probe.masked_fill(outward, 0.0))
    norm.max_gain = None
    assert norm.effective_gain() is norm.gain
    assert HeadNorm("swinv2", H, D, max_gain=500.0).max_gain == 100.0
    assert HeadNorm("swinv2", H, D).max_gain == 100.0


def test_ceiling_under_torch_func():
    norm = HeadNorm("l2", H, D, max_gain=2.0)
    state, x = {"gain": torch.full((H,), 5.0)}, torch.randn(3, H, D)

    def loss(params: dict[str, Tensor], row: Tensor) -> Tensor:
        return torch.func.functional_call(norm, params, (row[None],)).square().sum()

    grads = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(state, x)["gain"]
    assert grads.shape == (3, H)
    torch.testing.assert_close(grads, torch.full((3, H), 4.0))


@pytest.mark.parametrize("name", ALL)
def test_ramp(name):
    norm = QKNorm(name, H, G, D, max_gain=5.0, q_factor=3.0)
    randomise(norm)
    for dtype in (torch.float32, torch.bfloat16):
        q, k = torch.randn(3, 4, H, D, dtype=dtype), torch.randn(3, 4, G, D, dtype=dtype)
        q[0, 0] = 0.0
        full = norm(q, k)
        norm.set_ramp(0.0)
        assert all(torch.equal(a, b) for a, b in zip(norm(q, k), (q, k), strict=True))
        extreme = torch.full_like(q, math.inf)
        assert torch.equal(norm.q(extreme), extreme)
        norm.set_ramp(1.0)
        assert all(torch.equal(a, b) for a, b in zip(norm(q, k), full, strict=True))
        norm.set_ramp(0.5)
        between = norm(q, k)
        if norm.variant.norm != "layer" and dtype == torch.float32:
            sizes = (q.norm(dim=-1) * full[0].norm(dim=-1)).sqrt()
            if norm.variant.gain not in ("per_channel", "full_channel"):
                torch.testing.assert_close(between[0].norm(dim=-1), sizes, rtol=1e-5, atol=1e-5)
        norm.set_ramp(None)
        assert all(torch.equal(a, b) for a, b in zip(norm(q, k), full, strict=True))


def test_ramp_passes_negative_gains_and_gradients():
    norm = HeadNorm("qwen3", H, D)
    with torch.no_grad():
        norm.gain.copy_(torch.linspace(-1, 1, D))
        norm.gain[3] = 0.0
    x = torch.randn(2, H, D, requires_grad=True)
    for alpha in (0.0, 0.3, 1.0):
        norm.set_ramp(alpha)
        norm.gain.grad = x.grad = None
        norm(x).square().sum().backward()
        assert norm.gain.grad is not None  # used at any alpha: DDP waits for it
        assert norm.gain.grad.isfinite().all()
        assert x.grad.isfinite().all()
    with pytest.raises(QKWatchError, match=r"\[0, 1\]"):
        norm.set_ramp(1.5)
    assert "ramp" not in norm.state_dict()


@pytest.mark.parametrize("name", ALL)
def test_max_norm_is_a_tight_bound(name):
    norm = QKNorm(name, H, G, D, max_gain=2.0, q_factor=3.0)
    randomise(norm, -2.0, 2.0)
    worst = norm.q.max_norm()
    x = torch.randn(500, H, D)
    assert (norm.q(x).norm(dim=-1).amax(0) <= worst * (1 + 1e-5)).all()
    if norm.variant.norm != "layer":  # a vector along the head's strongest channel alone
        gain = norm.q._multiplier(torch.float32)
        channel = torch.ones(H, D) if gain is None else gain.detach().abs().expand(H, D)
        for head in range(H):
            x = torch.zeros(1, H, D)
            x[0, head, channel[head].argmax()] = 100.0
            torch.testing.assert_close(norm.q(x)[0, head].norm(), worst[head], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ALL)
def test_compile_and_export(name):
    norm = randomise(QKNorm(name, H, G, D, max_gain=2.0))
    q, k = torch.randn(2, 3, H, D, requires_grad=True), torch.randn(2, 3, G, D)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(norm, backend=counter, fullgraph=True)
    for alpha in (None, 0.25, 0.5, 0.75):
        norm.set_ramp(alpha)
        parameters = [q, *norm.parameters()]
        for got, want in zip(compiled(q, k), norm(q, k), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
        grads = [
            torch.autograd.grad(f(q, k)[0].square().sum(), parameters, allow_unused=True) for f in (compiled, norm)
        ]
        for got, want in zip(*grads, strict=True):
            if want is not None and got is not None:
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert counter.frame_count <= 2  # once plain, once with a ramp, whatever its value
    norm.set_ramp(None)
    exported = torch.export.export(norm, (q.detach(), k))
    for got, want in zip(exported.module()(q, k), norm(q, k), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def test_plan_travels_with_the_state():
    norm, other = QKNorm("qwen3", H, G, D), QKNorm("qwen3", H, G, D)
    assert norm.get_plan() == {}
    plan = {"site": "größe.0", "gains": [1.0, 2.5], "nested": {"a": None}}
    norm.set_plan(plan)
    assert norm.plan.dtype == torch.uint8
    assert bytes(norm.plan.tolist()).decode() == json.dumps(plan, separators=(",", ":"))
    other.load_state_dict(norm.state_dict())
    for twin in (other, copy.deepcopy(norm), pickle.loads(pickle.dumps(norm)), norm.to(torch.bfloat16)):
        assert twin.get_plan() == plan
        assert QKNorm.decode_plan(twin.state_dict()["plan"]) == plan
    buffer = io.BytesIO()
    torch.save(norm.state_dict(), buffer)
    buffer.seek(0)
    assert QKNorm.decode_plan(torch.load(buffer, weights_only=True)["plan"]) == plan
    other.load_state_dict(QKNorm("qwen3", H, G, D).state_dict())
    assert other.get_plan() == {}
    with pytest.raises(QKWatchError, match="JSON-able"):
        norm.set_plan({"a": torch.ones(1)})
    wrong_bytes = [torch.tensor(data, dtype=torch.uint8) for data in ([[1]], [65], [49], [255])]
    for broken in (torch.ones(2), *wrong_bytes):
        with pytest.raises(QKWatchError):
            QKNorm.decode_plan(broken)


def test_plan_survives_safetensors(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    norm = QKNorm("cohere", H, G, D)
    for plan in ({}, {"site": "a"}):
        norm.set_plan(plan)
        safetensors.save_file(norm.state_dict(), tmp_path / "x.safetensors")
        assert QKNorm.decode_plan(safetensors.load_file(tmp_path / "x.safetensors")["plan"]) == plan


def test_plan_survives_weight_averaging():
    """Averages over buffers truncate bytes (122.99 -> 122): the saved plan must not come from the buffer."""
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    norm = QKNorm("qwen3", H, G, D)
    norm.set_plan({"site": "layers.0.attn"})
    average = AveragedModel(norm, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    for _ in range(50):
        average.update_parameters(norm)
    assert bytes(average.module.plan.tolist()) != bytes(norm.plan.tolist())
    assert average.module.get_plan() == {"site": "layers.0.attn"}
    assert QKNorm.decode_plan(average.state_dict()["module.plan"]) == {"site": "layers.0.attn"}


def test_meta_device():
    norm = QKNorm("chameleon", H, G, D, device="meta")
    norm.set_plan({"site": "a"})
    assert norm.q.gain.is_meta
    norm.to_empty(device="cpu")
    norm.q.reset_parameters()
    norm.k.reset_parameters()
    assert (norm.q.gain == 1).all()
    assert (norm.k.bias == 0).all()
    assert norm.get_plan() == {"site": "a"}
    with torch.device("meta"):
        assigned = QKNorm("chameleon", H, G, D)
    assigned.load_state_dict(norm.state_dict(), assign=True)
    assert assigned.get_plan() == {"site": "a"}
    assert assigned.q.gain.device.type == "cpu"


def logits_of(norm: QKNorm, q: Tensor, k: Tensor, scale: float) -> Tensor:
    hat_q, hat_k = norm(q, k)
    hat_k = hat_k.repeat_interleave(hat_q.shape[-2] // hat_k.shape[-2], dim=-2)
    return torch.einsum("blhd,bshd->bhls", hat_q, hat_k) * scale


def calibrated(name: str, q: Tensor, k: Tensor, scale: float, cap: float) -> tuple[QKNorm, Tensor]:
    """The calibrated norm and the old largest logits (H,)."""
    heads, groups = q.shape[-2], k.shape[-2]
    wide = k.repeat_interleave(heads // groups, dim=-2)
    largest = (torch.einsum("blhd,bshd->bhls", q, wide) * scale).abs().amax((0, 2, 3))
    q_rms, k_rms = (t.pow(2).mean(-1).sqrt().mean((0, 1)) for t in (q, k))
    factor = 1 / scale if get_variant(name).scale != "keep" else 1.0
    norm = QKNorm(name, heads, groups, D, max_gain=None, q_factor=factor)
    norm.set_gains(calibrated_gains(name, q_rms, k_rms, largest, D, scale, cap))
    return norm, largest


@pytest.mark.parametrize("name", [n for n in ALL if n != "llama4"])
@pytest.mark.parametrize("cap", [4.0, 20.0])
def test_raised_gains_lie_between_the_start_and_the_cap(name, cap):
    """Heads that are all small, or all large; what they may reach is the variant's own start, or the cap."""
    scale, variant, one = D**-0.5, PRESETS[name], torch.ones(H)
    start = variant.start_bound(D, scale)
    for size, expected in ((0.05, min(start, cap)), (50.0, cap)):
        gains = calibrated_gains(name, size * one, one, size * one, D, scale, cap, floor=start)
        norm = QKNorm(name, H, H, D, max_gain=None, q_factor=1.0 if variant.scale == "keep" else 1 / scale)
        norm.set_gains(gains)
        q = torch.randn(1, 3, 1, D).expand(1, 3, H, D) * 1e3  # all heads alike: so are norms over all of them
        largest = logits_of(norm, q, q, scale).abs().max()
        torch.testing.assert_close(
            largest, torch.tensor(expected), rtol=1e-2 if variant.norm == "layer" else 1e-4, atol=0
        )
    middle = 0.5 * (start + cap) / (scale * D) if start < cap else None
    if middle is not None:  # between the two nothing is raised, and nothing cut
        figures = name, middle * one, one, one, D, scale, cap
        plain, raised = calibrated_gains(*figures), calibrated_gains(*figures, floor=start)
        assert all(torch.equal(plain[key], raised[key]) for key in plain)


@pytest.mark.parametrize("name", [n for n in ALL if n != "llama4"])
@pytest.mark.parametrize("heads", [(H, H), (H, G), (H, 1)])
def test_calibration_caps_saturated_heads(name, heads):
    """Keys and queries large and aligned: every head starts at or under the cap, and not far under it."""
    torch.manual_seed(0)
    direction = torch.randn(D)
    q = torch.randn(2, 9, heads[0], D) + 4 * direction
    k = torch.randn(2, 9, heads[1], D) + 4 * direction
    norm, largest = calibrated(name, q, k, D**-0.5, cap=20.0)
    assert (largest > 60).all()
    after = logits_of(norm, q, k, D**-0.5).abs().amax((0, 2, 3))
    assert (after <= 20.0 * 1.05).all(), after  # "full" and bias-free layer norms bind the mean token
    if get_variant(name).norm != "layer":  # a layer norm removes the common part of these vectors
        assert (after >= 10.0).all(), after


@pytest.mark.parametrize(
    "name", [n for n in ALL if PRESETS[n].gain in ("per_head", "per_head_channel", "full_channel")]
)
def test_calibration_keeps_a_healthy_function(name):
    """Heads of different sizes under the cap: the logits stay."""
    torch.manual_seed(0)
    sizes = torch.linspace(0.5, 1.5, H)[:, None]
    q, k = (
        F.normalize(torch.randn(2, 9, H, D), dim=-1) * sizes * 4,
        F.normalize(torch.randn(2, 9, H, D), dim=-1) * 4,
    )
    norm, largest = calibrated(name, q, k, D**-0.5, cap=20.0)
    assert (largest < 20).all()
    before = torch.einsum("blhd,bshd->bhls", q, k) * D**-0.5
    difference = (logits_of(norm, q, k, D**-0.5) - before).norm() / before.norm()
    assert difference < {"rms": 0.02, "l2": 1e-5, "layer": 0.5}[PRESETS[name].norm]


def test_calibration_by_hand():
    one = torch.ones(2)
    rms, largest = torch.tensor([1.0, 10.0]), torch.tensor([5.0, 400.0])
    # g0 = .25 * 16 * q_rms * 1 = 4, 40; shares 1, 20/40
    assert calibrated_gains("l2", rms, one, largest, 16, 0.25)["q.gain"].tolist() == [4.0, 20.0]
    # long but nearly orthogonal vectors: the gain still starts at the cap, in whatever shape
    for name in ("l2", "cohere"):
        gains = calibrated_gains(name, 10 * one, one, 5 * one, 16, 0.25)
        product = gains["q.gain"] * 4 * gains["k.gain"] if name == "cohere" else gains["q.gain"]
        torch.testing.assert_close(product, torch.full_like(product, 20.0))
    swin = calibrated_gains("swinv2", rms, one, largest, 16, -0.25)["q.gain"]
    torch.testing.assert_close(swin.exp(), torch.tensor([4.0, 20.0]))
    torch.testing.assert_close(
        calibrated_gains("henry", rms, one, largest, 16, 0.25)["q.gain"], torch.tensor([80.0**0.5])
    )
    cohere = calibrated_gains("cohere", rms, one, largest, 16, 0.25)
    torch.testing.assert_close(cohere["q.gain"][:, 0], torch.tensor([1.0, 10 * 0.5**0.5]))
    torch.testing.assert_close(cohere["k.gain"][:, 0], torch.tensor([1.0, 0.5**0.5]))
    shared = calibrated_gains("cohere", rms, one, largest, 16, 0.25, k_heads=1)
    torch.testing.assert_close(shared["k.gain"], torch.full((1, 16), 0.5**0.5))
    gemma, qwen = (calibrated_gains(n, rms, one, largest, 16, 0.25) for n in ("gemma3", "qwen3"))
    torch.testing.assert_close(gemma["q.gain"] + 1, qwen["q.gain"])
    # over all heads one may keep more than its share of the length: there the largest logit counts too
    olmo = calibrated_gains("olmo2", rms, one, largest, 16, 0.25)
    mean = torch.tensor(101 / 2).sqrt()
    torch.testing.assert_close(olmo["q.gain"].view(2, 16)[:, 0], mean * torch.tensor([1.0, 0.05]).sqrt())
    assert calibrated_gains("llama4", rms, one, largest, 16, 0.25) == {}


@pytest.mark.parametrize("name", [n for n in ALL if n != "llama4"])
def test_calibration_of_broken_figures_is_finite(name):
    bad = torch.tensor([0.0, math.inf, math.nan, 1.0])
    for figures in (
        (bad, torch.ones(4), torch.ones(4)),
        (torch.ones(4), bad, torch.ones(4)),
        (torch.ones(4), torch.ones(4), bad),
    ):
        gains = calibrated_gains(name, *figures, D, D**-0.5)
        for key, value in gains.items():
            assert value.isfinite().all(), key
        norm = QKNorm(name, 4, 4, D, max_gain=None)
        norm.set_gains(gains)
        effective = norm.q.effective_gain() * (1 if norm.k.gain is None else norm.k.effective_gain())
        width = 1.0 if norm.variant.scale != "keep" else D**0.5
        assert (effective * width <= 20.0 * 1.001).all()
        assert (effective > 0).all()


def test_calibration_refuses():
    one = torch.ones(4)
    with pytest.raises(QKWatchError, match="cap"):
        calibrated_gains("l2", one, one, one, D, 1.0, cap=0.0)
    with pytest.raises(QKWatchError, match="cannot share"):
        calibrated_gains("l2", one, torch.ones(3), one, D, 1.0)
    with pytest.raises(QKWatchError, match=r"it has \{'q.gain': \(6,\)\}"):
        QKNorm("l2", H, G, D).set_gains({"k.gain": torch.ones(G)})
    norm = QKNorm("l2", H, G, D, dtype=torch.bfloat16)
    gain = norm.q.gain
    norm.set_gains({"q.gain": torch.full((H,), 3.0)})
    assert norm.q.gain is gain
    assert gain.dtype == torch.bfloat16
    assert (gain == 3).all()


@pytest.mark.parametrize("name", [n for n in ALL if PRESETS[n].axis == "head" and n not in ("llama4", "chameleon")])
def test_max_gain_bounds_the_logits(name):
    """Gains far above the ceiling, vectors chosen to align: |logit| comes near the bound and never passes it."""
    scale, limit, variant = D**-0.5, 7.0, PRESETS[name]
    kept = scale * (1 if variant.norm == "l2" else D) * limit ** (1 if variant.side == "q" else 2)
    bound = limit if variant.scale != "keep" else kept
    norm = QKNorm(name, H, G, D, max_gain=limit, q_factor=1.0 if variant.scale == "keep" else 1 / scale)
    randomise(norm, 200.0, 300.0)
    q = torch.randn(2, 9, H, D) * 1e3
    k = q[..., :G, :]
    largest = logits_of(norm, q, torch.cat([k, torch.randn_like(k)], 1), scale).abs().max()
    assert 0.5 * bound < largest <= bound * (1 + 1e-5)


OWN = [Variant("unit", norm="l2", start=3.0), Variant("one side", side="q", start=3.0)]


@pytest.mark.parametrize("variant", [*(v for v in PRESETS.values() if v.axis == "head"), *OWN], ids=lambda v: v.name)
@pytest.mark.parametrize("scale", [D**-0.5, 1.0], ids=str)
def test_an_uncalibrated_start_is_bounded(variant, scale):
    """Vectors chosen to align: |logit| comes near what `start_bound` says and never passes it."""
    bound = variant.start_bound(D, scale)
    norm = QKNorm(variant, H, G, D, q_factor=1.0 if variant.scale == "keep" else 1 / scale)
    q = torch.randn(2, 9, H, D) * 1e3
    largest = logits_of(norm, q, q[..., :G, :], scale).abs().max()
    assert 0.9 * bound < largest <= bound * (1 + 1e-5)


def test_axis_full_differs_from_per_head():
    x = torch.randn(3, H, D) * torch.linspace(0.1, 3, H)[:, None]
    full = HeadNorm("olmo2", H, D)(x).pow(2).mean(-1)
    assert full.amax() > 2 * full.amin()
    torch.testing.assert_close(full.mean(-1), torch.ones(3), rtol=0, atol=1e-3)
    layer = HeadNorm(replace(get_variant("olmo2"), name="f", norm="layer"), H, D)(x)
    torch.testing.assert_close(layer.flatten(-2), F.layer_norm(x.flatten(-2), (H * D,), eps=1e-6))
