"""Norms at the fused softmax itself, for sites without projections to norm: they bound, and they leave no trace."""

from __future__ import annotations

import copy
import io
import json
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from families import TEXT, first_tensor, hf, token_ids
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import qkwatch
from qkwatch.coretaps import add_core_norm, has_core_norm
from qkwatch.errors import QKWatchError
from qkwatch.norms import QKNorm
from qkwatch.plan import RetrofitPlan
from qkwatch.variants import Variant


class Attention(nn.Module):
    """Queries and keys from one raw weight, as in EVA and BEiT; ``heads`` key heads of ``groups``."""

    def __init__(self, width: int = 32, heads: int = 4, groups: int = 4, *, repeat: bool = False):
        super().__init__()
        self.heads, self.groups, self.repeat, self.fused = heads, groups, repeat, True
        self.weight = nn.Parameter(torch.randn(width + 2 * width * groups // heads, width) * 0.15)
        self.out = nn.Linear(width, width)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        head_dim = x.shape[-1] // self.heads
        parts = F.linear(x, self.weight).split([n * head_dim for n in (self.heads, self.groups, self.groups)], -1)
        q, k, v = (p.unflatten(-1, (-1, head_dim)).transpose(1, 2) for p in parts)
        return q, k, v

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        if self.repeat:
            k, v = (t.repeat_interleave(self.heads // self.groups, 1) for t in (k, v))
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, enable_gqa=k.shape[1] != q.shape[1])
        else:
            y = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v
        return self.out(y.transpose(1, 2).flatten(2))


def _raw() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    return nn.Sequential(Attention(), Attention()).eval(), (torch.randn(2, 9, 32),), {}


def _eva() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    from timm.models.eva import Eva

    model = Eva(img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=4, num_classes=3, use_rot_pos_emb=True)
    return model.eval(), (torch.randn(2, 3, 32, 32),), {}


def _beit() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    from timm.models.beit import Beit

    model = Beit(img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=4, num_classes=3, use_rel_pos_bias=True)
    return model.eval(), (torch.randn(2, 3, 32, 32),), {}


def _latent(kind: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    sizes = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
    more = {"moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
    options = {**TEXT, "num_key_value_heads": 4, "first_k_dense_replace": 2, **sizes, **more}
    return hf(f"Deepseek{kind}ForCausalLM", f"Deepseek{kind}Config", **options).eval(), (token_ids(),), {}


def _sd3() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    from diffusers import SD3Transformer2DModel

    model = SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=4,
        joint_attention_dim=32, caption_projection_dim=32, pooled_projection_dim=16, out_channels=4,
        pos_embed_max_size=8,
    )  # fmt: skip
    inputs = (torch.randn(2, 4, 8, 8), torch.randn(2, 5, 32), torch.randn(2, 16), torch.tensor([3, 5]))
    return model.eval(), inputs, {}


KINDS: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]] = {
    "raw weights": _raw,
    "eva": _eva,
    "beit": _beit,
    "latent v2": lambda: _latent("V2"),
    "latent v3": lambda: _latent("V3"),
    "joint sd3": _sd3,
}


@pytest.fixture(params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def _run(model: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    with torch.no_grad():
        return first_tensor(model(*inputs, **kwargs))


def _patched(kind: str, **options: Any) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any], Any]:
    model, inputs, kwargs = KINDS[kind]()
    sites = qkwatch.find_sites(model, *inputs, **kwargs)
    report = qkwatch.retrofit_(model, sites, **options)
    assert report.refused == {}
    assert report.applied
    return model, inputs, kwargs, report


@contextmanager
def _grown(model: nn.Module, name: str) -> Iterator[None]:
    """Everything the site has learned times 1000, but for its norms."""
    own = [p for n, p in model.get_submodule(name).named_parameters() if not n.startswith("qk_norm")]
    saved = [p.detach().clone() for p in own]
    with torch.no_grad():
        for p in own:
            p.mul_(1000)
        yield
        for p, value in zip(own, saved, strict=True):
            p.copy_(value)


def test_sites_are_found_where_they_were_refused(kind: str) -> None:
    model, inputs, kwargs = KINDS[kind]()
    for site in qkwatch.find_sites(model, *inputs, **kwargs):
        assert (site.retrofittable, site.normed, site.reason, site.taps) == (True, False, None, None), site
        assert site.core_tap is not None
        assert (site.q_heads, site.k_heads) == (4, 4)


def test_logits_stay_under_the_gain(kind: str) -> None:
    model, inputs, kwargs, report = _patched(kind)
    for name in report.applied:
        gain = model.get_submodule(name).qk_norm.q.gain.detach()
        with _grown(model, name), qkwatch.watch(model) as watcher:
            _run(model, inputs, kwargs)
        (reading,) = [r for r in watcher.readings if r.site == name]
        bias = 0.0 if reading.bias_max is None else reading.bias_max.nan_to_num(0.0)
        assert bool((reading.max_logit - bias <= gain * 1.01 + 1e-4).all()), (reading.max_logit, gain)
        assert float(reading.max_logit.max()) > 0


def test_calibrated_it_keeps_the_function(kind: str) -> None:
    _, _, _, report = _patched(kind)
    assert max(report.drift.values()) < 0.25


def test_undo_is_bit_equal(kind: str) -> None:
    model, inputs, kwargs = KINDS[kind]()
    before, keys, classes = _run(model, inputs, kwargs), list(model.state_dict()), [type(m) for m in model.modules()]
    report = qkwatch.retrofit_(model, qkwatch.find_sites(model, *inputs, **kwargs), cap=0.5)
    new = [k for k in model.state_dict() if k not in keys]
    assert new
    assert all(any(k.startswith(f"{site}.qk_norm.") for site in report.applied) for k in new)
    assert sorted(qkwatch.undo_(model)) == sorted(report.applied)
    assert list(model.state_dict()) == keys
    assert [type(m) for m in model.modules()] == classes
    assert torch.equal(_run(model, inputs, kwargs), before)


def test_restored_from_a_state_dict_or_a_plan(kind: str) -> None:
    model, inputs, kwargs, report = _patched(kind, cap=0.5)
    after = _run(model, inputs, kwargs)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    fresh = KINDS[kind]()[0]
    assert sorted(qkwatch.restore_(fresh, state)) == sorted(report.applied)
    fresh.load_state_dict(state, strict=True)
    assert torch.equal(_run(fresh, inputs, kwargs), after)
    plan = RetrofitPlan.from_dict(json.loads(json.dumps(report.plan.to_dict())))
    assert plan == report.plan
    qkwatch.undo_(fresh)
    qkwatch.retrofit_(fresh, plan=plan)
    assert torch.equal(_run(fresh, inputs, kwargs), after)


def test_train_and_eval_agree_with_and_without_autograd(kind: str) -> None:
    model, inputs, kwargs, _ = _patched(kind, cap=0.5)
    after = _run(model, inputs, kwargs)
    assert torch.allclose(first_tensor(model(*inputs, **kwargs)), after, atol=1e-5)
    if kind != "joint sd3":  # whose training mode has no dropout either, but gates of its own
        assert torch.allclose(_run(model.train(), inputs, kwargs), after, atol=1e-5)


def test_copies_and_pickles(kind: str) -> None:
    model, inputs, kwargs, report = _patched(kind, cap=0.5)
    after = _run(model, inputs, kwargs)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(_run(twin, inputs, kwargs), after)
        with torch.no_grad():
            for name in report.applied:
                twin.get_submodule(name).qk_norm.q.gain.mul_(3)
        assert not torch.equal(_run(twin, inputs, kwargs), after)
        assert torch.equal(_run(model, inputs, kwargs), after)
        assert qkwatch.undo_(twin) == report.applied


def test_gains_and_weights_are_trained(kind: str) -> None:
    model, inputs, kwargs, report = _patched(kind)
    first_tensor(model(*inputs, **kwargs)).square().mean().backward()
    for name in report.applied:
        grad = model.get_submodule(name).qk_norm.q.gain.grad
        assert grad is not None
        assert bool(grad.isfinite().all())
        assert bool(grad.count_nonzero())


def test_found_again_it_is_normed(kind: str) -> None:
    model, inputs, kwargs, report = _patched(kind)
    again = qkwatch.find_sites(model, *inputs, **kwargs)
    assert [(s.name, s.normed, s.retrofittable) for s in again] == [(name, True, False) for name in report.applied]


@pytest.mark.parametrize("kind", ["eva", "latent v3", "raw weights"])
def test_compiled_whole(kind: str) -> None:
    model, inputs, kwargs, _ = _patched(kind, cap=0.5)
    after = _run(model, inputs, kwargs)
    torch._dynamo.reset()
    broken = torch._dynamo.explain(model)(*inputs, **kwargs).graph_break_count
    qkwatch_free = KINDS[kind]()[0]
    torch._dynamo.reset()
    assert broken == torch._dynamo.explain(qkwatch_free)(*inputs, **kwargs).graph_break_count
    torch._dynamo.reset()
    assert torch.allclose(_run(torch.compile(model, backend="aot_eager"), inputs, kwargs), after, atol=1e-5)  # type: ignore[arg-type]
    torch._dynamo.reset()


@pytest.mark.parametrize("strict", [False, True])
def test_exported(strict: bool) -> None:
    model, inputs, _, _ = _patched("raw weights", cap=0.5)
    exported = torch.export.export(model, inputs, strict=strict).module()
    assert torch.allclose(exported(*inputs), _run(model, inputs, {}), atol=1e-6)


def test_compiled_again_after_the_patch() -> None:
    """A graph compiled before the patch must not go on without it."""
    model, inputs, kwargs = _raw()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    plain = _run(compiled, inputs, kwargs)  # type: ignore[arg-type]
    qkwatch.retrofit_(model, qkwatch.find_sites(model, *inputs), cap=0.1)
    patched = _run(compiled, inputs, kwargs)  # type: ignore[arg-type]
    assert not torch.allclose(plain, patched, atol=1e-4)
    assert torch.allclose(patched, _run(model, inputs, kwargs), atol=1e-6)
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", ["latent v2", "latent v3"])
def test_generation_with_a_cache_is_that_without(kind: str) -> None:
    model, inputs, _, _ = _patched(kind, cap=0.2)
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    cached = model.generate(*inputs, use_cache=True, **options)  # type: ignore[operator]
    assert torch.equal(cached, model.generate(*inputs, use_cache=False, **options))  # type: ignore[operator]
    with torch.no_grad():
        whole = model(cached).logits
        part = model(cached[:, :-2], use_cache=True)
        rest = model(cached[:, -2:], past_key_values=part.past_key_values).logits
    assert torch.allclose(rest, whole[:, -2:], atol=1e-4)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_of_whole_layers(reentrant: bool) -> None:
    model, inputs, _, report = _patched("latent v3")

    def grads() -> list[Tensor]:
        model.zero_grad()
        model(inputs_embeds=model.get_input_embeddings()(inputs[0])).logits.square().mean().backward()  # type: ignore[operator]
        names = (report.applied[0] + ".qk_norm.q.gain", report.applied[0] + ".o_proj.weight")
        return [model.get_parameter(n).grad.clone() for n in names]  # type: ignore[union-attr]

    plain = grads()
    model.train().gradient_checkpointing_enable({"use_reentrant": reentrant})  # type: ignore[operator]
    for a, b in zip(plain, grads(), strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-8)


def test_under_autocast() -> None:
    model, inputs, kwargs, report = _patched("eva")
    with torch.autocast("cpu", torch.bfloat16):
        assert first_tensor(model(*inputs, **kwargs)).isfinite().all()
        sites = qkwatch.find_sites(_eva()[0], *inputs)
        assert all(site.core_tap is not None for site in sites)
    assert report.applied


# -- what must not happen -----------------------------------------------------------------------------------


def test_another_implementation_raises() -> None:
    model, inputs, kwargs, report = _patched("latent v3")
    model.set_attn_implementation("eager")  # type: ignore[operator]
    with pytest.raises(QKWatchError, match=rf"{report.applied[0]}.*scaled_dot_product_attention.*'sdpa'"):
        _run(model, inputs, kwargs)
    model.set_attn_implementation("sdpa")  # type: ignore[operator]
    assert _run(model, inputs, kwargs).isfinite().all()
    raw, inputs, kwargs, _ = _patched("raw weights")
    raw[1].fused = False  # type: ignore[index]
    with pytest.raises(QKWatchError, match=r"'1': its forward called no scaled_dot_product_attention"):
        raw(*inputs)


def test_another_implementation_at_the_patch_is_refused() -> None:
    model, inputs, _ = _raw()
    sites, keys = qkwatch.find_sites(model, *inputs), list(model.state_dict())
    model[1].fused = False  # type: ignore[index]
    report = qkwatch.retrofit_(model, sites)
    assert report.applied == ["0"]
    assert "called no scaled_dot_product_attention" in report.refused["1"]
    assert [k for k in model.state_dict() if not k.startswith("0.qk_norm")] == keys


def test_a_forward_that_is_overridden_is_refused() -> None:
    model, inputs, _ = _raw()
    sites = qkwatch.find_sites(model, *inputs)
    model[0].forward = model[0].forward  # type: ignore[index, method-assign]
    report = qkwatch.retrofit_(model, sites)
    assert report.applied == ["1"]
    assert "overridden on the instance" in report.refused["0"]


def test_a_class_changed_since_is_not_undone_by_half() -> None:
    model, _, _, report = _patched("raw weights")

    class Other(type(model[0])):  # type: ignore[index, misc]
        pass

    model[0].__class__ = Other  # type: ignore[index]
    with pytest.raises(QKWatchError, match="take that change back first"):
        qkwatch.undo_(model)
    assert all(model.get_submodule(name).qk_norm is not None for name in report.applied)


def test_watched_in_inference_mode() -> None:
    model, inputs, _, report = _patched("latent v3")
    with torch.inference_mode(), qkwatch.watch(model) as watcher:
        model(*inputs)
    assert [reading.site for reading in watcher.readings] == report.applied
    gains = [model.get_submodule(name).qk_norm.q.gain for name in report.applied]
    assert all(bool((r.max_logit <= g * 1.01).all()) for r, g in zip(watcher.readings, gains, strict=True))


def test_a_ramp_begins_with_the_old_function() -> None:
    model, inputs, kwargs = _raw()
    before = _run(model, inputs, kwargs)
    qkwatch.retrofit_(model, qkwatch.find_sites(model, *inputs), cap=0.1)
    for site in model:  # type: ignore[attr-defined]
        site.qk_norm.set_ramp(0.0)
    assert torch.equal(_run(model, inputs, kwargs), before)


def test_clip_says_that_it_knows_no_projections() -> None:
    model, inputs, _ = _raw()
    clip = qkwatch.QKClip(qkwatch.find_sites(model, *inputs), tau=100)
    assert set(clip.refused) == {"0", "1"}
    assert all("come from the parameter 'weight', not from a module's output" in why for why in clip.refused.values())


@pytest.mark.parametrize("variant", ["qwen3", "olmo2", "chameleon", "cohere", "vit22b"])
def test_gains_per_channel_are_refused(variant: str) -> None:
    model, inputs, _ = _raw()
    before = copy.deepcopy(model.state_dict())
    report = qkwatch.retrofit_(model, qkwatch.find_sites(model, *inputs), variant=variant)
    assert report.applied == []
    assert all("behind any rotary embedding" in reason for reason in report.refused.values())
    assert list(before) == list(model.state_dict())
    assert not any(has_core_norm(m) for m in model.modules())


@pytest.mark.parametrize(
    "variant", ["henry", "llama4", "swinv2", Variant("mine", gain="per_head"), Variant("scalar", gain="scalar")]
)
def test_other_variants_fit(variant: str | Variant) -> None:
    model, inputs, kwargs, report = _patched("latent v3", variant=variant)
    name = report.applied[0]
    with _grown(model, name), qkwatch.watch(model) as watcher:
        _run(model, inputs, kwargs)
    norm = model.get_submodule(name).qk_norm
    bound = float((norm.q.max_norm() * norm.k.max_norm()).max()) * 16**-0.5
    (reading,) = [r for r in watcher.readings if r.site == name]
    assert float(reading.max_logit.max()) <= bound * 1.01


class Nested(nn.Module):
    """Raw-weight attention around a module that attends itself."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.own, self.inner = Attention(), inner
        self.weight = nn.Parameter(torch.randn(96, 32) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in F.linear(x, self.weight).chunk(3, -1))
        return self.inner(x) + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)  # type: ignore[no-any-return]


def test_a_site_around_another_is_refused() -> None:
    model, x = Nested(Attention()), torch.randn(2, 9, 32)
    sites = {site.name: site for site in qkwatch.find_sites(model, x)}
    assert sites["inner"].retrofittable
    assert not sites[""].retrofittable
    report = qkwatch.retrofit_(model, list(sites.values()))
    assert report.applied == ["inner"]


def test_a_patched_site_does_not_norm_what_runs_in_another() -> None:
    model, x = Nested(Attention()).eval(), torch.randn(2, 9, 32)
    seen: list[str] = []
    for name, site in (("outer", model), ("inner", model.inner)):
        add_core_norm(site, -3)
        site.qk_norm = QKNorm("l2", 4, 4, 8)
        site.qk_norm.q.register_forward_hook(lambda m, a, o, name=name: seen.append(name))
    model(x)
    assert sorted(seen) == ["inner", "outer"]


def test_attention_of_nn_multihead_attention_inside_is_left_alone() -> None:
    x = torch.randn(2, 9, 32)

    class Both(Attention):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.split(x)
            y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            return self.out(y, y, y)[0]  # type: ignore[no-any-return]

    both = Both()
    both.out = nn.MultiheadAttention(32, 4, batch_first=True)  # type: ignore[assignment]
    sites = {site.name: site for site in qkwatch.find_sites(both, x)}
    assert sites["out"].retrofittable
    assert not sites[""].retrofittable


class Checkpointed(Attention):
    """Recomputes its own core in the backward pass."""

    reentrant = True

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        if self.training:
            y = checkpoint(F.scaled_dot_product_attention, q, k, v, use_reentrant=self.reentrant)
        else:
            y = F.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_core_recomputed_without_its_norm_is_an_error(reentrant: bool) -> None:
    model, x = Checkpointed().eval(), torch.randn(2, 9, 32)
    model.reentrant = reentrant
    assert qkwatch.retrofit_(model, qkwatch.find_sites(model, x)).applied == [""]
    model.train()
    with pytest.raises((QKWatchError, torch.utils.checkpoint.CheckpointError)):
        model(x).square().mean().backward()


class MaskFromQueries(Attention):
    """Relative positions: the mask is a product of the queries too."""

    def __init__(self) -> None:
        super().__init__()
        self.relative = nn.Parameter(torch.randn(8, 9))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=q @ self.relative)
        return self.out(y.transpose(1, 2).flatten(2))


def test_masks_that_hold_queries_are_refused() -> None:
    (site,) = qkwatch.find_sites(MaskFromQueries(), torch.randn(2, 9, 32))
    assert not site.retrofittable


def test_learned_masks_and_masks_from_outside_are_taken() -> None:
    class Masked(Attention):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
            q, k, v = self.split(x)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            return self.out(y.transpose(1, 2).flatten(2))

    model, x, mask = Masked(), torch.randn(2, 9, 32), torch.randn(9, 9)
    before = model(x, mask)
    report = qkwatch.retrofit_(model, qkwatch.find_sites(model, x, mask))
    assert report.applied == [""]
    assert report.drift[""] < 0.3
    qkwatch.undo_(model)
    assert torch.equal(model(x, mask), before)


# -- where the heads are ------------------------------------------------------------------------------------


@pytest.mark.parametrize("repeat", [False, True])
@pytest.mark.parametrize("variant", ["l2", Variant("mine", gain="per_head")])
@pytest.mark.parametrize("groups", [1, 2])
def test_grouped_keys(repeat: bool, variant: str | Variant, groups: int) -> None:
    """Found as they come (grouped, or repeated for their queries), used either way."""
    model, x = Attention(groups=groups, repeat=repeat).eval(), torch.randn(2, 9, 32)
    (site,) = qkwatch.find_sites(model, x)
    assert (site.q_heads, site.k_heads) == (4, groups)
    assert qkwatch.retrofit_(model, [site], variant=variant).applied == [""]
    after = model(x)
    model.repeat = not repeat
    assert torch.allclose(model(x), after, atol=1e-5)


class HeadsFirst(Attention):
    """(H, B, T, D), which is (B, H, T, D) to whoever does not look."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.transpose(0, 1) for t in self.split(x))
        return self.out(F.scaled_dot_product_attention(q, k, v).permute(1, 2, 0, 3).flatten(2))


class Windows(Attention):
    """(B, H, windows, T, D)."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(2, (3, 3)) for t in self.split(x))
        y = F.scaled_dot_product_attention(q, k, v).flatten(2, 3)
        return self.out(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize(("model", "axis"), [(Attention(), -3), (HeadsFirst(), -4), (Windows(), -4)])
@pytest.mark.parametrize("batch", [1, 3, 4])
def test_the_axis_of_the_heads(model: Attention, axis: int, batch: int) -> None:
    model = copy.deepcopy(model)
    (site,) = qkwatch.find_sites(model, torch.randn(batch, 9, 32))
    assert site.core_tap is not None
    assert (site.core_tap.layout.axis, site.q_heads) == (axis, 4)
    assert qkwatch.retrofit_(model, [site]).applied == [""]
    assert model(torch.randn(2, 9, 32)).shape == (2, 9, 32)  # another batch


def test_gains_are_in_logit_units_behind_a_learned_mask() -> None:
    """A mask with a gradient makes PyTorch compute attention unfused, with the scale split over q and k."""
    _, _, _, report = _patched("beit")
    assert [site.q_factor for site in report.plan.sites] == pytest.approx([8**0.5] * 2, rel=1e-3)


def test_a_plan_for_another_class_is_refused() -> None:
    _, _, _, report = _patched("raw weights")
    other = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    with pytest.raises(QKWatchError, match="'0' is a Linear, not a Attention"):
        qkwatch.retrofit_(other, plan=report.plan)
    assert list(other.state_dict()) == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_patched_behind_a_learned_bias_it_is_known_as_normed() -> None:
    class Biased(Attention):
        """A bias that no norm at the projection would bound; fused, so that one at the softmax does."""

        def __init__(self) -> None:
            super().__init__()
            self.project, self.u = nn.Linear(32, 96), nn.Parameter(torch.randn(4, 1, 8))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in self.project(x).chunk(3, -1))
            return self.out(F.scaled_dot_product_attention(q + self.u, k, v).transpose(1, 2).flatten(2))

    model, x = Biased(), torch.randn(2, 9, 32)
    (site,) = qkwatch.find_sites(model, x)
    assert site.core_tap is not None
    report = qkwatch.retrofit_(model, [site])
    assert report.applied == [""]
    assert report.notes == {}
    with torch.no_grad():
        model.u.mul_(1000)
    (again,) = qkwatch.find_sites(model, x)
    assert (again.normed, again.retrofittable, again.core_tap) == (True, False, site.core_tap)
    assert again.reading is not None
    assert bool((again.reading.max_logit <= model.qk_norm.q.gain * 1.001).all())
