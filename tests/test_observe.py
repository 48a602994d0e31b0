"""watch: bit-equal outputs and gradients, readings that equal a dense float64 reference, and no trace left."""

from __future__ import annotations

import contextlib
import copy
import pickle
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from families import FAMILIES, TinyAttention, TinyGPT, first_tensor, hf, llama, token_ids
from test_sites import assert_no_trace
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import qkwatch
from qkwatch.reading import Reading

pytestmark = pytest.mark.filterwarnings("ignore:.*(nested tensors|torch.jit.script|PyTorch API of nested).*")


# -- bit for bit ----------------------------------------------------------------------------------------------


def run(model: nn.Module, args: tuple, kwargs: dict, grad: bool) -> dict[str, Tensor]:
    """Two forward passes (and backward): outputs, gradients, buffers and random state."""
    torch.manual_seed(3)
    found: dict[str, Tensor] = {}
    for i in range(2):
        out = first_tensor(model(*args, **kwargs))
        found[f"output {i}"] = out.detach().clone()
        if grad:
            out.float().square().sum().backward()
    found |= {f"grad {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
    found |= {f"buffer {n}": b.clone() for n, b in model.named_buffers()}
    found["rng"] = torch.get_rng_state()
    return found


@contextlib.contextmanager
def _autocast():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        yield


CONTEXTS: dict[str, tuple[Callable[[], Any], bool]] = {
    "grad": (contextlib.nullcontext, True),
    "no_grad": (torch.no_grad, False),
    "inference": (torch.inference_mode, False),
    "autocast": (_autocast, True),
    "math": (lambda: sdpa_kernel(SDPBackend.MATH), True),
    "flash": (lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION), True),
}
MHA = ["mha", "mha-quiet", "mha-cross", "encoder", "encoder-padded", "decoder"]
EQUAL = [
    *((name, training, context) for name in MHA for training in (True, False) for context in list(CONTEXTS)[:3]),
    *((name, True, context) for name in ("tiny-eager", "llama-eager", "gpt2-sdpa") for context in list(CONTEXTS)[:4]),
    *((name, True, context) for name in ("tiny-flash",) for context in CONTEXTS),
    ("tiny-flash", False, "flash"),
    ("llama-sdpa", False, "math"),
    ("encoder-padded", False, "autocast"),
    ("t5-eager", True, "grad"),
    ("swin-sdpa", True, "grad"),
    ("x-transformers", True, "grad"),
    ("timm-swin", False, "no_grad"),
]


@pytest.mark.parametrize(("name", "training", "context"), EQUAL, ids=["-".join(map(str, c)) for c in EQUAL])
def test_outputs_and_gradients_are_bit_equal(name, training, context):
    enter, grad = CONTEXTS[context]
    family = FAMILIES[name]
    plain = family.build().train(training)
    args, kwargs = family.args(), family.kwargs()
    if context == "flash":
        plain = TinyGPT(True, dropout=0.0).train(training)  # the CPU flash kernel has no dropout
    first_then_known, known = copy.deepcopy(plain), copy.deepcopy(plain)
    sites = qkwatch.find_sites(known, *args, **kwargs)
    with enter():
        expected = run(plain, args, kwargs, grad)
        with qkwatch.watch(first_then_known) as found_here:
            got = run(first_then_known, args, kwargs, grad)
        with qkwatch.watch(known, sites) as given:
            again = run(known, args, kwargs, grad)
    for other in (got, again):
        assert list(other) == list(expected)
        for key, value in expected.items():
            assert torch.equal(value, other[key]), key
    for watcher in (found_here, given):
        assert len(watcher.readings) == 2 * len(family.sites)
        assert {r.site for r in watcher.readings} == {site.name for site in family.sites}
    for a, b in zip(found_here.readings, given.readings, strict=True):
        assert a.site == b.site
        torch.testing.assert_close(a.max_logit, b.max_logit, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(a.entropy, b.entropy, rtol=1e-4, atol=1e-5)
    for model in (first_then_known, known):
        assert_no_trace(model)


# -- against a dense reference --------------------------------------------------------------------------------


def reference(logits: Tensor, visible: Tensor, rows: Tensor) -> dict[str, Tensor]:
    """Every figure of a reading from (B, H, T, S) logits, in float64, row by row.

    visible (B, H, T, S) boolean; rows (B, T) boolean: the queries that count.
    """
    logits = logits.double()
    figures: dict[str, list[float]] = {}
    for h in range(logits.shape[1]):
        kept = []
        for b, t in rows.nonzero().tolist():
            seen = logits[b, h, t][visible[b, h, t]]
            p = seen.softmax(0)
            nats = float(-(p * p.clamp_min(1e-300).log()).sum())
            kept.append((len(seen), float(seen.abs().max()), float(seen.max() - seen.mean()), nats, float(p.max()),
                         1 - float(p.square().sum())))  # fmt: skip
        n, peak, margin, nats, top, signal = torch.tensor(kept, dtype=torch.float64).unbind(1)
        long = n >= (16 if bool((n >= 16).any()) else 2)
        head = {
            "max_logit": peak.max(),
            "margin": margin.max(),
            "entropy": (nats[long] / n[long].log()).mean(),
            "entropy_nats": nats.mean(),
            "saturated": (top[n >= 2] > 0.99).double().mean(),
            "grad_signal": signal.mean(),
        }
        for key, value in head.items():
            figures.setdefault(key, []).append(float(value))
    return {key: torch.tensor(values) for key, values in figures.items()}


def assert_reading(reading: Reading, expected: dict[str, Tensor], rows: int, excluded: int) -> None:
    for key, value in expected.items():
        got = getattr(reading, key)
        assert got.dtype == torch.float32
        assert got.device.type == "cpu"
        torch.testing.assert_close(got, value, rtol=2e-5, atol=2e-6, msg=lambda m, key=key: f"{key}: {m}")
    assert (reading.rows, reading.excluded_rows, reading.exact) == (rows, excluded, True)


def causal(batch: int, heads: int, length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril().expand(batch, heads, length, length)


def sharpen_(model: nn.Module, factor: float = 25.0) -> None:
    """Larger weights, so that the logits are worth measuring."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim == 2 and any(n in name for n in ("qkv", "q_proj", "k_proj", "query", "key", "c_attn")):
                p.mul_(factor)


@pytest.mark.parametrize("length", [12, 33])
@pytest.mark.parametrize("flash", [True, False])
@pytest.mark.parametrize("mask", [None, "boolean"])
def test_readings_of_a_written_out_attention(flash, mask, length):
    attn = TinyAttention(32, 4, flash).eval()
    sharpen_(attn, 4.0)
    x = torch.randn(3, length, 32)
    visible = causal(3, 4, length)
    if mask:
        visible = (torch.rand(3, 1, length, length) < 0.6) | torch.eye(length, dtype=torch.bool)
    with qkwatch.watch(attn) as watcher:
        attn(x, visible if mask else None)
    q, k, _ = (z.unflatten(-1, (4, 8)).transpose(1, 2) for z in attn.qkv(x).detach().double().split(32, -1))
    expected = reference(q @ k.transpose(-1, -2) / 8**0.5, visible.expand(3, 4, -1, -1), torch.ones(3, length).bool())
    expected["q_rms"] = q.square().mean(-1).sqrt().mean((0, 2)).float()
    expected["k_rms"] = k.square().mean(-1).sqrt().mean((0, 2)).float()
    (reading,) = watcher.readings
    assert_reading(reading, expected, rows=3 * length, excluded=0)


@pytest.mark.parametrize("impl", ["eager", "sdpa"])
@pytest.mark.parametrize("side", ["left", "right", None])
@pytest.mark.parametrize("name", ["llama", "bert", "gpt2"])
def test_readings_equal_the_models_own_attentions(name, side, impl):
    """The reference are the attention weights that transformers itself returns in eager mode."""
    build = FAMILIES[f"{name}-eager"].build
    eager = build().eval()
    sharpen_(eager)
    ids = token_ids(3, 20)
    padding = torch.ones(3, 20, dtype=torch.bool)
    if side == "left":
        padding[0, :7], padding[1, :1] = False, False
    if side == "right":
        padding[0, 13:], padding[1, 19:] = False, False
    mask = {} if side is None else {"attention_mask": padding.long()}
    own = eager(ids, output_attentions=True, **mask).attentions
    model = FAMILIES[f"{name}-{impl}"].build().eval()
    model.load_state_dict(eager.state_dict())

    with torch.no_grad(), qkwatch.watch(model) as watcher:
        model(ids, **mask)

    visible = padding[:, None, None, :].expand(3, 4, 20, 20)
    if name != "bert":
        visible = visible & causal(3, 4, 20)
    assert len(watcher.readings) == len(own) == 2
    for reading, weights in zip(watcher.readings, own, strict=True):
        expected = reference(weights.detach().double().clamp_min(1e-300).log(), visible, padding)
        del expected["max_logit"], expected["margin"]  # not to be had from probabilities that underflow
        assert_reading(reading, expected, int(padding.sum()), int((~padding).sum()))
        assert float(reading.max_logit.max()) > 3


@pytest.mark.parametrize("impl", ["eager", "sdpa"])
def test_largest_logits_of_a_transformers_model(impl):
    model = hf("BertModel", "BertConfig", impl, vocab_size=100, hidden_size=32, intermediate_size=48,
               num_hidden_layers=2, num_attention_heads=4).eval()  # fmt: skip
    sharpen_(model)
    kept: dict[str, Tensor] = {}
    for i, layer in enumerate(model.encoder.layer):
        for side in ("query", "key"):
            module = getattr(layer.attention.self, side)
            module.register_forward_hook(lambda m, a, out, key=f"{i} {side}": kept.__setitem__(key, out.detach()))
    ids, padding = token_ids(2, 18), torch.ones(2, 18, dtype=torch.bool)
    padding[0, 11:] = False
    sites = qkwatch.find_sites(model, ids)  # the probes of a watch without sites would run the hooks again
    with qkwatch.watch(model, sites) as watcher:
        model(ids, attention_mask=padding.long())
    for i, reading in enumerate(watcher.readings):
        q, k = (kept[f"{i} {s}"].double().unflatten(-1, (4, 8)).transpose(1, 2) for s in ("query", "key"))
        visible = padding[:, None, None, :].expand(2, 4, 18, 18)
        assert_reading(reading, reference(q @ k.transpose(-1, -2) / 8**0.5, visible, padding), 29, 7)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
def test_readings_of_multihead_attention(training, need_weights):
    mha = nn.MultiheadAttention(32, 4, batch_first=True).train(training)
    with torch.no_grad():
        mha.in_proj_weight.mul_(5)
        mha.in_proj_bias.normal_()
    x, hidden = torch.randn(2, 17, 32), torch.zeros(2, 17, dtype=torch.bool)
    hidden[1, 12:] = True
    with contextlib.nullcontext() if training else torch.no_grad(), qkwatch.watch(mha) as watcher:
        mha(x, x, x, key_padding_mask=hidden, need_weights=need_weights)
    q, k, _ = F.linear(x, mha.in_proj_weight, mha.in_proj_bias).detach().double().chunk(3, -1)
    q, k = (z.unflatten(-1, (4, 8)).transpose(1, 2) for z in (q, k))
    visible = ~hidden[:, None, None, :].expand(2, 4, 17, 17)
    (reading,) = watcher.readings
    assert_reading(reading, reference(q @ k.transpose(-1, -2) / 8**0.5, visible, ~hidden), 29, 5)


class Spelled(nn.Module):
    """One attention, fused or written out."""

    def __init__(self, fused: bool):
        super().__init__()
        self.fused, self.qkv = fused, nn.Linear(32, 96)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        if self.fused:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            logits = q @ k.transpose(-1, -2) * 8**-0.5
            bias = mask if mask.dtype != torch.bool else torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -1e30)
            out = (logits + bias).softmax(-1) @ v
        return out.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hides", ["False", "-inf", "minimum", "-10000"])
def test_what_hides_a_key_hides_it_however_attention_is_written(hides: str, dtype: torch.dtype):
    """All by the same boolean: -10000, the mask of old half-precision models, is no logit of 10000."""
    torch.manual_seed(0)
    shown = torch.ones(2, 1, 1, 20, dtype=torch.bool)
    shown[1, ..., 12:] = False
    value = {"-inf": -torch.inf, "minimum": torch.finfo(dtype).min, "-10000": -1e4}.get(hides)
    mask = shown if value is None else torch.zeros(shown.shape, dtype=dtype).masked_fill(~shown, value)
    x, weights = torch.randn(2, 20, 32, dtype=dtype), Spelled(True).state_dict()
    close = {"rtol": 2e-5, "atol": 2e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 1e-2}
    found = []
    for fused, given in ((True, shown), (True, mask), (False, mask)):
        model = Spelled(fused).to(dtype)
        model.load_state_dict(weights)
        (site,) = qkwatch.find_sites(model, x, given)
        assert site.reading is not None
        assert (site.reading.rows, site.reading.excluded_rows) == (32, 8)
        assert site.reading.bias_max is None or float(site.reading.bias_max.max()) == 0
        found.append(site.reading)
    for name in ("max_logit", "product_logit", "margin", "entropy", "saturated", "grad_signal", "over_100"):
        for reading in found[1:]:
            torch.testing.assert_close(getattr(reading, name), getattr(found[0], name), **close, msg=name)


def test_half_precision_padding_gives_finite_figures():
    model = llama("eager").to(torch.bfloat16).eval()
    padding = torch.ones(2, 12, dtype=torch.long)
    padding[0, :5] = 0
    with qkwatch.watch(model) as watcher:
        model(token_ids(), attention_mask=padding)
    for reading in watcher.readings:
        assert (reading.rows, reading.excluded_rows) == (19, 5)
        for key in ("max_logit", "margin", "entropy", "entropy_nats", "saturated", "grad_signal", "q_rms", "k_rms"):
            figure = getattr(reading, key)
            assert figure.dtype == torch.float32
            assert bool(torch.isfinite(figure).all()), key
        assert float(reading.nonfinite.sum()) == 0


# -- activation checkpointing ---------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool | None, dropout: float = 0.1):
        super().__init__()
        self.gpt, self.reentrant = TinyGPT(True, dropout=dropout), reentrant

    def forward(self, ids: Tensor) -> Tensor:
        x = self.gpt.wte(ids).requires_grad_()
        for block in self.gpt.h:
            plain = self.reentrant is None
            x = block(x) if plain else checkpoint(block, x, use_reentrant=self.reentrant)
        return self.gpt.head(x)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("given", [True, False])
def test_checkpointing_counts_each_sample_once(reentrant, given):
    plain = Checkpointed(reentrant)
    for block in plain.gpt.h:
        block.mlp[2].momentum = 0.0  # a recomputation updates batch norms twice, with or without us
    watched, uncheckpointed = copy.deepcopy(plain), copy.deepcopy(plain)
    uncheckpointed.reentrant = None
    ids = token_ids()
    expected = run(plain, (ids,), {}, grad=True)
    sites = qkwatch.find_sites(watched, ids) if given else None
    with qkwatch.watch(watched, sites) as watcher:
        got = run(watched, (ids,), {}, grad=True)
    for key, value in expected.items():
        assert torch.equal(value, got[key]), key
    with qkwatch.watch(uncheckpointed) as other:
        run(uncheckpointed, (ids,), {}, grad=True)
    names = ["gpt.h.0.attn", "gpt.h.1.attn"] * 2
    assert [r.site for r in watcher.readings] == [r.site for r in other.readings] == names
    for a, b in zip(watcher.readings, other.readings, strict=True):
        assert a.rows == b.rows == ids.numel()
        assert torch.equal(a.max_logit, b.max_logit)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_of_transformers(reentrant):
    model = llama("sdpa").train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    with qkwatch.watch(model) as watcher:
        for _ in range(2):
            model(token_ids(), use_cache=False).logits.sum().backward()
    assert [r.site for r in watcher.readings] == [f"model.layers.{i}.self_attn" for i in (0, 1, 0, 1)]


# -- nothing stays --------------------------------------------------------------------------------------------


class Fails(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn, self.fail = TinyAttention(32, 4, True), False

    def forward(self, x):
        y = self.attn(x)
        if self.fail:
            raise KeyError("the model's own error")
        return y


@pytest.mark.parametrize("when", ["first", "second", "outside"])
def test_an_exception_leaves_nothing(when):
    model, x = Fails(), torch.randn(2, 5, 32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(KeyError, match="own error"), qkwatch.watch(model) as watcher:  # noqa: PT012
            if when != "first":
                model(x)
            model.fail = when != "outside"
            model(x)
            raise KeyError("own error")
    assert_no_trace(model)
    assert [r.site for r in watcher.readings] == {"first": [], "second": ["attn"] * 2, "outside": ["attn"] * 2}[when]
    model.fail = False
    with qkwatch.watch(model) as watcher:
        model(x)
    assert len(watcher.readings) == 1


def test_an_error_caught_inside_the_block_does_not_spoil_the_rest():
    model, x = Fails(), torch.randn(2, 5, 32)
    with qkwatch.watch(model) as watcher:
        model.fail = True
        with pytest.raises(KeyError):
            model(x)
        model.fail = False
        model(x)
    assert [r.site for r in watcher.readings][-1] == "attn"
    assert_no_trace(model)


class KeywordsOnly(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleDict({"attn": TinyAttention(32, 4, False)})

    def forward(self, *, hidden_states, attention_mask=None):
        return self.inner["attn"](x=hidden_states, mask=attention_mask)


def test_modules_called_with_keywords_only():
    model = KeywordsOnly()
    with qkwatch.watch(model) as watcher:
        model(hidden_states=torch.randn(2, 6, 32))
    assert [r.site for r in watcher.readings] == ["inner.attn"]
    (site,) = qkwatch.find_sites(model, hidden_states=torch.randn(2, 6, 32))
    assert site.retrofittable


def test_the_model_can_be_copied_pickled_and_exported_inside_the_block():
    model, ids = TinyGPT(True).eval(), token_ids()
    with qkwatch.watch(model) as watcher:
        model(ids)
        twin = copy.deepcopy(model)
        loaded = pickle.loads(pickle.dumps(model))
        assert torch.equal(twin(ids), loaded(ids))
        model(ids)
    assert [r.site for r in watcher.readings] == ["h.0.attn", "h.1.attn"] * 2  # the copies are other models
    assert list(torch.export.export(model, (ids,)).state_dict)
    assert_no_trace(twin)


def test_one_reading_per_core_call_and_in_order():
    model = TinyGPT(True)
    with qkwatch.watch(model, layers="h.1.*") as watcher:
        for length in (12, 12, 12):
            model(token_ids(length % 5 + 1, length))
    assert [(r.site, r.rows) for r in watcher.readings] == [("h.1.attn", 36)] * 3
    attn = model.h[0].attn
    with qkwatch.watch(model) as watcher:  # only a part of the model runs
        attn(torch.randn(2, 7, 32))
    assert [(r.site, r.rows) for r in watcher.readings] == [("h.0.attn", 14)]
    with qkwatch.watch(model) as watcher:  # nothing runs
        pass
    assert watcher.readings == []


def test_readings_can_be_taken_inside_the_block():
    model = TinyGPT(True)
    with qkwatch.watch(model) as watcher:
        assert watcher.readings == []
        model(token_ids())
        assert len(watcher.readings) == 2
        model(token_ids())
        assert len(watcher.readings) == 4
    assert len(watcher.readings) == 4


def test_sites_of_another_model_are_no_sites_of_this_one():
    model, x = TinyAttention(32, 4, True), torch.randn(2, 9, 32)
    sites = qkwatch.find_sites(model, x)
    with (
        pytest.raises(qkwatch.QKWatchError, match="find_sites on this one"),
        qkwatch.watch(copy.deepcopy(model), sites),
    ):
        pass


def test_other_models_in_the_block_are_left_alone():
    model, other = TinyGPT(True), TinyGPT(False)
    with qkwatch.watch(model) as watcher:
        other(token_ids())
        F.scaled_dot_product_attention(*torch.randn(3, 1, 2, 4, 8))
        model(token_ids())
        other(token_ids())
    assert len(watcher.readings) == 2


def test_two_watchers_at_once():
    one, two = TinyGPT(True), TinyGPT(False)
    with qkwatch.watch(one) as a, qkwatch.watch(two, layers="h.0.*") as b:
        one(token_ids())
        two(token_ids())
        one(token_ids())
    assert (len(a.readings), len(b.readings)) == (4, 1)
    assert_no_trace(one)


def test_a_mode_entered_inside_the_block_is_not_disturbed():
    """The first forward ends discovery: it must not pop a dispatch mode that the user entered meanwhile."""

    class Counting(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.count += 1
            return func(*args, **(kwargs or {}))

    model = TinyGPT(True)
    with qkwatch.watch(model) as watcher:
        with Counting() as counting:
            model(token_ids())
            before = counting.count
            torch.ones(2) + 1
            assert counting.count > before
        after = counting.count
        model(token_ids())
        assert counting.count == after
    assert len(watcher.readings) == 4
    assert_no_trace(model)


def test_fewer_rows_are_said_to_be_a_sample():
    attn = TinyAttention(32, 4, True)
    x = torch.randn(1, 64, 32)
    with (
        qkwatch.watch(attn) as all_rows,
        qkwatch.watch(attn, rows=8) as sampled,
        qkwatch.watch(attn, rows="auto") as auto,
    ):
        attn(x)
    assert [w.readings[0].exact for w in (all_rows, sampled, auto)] == [True, False, True]
    assert sampled.readings[0].rows == 8
    assert bool((sampled.readings[0].max_logit <= all_rows.readings[0].max_logit).all())


def test_long_sequences_leave_no_square_tensor():
    length = 4096
    square = length * length
    alive: list[weakref.ref[Tensor]] = []
    largest = 0

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for t in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(t, Tensor):
                    largest = max(largest, t.untyped_storage().size() // t.element_size())
                    if t.numel() > length * 64:
                        alive.append(weakref.ref(t))
            return out

    attn = TinyAttention(16, 2, True)
    x = torch.randn(1, length, 16)
    sites = qkwatch.find_sites(attn, x[:, :32])
    with torch.no_grad(), Sizes(), qkwatch.watch(attn, sites) as watcher:
        attn(x)
    assert watcher.readings[0].exact
    assert watcher.readings[0].rows == length
    assert largest < square / 2
    assert not [ref for ref in alive if ref() is not None]


# -- what cannot be looked into -------------------------------------------------------------------------------


@torch.library.custom_op("mylib::flash_attn", mutates_args=())
def flash_attn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


class Opaque(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return flash_attn(q, k, v)


def _caught(action: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
    return [str(w.message) for w in caught if "qkwatch" in str(w.message)]


def test_an_opaque_kernel_gives_one_warning_with_the_modules_name():
    model = nn.ModuleDict({"block": Opaque()})
    model.forward = lambda x: model["block"](x)  # type: ignore[method-assign]
    x = torch.randn(2, 5, 16)

    def watched() -> None:
        with qkwatch.watch(model) as watcher:
            for _ in range(3):
                model["block"](x)
        assert watcher.readings == []

    (message,) = _caught(watched)
    assert "block" in message
    assert "mylib::flash_attn" in message


class Jagged(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x):
        q, k, v = (z.contiguous().unflatten(-1, (2, 8)).transpose(1, 2) for z in self.qkv(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v)


def _strided(x: Tensor) -> Tensor:
    def split(z: Tensor) -> Tensor:
        rows = [row.unflatten(-1, (2, 8)).transpose(0, 1).contiguous() for row in z.unbind()]
        return torch.nested.as_nested_tensor(rows)

    return F.scaled_dot_product_attention(*map(split, x.chunk(3, -1)))


class Strided(Jagged):
    def forward(self, x):
        return _strided(self.qkv(x))


@pytest.mark.parametrize(("kind", "layout"), [(Jagged, torch.jagged), (Strided, torch.strided)])
def test_nested_tensors_give_a_warning_and_no_crash(kind, layout, monkeypatch):
    import torch.nested._internal.sdpa as nested_sdpa

    # a CUDA build on a machine without a driver asks cuDNN even about CPU tensors, and fails
    monkeypatch.setattr(nested_sdpa, "can_use_cudnn_attention", lambda *args, **kwargs: False, raising=False)
    x = torch.nested.nested_tensor([torch.randn(5, 16), torch.randn(3, 16)], layout=layout)
    model = nn.Sequential(kind()).eval()
    with torch.no_grad():
        expected = model(x)

        def watched() -> None:
            with qkwatch.watch(model) as watcher:
                for _ in range(2):
                    for a, b in zip(model(x).unbind(), expected.unbind(), strict=True):
                        assert torch.equal(a, b)
            assert watcher.readings == []

        messages = _caught(watched)
    assert len(messages) == 1
    assert "nested" in messages[0]
    assert "0" in messages[0].split("runs")[0]
    assert_no_trace(model)


# -- on a patched model ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama-sdpa", "gpt2-eager", "encoder", "tiny-flash"])
def test_a_patched_model_is_watched_too(name):
    family = FAMILIES[name]
    model = family.build().eval()
    args, kwargs = family.args(), family.kwargs()
    sites = qkwatch.find_sites(model, *args, **kwargs)
    report = qkwatch.retrofit_(model, sites)
    assert not report.refused
    found = qkwatch.find_sites(model, *args, **kwargs)
    assert [s.name for s in found] == [s.name for s in sites]
    assert all(s.normed and not s.retrofittable for s in found)
    with torch.no_grad(), qkwatch.watch(model) as fresh, qkwatch.watch(model, sites) as old:
        model(*args, **kwargs)
    assert [r.site for r in fresh.readings] == [s.name for s in sites]
    for a, b in zip(fresh.readings, old.readings, strict=True):
        assert torch.equal(a.max_logit, b.max_logit)
        gain = model.get_submodule(a.site).qk_norm.q.effective_gain()
        assert bool((a.max_logit <= gain * 1.0001).all())


class Differential(nn.Module):
    """Two softmaxes, of which the second is taken off before the values."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(32, 64), nn.Linear(32, 64), nn.Linear(32, 32)
        with torch.no_grad():
            self.q.weight[32:] *= 30

    def forward(self, x: Tensor) -> Tensor:
        q, k = (p(x).unflatten(-1, (2, 4, 8)).permute(2, 0, 3, 1, 4) for p in (self.q, self.k))
        first, second = ((a @ b.mT * 8**-0.5).softmax(-1) for a, b in zip(q, k, strict=True))
        v = self.v(x).unflatten(-1, (4, 8)).transpose(1, 2)
        return ((first - 0.4 * second) @ v).transpose(1, 2).flatten(2)


def test_each_softmax_of_a_difference_is_read_from_the_first_forward_on():
    torch.manual_seed(0)
    model, x = Differential(), torch.randn(2, 9, 32)
    (site,) = qkwatch.find_sites(model, x)
    with qkwatch.watch(model) as watcher, torch.no_grad():
        model(x)
        model(x)
    first, second, *again = watcher.readings
    assert bool((second.max_logit > 3 * first.max_logit).all())
    assert [r.max_logit.tolist() for r in again] == [r.max_logit.tolist() for r in (first, second)]
    assert site.reading is not None
    assert site.reading.max_logit.tolist() == second.max_logit.tolist()
    assert site.reading.rows == first.rows + second.rows


@pytest.mark.parametrize("rows", [0, -1, "some", 3.5, True, None])
@pytest.mark.parametrize("known", [True, False])
def test_rows_that_are_no_number_of_rows_are_refused(rows, known):
    model, x = TinyAttention(32, 4, True), torch.randn(2, 9, 32)
    sites = qkwatch.find_sites(model, x) if known else None
    allowed = '"all", "auto" or a whole number of at least 1'
    with pytest.raises(qkwatch.QKWatchError, match=allowed), qkwatch.watch(model, sites, rows=rows):
        model(x)


@pytest.mark.parametrize("known", [True, False])
def test_a_fault_of_a_measurement_is_one_warning_and_no_crash(known, monkeypatch):
    model, x = TinyAttention(32, 4, True), torch.randn(2, 9, 32)
    want = model(x)
    sites = qkwatch.find_sites(model, x) if known else None

    def fail(*args: object) -> None:
        raise RuntimeError("cannot be read")

    monkeypatch.setattr("qkwatch.observe.measure_at" if known else "qkwatch.capture.CoreCapture._fused", fail)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with qkwatch.watch(model, sites) as watcher:
            assert torch.equal(model(x), want)
            assert torch.equal(model(x), want)
    assert watcher.readings == []
    told = [str(w.message) for w in seen if "qkwatch" in str(w.message)]
    assert len(told) == 1
    assert "could not be measured (RuntimeError: cannot be read)" in told[0]
