"""Two real processes over gloo: ranks stay equal, equal to one process with the joint batch, and never wait in vain."""

from __future__ import annotations

import copy
import os
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy
from processes import together
from tiny import Block, Net, Tiny, assert_same, data, loss_of, trainer, weights
from torch.utils.data import DataLoader, TensorDataset

import qkwatch
from qkwatch import QKWatch, trainers
from qkwatch.surgery import norm_parameters

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not hasattr(os, "fork") or not dist.is_gloo_available(), reason="needs fork and gloo"),
]
SITES = ["net.blocks.0.attn", "net.blocks.1.attn"]


def watch(**options: Any) -> QKWatch:
    return QKWatch(**{"every_n_steps": 2, "console": False, "on_error": "raise", **options})


class Plain(Tiny):
    """SGD: what is nearly equal stays nearly equal."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


def ddp(*callbacks: Any, module: Any, size: int = 2, strategy: Any = None, **options: Any) -> Any:
    """One rank's run: every other sample of each batch of four."""
    kind: Any = strategy or {} if size > 1 else "auto"
    if isinstance(kind, dict):
        kind = DDPStrategy(process_group_backend="gloo", **kind)
    settings = {"devices": size, "strategy": kind, "max_steps": 6, "use_distributed_sampler": False}
    run = trainer(*callbacks, **{**settings, **options})
    ids = data(count=96).dataset.tensors[0][int(os.environ["RANK"]) if size > 1 else 0 :: size]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run.fit(module, DataLoader(TensorDataset(ids), batch_size=4 // size))
    run.seen = [str(w.message) for w in seen if "QKWatch" in str(w.message)]
    return run


def outcome(run: Any, module: Any, callback: QKWatch) -> dict[str, Any]:
    return {
        "weights": weights(module),
        "grads": {n: None if p.grad is None else p.grad.clone() for n, p in module.named_parameters()},
        "optimizers": [o.state_dict() for o in run.optimizers],
        "callback": callback.state_dict(),
        "metrics": {k: v for k, v in run.callback_metrics.items() if "qkwatch" in k},
        "readings": [vars(r) for r in callback.readings],
        "steps": [step for step, _ in callback.history],
        "retrofits": [
            (e.step, e.report.applied, e.report.refused, e.report.plan.to_dict()) for e in callback.retrofits
        ],
        "warnings": run.seen,
    }


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "find_unused_parameters": ({"find_unused_parameters": True}, {}),
    "static_graph": ({"static_graph": True}, {}),
    "bucket views": ({"gradient_as_bucket_view": True}, {}),
    "accumulation and clipping": ({}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}),
}


@pytest.mark.parametrize("name", CASES)
def test_ranks_are_equal_and_equal_to_one_process(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    strategy, options = CASES[name]

    def work(rank: int) -> Any:
        module, callback = Plain(sharp=True), watch(retrofit="auto", calibrate=True)
        run = ddp(callback, module=module, strategy=strategy, **options)
        return outcome(run, module, callback)

    first, second = together(work, tmp_path)
    assert_same({**first, "warnings": []}, {**second, "warnings": []})
    [(step, applied, _, plan)] = first["retrofits"]
    assert applied == SITES
    accumulated = "accumulate_grad_batches" in options  # then the alert comes before the step has ended
    assert step == (0 if accumulated else 1)
    assert first["steps"] == ([0, 2, 4] if accumulated else [0, 1, 2, 4])
    # one process with the joint batch; its own calibration would see all four samples, so it gets rank zero's plan
    monkeypatch.setattr("qkwatch.midrun._decide", lambda module, *args: qkwatch.retrofit_(module, plan=plan))
    module, callback = Plain(sharp=True), watch(retrofit="auto", calibrate=True)
    ddp(callback, module=module, size=1, **options)
    gains = dict(norm_parameters(module))
    assert gains
    moved = [
        not torch.equal(torch.tensor(s["gains"]["q.gain"]), first["weights"][f"{s['site']}.qk_norm.q.gain"])
        for s in plan["sites"]
    ]
    assert all(moved)
    for key, value in weights(module).items():
        torch.testing.assert_close(first["weights"][key], value, rtol=1e-5, atol=2e-6)
    for key, grad in ((n, p.grad) for n, p in module.named_parameters()):
        torch.testing.assert_close(first["grads"][key], grad, rtol=1e-4, atol=2e-6)
    for ours, theirs in zip(first["readings"], [vars(r) for r in callback.readings], strict=True):
        assert ours["rows"] == theirs["rows"]
        for key in ("max_logit", "margin", "entropy", "saturated", "grad_signal", "q_rms", "k_rms"):
            torch.testing.assert_close(ours[key], theirs[key], rtol=1e-3, atol=1e-5)


def test_without_averaging_ranks_would_drift_apart(tmp_path: Path) -> None:
    """The test above can fail: DDP knows nothing of parameters born after it wrapped the model."""

    def work(rank: int) -> Any:
        qkwatch.callback.average_gradients = lambda parameters: None  # type: ignore[assignment]
        module, callback = Plain(sharp=True), watch(retrofit="now")
        ddp(callback, module=module)
        return weights(module)

    first, second = together(work, tmp_path)
    assert not torch.equal(first[f"{SITES[0]}.qk_norm.q.gain"], second[f"{SITES[0]}.qk_norm.q.gain"])


def test_one_collective_per_measured_step_and_none_between(tmp_path: Path) -> None:
    def work(rank: int) -> Any:
        calls: list[tuple[int, str]] = []
        module, callback = Plain(), watch(every_n_steps=3)

        def count(name: str) -> None:
            original = getattr(dist, name)

            def counted(*args: Any, **kwargs: Any) -> Any:
                calls.append((callback._step, name))
                return original(*args, **kwargs)

            setattr(dist, name, counted)

        for name in ("all_gather", "all_gather_object", "broadcast_object_list", "barrier", "all_reduce"):
            count(name)

        ddp(callback, module=module, max_steps=8)
        return calls

    for calls in together(work, tmp_path):
        during = [(step, name) for step, name in calls if 0 < step < 7 and name != "barrier"]
        assert during == [(3, "all_gather"), (6, "all_gather")]


class Uneven(Plain):
    """An extra block of attention that runs on rank 1 only."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.extra = Block()

    def training_step(self, batch: Any, index: int) -> Any:
        loss = loss_of(self.net, batch[0])
        if self.global_rank == 1 or self.trainer.world_size == 1:
            loss = loss + 0.1 * self.extra(self.net.embed(batch[0])).square().mean()
        return loss


@pytest.mark.parametrize("retrofit", ["off", "now"])
def test_a_site_that_runs_on_one_rank_only(retrofit: str, tmp_path: Path) -> None:
    def work(rank: int) -> Any:
        module, callback = Uneven(), watch(retrofit=retrofit)
        run = ddp(callback, module=module, strategy={"find_unused_parameters": True})
        return outcome(run, module, callback)

    first, second = together(work, tmp_path)
    assert_same({**first, "warnings": []}, {**second, "warnings": []})
    assert [r["site"] for r in first["readings"]] == [*SITES, "extra.attn"]
    assert first["readings"][2]["rows"] == 2 * 9  # of one rank
    assert first["readings"][0]["rows"] == 4 * 8  # of both
    if retrofit == "now":
        [(_, applied, refused, _)] = first["retrofits"]
        assert applied == SITES
        assert "did not run" in refused["extra.attn"]


class TakesTurns(Plain):
    """Two networks, in turn; on rank 1 a third one late in the run."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        torch.manual_seed(5)
        self.other, self.late = Net(), Block()

    def training_step(self, batch: Any, index: int) -> Any:
        loss = loss_of(self.other if index % 2 else self.net, batch[0])
        if self.global_rank == 1 and index > 8:
            loss = loss + 0.1 * self.late(self.net.embed(batch[0])).square().mean()
        return loss


@pytest.mark.parametrize("retrofit", ["off", "now"])
def test_parts_that_the_first_steps_leave_out(retrofit: str, tmp_path: Path) -> None:
    def work(rank: int) -> Any:
        module, callback = TakesTurns(), watch(retrofit=retrofit)
        run = ddp(callback, module=module, strategy={"find_unused_parameters": True}, max_steps=20)
        return outcome(run, module, callback), sorted({r.site for _, rs in callback.history for r in rs})

    (first, read), (second, _) = together(work, tmp_path)
    assert_same({**first, "warnings": []}, {**second, "warnings": []})
    both = SITES + [site.replace("net", "other") for site in SITES]
    assert read == ["late.attn", *both]
    if retrofit == "now":
        assert sorted(name for _, applied, _, _ in first["retrofits"] for name in applied) == both


class Averaged(Plain):
    """Keeps an average of its network that never runs in training."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.ema = copy.deepcopy(self.net).requires_grad_(False)

    def on_train_batch_end(self, *args: Any) -> None:
        for mine, live in zip(self.ema.parameters(), self.net.parameters(), strict=True):
            mine.lerp_(live.detach(), 0.1)


def test_an_average_inside_the_module(tmp_path: Path) -> None:
    def work(rank: int) -> Any:
        module, callback = Averaged(), watch(retrofit="now")
        return outcome(ddp(callback, module=module), module, callback)

    first, second = together(work, tmp_path)
    assert_same(first, second)
    assert "ema.blocks.0.attn.qk_norm.q.gain" in first["weights"]


def _raise(*args: Any, **kwargs: Any) -> Any:
    raise ZeroDivisionError("injected")


FAULTS = {
    "statistics": "qkwatch.observe.measure_at",
    "statistics, in the search": "qkwatch.scout.measure",
    "search": "qkwatch.scout.find_taps",
    "attaching": "qkwatch.monitor.Monitor._attach",
    "merging": "qkwatch.monitor.merge",
    "rules": "qkwatch.rules.Rules.update",
    "metrics": "qkwatch.trainers.log",
    "panels": "qkwatch.panels.Panels.readings",
    "verification": "qkwatch.retrofit.calibrate_and_verify",
    "installing": "qkwatch.retrofit.install",
    "adopting": "qkwatch.midrun.adopt_",
}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("faulty", [0, 1])
@pytest.mark.parametrize("retrofit", ["now", "auto"])
def test_a_fault_on_one_rank_is_no_deadlock_and_leaves_ranks_equal(
    name: str, faulty: int, retrofit: str, tmp_path: Path
) -> None:
    if retrofit == "auto" and name not in ("rules", "metrics", "panels", "adopting"):
        pytest.skip("the same as for now")

    def work(rank: int) -> Any:
        patch = pytest.MonkeyPatch()
        if rank == faulty:
            patch.setattr(FAULTS[name], _raise)
        module, callback = Plain(sharp=True), watch(retrofit=retrofit, on_error="warn")
        run = ddp(callback, module=module)
        return outcome(run, module, callback)

    results = together(work, tmp_path)
    assert_same(results[0]["weights"], results[1]["weights"])
    assert_same(results[0]["optimizers"], results[1]["optimizers"])
    assert [patched for patched in results[0]["weights"] if "qk_norm" in patched] == [
        patched for patched in results[1]["weights"] if "qk_norm" in patched
    ]
    if name in ("installing", "adopting") and (name != "installing" or faulty == 1):
        assert not any("qk_norm" in key for key in results[0]["weights"])
    silent = name == "verification"  # rank zero alone verifies, and a verification that fails is a refusal
    assert len(results[faulty]["warnings"]) == (0 if silent else 1), results[faulty]["warnings"]
    assert len(results[1 - faulty]["warnings"]) <= 1


def test_resume_is_bit_identical(tmp_path: Path) -> None:
    def work(rank: int) -> Any:
        results = []
        for steps, path in ((8, None), (3, None), (8, tmp_path / "three.ckpt")):
            module, callback = Plain(sharp=True), watch(retrofit="auto")
            loader = DataLoader(TensorDataset(torch.arange(9 * 8).reshape(8, 9) % 17), batch_size=2)
            kind = DDPStrategy(process_group_backend="gloo")
            run = trainer(callback, EMAWeightAveraging(decay=0.5), devices=2, strategy=kind, max_steps=steps)
            run.seen = []
            run.fit(module, loader, loader, ckpt_path=path)
            if steps == 3:
                run.save_checkpoint(tmp_path / "three.ckpt")
            result = outcome(run, module, callback)
            results.append({k: v for k, v in result.items() if k not in ("steps", "retrofits", "warnings", "grads")})
        return results

    first, second = together(work, tmp_path)
    assert_same(first, second)
    assert any("qk_norm" in key for key in first[1]["weights"])
    assert not torch.equal(first[0]["weights"]["net.head.bias"], first[1]["weights"]["net.head.bias"])


# -- strategies that take no new parameters ---------------------------------------------------------------------


class OnCPU(FSDPStrategy):
    """Lightning asks for a GPU where it sees its own class only; torch takes the CPU if told so."""


class Flat(Plain):
    """FSDP1. With `plan` it is patched before it is wrapped."""

    def __init__(self, plan: Any = None, **options: Any) -> None:
        super().__init__(**options)
        self.plan = plan

    def configure_model(self) -> None:
        from torch.distributed.fsdp import FullyShardedDataParallel

        if self.plan is not None:
            qkwatch.retrofit_(self, plan=self.plan)
        how: dict[str, Any] = {"device_id": torch.device("cpu"), "use_orig_params": True}
        for i, block in enumerate(self.net.blocks):
            self.net.blocks[i] = FullyShardedDataParallel(block, **how)
        self.net = FullyShardedDataParallel(self.net, **how)  # type: ignore[assignment]


def test_fsdp1_is_watched_not_patched_in_mid_run_and_the_remedy_works(tmp_path: Path) -> None:
    model = Tiny(sharp=True)
    sites = qkwatch.find_sites(model.net, data().dataset.tensors[0][:4, :-1])
    plan = qkwatch.retrofit_(model, sites).plan.to_dict()

    def work(rank: int) -> Any:
        results = []
        for callback, own in ((watch(retrofit="now"), None), (None, None), (watch(), plan)):
            module = Flat(own, sharp=True)
            callbacks = [callback] if callback else []
            run = ddp(*callbacks, module=module, max_steps=3, strategy=OnCPU(process_group_backend="gloo"))
            refused = callback.retrofits[0].report.refused if callback and not own else {}
            history = [[(r.site, r.rows, r.max_logit) for r in rs] for _, rs in callback.history] if callback else []
            results.append((run.strategy.lightning_module_state_dict(), refused, history))
        return results

    first, second = together(work, tmp_path)
    assert_same([rest for _, *rest in first], [rest for _, *rest in second])
    (watched, refused, history), (plain, _, _), (patched, _, bounded) = first
    assert_same(watched, plain)
    assert list(refused) == SITES
    assert "configure_model" in refused[SITES[0]]
    single = watch()
    ddp(single, module=Tiny(sharp=True), size=1, max_steps=1)
    for (site, rows, ours), theirs in zip(history[0], single.readings, strict=True):
        assert (site, rows) == (theirs.site, theirs.rows)
        torch.testing.assert_close(ours, theirs.max_logit)
    assert any("qk_norm" in key for key in patched)
    assert max(float(m.max()) for _, _, m in bounded[-1]) < 25


@pytest.mark.parametrize("name", ["DeepSpeedStrategy", "FSDPStrategy"])
def test_patching_is_refused_with_the_remedy(name: str) -> None:
    kind = type(name, (), {})
    for strategy in (kind(), type("Mine", (kind,), {})()):
        reason = trainers.refuses_patches(SimpleNamespace(strategy=strategy))
        assert reason is not None
        assert "qkwatch.retrofit_" in reason
        assert "configure_model" in reason
    assert trainers.refuses_patches(SimpleNamespace(strategy=DDPStrategy())) is None


class Costly(Plain):
    """From step 9 on the loss is three higher on one rank."""

    def training_step(self, batch: Any, index: int) -> Any:
        loss = super().training_step(batch, index)
        guilty = self.global_step > 9 and os.environ["RANK"] == "1"
        return loss + 3.0 if guilty else loss


class PatchAt(QKWatch):
    """Wants its retrofit at step 9, when there is a past to forecast from."""

    def on_train_batch_start(self, run: Any, pl_module: Any, batch: Any, index: int) -> None:
        if run.global_step == 9:
            self._run.pending = "asked for"
        super().on_train_batch_start(run, pl_module, batch, index)


@pytest.mark.parametrize("budget", [0.5, 5.0])
def test_all_ranks_take_a_costly_retrofit_back_or_none_does(budget: float, tmp_path: Path) -> None:
    def work(rank: int) -> Any:
        module = Costly()
        options = {"every_n_steps": 2, "console": False, "on_error": "raise"}
        callback = PatchAt(**options, budget=budget, budget_steps=4)
        run = ddp(callback, module=module, max_steps=18)
        result = outcome(run, module, callback)
        return {**result, "undone": [e.undone for e in callback.retrofits]}

    first, second = together(work, tmp_path)
    assert_same({**first, "warnings": []}, {**second, "warnings": []})
    assert first["undone"] == [13 if budget < 1 else None]
    patched = any("qk_norm" in name for name in first["weights"])
    assert patched == (budget > 1)


def test_ranks_clip_the_same_heads(tmp_path: Path) -> None:
    def work(rank: int) -> Any:
        module, callback = Plain(sharp=True), watch(retrofit="auto", variant="qkclip", cap=15.0)
        return outcome(ddp(callback, module=module), module, callback)

    first, second = together(work, tmp_path)
    assert_same({**first, "warnings": []}, {**second, "warnings": []})
    [(step, applied, _, plan)] = first["retrofits"]
    assert (step, applied, plan["sites"]) == (1, SITES, [])
    assert max(float(r["max_logit"].max()) for r in first["readings"]) < 100  # momentum lets them grow in between
