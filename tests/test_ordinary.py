"""A patched model is an ordinary model: copies, files, compilers, dtypes, devices, caches and adapters."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from families import FAMILIES, TinyGPT, first_tensor, llama, token_ids
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import qkwatch
from qkwatch.errors import QKWatchError

pytestmark = pytest.mark.filterwarnings("ignore:.*(nested tensors|torch.jit.script|PyTorch API of nested).*")
KINDS = ["tiny-flash", "tiny-eager", "llama-sdpa", "gpt2-eager", "encoder", "timm-vit", "conv", "neox-eager"]


def patched(name: str, **options: Any) -> tuple[nn.Module, tuple, dict, Any]:
    """An eval-mode model with gains away from their starts."""
    family = FAMILIES[name]
    model, args, kwargs = family.build().eval(), family.args(), family.kwargs()
    report = qkwatch.retrofit_(model, qkwatch.find_sites(model, *args, **kwargs), **options)
    assert report.applied
    assert not report.refused
    with torch.no_grad():
        for key, p in model.named_parameters():
            if "qk_norm" in key:
                p.mul_(torch.rand_like(p) + 1).add_(3.0)
    return model, args, kwargs, report


@torch.no_grad()
def output(model: Any, args: tuple, kwargs: dict) -> Tensor:
    return first_tensor(model(*args, **kwargs)).clone()


def _saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


CLONES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "old pickle": lambda model: pickle.loads(pickle.dumps(model, protocol=2)),
    "torch.save": _saved,
    "twice": lambda model: copy.deepcopy(pickle.loads(pickle.dumps(copy.deepcopy(model)))),
}


@pytest.mark.parametrize("how", CLONES)
@pytest.mark.parametrize("name", KINDS)
def test_copies_are_whole_and_independent(name, how):
    model, args, kwargs, report = patched(name)
    expected = output(model, args, kwargs)
    twin = CLONES[how](model)
    assert torch.equal(output(twin, args, kwargs), expected)
    assert list(twin.state_dict()) == list(model.state_dict())
    assert not {id(p) for p in twin.parameters()} & {id(p) for p in model.parameters()}
    with torch.no_grad():
        for key, p in twin.named_parameters():
            if key.endswith("qk_norm.q.gain"):
                p.mul_(3.0)
    assert not torch.equal(output(twin, args, kwargs), expected)  # the copy's gains feed the copy's projections
    assert torch.equal(output(model, args, kwargs), expected)
    assert qkwatch.undo_(twin) == report.applied
    assert torch.equal(output(model, args, kwargs), expected)


def test_a_copied_projection_alone_still_works():
    model, *_ = patched("tiny-flash")
    qkv = model.h[0].attn.qkv
    x = torch.randn(2, 5, 32)
    assert torch.equal(copy.deepcopy(qkv)(x), qkv(x))
    assert isinstance(qkv, nn.Linear)
    assert "QKNormedLinear" in repr(qkv)


# -- compilers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", ["tiny-flash", "tiny-eager", "timm-vit", "llama-sdpa", "conv"])
def test_compiles_in_one_graph_as_before(name, backend):
    if backend == "aot_eager" and name not in ("tiny-flash", "conv"):
        pytest.skip("one is enough")
    torch._dynamo.reset()
    model, args, kwargs, _ = patched(name)
    expected = output(model, args, kwargs)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    got = output(compiled, args, kwargs)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("variant", ["l2", "gemma3", "olmo2", "swinv2", "chameleon"])
def test_compiled_gradients(variant, dynamic):
    torch._dynamo.reset()
    model, args, kwargs, _ = patched("tiny-flash", variant=variant)
    grads = []
    for m in (model, torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=dynamic)):
        model.zero_grad()
        first_tensor(m(*args, **kwargs)).square().mean().backward()
        grads.append({n: p.grad.clone() for n, p in model.named_parameters()})
    assert any("qk_norm" in key and bool(g.count_nonzero()) for key, g in grads[0].items())
    for key, grad in grads[0].items():
        torch.testing.assert_close(grads[1][key], grad, rtol=1e-4, atol=1e-6, msg=lambda m, key=key: f"{key}: {m}")


@pytest.mark.parametrize("name", ["tiny-flash", "llama-sdpa", "encoder"])
def test_a_patch_reaches_a_model_that_is_compiled_already(name):
    torch._dynamo.reset()
    family = FAMILIES[name]
    model, args, kwargs = family.build().eval(), family.args(), family.kwargs()
    compiled = torch.compile(model, backend="eager")
    plain = output(compiled, args, kwargs)
    torch.testing.assert_close(plain, output(model, args, kwargs))
    qkwatch.retrofit_(model, qkwatch.find_sites(model, *args, **kwargs), calibrate=False)
    normed = output(compiled, args, kwargs)
    torch.testing.assert_close(normed, output(model, args, kwargs), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(normed, plain, rtol=1e-3)
    qkwatch.undo_(model)
    torch.testing.assert_close(output(compiled, args, kwargs), plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["tiny-flash", "gpt2-sdpa", "timm-vit", "conv"])
def test_exports(name):
    model, args, kwargs, _ = patched(name)
    if name == "gpt2-sdpa":
        kwargs = {"use_cache": False}
    program = torch.export.export(model, args, kwargs)
    torch.testing.assert_close(
        output(program.module(), args, kwargs), output(model, args, kwargs), rtol=1e-5, atol=1e-5
    )
    gains = [key for key in program.state_dict if key.endswith("qk_norm.q.gain")]
    assert len(gains) == len([k for k in model.state_dict() if k.endswith("qk_norm.q.gain")])


@pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")
def test_wrapped_blocks():
    """Blocks that are compiled or checkpointed one by one, as large trainings do."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    torch._dynamo.reset()
    model, ids = TinyGPT(True).eval(), token_ids()
    reference = copy.deepcopy(model)
    model.h[0].attn = checkpoint_wrapper(model.h[0].attn)
    model.h[1] = torch.compile(model.h[1], backend="eager")
    plain = output(model, (ids,), {})
    report = qkwatch.retrofit_(model, qkwatch.find_sites(model, ids), variant="qwen3")
    assert report.applied == ["h.0.attn", "h.1.attn"]
    qkwatch.retrofit_(reference, plan=report.plan)  # the plan knows no wrappers
    torch.testing.assert_close(output(model, (ids,), {}), output(reference, (ids,), {}), rtol=1e-5, atol=1e-5)
    model(ids).square().mean().backward()
    assert all(p.grad is not None for key, p in model.named_parameters() if "qk_norm" in key)
    saved = model.state_dict()
    assert any("_orig_mod" in key for key in saved)
    twin = TinyGPT(True)
    assert qkwatch.restore_(twin, saved) == report.applied
    assert qkwatch.undo_(model) == report.applied
    torch.testing.assert_close(output(model, (ids,), {}), plain, rtol=1e-5, atol=1e-5)


def test_functional_call_uses_the_parameters_it_is_given():
    model, args, kwargs, _ = patched("tiny-flash")
    parameters = {key: p.detach().clone() for key, p in model.named_parameters()}
    for key in parameters:
        if key.endswith("q.gain"):
            parameters[key] *= 2.0
    got = torch.func.functional_call(model, parameters, args)
    assert not torch.allclose(got, output(model, args, kwargs))
    model.load_state_dict(parameters, strict=False)
    torch.testing.assert_close(got, output(model, args, kwargs))


# -- dtypes and devices ---------------------------------------------------------------------------------------


class Seen(nn.Module):
    """Notes the dtypes with which attention is called."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model, self.dtypes = model, []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        original = torch.nn.functional.scaled_dot_product_attention

        def noting(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> Tensor:
            self.dtypes.append((q.dtype, k.dtype, v.dtype))
            return original(q, k, v, *rest, **options)

        torch.nn.functional.scaled_dot_product_attention = noting
        try:
            return self.model(*args, **kwargs)
        finally:
            torch.nn.functional.scaled_dot_product_attention = original


VARIANTS = ["l2", "qwen3", "gemma3", "olmo2", "chameleon", "swinv2", "llama4"]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("how", ["autocast", "pure", "fp32 gains"])
@pytest.mark.parametrize("name", ["tiny-flash", "llama-sdpa"])
def test_bfloat16_keeps_one_dtype(name, variant, how):
    model, args, kwargs, _ = patched(name, variant=variant)
    reference = output(model, args, kwargs)
    plain = copy.deepcopy(model)
    qkwatch.undo_(plain)
    if how != "autocast":
        model.to(torch.bfloat16)
    if how == "fp32 gains":  # as some recipes keep their norms
        for key, p in model.named_parameters():
            if "qk_norm" in key:
                p.data = p.data.float()
    seen, before = Seen(model), Seen(plain if how == "autocast" else plain.to(torch.bfloat16))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=how == "autocast"):
        out = first_tensor(seen(*args, **kwargs))
        before(*args, **kwargs)
    assert seen.dtypes
    assert seen.dtypes == before.dtypes
    if (name, how) != ("llama-sdpa", "autocast"):  # there its own float32 rotation promotes q and k, patched or not
        assert set(seen.dtypes) == {(torch.bfloat16,) * 3}
    assert bool(torch.isfinite(out).all())
    error = (out.float() - reference).abs().max() / reference.abs().max()
    assert float(error) < 0.15
    out.float().sum().backward()
    for key, p in model.named_parameters():
        if "qk_norm" in key:
            assert p.grad is not None, key
            assert p.grad.dtype == p.dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_model_of_another_dtype_is_patched_in_that_dtype(dtype):
    model = TinyGPT(True).eval().to(dtype)
    ids = token_ids()
    report = qkwatch.retrofit_(model, qkwatch.find_sites(model, ids))
    assert len(report.applied) == 2, report.refused
    assert model.h[0].attn.qk_norm.q.gain.dtype == dtype
    assert model(ids).dtype == dtype
    assert max(report.drift.values()) < 0.5


@pytest.mark.parametrize("name", ["tiny-flash", "llama-sdpa"])
def test_to_double_and_back(name):
    model, args, kwargs, _ = patched(name)
    expected = output(model, args, kwargs)
    model.double()
    torch.testing.assert_close(output(model, args, kwargs).float(), expected, rtol=1e-4, atol=1e-5)
    model.float()
    assert torch.equal(output(model, args, kwargs), expected)


def test_requires_grad_and_optimizer():
    model, args, kwargs, _ = patched("tiny-flash")
    gains = [p for key, p in model.named_parameters() if "qk_norm" in key]
    assert all(p.requires_grad for p in gains)
    model.requires_grad_(False)
    assert not any(p.requires_grad for p in gains)
    for p in gains:
        p.requires_grad_(True)
    before = [p.detach().clone() for p in gains]
    optimizer = torch.optim.AdamW(gains, lr=0.1)
    model(*args, **kwargs).square().mean().backward()
    optimizer.step()
    assert all(not torch.equal(a, b) for a, b in zip(before, gains, strict=True))
    assert all(p.grad is None for key, p in model.named_parameters() if "qk_norm" not in key)


@pytest.mark.parametrize("assign", [True, False])
def test_meta_device_then_weights(assign):
    """The usual way of loading something large: build on meta, patch by the checkpoint's keys, then load."""
    model, args, kwargs, report = patched("tiny-flash")
    state = {key: value.clone() for key, value in model.state_dict().items()}
    with torch.device("meta"):
        shell = TinyGPT(True)
    shell.eval()
    assert qkwatch.restore_(shell, state) == report.applied
    assert all(p.is_meta for p in shell.parameters())
    if not assign:
        shell.to_empty(device="cpu")
    shell.load_state_dict(state, strict=True, assign=assign)
    assert torch.equal(output(shell, args, kwargs), output(model, args, kwargs))
    assert qkwatch.undo_(shell) == report.applied
    planned = TinyGPT(True).to("meta")
    qkwatch.retrofit_(planned, plan=report.plan)
    assert planned.h[0].attn.qk_norm.q.gain.is_meta


# -- use ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gpt2", "neox", "falcon"])
@pytest.mark.parametrize("impl", ["eager", "sdpa"])
def test_generation_with_a_cache(name, impl):
    """Cached keys were normed when they were made: decoding step by step is the full forward pass."""
    model, (ids,), _, _ = patched(f"{name}-{impl}")
    out = model.generate(
        ids, max_new_tokens=5, min_new_tokens=5, do_sample=False, use_cache=True, output_logits=True,
        return_dict_in_generate=True, pad_token_id=0,
    )  # fmt: skip
    with torch.no_grad():
        full = model(out.sequences[:, :-1]).logits[:, ids.shape[1] - 1 :]
    torch.testing.assert_close(torch.stack(out.logits, 1), full, rtol=1e-3, atol=1e-4)


def test_print_shows_the_norm():
    model, *_ = patched("llama-sdpa")
    text = repr(model)
    assert "(qk_norm): QKNorm(" in text
    assert "l2" in text
    assert "heads=4" in text
    assert "(q_proj): QKNormedLinear(in_features=32" in text
    qkwatch.undo_(model)
    assert "QKNorm" not in repr(model)


def test_module_walks_see_each_parameter_once():
    model, *_ = patched("gpt2-eager")
    names = [key for key, _ in model.named_parameters(remove_duplicate=False)]
    assert len(names) == len(set(names))
    assert [key for key in names if "qk_norm" in key] == [f"transformer.h.{i}.attn.qk_norm.q.gain" for i in range(2)]
    assert sum(p.numel() for p in model.parameters()) == sum(v.numel() for v in dict(model.named_parameters()).values())
    assert not model.transformer.h[0].attn.qk_norm.q.training  # as the site was
    model.apply(lambda m: None)
    model.zero_grad()
    model.train()
    assert model.transformer.h[0].attn.qk_norm.q.training


# -- adapters and parametrizations ----------------------------------------------------------------------------


def lora(model: nn.Module, targets: list[str]) -> nn.Module:
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=targets, lora_dropout=0.0))
    with torch.no_grad():
        for key, p in adapted.named_parameters():
            if "lora_B" in key:
                p.normal_(0, 0.3)
    return adapted.eval()


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["q_proj", "k_proj"], ["v_proj"]])
def test_lora_then_patch_then_merge(targets):
    model, ids = lora(llama("sdpa"), targets), token_ids()
    sites = qkwatch.find_sites(model, ids)
    report = qkwatch.retrofit_(model, sites)
    assert len(report.applied) == 2, report.refused
    gains = [p for key, p in model.named_parameters() if key.endswith("qk_norm.q.gain")]
    assert all(p.requires_grad for p in gains)  # they train along with the adapter
    expected = output(model, (ids,), {})
    with model.disable_adapter():
        assert not torch.allclose(output(model, (ids,), {}), expected)
    with torch.no_grad(), qkwatch.watch(model, sites) as watcher:
        model(ids)
    for reading in watcher.readings:  # what the adapter adds is normed, too
        gain = model.get_submodule(reading.site).qk_norm.q.effective_gain()
        assert bool((reading.max_logit <= gain * 1.0001).all())

    model.merge_adapter()
    torch.testing.assert_close(output(model, (ids,), {}), expected, rtol=1e-4, atol=1e-4)
    model.unmerge_adapter()
    merged = model.merge_and_unload()
    torch.testing.assert_close(output(merged, (ids,), {}), expected, rtol=1e-4, atol=1e-4)
    assert type(merged.model.layers[0].self_attn.q_proj).__name__ == "QKNormedLinear"
    assert isinstance(merged.model.layers[0].self_attn.q_proj, nn.Linear)

    fresh = llama("sdpa").eval()  # and its checkpoint is that of a patched plain model
    qkwatch.restore_(fresh, merged.state_dict())
    fresh.load_state_dict(merged.state_dict(), strict=True)
    assert torch.equal(output(fresh, (ids,), {}), output(merged, (ids,), {}))
    assert len(qkwatch.undo_(merged)) == 2
    assert type(merged.model.layers[0].self_attn.q_proj) is nn.Linear


def test_lora_then_patch_then_unload_without_merging():
    base, ids = llama("sdpa").eval(), token_ids()
    model = lora(base, ["q_proj", "k_proj"])
    qkwatch.retrofit_(model, qkwatch.find_sites(model, ids))
    with model.disable_adapter():
        expected = output(model, (ids,), {})
    unloaded = model.unload()
    assert torch.equal(output(unloaded, (ids,), {}), expected)


def test_undo_below_an_adapter():
    model, ids = lora(llama("sdpa"), ["q_proj", "k_proj"]), token_ids()
    plain, keys = output(model, (ids,), {}), list(model.state_dict())
    qkwatch.retrofit_(model, qkwatch.find_sites(model, ids))
    assert len(qkwatch.undo_(model)) == 2
    assert torch.equal(output(model, (ids,), {}), plain)
    assert list(model.state_dict()) == keys


def test_parametrized_projections():
    model, ids = TinyGPT(True).eval(), token_ids()
    for block in model.h:
        parametrizations.weight_norm(block.attn.qkv)
    plain = output(model, (ids,), {})
    report = qkwatch.retrofit_(model, qkwatch.find_sites(model, ids), calibrate=False)
    assert len(report.applied) == 2, report.refused
    assert not torch.allclose(output(model, (ids,), {}), plain)
    qkwatch.undo_(model)
    assert torch.equal(output(model, (ids,), {}), plain)
    parametrize.remove_parametrizations(model.h[0].attn.qkv, "weight")


def test_a_class_that_was_changed_after_the_patch_is_not_torn_apart():
    model, args, kwargs, report = patched("tiny-flash")
    parametrizations.weight_norm(model.h[1].attn.qkv)
    expected = output(model, args, kwargs)
    with pytest.raises(QKWatchError, match="was changed afterwards"):
        qkwatch.undo_(model)
    assert torch.equal(output(model, args, kwargs), expected)
    parametrize.remove_parametrizations(model.h[1].attn.qkv, "weight")
    assert qkwatch.undo_(model) == report.applied
