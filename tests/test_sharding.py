"""FSDP2 in two real processes: what `fully_shard` has taken apart is read, patched in mid-run, saved and resumed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from processes import together
from tiny import WIDTH, Attention, Block, Tiny, assert_same, data, loss_of, trainer, weights
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import qkwatch
from qkwatch import QKWatch, trainers
from qkwatch.surgery import patched_sites

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not hasattr(os, "fork") or not dist.is_gloo_available(), reason="needs fork and gloo"),
]
SITES = ["net.blocks.0.attn", "net.blocks.1.attn"]


def watch(**options: Any) -> QKWatch:
    return QKWatch(**{"every_n_steps": 2, "console": False, "on_error": "raise", **options})


# -- ways to shard: a model, what shards one module ---------------------------------------------------------------


def by_block(net: nn.Module, shard: Callable[[nn.Module], None]) -> None:
    for block in net.blocks:
        shard(block)
    shard(net)


def whole(net: nn.Module, shard: Callable[[nn.Module], None]) -> None:
    shard(net)


def by_attention(net: nn.Module, shard: Callable[[nn.Module], None]) -> None:
    for block in net.blocks:
        shard(block.attn)
    shard(net)


def by_projection(net: nn.Module, shard: Callable[[nn.Module], None]) -> None:
    for block in net.blocks:
        for module in [m for m in block.attn.modules() if type(m) is nn.Linear]:
            shard(module)
        shard(block)
    shard(net)


WAYS = {way.__name__: way for way in (by_block, whole, by_attention, by_projection)}


class Sharded(Tiny):
    """With `plan` it is patched before it is sharded."""

    def __init__(self, plan: Any = None, way: str = "by_block", low: bool = False, mesh: int = 1, **options: Any):
        super().__init__(**options)
        self.plan, self.way, self.low, self.mesh = plan, way, low, mesh

    def configure_model(self) -> None:
        from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

        if any(isinstance(m, FSDPModule) for m in self.modules()):
            return
        if self.plan is not None:
            qkwatch.retrofit_(self, plan=self.plan)
        mesh = self.device_mesh["data_parallel"]
        if self.mesh == 2:  # replicas of shards
            mesh = dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("replica", "shard"))
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if self.low else MixedPrecisionPolicy()
        WAYS[self.way](self.net, lambda module: fully_shard(module, mesh=mesh, mp_policy=policy))


class PlainSharded(Sharded):
    """SGD: what is nearly equal stays nearly equal."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


class AdamSharded(Sharded):
    """The epsilon keeps gradients that are zero but for rounding (the keys' biases) from being blown up."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1, eps=1e-3)


def batches(rank: int | None, count: int = 4) -> Any:
    """One rank's two of each four samples, or all four."""
    ids = data(count=count).dataset.tensors[0]
    ids = (ids if rank is None else ids[rank::2]).repeat(8, 1)
    return DataLoader(TensorDataset(ids), batch_size=count if rank is None else count // 2)


def fsdp2(*callbacks: Any, full: bool = True, steps: int = 6, **options: Any) -> Any:
    strategy = ModelParallelStrategy(
        data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo", save_distributed_checkpoint=not full
    )
    settings = {"devices": 2, "strategy": strategy, "max_steps": steps, "use_distributed_sampler": False}
    return trainer(*callbacks, **{**settings, **options})


def fit(*callbacks: Any, module: Any, path: Any = None, **options: Any) -> Any:
    run = fsdp2(*callbacks, **options)
    loader = batches(int(os.environ["RANK"]))
    run.fit(module, loader, loader, ckpt_path=path)
    return run


def full(value: Any) -> Any:
    """The same with every sharded tensor whole."""
    if isinstance(value, dict):
        return {k: full(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [full(v) for v in value]
    value = value.full_tensor() if hasattr(value, "full_tensor") else value
    return value.detach().clone() if isinstance(value, Tensor) else value


def outcome(run: Any, module: Any, callback: QKWatch) -> dict[str, Any]:
    return {
        "weights": full(module.state_dict()),
        "optimizers": full([o.state_dict() for o in run.optimizers]),
        "callback": callback.state_dict(),
        "readings": [vars(r) for r in callback.readings],
    }


# -- readings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["by_block", "whole", "by_projection"])
def test_sharded_models_are_watched_as_others_are(way: str, tmp_path: Path) -> None:
    def work(rank: int) -> Any:
        results = []
        for callback in (watch(), None):
            module = Sharded(sharp=True, way=way)
            fit(*([callback] if callback else []), module=module, steps=5)
            history = [(s, [vars(r) for r in rs]) for s, rs in callback.history] if callback else []
            found = [(s.name, s.retrofittable, s.reason, s.layout) for s in callback.sites] if callback else []
            results.append((full(module.state_dict()), history, found))
        return results

    first, second = together(work, tmp_path)
    assert_same(first, second)
    (watched, history, found), (plain, _, _) = first
    assert_same(watched, plain)
    single = watch()
    trainer(single, max_steps=1).fit(Tiny(sharp=True), batches(None))
    assert found == [(s.name, True, None, s.layout) for s in single.sites]
    assert [step for step, _ in history] == [0, 2, 4]
    for ours, theirs in zip(history[0][1], [vars(r) for r in single.readings], strict=True):
        assert ours["rows"] == theirs["rows"] == 4 * 8
        for key in ("max_logit", "margin", "entropy", "saturated", "q_rms", "k_rms"):
            torch.testing.assert_close(ours[key], theirs[key], rtol=1e-5, atol=1e-6)


# -- patching in mid-run ------------------------------------------------------------------------------------------


class Recomputed(PlainSharded):
    """Activation checkpointing around each block's attention, inside what is sharded."""

    def __init__(self, reentrant: bool = False, **options: Any) -> None:
        super().__init__(**options)
        for block in self.net.blocks:
            inner = block.forward
            block.forward = lambda x, inner=inner: checkpoint(inner, x, use_reentrant=reentrant)  # type: ignore[method-assign]


class Compiled(PlainSharded):
    """Each block compiled, after it was sharded."""

    def configure_model(self) -> None:
        super().configure_model()
        for block in self.net.blocks:
            block.compile(backend="eager")


CASES: dict[str, tuple[type, dict[str, Any], dict[str, Any]]] = {
    "by block": (PlainSharded, {}, {}),
    "whole": (PlainSharded, {"way": "whole"}, {}),
    "by attention": (PlainSharded, {"way": "by_attention"}, {}),
    "by projection": (PlainSharded, {"way": "by_projection"}, {}),
    "replicas of shards": (PlainSharded, {"mesh": 2}, {}),
    "eager": (PlainSharded, {"kind": "eager"}, {}),
    "mha": (PlainSharded, {"kind": "mha"}, {}),
    "adamw": (AdamSharded, {}, {}),
    "accumulation and clipping": (PlainSharded, {}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}),
    "compiled": (Compiled, {}, {}),
    "recomputed": (Recomputed, {}, {}),
    "recomputed, reentrant": (Recomputed, {"reentrant": True}, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_ranks_are_equal_and_equal_to_one_process(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    kind, model, options = CASES[name]

    def work(rank: int) -> Any:
        module, callback = kind(sharp=True, **model), watch(retrofit="auto", calibrate=True)
        run = fit(callback, module=module, **options)
        groups = [[p.numel() for p in g["params"]] for g in run.optimizers[0].param_groups]
        [entry] = callback.retrofits
        report = entry.report
        plans = (entry.step, report.applied, report.refused, report.drift, report.plan.to_dict())
        return outcome(run, module, callback), groups, plans

    first, second = together(work, tmp_path)
    assert_same(first, second)
    result, groups, (step, applied, refused, drift, plan) = first
    assert applied == list(drift) == SITES and not refused
    assert step == (0 if "accumulate_grad_batches" in options else 1)
    assert groups[1] == [2, 2]  # the gains, without weight decay
    assert result["optimizers"][0]["param_groups"][1]["weight_decay"] == 0
    # one process with the joint batch; its own calibration would see all four samples, so it gets rank zero's plan
    monkeypatch.setattr("qkwatch.midrun._decide", lambda module, *args: qkwatch.retrofit_(module, plan=plan))
    monkeypatch.setattr(kind, "configure_model", lambda self: None)
    module, callback = kind(sharp=True, **model), watch(retrofit="auto", calibrate=True)
    run = trainer(callback, **{"max_steps": 6, **options})
    run.fit(module, batches(None), batches(None))
    for site in plan["sites"]:
        gain = f"{site['site']}.qk_norm.q.gain"
        assert not torch.equal(torch.tensor(site["gains"]["q.gain"]), result["weights"][gain])
    for key, value in weights(module).items():
        torch.testing.assert_close(result["weights"][key], value, rtol=1e-5, atol=2e-5 if kind is AdamSharded else 2e-6)
    for ours, theirs in zip(result["readings"], [vars(r) for r in callback.readings], strict=True):
        torch.testing.assert_close(ours["max_logit"], theirs["max_logit"], rtol=1e-3, atol=1e-4)


def test_plain_gains_would_drift_apart(tmp_path: Path) -> None:
    """The test above can fail: nothing averages the gradients of a parameter that is not sharded."""

    def work(rank: int) -> Any:
        pytest.MonkeyPatch().setattr("qkwatch.retrofit.shard_norms", lambda model: None)
        module = PlainSharded(sharp=True)
        fit(watch(retrofit="now"), module=module)
        return full(module.state_dict())

    first, second = together(work, tmp_path)
    assert not torch.equal(first[f"{SITES[0]}.qk_norm.q.gain"], second[f"{SITES[0]}.qk_norm.q.gain"])


@pytest.mark.parametrize("variant", ["swinv2", "qwen3", "chameleon", "henry", "llama4", "olmo2"])
def test_every_shape_of_gain(variant: str, tmp_path: Path) -> None:
    def work(rank: int) -> Any:
        module, callback = PlainSharded(sharp=True), watch(retrofit="now", variant=variant, ramp_steps=2)
        run = fit(callback, module=module, steps=4, gradient_clip_val=1.0)
        run.save_checkpoint(tmp_path / "four.ckpt")
        assert callback.retrofits[0].report.applied == SITES
        return outcome(run, module, callback)

    first, second = together(work, tmp_path)
    assert_same(first, second)
    assert patched_sites(qkwatch.load_from_checkpoint(Tiny, tmp_path / "four.ckpt")) == SITES


def test_a_low_precision_policy(tmp_path: Path) -> None:
    """The norms have the dtype of the weights that the optimizer holds, and meet activations of the policy's."""

    def work(rank: int) -> Any:
        module, callback = PlainSharded(sharp=True, low=True), watch(retrofit="now")
        run = fit(callback, module=module, steps=4)
        assert callback.retrofits[0].report.applied == SITES, callback.retrofits[0].report.refused
        return outcome(run, module, callback)

    first, second = together(work, tmp_path)
    assert_same(first, second)
    gain = first["weights"][f"{SITES[0]}.qk_norm.q.gain"]
    assert gain.dtype == torch.float32 and bool(gain.isfinite().all())
    assert max(float(r["max_logit"].max()) for r in first["readings"]) < 25


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_the_precisions_of_the_trainer(precision: str, tmp_path: Path) -> None:
    def work(rank: int) -> Any:
        module, callback = PlainSharded(sharp=True), watch(retrofit="now")
        run = fit(callback, module=module, steps=4, precision=precision)
        assert callback.retrofits[0].report.applied == SITES, callback.retrofits[0].report.refused
        return outcome(run, module, callback)

    first, second = together(work, tmp_path)
    assert_same(first, second)
    assert max(float(r["max_logit"].max()) for r in first["readings"]) < 25


class Shared(Attention):
    """Two heads of queries, one of keys: a gain of one entry for two ranks."""

    def __init__(self) -> None:
        super().__init__("sdpa", 0.0)
        self.k_proj = nn.Linear(WIDTH, WIDTH // 2)
        self.v_proj = nn.Linear(WIDTH, WIDTH // 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            p(x).unflatten(-1, (-1, WIDTH // 2)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        k, v = (t.repeat_interleave(2, 1) for t in (k, v))
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).flatten(-2))


def test_fewer_heads_than_ranks(tmp_path: Path) -> None:
    def work(rank: int) -> Any:
        results = []
        for steps, path in ((6, None), (4, None), (6, tmp_path / "four.ckpt")):
            module = Sharded(sharp=False)
            for block in module.net.blocks:
                block.attn = Shared()
            callback = watch(retrofit="now", variant="swinv2")
            run = fit(callback, module=module, steps=steps, path=path, gradient_clip_val=1.0)
            if steps == 4:
                run.save_checkpoint(tmp_path / "four.ckpt")
            results.append(outcome(run, module, callback))
        return results

    first, second = together(work, tmp_path)
    assert_same(first, second)
    assert_same(first[0], first[2])


# -- checkpoints --------------------------------------------------------------------------------------------------

FORMS = pytest.mark.parametrize("whole_file", [True, False], ids=["one file", "a file a rank"])


@FORMS
def test_resume_is_bit_identical(whole_file: bool, tmp_path: Path) -> None:
    """Fresh, unpatched models go on from any step, and again from there."""
    runs = [(8, None), (3, None), (5, 3), (8, 5), (1, None), (8, 1)]

    def work(rank: int) -> Any:
        results = []
        for steps, start in runs:
            module, callback = Sharded(sharp=True), watch(retrofit="auto")
            path = tmp_path / f"{start}.ckpt" if start else None
            run = fit(callback, module=module, steps=steps, path=path, full=whole_file)
            if steps < 8:
                run.save_checkpoint(tmp_path / f"{steps}.ckpt")
            results.append((patched_sites(module), outcome(run, module, callback)))
        return results

    first, second = together(work, tmp_path)
    assert_same(first, second)
    assert [len(sites) for sites, _ in first] == [2, 2, 2, 2, 0, 2]
    for i in (3, 5):
        assert_same(first[0][1], first[i][1])
    assert not torch.equal(first[0][1]["weights"]["net.head.bias"], first[1][1]["weights"]["net.head.bias"])
    fresh = Tiny()
    assert qkwatch.restore_(fresh, tmp_path / "3.ckpt") == SITES
    if whole_file:
        fresh.load_state_dict(torch.load(tmp_path / "3.ckpt", weights_only=True)["state_dict"])
        assert patched_sites(qkwatch.load_from_checkpoint(Tiny, tmp_path / "3.ckpt")) == SITES
    assert qkwatch.restore_(fresh, tmp_path / "1.ckpt") == []


class FromNothing(Sharded):
    """Built without memory, as large models are; Lightning gives it some after it was sharded."""

    def configure_model(self) -> None:
        if not hasattr(self, "built"):
            self.net, self.built = self.net.to("meta"), True
        super().configure_model()


@FORMS
def test_a_model_that_is_built_on_the_meta_device_resumes(whole_file: bool, tmp_path: Path) -> None:
    def work(rank: int) -> Any:
        results = []
        for kind, steps, path in ((Sharded, 6, None), (Sharded, 4, None), (FromNothing, 6, tmp_path / "four")):
            module, callback = kind(sharp=True), watch(retrofit="auto")
            run = fit(callback, module=module, steps=steps, path=path, full=whole_file)
            if steps == 4:
                run.save_checkpoint(tmp_path / "four")
            results.append(outcome(run, module, callback))
        return results

    first, second = together(work, tmp_path)
    assert_same(first, second)
    assert_same(first[0], first[2])
    assert any("qk_norm" in key for key in first[2]["weights"])


@FORMS
def test_patched_and_then_sharded_it_trains_saves_and_resumes(whole_file: bool, tmp_path: Path) -> None:
    model = Tiny(sharp=True)
    sites = qkwatch.find_sites(model.net, data().dataset.tensors[0][:4, :-1])
    plan = qkwatch.retrofit_(model, sites).plan.to_dict()

    def work(rank: int) -> Any:
        results = []
        # the last comes without the plan: the checkpoint knows
        for own, steps, path in ((plan, 8, None), (plan, 5, None), (plan, 8, "five"), (None, 8, "five")):
            module, callback = Sharded(own, sharp=True), watch()
            run = fit(callback, module=module, steps=steps, full=whole_file, path=path and tmp_path / path)
            if steps == 5:
                run.save_checkpoint(tmp_path / "five")
            results.append((outcome(run, module, callback), [(r.site, r.max_logit) for r in callback.readings]))
        return results

    first, second = together(work, tmp_path)
    assert_same(first, second)
    straight, _, resumed, unplanned = first
    assert_same(straight, resumed)
    assert_same(straight, unplanned)
    start = torch.tensor(plan["sites"][0]["gains"]["q.gain"])
    assert not torch.equal(straight[0]["weights"][f"{SITES[0]}.qk_norm.q.gain"], start)
    assert max(float(m.max()) for _, m in straight[1]) < 25


@FORMS
def test_an_old_checkpoint_goes_on_patched_with_its_optimizer_state(whole_file: bool, tmp_path: Path) -> None:
    def work(rank: int) -> Any:
        module = Sharded(sharp=True)
        run = fit(module=module, steps=3, full=whole_file)
        run.save_checkpoint(tmp_path / "old")
        module, callback = Sharded(sharp=True), watch(retrofit="now")
        run = fit(callback, module=module, steps=6, full=whole_file, path=tmp_path / "old")
        state = run.optimizers[0].state_dict()
        return patched_sites(module), callback.retrofits[0].step, [float(s["step"]) for s in state["state"].values()]

    for sites, step, counts in together(work, tmp_path):
        assert (sites, step) == (SITES, 3)
        assert counts[:-2] == [6.0] * (len(counts) - 2) and counts[-2:] == [2.0, 2.0]


@FORMS
def test_evaluating_checkpoints_from_either_side_of_the_patch(whole_file: bool, tmp_path: Path) -> None:
    """By the patched model that goes on afterwards, and by fresh ones."""

    def work(rank: int) -> Any:
        saved, results = {}, []
        for steps in (1, 4):
            module, callback = Sharded(sharp=True), watch(retrofit="auto")
            run = fit(callback, module=module, steps=steps, full=whole_file)
            run.save_checkpoint(tmp_path / f"{steps}")
            saved[steps] = full(module.state_dict())
        loader = batches(rank)
        for steps in (1, 4, 1):
            run.validate(module, loader, ckpt_path=tmp_path / f"{steps}", verbose=False)
            results.append((full(module.state_dict()), float(run.callback_metrics["val_loss"])))
            fresh = fsdp2(watch(), full=whole_file)
            other = Sharded()
            fresh.validate(other, loader, ckpt_path=tmp_path / f"{steps}", verbose=False)
            results.append((full(other.state_dict()), float(fresh.callback_metrics["val_loss"])))
        again = fsdp2(watch(), full=whole_file, steps=6)  # the model as it is now, unpatched, from the patched file
        again.fit(module, loader, loader, ckpt_path=tmp_path / "4")
        resumed, other = full(module.state_dict()), Sharded()
        fit(watch(), module=other, steps=6, full=whole_file, path=tmp_path / "4")
        return saved, results, (resumed, full(other.state_dict()))

    first, second = together(work, tmp_path)
    saved, results, (resumed, other) = first
    assert_same((saved, resumed), (second[0], second[2][0]))
    for steps, (own, theirs) in zip((1, 4, 1), zip(results[::2], results[1::2], strict=True), strict=True):
        assert_same(own, theirs)
        assert_same(own[0], saved[steps])
    assert_same(resumed, other)


# -- plain loops --------------------------------------------------------------------------------------------------


def test_a_plan_in_a_plain_loop(tmp_path: Path) -> None:
    """Found and read sharded; what would have to be verified is refused; a plan is applied, its gains sharded."""
    ids = data(count=4).dataset.tensors[0]
    whole_model = Tiny(sharp=True)
    plan = qkwatch.retrofit_(whole_model.net, qkwatch.find_sites(whole_model.net, ids[:, :-1])).plan.to_dict()

    def train(net: Any, own: Tensor) -> dict[str, Any]:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
        for step in range(4):
            if step == 2:
                qkwatch.retrofit_(net, plan=plan)
                qkwatch.adopt_(net, optimizer)
            optimizer.zero_grad()
            loss_of(net, own).backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
        return full(net.state_dict())

    def work(rank: int) -> Any:
        from torch.distributed.fsdp import fully_shard

        dist.init_process_group("gloo")
        net = Tiny(sharp=True).net
        by_block(net, lambda module: fully_shard(module, mesh=dist.init_device_mesh("cpu", (2,))))
        sites = qkwatch.find_sites(net, ids[rank::2, :-1])
        report = qkwatch.retrofit_(net, sites)
        return train(net, ids[rank::2]), [s.retrofittable for s in sites], report.refused, patched_sites(net)

    first, second = together(work, tmp_path)
    assert_same(first, second)
    trained, retrofittable, refused, patched = first
    assert retrofittable == [True, True]
    assert all("sharded" in reason for reason in refused.values()) and len(refused) == len(patched) == 2
    expected = train(Tiny(sharp=True).net, ids)
    for key, value in trained.items():
        torch.testing.assert_close(value, expected[key], rtol=1e-5, atol=2e-6)


# -- trouble ------------------------------------------------------------------------------------------------------


def _raise(*args: Any, **kwargs: Any) -> Any:
    raise ZeroDivisionError("injected")


FAULTS = {
    "search": "qkwatch.scout.find_taps",
    "attaching": "qkwatch.monitor.Monitor._attach",
    "verification": "qkwatch.retrofit.calibrate_and_verify",
    "planning": "qkwatch.retrofit._draft",
    "installing": "qkwatch.retrofit.install",
    "sharding": "qkwatch.retrofit.shard_norms",
    "adopting": "qkwatch.midrun.adopt_",
}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("faulty", [0, 1])
def test_a_fault_on_one_rank_is_no_deadlock_and_leaves_ranks_equal(name: str, faulty: int, tmp_path: Path) -> None:
    def work(rank: int) -> Any:
        patch = pytest.MonkeyPatch()
        if rank == faulty:
            patch.setattr(FAULTS[name], _raise)
        module, callback = Sharded(sharp=True), watch(retrofit="now", on_error="warn")
        run = fit(callback, module=module)
        return full(module.state_dict()), full([o.state_dict() for o in run.optimizers]), dict(module.named_modules())

    first, second = together(lambda rank: work(rank)[:2], tmp_path)
    assert_same(first, second)
    patched = any("qk_norm" in key for key in first[0])
    assert patched == (faulty == 1 and name in ("verification", "planning")), "rank zero alone verifies"


class Lopsided(nn.Module):
    """More attention on one rank, inside what every rank runs."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.extra = net, Block()
        self.blocks = net.blocks

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.net(ids)
        if dist.get_rank() == 1:
            with torch.no_grad():  # FSDP wants the same parameters to have gradients on every rank
                more = self.extra(self.net.embed(ids)).mean()
            out = out + more
        return out


def test_a_site_that_runs_on_one_rank_only(tmp_path: Path) -> None:
    """Weights cannot be gathered for it, nor while it is looked at: read, not patched, and no deadlock."""

    def work(rank: int) -> Any:
        module, callback = Sharded(sharp=True), watch(retrofit="now")
        module.net = Lopsided(module.net)
        fit(callback, module=module)
        refused = callback.retrofits[0].report.refused if callback.retrofits else {}
        return full(module.state_dict()), [(r.site, r.rows) for r in callback.readings], sorted(refused)

    first, second = together(work, tmp_path)
    assert_same(first, second)
    sites = ["net.net.blocks.0.attn", "net.net.blocks.1.attn", "net.extra.attn"]
    assert [site for site, _ in first[1]] == sites
    assert first[2] == sorted(sites)


def test_tensor_parallelism_and_what_nothing_shards_are_refused_with_the_remedy(tmp_path: Path) -> None:
    def work(rank: int) -> Any:
        dist.init_process_group("gloo")
        reasons = []
        for shape in ((1, 2), (2, 1)):
            mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("data_parallel", "tensor_parallel"))
            strategy = SimpleNamespace(_device_mesh=mesh)
            reasons.append(trainers.refuses_patches(SimpleNamespace(strategy=strategy, lightning_module=Tiny())))
        return reasons

    for parallel, plain in together(work, tmp_path):
        assert "tensor parallelism" in parallel and "configure_model" in parallel
        assert "fully_shard" in plain and "configure_model" in plain
