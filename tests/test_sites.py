"""find_sites: the right modules, heads and channels in many families, and a model left exactly as it was."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from families import FAMILIES, ConvAttention, Expected, TinyGPT, first_tensor, hf, timm_model, token_ids, x_transformer
from torch import Tensor, nn
from torch.utils._python_dispatch import _len_torch_dispatch_stack

import qkwatch
from qkwatch.errors import QKWatchError
from qkwatch.modules import clean_name, named_modules
from qkwatch.sites import Site, select

pytestmark = pytest.mark.filterwarnings("ignore:.*(nested tensors|torch.jit.script).*")
CASES = [(name, mode) for name, family in FAMILIES.items() for mode in family.modes]


def described(site: Site, model: nn.Module) -> Expected:
    names = {id(m): name for name, m in named_modules(model).items()}
    taps = [(names[id(t.module)], t.channels.starts) for t in site.taps] if site.taps else (None, None)
    return Expected(site.name, site.q_heads, site.k_heads, site.head_dim, *taps)


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Everything about a model that a look at it must not change."""
    return {
        "state": {k: v.clone() for k, v in model.state_dict(keep_vars=True).items()},
        "buffers": {k: v.clone() for k, v in model.named_buffers()},
        "versions": [p._version for p in model.parameters()],
        "identity": [id(p) for p in model.parameters()],
        "grads": [p.grad is None for p in model.parameters()],
        "requires_grad": [p.requires_grad for p in model.parameters()],
        "training": [m.training for m in model.modules()],
        "classes": [type(m) for m in model.modules()],
        "attributes": [sorted(vars(m)) for m in model.modules()],
        "rng": torch.get_rng_state().clone(),
    }


def assert_unchanged(model: nn.Module, before: dict[str, Any]) -> None:
    after = snapshot(model)
    for key in before:
        if key in ("state", "buffers"):
            assert list(before[key]) == list(after[key]), key
            for name, value in before[key].items():
                assert torch.equal(value, after[key][name]), (key, name)
        elif key == "rng":
            assert torch.equal(before[key], after[key])
        else:
            assert before[key] == after[key], key
    assert_no_trace(model)


def assert_no_trace(model: nn.Module) -> None:
    """No hook anywhere, no dispatch mode on the stack."""
    import torch.nn.modules.module as hooks

    assert not hooks._global_forward_hooks
    assert not hooks._global_forward_pre_hooks
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert not module._forward_hooks_with_kwargs
        assert not module._backward_hooks
    assert _len_torch_dispatch_stack() == 0


def output(model: nn.Module, args: tuple, kwargs: dict) -> Tensor:
    torch.manual_seed(7)
    with torch.no_grad():
        return first_tensor(model(*args, **kwargs)).clone()


@pytest.mark.parametrize(("name", "training"), CASES, ids=[f"{n}-{'train' if m else 'eval'}" for n, m in CASES])
def test_sites_of_a_family(name: str, training: bool):
    family = FAMILIES[name]
    model = family.build().train(training)
    args, kwargs = family.args(), family.kwargs()
    twin = copy.deepcopy(model)
    expected_output = output(twin, args, kwargs)
    before = snapshot(model)

    sites = qkwatch.find_sites(model, *args, **kwargs)

    assert_unchanged(model, before)
    assert torch.equal(output(model, args, kwargs), expected_output)
    assert [described(site, model) for site in sites] == family.sites
    for site in sites:
        assert site.module is model.get_submodule(site.name)
        assert (site.retrofittable, site.normed, site.reason) == (True, False, None)
        assert site.reading is not None
        assert site.reading.site == site.name
        assert site.reading.heads == site.q_heads
        assert bool((site.reading.max_logit > 0).all())
        assert bool(torch.isfinite(site.reading.max_logit).all())


def _linear_attention() -> nn.Module:
    class Linear(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            q, k = self.q(x).softmax(-1), self.k(x).softmax(-2)
            return q @ (k.transpose(-1, -2) @ self.v(x))

    return Linear()


@pytest.mark.parametrize(
    ("build", "args"),
    [
        (lambda: nn.Linear(3, 3), (torch.randn(2, 3),)),
        (
            lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(2)),
            (torch.randn(2, 3, 8, 8),),
        ),
        (lambda: nn.Sequential(nn.Linear(8, 5), nn.Softmax(-1)), (torch.randn(2, 8),)),
        (lambda: nn.LSTM(4, 4), (torch.randn(3, 2, 4),)),
        (lambda: nn.Bilinear(4, 4, 3), (torch.randn(2, 4), torch.randn(2, 4))),
        (_linear_attention, (torch.randn(2, 6, 8),)),
    ],
    ids=["linear", "convnet", "classifier", "lstm", "bilinear", "linear-attention"],
)
def test_no_softmax_attention_gives_an_empty_list(build, args):
    model = build()
    model(*args)  # lazy modules
    assert qkwatch.find_sites(model, *args) == []
    assert_no_trace(model)


def test_contrastive_softmax_outside_attention_is_no_site():
    """A softmax over a product of activations that never meets values (a CLIP loss) is not attention."""

    class Clip(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 4), nn.Linear(8, 4)

        def forward(self, x):
            return (
                -(self.a(x) @ self.b(x).T).log_softmax(-1).diagonal().mean()
                + (self.a(x) @ self.b(x).T).softmax(-1).sum()
            )

    assert qkwatch.find_sites(Clip(), torch.randn(6, 8)) == []


@pytest.mark.parametrize(
    ("build", "args"),
    [
        (
            lambda: hf("Qwen3ForCausalLM", "Qwen3Config", vocab_size=100, hidden_size=32, intermediate_size=48,
                       num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=8),
            lambda: (token_ids(),),
        ),
        (lambda: x_transformer(attn_qk_norm=True), lambda: (token_ids(),)),
        (
            lambda: timm_model("swinv2_tiny_window8_256", img_size=64, depths=(1,), num_heads=(3,)),
            lambda: (torch.randn(2, 3, 64, 64),),
        ),
        (
            lambda: timm_model("vit_tiny_patch16_224", img_size=32, depth=1, qk_norm=True),
            lambda: (torch.randn(2, 3, 32, 32),),
        ),
    ],
    ids=["qwen3", "x-transformers", "swinv2", "timm-vit"],
)  # fmt: skip
def test_normed_models_are_recognised_and_still_measured(build, args):
    model = build()
    sites = qkwatch.find_sites(model, *args())
    assert sites
    for site in sites:
        assert site.normed
        assert not site.retrofittable
        assert site.reason
        assert site.reading is not None
        assert site.reading.rows > 0


def test_a_user_hook_and_grad_mode_are_left_alone():
    model = TinyGPT()
    handle = model.h[0].attn.register_forward_hook(lambda m, a, out: None)
    with torch.inference_mode():
        sites = qkwatch.find_sites(model, token_ids())
        assert torch.is_inference_mode_enabled()
    assert len(sites) == 2
    assert all(site.retrofittable for site in sites)
    assert list(model.h[0].attn._forward_hooks) == [handle.id]
    assert torch.is_grad_enabled()
    assert all(p.grad is None for p in model.parameters())


def test_conv_channels_lie_on_their_axis():
    site = qkwatch.find_sites(nn.Sequential(ConvAttention()), torch.randn(2, 16, 4, 4))[0]
    assert site.taps is not None
    assert [tap.channels.axis for tap in site.taps] == [-3, -3]


def test_an_error_of_the_model_passes_through_and_leaves_nothing():
    model = TinyGPT()
    before = snapshot(model)
    with pytest.raises(IndexError):
        qkwatch.find_sites(model, torch.full((1, 12), 10_000))
    assert_unchanged(model, before)


@pytest.mark.parametrize(
    ("layers", "chosen"),
    [
        (None, ["h.0.attn", "h.1.attn", "h.2.attn"]),
        ("h.1.attn", ["h.1.attn"]),
        ("h.*", ["h.0.attn", "h.1.attn", "h.2.attn"]),
        (["h.0.*", "h.2.*"], ["h.0.attn", "h.2.attn"]),
        ("!h.0.*", ["h.1.attn", "h.2.attn"]),
        (["h.[01].*", "!h.1.attn"], ["h.0.attn"]),
    ],
)
def test_select(layers, chosen):
    sites = qkwatch.find_sites(TinyGPT(layers=3), token_ids())
    assert [site.name for site in select(sites, layers)] == chosen
    with qkwatch.watch(model := TinyGPT(layers=3), layers=layers) as watcher:
        model(token_ids())
    assert [reading.site for reading in watcher.readings] == chosen


@pytest.mark.parametrize("layers", ["nothing.*", "!nothing.*", ["h.0.attn", "nothing.*"]])
def test_a_glob_that_matches_nothing_lists_the_sites(layers):
    model = TinyGPT()
    sites = qkwatch.find_sites(model, token_ids())
    for attempt in (
        lambda: select(sites, layers),
        lambda: _watched(model, layers),
        lambda: _watched(model, layers, sites),
    ):
        with pytest.raises(QKWatchError, match=r"nothing\.\*.*h\.0\.attn.*h\.1\.attn"):
            attempt()
    assert_no_trace(model)


def _watched(model: nn.Module, layers: Any, sites: list[Site] | None = None) -> None:
    with qkwatch.watch(model, sites, layers=layers):
        model(token_ids())


@pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")
def test_names_are_the_users_own_under_wrappers():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = TinyGPT()
    model.h[0].attn = checkpoint_wrapper(model.h[0].attn)
    model.h[1] = torch.compile(model.h[1], backend="eager")
    sites = qkwatch.find_sites(nn.DataParallel(model) if torch.cuda.is_available() else model, token_ids())
    assert [site.name for site in sites] == ["h.0.attn", "h.1.attn"]
    assert clean_name("_orig_mod.h.0._checkpoint_wrapped_module.attn") == "h.0.attn"
    assert all(site.retrofittable for site in sites)


def test_a_module_used_twice_is_one_site():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = TinyGPT(layers=1).h[0].attn
            self.b = self.a

        def forward(self, x):
            return self.b(self.a(x))

    model = Shared()
    x = torch.randn(2, 12, 32)
    sites = qkwatch.find_sites(model, x)
    assert [site.name for site in sites] == ["a"]
    with qkwatch.watch(model) as watcher:
        model(x)
    assert [reading.site for reading in watcher.readings] == ["a", "a"]
    assert sites[0].reading is not None
    assert sites[0].reading.rows == 2 * 2 * 12


@pytest.mark.parametrize("flash", [True, False])
def test_tensors_without_values_are_refused_in_one_line(flash):
    with torch.device("meta"):
        model, ids = TinyGPT(flash), torch.zeros(2, 12, dtype=torch.long)
    with pytest.raises(qkwatch.QKWatchError, match="none on the meta device"):
        qkwatch.find_sites(model, ids)
    with pytest.warns(UserWarning, match="runs attention on the meta device"), qkwatch.watch(model) as watcher:
        assert model(ids).is_meta
    assert watcher.readings == []


class Folded(nn.Module):
    """Each channel of a head's queries is the sum of two of their projection."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(32, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k = (p(x).unflatten(-1, (4, -1)).transpose(1, 2) for p in (self.q, self.k))
        return (q.unflatten(-1, (2, 4)).sum(-2) @ k.mT).softmax(-1) @ k


def test_a_head_that_more_channels_feed_than_it_has_is_refused_in_words_that_fit():
    (site,) = qkwatch.find_sites(Folded(), torch.randn(2, 9, 32))
    assert site.reason == "a head's queries are 4 wide, but 8 of their projection feed it"
