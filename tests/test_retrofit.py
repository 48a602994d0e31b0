"""retrofit_, undo_, restore_ and plans: the promise holds, the rest stays, and every way back leads back."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from families import FAMILIES, TEXT, TinyGPT, first_tensor, hf, llama, token_ids, x_transformer
from test_sites import assert_no_trace, snapshot
from torch import Tensor, nn

import qkwatch
import qkwatch.retrofit as retrofit_module
from qkwatch.errors import QKWatchError
from qkwatch.modules import named_modules
from qkwatch.norms import QKNorm
from qkwatch.plan import RetrofitPlan
from qkwatch.probe import Refusal
from qkwatch.variants import PRESETS

pytestmark = pytest.mark.filterwarnings("ignore:.*(nested tensors|torch.jit.script|PyTorch API of nested).*")
# fused, separate, grouped, one key head, rotary, multi-head module, cross-attention, relative bias, convolution, ...
KINDS = [
    "tiny-flash",
    "tiny-eager",
    "llama-sdpa",
    "gpt2-eager",
    "neox-sdpa",
    "falcon-eager",
    "falcon-grouped-sdpa",
    "t5-eager",
    "whisper-sdpa",
    "swin-eager",
    "bert-sdpa",
    "mha",
    "mha-cross-quiet",
    "encoder-padded",
    "decoder",
    "conv",
    "timm-vit",
    "timm-swin",
    "x-transformers-flash",
    "vit-pytorch",
]


def make(name: str, training: bool = False) -> tuple[nn.Module, tuple, dict]:
    family = FAMILIES[name]
    return family.build().train(training), family.args(), family.kwargs()


@torch.no_grad()
def output(model: nn.Module, args: tuple, kwargs: dict) -> Tensor:
    torch.manual_seed(5)
    return first_tensor(model(*args, **kwargs)).clone()


def patched(name: str, **options: Any) -> tuple[nn.Module, tuple, dict, Any]:
    model, args, kwargs = make(name)
    report = qkwatch.retrofit_(model, qkwatch.find_sites(model, *args, **kwargs), **options)
    assert not report.refused, report.refused
    return model, args, kwargs, report


@torch.no_grad()
def grow_(model: nn.Module, factor: float) -> None:
    """All projections of all sites, as if training had blown them up."""
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention):
            parameters = [module.in_proj_weight, module.in_proj_bias]
        elif hasattr(module, "_qkwatch_parts"):
            parameters = list(module.parameters(recurse=False))
        else:
            continue
        for parameter in parameters:
            parameter.mul_(factor)


def readings(model: nn.Module, sites: list, args: tuple, kwargs: dict) -> list[Any]:
    with torch.no_grad(), qkwatch.watch(model, sites) as watcher:
        model(*args, **kwargs)
    return watcher.readings


# -- the promise ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
def test_logits_stay_under_the_gain_however_the_projections_grow(name):
    model, args, kwargs = make(name)
    before = {key: (id(p), p.detach().clone()) for key, p in model.named_parameters()}
    keys = list(model.state_dict())
    plain = output(model, args, kwargs)
    sites = qkwatch.find_sites(model, *args, **kwargs)

    report = qkwatch.retrofit_(model, sites, cap=20.0)

    assert report.applied == [site.name for site in sites]
    assert not report.refused
    for site in sites:
        norm = model.get_submodule(site.name).qk_norm
        gain = norm.q.effective_gain()
        assert gain.shape == (site.q_heads,)
        assert bool((gain > 0).all())
        assert bool((gain <= 20.0 * 1.0001).all())
        assert norm.k.gain is None
        assert 0 <= report.drift[site.name] < 2
    # parameters: same objects, names and values; new keys only under qk_norm
    after = dict(model.named_parameters())
    for key, (identity, value) in before.items():
        assert id(after[key]) == identity
        assert torch.equal(after[key], value)
    new = [key for key in model.state_dict() if key not in keys]
    assert [key for key in model.state_dict() if key in keys] == keys
    assert sorted(new) == sorted(
        f"{site.name}.qk_norm.{part}".lstrip(".") for site in sites for part in ("q.gain", "plan")
    )
    assert sorted(k for k in after if k not in before) == sorted(k for k in new if k.endswith("gain"))

    for factor in (1.0, 1000.0):
        grow_(model, factor)
        for reading in readings(model, sites, args, kwargs):
            norm = model.get_submodule(reading.site).qk_norm
            allowed = norm.q.effective_gain() * 1.0001
            if reading.bias_max is not None:  # relative and linear biases are added behind the norm
                allowed = allowed + reading.bias_max * 1.001  # the largest of several that are added
            assert bool((reading.max_logit <= allowed).all()), (reading.site, factor)
    grow_(model, 1 / 1000)

    assert qkwatch.undo_(model) == report.applied
    assert list(model.state_dict()) == keys
    with torch.no_grad():
        for key, p in model.named_parameters():
            p.copy_(before[key][1])
    assert torch.equal(output(model, args, kwargs), plain)
    assert_no_trace(model)


@pytest.mark.parametrize("variant", sorted(PRESETS))
@pytest.mark.parametrize("name", ["llama-sdpa", "gpt2-eager", "mha", "neox-sdpa", "falcon-sdpa"])
def test_every_variant_goes_in_and_out(name, variant):
    model, args, kwargs = make(name)
    plain, state = output(model, args, kwargs), copy.deepcopy(model.state_dict())
    sites = qkwatch.find_sites(model, *args, **kwargs)
    report = qkwatch.retrofit_(model, sites, variant=variant)
    assert not report.refused, report.refused
    normed = output(model, args, kwargs)
    assert bool(torch.isfinite(normed).all())
    assert not torch.equal(normed, plain)
    lengths = readings(model, sites, args, kwargs)
    grow_(model, 1000.0)
    for a, b in zip(lengths, readings(model, sites, args, kwargs), strict=True):
        if variant != "olmo2" and PRESETS[variant].norm != "layer":
            torch.testing.assert_close(a.q_rms, b.q_rms, rtol=2e-2, atol=1e-6)
        assert bool((b.max_logit < 1e3).all())
    qkwatch.undo_(model)
    model.load_state_dict(state)
    assert torch.equal(output(model, args, kwargs), plain)


def test_calibration_follows_the_cap():
    """Logits far above the cap start at it; logits below it keep their size, and the drift says what it cost."""
    drifts = []
    for factor in (1.0, 8.0):
        model = TinyGPT(True, dropout=0.0).eval()
        with torch.no_grad():
            for block in model.h:
                block.attn.qkv.weight[:64].mul_(factor)
        ids = token_ids()
        sites = qkwatch.find_sites(model, ids)
        report = qkwatch.retrofit_(model, sites, cap=5.0)
        for site in sites:
            gain = model.get_submodule(site.name).qk_norm.q.effective_gain().detach()
            typical = site.reading.q_rms * site.reading.k_rms * site.head_dim**0.5
            torch.testing.assert_close(gain, typical.clamp_max(5.0), rtol=1e-3, atol=1e-5)
        for reading in readings(model, sites, (ids,), {}):
            assert bool((reading.max_logit <= 5.0 * 1.0001).all())
        drifts.append(max(report.drift.values()))
    assert drifts[0] < 0.4 < drifts[1]


def test_drift_is_the_change_of_the_sites_own_output():
    model, args, _ = make("tiny-flash")
    sites = qkwatch.find_sites(model, *args)
    kept: list[Tensor] = []
    with torch.no_grad():
        inputs = model.h[0].ln(model.wte(*args))
        kept.append(model.h[0].attn(inputs))
        report = qkwatch.retrofit_(model, sites)
        kept.append(model.h[0].attn(inputs))
    expected = float((kept[1] - kept[0]).norm() / kept[0].norm())
    assert report.drift["h.0.attn"] == pytest.approx(expected, rel=1e-4)
    assert expected > 0


@pytest.mark.parametrize(
    ("variant", "starts"),
    [("l2", {"q.gain": 10.0}), ("qwen3", {"q.gain": 1.0, "k.gain": 1.0}), ("gemma3", {"q.gain": 0.0, "k.gain": 0.0}),
     ("chameleon", {"q.gain": 1.0, "k.gain": 1.0, "q.bias": 0.0, "k.bias": 0.0}), ("swinv2", {"q.gain": 2.302585}),
     ("llama4", {})],
)  # fmt: skip
def test_without_calibration_gains_start_as_the_system_starts_them(variant, starts):
    model, *_ = patched("llama-sdpa", variant=variant, calibrate=False)
    norm = model.model.layers[0].self_attn.qk_norm
    own = dict(norm.named_parameters())
    assert sorted(own) == sorted(starts)
    for key, value in starts.items():
        torch.testing.assert_close(own[key], torch.full_like(own[key], value))


@pytest.mark.parametrize("variant", ["l2", "henry", "swinv2"])
@pytest.mark.parametrize(
    ("name", "scale"),
    [
        ("llama-sdpa", 8**-0.5),  # at the softmax
        ("bert-eager", 8**-0.5),
        ("gpt2-eager", 8**-0.5),
        ("t5-eager", 1.0),  # none at all
        ("whisper-eager", 1.0),  # on the queries, before the product
        ("timm-swin", 1.0),
        ("mha", 1.0),
    ],
)
def test_gains_in_logit_units_replace_the_true_scale(name, scale, variant):
    """Wherever a model scales, |q| |k| scale at its softmax is the gain, so that the gain is in logit units."""
    model, args, kwargs, _ = patched(name, variant=variant, calibrate=False)
    sites = qkwatch.find_sites(model, *args, **kwargs)
    with torch.no_grad():
        for site in sites:
            norm = model.get_submodule(site.name).qk_norm
            norm.q.gain.copy_(norm.variant.stored(torch.full_like(norm.q.gain, 30.0)))
    for reading in readings(model, sites, args, kwargs):
        bias = 0.0 if reading.bias_max is None else float(reading.bias_max.max())
        assert 3.0 < float(reading.max_logit.max()) <= 30.0 * 1.0001 + bias * 1.001
        head_dim = model.get_submodule(reading.site).qk_norm.q.head_dim
        size = reading.q_rms * reading.k_rms * head_dim * scale
        torch.testing.assert_close(size, torch.full_like(size, 30.0), rtol=1e-4, atol=0)


def test_a_learned_gain_never_passes_max_gain_and_can_come_back():
    model = TinyGPT(True, dropout=0.0)
    ids = token_ids()
    sites = qkwatch.find_sites(model, ids)
    qkwatch.retrofit_(model, sites, max_gain=15.0)
    norm = model.h[0].attn.qk_norm
    optimizer = torch.optim.SGD([norm.q.gain], lr=3.0)

    def step(direction: float) -> Tensor:
        """Raise (or lower) the largest logits, through the model's own attention."""
        optimizer.zero_grad()
        unit = F.normalize(torch.randn(3, 4, 8), dim=-1)
        (-direction * norm.q(unit).norm(dim=-1).mean() / norm.q.factor * 4).backward()
        optimizer.step()
        return norm.q.effective_gain().detach()

    for _ in range(100):
        gain = step(1.0)
        assert bool((gain <= 15.0).all())
    assert bool((gain == 15.0).all())
    for reading in readings(model, sites, (ids,), {}):
        assert bool((reading.max_logit <= 15.0 * 1.0001).all())
    at_once = step(-1.0)
    for _ in range(20):
        at_once = step(-1.0)
    assert bool((at_once < 14.0).all())


def test_max_gain_none_sets_no_ceiling():
    model, *_ = patched("tiny-flash", max_gain=None)
    norm = model.h[0].attn.qk_norm
    with torch.no_grad():
        norm.q.gain.fill_(1e6)
    assert bool((norm.q.effective_gain() == 1e6).all())


# -- refusals -------------------------------------------------------------------------------------------------


class Half(nn.Module):
    """One block that can be patched, one whose keys are no module's output."""

    def __init__(self):
        super().__init__()
        self.good = TinyGPT().h[0].attn
        self.q, self.memory = nn.Linear(32, 32), nn.Parameter(torch.randn(9, 32))

    def forward(self, x):
        x = self.good(x)
        return (self.q(x) @ self.memory.T * 32**-0.5).softmax(-1) @ self.memory


@pytest.mark.parametrize("kind", ["normed", "memory", "shared", "own"])
def test_refused_sites_are_left_exactly_as_they_were(kind):
    if kind == "normed":
        options = {**TEXT, "num_hidden_layers": 1, "num_key_value_heads": 2, "head_dim": 8}
        model: nn.Module = hf("Qwen3ForCausalLM", "Qwen3Config", **options)
        args: tuple = (token_ids(),)
    elif kind == "memory":
        model, args = Half(), (torch.randn(2, 5, 32),)
    elif kind == "shared":
        model, args = TinyGPT(), (token_ids(),)
        model.h[1].attn.qkv = model.h[0].attn.qkv
    else:
        model, args = TinyGPT(layers=1), (token_ids(),)
        model.h[0].attn.qk_norm = nn.LayerNorm(8)  # unused, but the name is taken
    sites = qkwatch.find_sites(model, *args)
    before = snapshot(model)
    good = [site.name for site in sites if site.name == "good"]
    report = qkwatch.retrofit_(model, sites)
    assert report.applied == good
    assert set(report.refused) == {site.name for site in sites} - set(good)
    assert all(len(reason) > 10 for reason in report.refused.values())
    qkwatch.undo_(model)
    after = snapshot(model)
    assert {k: v for k, v in after.items() if k not in ("state", "buffers", "rng")} == {
        k: v for k, v in before.items() if k not in ("state", "buffers", "rng")
    }
    assert all(torch.equal(value, after["state"][key]) for key, value in before["state"].items())


class Between(nn.Module):
    """Attention that does something to its queries and keys between projection and softmax."""

    def __init__(self, what: str):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(32, 32) for _ in range(3))
        self.what, self.u = what, nn.Parameter(torch.randn(4, 1, 8))
        self.mix = nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        q, k, v = (p(x).unflatten(-1, (4, 8)).transpose(1, 2) for p in (self.q, self.k, self.v))
        t = x.shape[1]
        q = {
            "nothing": lambda: q,
            "rotation": lambda: torch.cat([q[..., 4:], -q[..., :4]], -1),
            "scale": lambda: q * 3.0,
            "position bias": lambda: q + self.u,
            "temperature": lambda: q * torch.arange(1, t + 1)[:, None].log1p(),
            "mixing": lambda: q @ self.mix,
            "half": lambda: torch.cat([q[..., :4], self.u[..., :4].expand(len(x), 4, t, 4)], -1),
            "activation": lambda: q.relu(),
            "softcap": lambda: q,
        }[self.what]()
        logits = q @ k.transpose(-1, -2) * 8**-0.5
        if self.what == "softcap":
            logits = 2.0 * (logits / 2.0).tanh()
        return (logits.softmax(-1) @ v).transpose(1, 2).flatten(-2)


@pytest.mark.parametrize(
    ("what", "fits"),
    [
        ("nothing", True),
        ("rotation", True),
        ("scale", True),
        ("position bias", True),  # with a note
        ("temperature", False),
        ("mixing", False),
        ("half", False),
        ("activation", False),
        ("softcap", True),  # it only bounds the logits further
    ],
)
def test_where_a_norm_at_the_projection_would_not_bound_the_logits_there_is_no_patch(what, fits):
    model, x = Between(what), torch.randn(2, 9, 32)
    with torch.no_grad():
        model.q.weight.mul_(5)
    before, plain = snapshot(model), model(x)
    sites = qkwatch.find_sites(model, x)
    report = qkwatch.retrofit_(model, sites)
    assert bool(report.applied) == fits, report.refused
    assert bool(report.notes) == (what == "position bias")
    if fits and not report.notes:
        (reading,) = readings(model, sites, (x,), {})
        assert bool((reading.max_logit <= model.qk_norm.q.effective_gain() * 1.0001).all())
    elif not fits:
        (reason,) = report.refused.values()
        assert any(word in reason for word in ("queries", "logits")), reason
    qkwatch.undo_(model)
    after = snapshot(model)
    for key in ("identity", "classes", "attributes"):
        assert before[key] == after[key]
    assert torch.equal(model(x), plain)


def test_a_patched_model_is_not_patched_twice():
    model, args, kwargs, _ = patched("gpt2-sdpa")
    sites = qkwatch.find_sites(model, *args, **kwargs)
    expected = output(model, args, kwargs)
    report = qkwatch.retrofit_(model, sites)
    assert report.applied == []
    assert len(report.refused) == 2
    assert torch.equal(output(model, args, kwargs), expected)


@pytest.mark.parametrize("fault", [RuntimeError("midway"), Refusal("midway"), KeyboardInterrupt("midway")])
@pytest.mark.parametrize("step", ["_run_grown", "_check_bound", "calibrated_gains"])
@pytest.mark.parametrize("name", ["llama-sdpa", "encoder", "gpt2-eager"])
def test_a_failing_verification_leaves_the_model_as_it_was(name, step, fault, monkeypatch):
    import qkwatch.verify as verify

    model, args, kwargs = make(name)
    sites = qkwatch.find_sites(model, *args, **kwargs)
    before, expected = snapshot(model), output(model, args, kwargs)
    original, calls = getattr(verify, step), []

    def second_site_fails(*args: Any, **kwargs: Any) -> Any:
        calls.append(step)
        if len(calls) > (2 if step == "_run_grown" else 1):
            raise fault
        return original(*args, **kwargs)

    monkeypatch.setattr(verify, step, second_site_fails)
    if isinstance(fault, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            qkwatch.retrofit_(model, sites)
    else:
        report = qkwatch.retrofit_(model, sites)
        assert report.applied == [sites[0].name]
        assert "midway" in report.refused[sites[1].name]
        assert "qk_norm" not in sites[1].module._modules
        qkwatch.undo_(model)
    after = snapshot(model)
    for key in ("identity", "classes", "attributes", "training", "requires_grad", "grads"):
        assert before[key] == after[key], key
    assert list(before["state"]) == list(after["state"])
    assert torch.equal(output(model, args, kwargs), expected)
    assert_no_trace(model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"variant": "l3"}, "unknown variant 'l3'.*'l2'"),
        ({"cap": 0.0}, "cap must be a positive, finite number"),
        ({"cap": float("nan")}, "cap must be a positive, finite number"),
        ({"cap": float("inf")}, "cap must be a positive, finite number"),
        ({"max_gain": -1.0}, "max_gain must be a positive number"),
        ({"cap": "20"}, "cap must be a positive, finite number, got '20'"),
        ({"max_gain": "20"}, "max_gain must be a positive number or None, got '20'"),
        ({"calibrate": "no"}, "unknown calibrate 'no'.*'raised'"),
    ],
)
def test_bad_options_are_errors_before_anything_is_touched(options, message):
    model, args, _ = make("tiny-flash")
    sites = qkwatch.find_sites(model, *args)
    before = snapshot(model)
    with pytest.raises(QKWatchError, match=message):
        qkwatch.retrofit_(model, sites, **options)
    assert snapshot(model)["classes"] == before["classes"]
    for wrong in (None, args[0]):
        with pytest.raises(QKWatchError, match="find_sites"):
            qkwatch.retrofit_(model, wrong)


def test_gains_start_at_their_ceiling_at_most():
    """Stored above it they would have a way to go before they move."""
    model, args, _ = make("tiny-flash")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(30.0)
    sites = qkwatch.find_sites(model, *args)
    for name in qkwatch.retrofit_(model, sites, cap=500.0, max_gain=50.0).applied:
        gain = model.get_submodule(name).qk_norm.q.gain
        torch.testing.assert_close(gain, torch.full_like(gain, 50.0))


def test_henry_starts_by_the_length_of_the_keys():
    model, args, _ = make("tiny-flash")
    report = qkwatch.retrofit_(model, qkwatch.find_sites(model, *args), variant="henry", calibrate=False)
    length = args[0].shape[1]
    for site in report.plan.sites:
        gain = model.get_submodule(site.site).qk_norm.q.gain
        torch.testing.assert_close(gain, torch.full_like(gain, math.log2(length**2 - length)))
        assert site.gains == {"q.gain": gain.tolist()}


def test_sites_of_another_model_are_refused():
    model, args, _ = make("tiny-flash")
    twin = copy.deepcopy(model)
    report = qkwatch.retrofit_(twin, qkwatch.find_sites(model, *args))
    assert report.applied == []
    assert all("not a module of this model" in reason for reason in report.refused.values())


def test_sites_found_in_a_part_of_the_model():
    whole = nn.ModuleDict({"gpt": TinyGPT()})
    report = qkwatch.retrofit_(whole, qkwatch.find_sites(whole["gpt"], token_ids()))
    assert report.applied == ["gpt.h.0.attn", "gpt.h.1.attn"]
    assert qkwatch.undo_(whole) == report.applied


def test_a_setting_called_qk_norm_is_kept_and_given_back():
    """x-transformers keeps a flag of that name on its attention modules, and reads it in the forward."""
    model, ids = x_transformer().eval(), token_ids()
    attn = model.attn_layers.layers[0][1]
    assert attn.qk_norm is False
    plain = output(model, (ids,), {})
    report = qkwatch.retrofit_(model, qkwatch.find_sites(model, ids))
    assert len(report.applied) == 2
    assert not attn.qk_norm  # its own forward still reads "off"
    assert attn.qk_norm.q.gain.shape == (4,)
    twin = copy.deepcopy(model)
    assert torch.equal(output(twin, (ids,), {}), output(model, (ids,), {}))
    for patched_model in (model, twin):
        qkwatch.undo_(patched_model)
        assert patched_model.attn_layers.layers[0][1].qk_norm is False
        assert torch.equal(output(patched_model, (ids,), {}), plain)


@pytest.mark.parametrize("value", [None, False, 0])
def test_a_plain_attribute_of_that_name_comes_back(value):
    model, args, _ = make("tiny-flash")
    model.h[0].attn.qk_norm = value
    qkwatch.retrofit_(model, qkwatch.find_sites(model, *args))
    assert model.h[0].attn.qk_norm.q.gain is not None
    qkwatch.undo_(model)
    assert vars(model.h[0].attn)["qk_norm"] is value


def test_a_class_attribute_of_that_name_is_refused():
    class Own(type(TinyGPT().h[0].attn)):  # type: ignore[misc]
        qk_norm = False

    model, args, _ = make("tiny-flash")
    model.h[0].attn.__class__ = Own
    report = qkwatch.retrofit_(model, qkwatch.find_sites(model, *args))
    assert report.applied == ["h.1.attn"]
    assert "class" in report.refused["h.0.attn"]


# -- plans and checkpoints ------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["l2", "chameleon", "olmo2", "swinv2"])
@pytest.mark.parametrize("name", ["llama-sdpa", "gpt2-eager", "encoder", "conv", "x-transformers", "t5-sdpa"])
def test_a_plan_makes_the_same_model_again(name, variant):
    model, args, kwargs = make(name)
    fresh = copy.deepcopy(model)
    report = qkwatch.retrofit_(model, qkwatch.find_sites(model, *args, **kwargs), variant=variant)
    if name == "conv" and report.refused:
        pytest.skip(str(report.refused))
    assert report.applied
    data = json.loads(json.dumps(report.plan.to_dict()))
    assert RetrofitPlan.from_dict(data) == report.plan
    again = qkwatch.retrofit_(fresh, plan=data)
    assert again.applied == report.applied
    assert again.drift == {}
    assert torch.equal(output(fresh, args, kwargs), output(model, args, kwargs))
    assert fresh.state_dict().keys() == model.state_dict().keys()


def _train_gains_(model: nn.Module) -> None:
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "qk_norm" in name:
                p.add_(torch.rand_like(p))


@pytest.mark.parametrize("name", ["llama-sdpa", "gpt2-eager", "encoder", "mha", "x-transformers"])
@pytest.mark.parametrize("how", ["state_dict", "file", "lightning", "lightning file", "prefixed", "compiled", "inner"])
def test_restore(name, how, tmp_path):
    model, args, kwargs = make(name)
    fresh: nn.Module = copy.deepcopy(model)
    report = qkwatch.retrofit_(model, qkwatch.find_sites(model, *args, **kwargs))
    _train_gains_(model)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    source: Any = state
    target = fresh
    if how in ("file", "lightning file"):
        source = tmp_path / "weights.ckpt"
        torch.save(
            state if how == "file" else {"state_dict": state, "epoch": 3, "pytorch-lightning_version": "2"}, source
        )
        source = str(source) if how == "file" else source
    elif how == "lightning":
        source = {"state_dict": state, "global_step": 1}
    elif how == "prefixed":  # saved from the model, loaded into a module that holds it
        target = nn.ModuleDict({"model": fresh})
        state = {f"model.{key}": value for key, value in state.items()}
        source = state
    elif how == "compiled":
        state = torch.compile(model, backend="eager").state_dict()
        source, target = state, torch.compile(fresh, backend="eager")
        assert all(key.startswith("_orig_mod.") for key in state)
    elif how == "inner":  # saved from a module that holds it, loaded into the model
        whole = nn.ModuleDict({"net": model})
        qkwatch.undo_(whole)
        report = qkwatch.retrofit_(whole, qkwatch.find_sites(model, *args, **kwargs))
        state = {key.removeprefix("net."): value for key, value in whole.state_dict().items()}
        source = state
    restored = qkwatch.restore_(target, source)
    assert len(restored) == len(report.applied)
    target.load_state_dict(state, strict=True)
    assert torch.equal(output(fresh, args, kwargs), output(model, args, kwargs))
    norms = [id(m) for m in fresh.modules() if isinstance(m, QKNorm)]
    assert len(norms) == len(restored)
    assert qkwatch.restore_(target, source) == restored
    assert norms == [id(m) for m in fresh.modules() if isinstance(m, QKNorm)]  # nothing to do


def test_restore_takes_away_what_the_checkpoint_lacks():
    model, args, kwargs = make("tiny-flash")
    plain = copy.deepcopy(model.state_dict())
    qkwatch.retrofit_(model, qkwatch.find_sites(model, *args, **kwargs))
    assert qkwatch.restore_(model, plain) == []
    model.load_state_dict(plain, strict=True)


def test_restore_exchanges_another_variant():
    model, args, kwargs = make("llama-sdpa")
    other = copy.deepcopy(model)
    qkwatch.retrofit_(model, qkwatch.find_sites(model, *args, **kwargs), variant="qwen3")
    qkwatch.retrofit_(other, qkwatch.find_sites(other, *args, **kwargs), variant="l2")
    state = copy.deepcopy(model.state_dict())
    qkwatch.restore_(other, state)
    other.load_state_dict(state, strict=True)
    assert torch.equal(output(other, args, kwargs), output(model, args, kwargs))


class Renamed(TinyGPT):
    def __init__(self):
        super().__init__()
        self.blocks = self.h
        del self.h


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: TinyGPT(layers=1), r"no module 'h\.1\.attn'"),
        (lambda: TinyGPT(dim=64), r"'h\.0\.attn\.qkv' has a weight of shape \(192, 64\), not \(96, 32\)"),
        (Renamed, r"no module 'h\.0\.attn'"),
        (lambda: _with_conv(), r"'h\.1\.attn\.qkv' is a Conv1d, not a Linear"),
    ],
)
@pytest.mark.parametrize("carries", [True, False])
def test_a_plan_for_another_model_is_refused_and_touches_nothing(other, message, carries):
    model, args, _ = make("tiny-flash")
    report = qkwatch.retrofit_(model, qkwatch.find_sites(model, *args))
    stranger = other()
    if carries and isinstance(stranger, TinyGPT) and hasattr(stranger, "h"):
        own = qkwatch.find_sites(stranger, *args) if not isinstance(stranger.h[-1].attn.qkv, nn.Conv1d) else []
        qkwatch.retrofit_(stranger, own, variant="qwen3")
    before = snapshot(stranger)
    for attempt in (
        lambda: qkwatch.retrofit_(stranger, plan=report.plan),
        lambda: qkwatch.restore_(stranger, model.state_dict()),
    ):
        with pytest.raises(QKWatchError, match=message if not carries else "does not fit this model"):
            attempt()
        after = snapshot(stranger)
        for key in ("identity", "classes", "attributes"):
            assert before[key] == after[key], key
        assert list(before["state"]) == list(after["state"])


def _with_conv() -> nn.Module:
    model = TinyGPT()
    model.h[1].attn.qkv = nn.Conv1d(32, 96, 1)  # type: ignore[assignment]
    return model


def test_a_multihead_plan_for_other_heads_is_refused():
    *_, report = patched("mha")
    with pytest.raises(QKWatchError, match="8 heads of 4, not 4 of 8"):
        qkwatch.retrofit_(nn.MultiheadAttention(32, 8, batch_first=True), plan=report.plan)


@pytest.mark.parametrize(
    "data",
    [{}, {"sites": [{}]}, {"sites": [{"version": 99}]}, [1], {"sites": [{"version": 1, "site": "a"}]}],
)
def test_what_is_no_plan_is_an_error(data):
    with pytest.raises(QKWatchError, match="plan"):
        RetrofitPlan.from_dict(data)


def test_a_plan_with_spoilt_gains_leaves_the_model_alone():
    model, args, _ = make("tiny-flash")
    fresh = copy.deepcopy(model)
    data = qkwatch.retrofit_(model, qkwatch.find_sites(model, *args)).plan.to_dict()
    data["sites"][1]["gains"]["q.gain"] = [1.0]
    before = snapshot(fresh)
    with pytest.raises(QKWatchError):
        qkwatch.retrofit_(fresh, plan=data)
    after = snapshot(fresh)
    assert before["classes"] == after["classes"]
    assert before["attributes"] == after["attributes"]
    assert list(before["state"]) == list(after["state"])


# -- nn.MultiheadAttention in its parents ---------------------------------------------------------------------


def _stack(kind: str, norm_first: bool) -> nn.Module:
    options = {"d_model": 32, "nhead": 4, "dim_feedforward": 48, "dropout": 0.0, "batch_first": True}
    layer = nn.TransformerEncoderLayer(**options, norm_first=norm_first)
    return layer if kind == "layer" else nn.TransformerEncoder(layer, 2)


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("kind", ["layer", "encoder"])
@pytest.mark.parametrize("padded", [True, False])
def test_no_fast_path_goes_around_the_patch(kind, norm_first, padded):
    """Train, eval, no_grad and inference mode agree, with no hook attached that would itself disable the path."""
    model, x = _stack(kind, norm_first).eval(), torch.randn(2, 9, 32)
    hidden = torch.zeros(2, 9, dtype=torch.bool)
    hidden[0, 6:] = padded
    options = {"src_key_padding_mask": hidden} if padded else {}
    qkwatch.retrofit_(model, qkwatch.find_sites(model, x, **options), calibrate=False)
    with torch.no_grad():
        for p in (p for n, p in model.named_parameters() if "qk_norm" in n):
            p.uniform_(1, 40)
    assert_no_trace(model)
    trained = model.train()(x, **options).detach()
    model.eval()
    results = [model(x, **options).detach()]
    with torch.no_grad():
        results.append(model(x, **options))
    with torch.inference_mode():
        results.append(model(x, **options).clone())
    keep = ~hidden
    for result in results:
        width = min(result.shape[1], 9)
        torch.testing.assert_close(
            result[:, :width][keep[:, :width]], trained[:, :width][keep[:, :width]], rtol=1e-4, atol=1e-5
        )
    qkwatch.undo_(model)
    with torch.no_grad():
        plain = model(x, **options)
    assert float((plain[:, :6] - trained[:, :6]).abs().max()) > 1e-3  # the norm did something


def test_the_surgery_has_no_leftovers():
    assert retrofit_module.CHILD == "qk_norm"
    model, *_ = patched("llama-sdpa")
    names = [name for name in named_modules(model) if name.endswith("qk_norm")]
    assert len(names) == 2
    qkwatch.undo_(model)
    assert not [name for name in named_modules(model) if "qk_norm" in name]
    assert all(not type(m).__name__.startswith("QKNormed") for m in model.modules())
    assert qkwatch.undo_(model) == []


def test_frozen_sites_get_frozen_gains():
    model, args, kwargs = make("llama-sdpa")
    model.requires_grad_(False)
    model.model.layers[1].self_attn.o_proj.weight.requires_grad_(True)
    qkwatch.retrofit_(model, qkwatch.find_sites(model, *args, **kwargs))
    flags = [layer.self_attn.qk_norm.q.gain.requires_grad for layer in model.model.layers]
    assert flags == [False, True]


def test_dropout_does_not_reach_the_drift():
    """A model in training is patched with the random state left alone, both runs under the same masks."""
    model = llama("eager", attention_dropout=0.3).train()
    ids = token_ids()
    sites = qkwatch.find_sites(model, ids)
    torch.manual_seed(11)
    state = torch.get_rng_state()
    report = qkwatch.retrofit_(model, sites)
    assert torch.equal(torch.get_rng_state(), state)
    assert len(report.applied) == 2
    assert max(report.drift.values()) < 0.2
    assert all(m.training for m in model.modules())
