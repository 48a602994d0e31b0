"""Two real processes over gloo: ranks stay equal, equal to one process with the joint batch, and never wait in vain."""

from __future__ import annotations

import os
import signal
import socket
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from tiny import Block, Tiny, assert_same, data, loss_of, trainer, weights
from torch.utils.data import DataLoader, TensorDataset

import qkwatch
from qkwatch import QKWatch, trainers
from qkwatch.retrofit import norm_parameters, patched_sites

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not hasattr(os, "fork") or not dist.is_gloo_available(), reason="needs fork and gloo"),
]
SITES = ["net.blocks.0.attn", "net.blocks.1.attn"]
LIMIT = 60.0  # seconds; a deadlock would last for ever


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def together(work: Callable[[int], Any], folder: Path, size: int = 2) -> list[Any]:
    """Run ``work(rank)`` in processes of its own and return what each gave; fails on an error and on a deadlock."""
    port, ids = free_port(), []
    for rank in range(size):
        process = os.fork()
        if process:
            ids.append(process)
            continue
        code = 1
        try:
            os.environ.update(
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                GROUP_RANK="0",
                WORLD_SIZE=str(size),
                LOCAL_WORLD_SIZE=str(size),
                TORCHELASTIC_RUN_ID="test",
            )
            torch.save(work(rank), folder / f"rank{rank}.pt")
            code = 0
        except BaseException:
            (folder / f"rank{rank}.txt").write_text(traceback.format_exc())
        finally:
            os._exit(code)
    deadline, codes = time.monotonic() + LIMIT, dict.fromkeys(ids)
    while None in codes.values() and time.monotonic() < deadline:
        for process in [p for p, code in codes.items() if code is None]:
            done, status = os.waitpid(process, os.WNOHANG)
            codes[process] = status if done else None
        time.sleep(0.01)
    for process in [p for p, code in codes.items() if code is None]:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    errors = "\n".join(file.read_text() for file in sorted(folder.glob("rank*.txt")))
    assert None not in codes.values(), f"deadlock\n{errors}"
    assert not errors, errors
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(size)]


def watch(**options: Any) -> QKWatch:
    return QKWatch(**{"every_n_steps": 2, "console": False, "on_error": "raise", **options})


class Plain(Tiny):
    """SGD: what is nearly equal stays nearly equal."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


def ddp(*callbacks: Any, module: Any, size: int = 2, strategy: dict[str, Any] | None = None, **options: Any) -> Any:
    """One rank's run: every other sample of each batch of four."""
    kind: Any = DDPStrategy(process_group_backend="gloo", **(strategy or {})) if size > 1 else "auto"
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
        module, callback = Plain(sharp=True), watch(retrofit="auto")
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
    module, callback = Plain(sharp=True), watch(retrofit="auto")
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


# -- FSDP2 ------------------------------------------------------------------------------------------------------


class Sharded(Tiny):
    """`patch` is the way that stays open to sharded models: patch, then shard."""

    def __init__(self, plan: Any = None, **options: Any) -> None:
        super().__init__(**options)
        self.plan = plan

    def configure_model(self) -> None:
        from torch.distributed.fsdp import FSDPModule, fully_shard

        if isinstance(self.net, FSDPModule):
            return
        if self.plan is not None:
            qkwatch.retrofit_(self, plan=self.plan)
        mesh = self.device_mesh["data_parallel"]
        for block in self.net.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.net, mesh=mesh)


def fsdp2(*callbacks: Any, module: Any, steps: int, full: bool = True, path: Any = None) -> Any:
    strategy = ModelParallelStrategy(
        data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo", save_distributed_checkpoint=not full
    )
    run = trainer(*callbacks, devices=2, strategy=strategy, max_steps=steps, use_distributed_sampler=False)
    ids = data(count=4).dataset.tensors[0][int(os.environ["RANK"]) :: 2].repeat(8, 1)
    loader = DataLoader(TensorDataset(ids), batch_size=2)
    run.fit(module, loader, loader, ckpt_path=path)
    return run


def full_weights(module: Any) -> dict[str, Any]:
    return {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in module.state_dict().items()}


def test_sharded_models_are_watched_and_not_patched(tmp_path: Path) -> None:
    def work(rank: int) -> Any:
        results = []
        for callback in (watch(retrofit="now"), None):
            module = Sharded(sharp=True)
            fsdp2(*([callback] if callback else []), module=module, steps=5)
            refused = callback.retrofits[0].report.refused if callback else {}
            history = (
                [(s, [(r.site, r.rows, r.max_logit) for r in rs]) for s, rs in callback.history] if callback else []
            )
            results.append((full_weights(module), refused, history))
        return results

    first, second = together(work, tmp_path)
    assert_same(first, second)
    (watched, refused, history), (plain, _, _) = first
    assert_same(watched, plain)
    assert list(refused) == SITES
    assert "configure_model" in refused[SITES[0]]
    assert [(step, [(name, rows) for name, rows, _ in figures]) for step, figures in history] == [
        (step, [(name, 4 * 8) for name in SITES]) for step in (0, 2, 4)
    ]
    single = watch()
    trainer(single, max_steps=1).fit(Tiny(sharp=True), data(count=4))
    for (_, _, ours), theirs in zip(history[0][1], single.readings, strict=True):
        torch.testing.assert_close(ours, theirs.max_logit)


@pytest.mark.parametrize("full", [True, False])
def test_patched_and_then_sharded_it_trains_saves_and_resumes(full: bool, tmp_path: Path) -> None:
    model = Tiny(sharp=True)
    report = qkwatch.retrofit_(model, _found(model))
    assert report.applied == SITES
    plan = report.plan.to_dict()

    def work(rank: int) -> Any:
        results = []
        for steps, path in ((8, None), (5, None), (8, tmp_path / "five.ckpt")):
            module, callback = Sharded(plan, sharp=True), watch()
            run = fsdp2(callback, module=module, steps=steps, full=full, path=path)
            if steps == 5:
                run.save_checkpoint(tmp_path / "five.ckpt")
            results.append((full_weights(module), [r.max_logit for r in callback.readings], callback.state_dict()))
        return results

    first, second = together(work, tmp_path)
    assert_same(first, second)
    straight, _, resumed = first
    assert_same(straight, resumed)
    start = torch.tensor(plan["sites"][0]["gains"]["q.gain"])
    assert not torch.equal(straight[0][f"{SITES[0]}.qk_norm.q.gain"], start)
    assert max(float(m.max()) for m in straight[1]) < 25
    if full:
        again = qkwatch.load_from_checkpoint(Tiny, tmp_path / "five.ckpt")
        assert patched_sites(again) == SITES


def _found(model: Tiny) -> list[qkwatch.Site]:
    sites = qkwatch.find_sites(model.net, data().dataset.tensors[0][:4, :-1])
    for site in sites:
        site.name = f"net.{site.name}"
    return sites


# -- strategies that take no new parameters ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["DeepSpeedStrategy", "FSDPStrategy", "ModelParallelStrategy"])
def test_patching_is_refused_with_the_remedy(name: str) -> None:
    kind = type(name, (), {})
    for strategy in (kind(), type("Mine", (kind,), {})()):
        reason = trainers.refuses_patches(SimpleNamespace(strategy=strategy))
        assert reason is not None
        assert "qkwatch.retrofit_" in reason
        assert "configure_model" in reason
    assert trainers.refuses_patches(SimpleNamespace(strategy=DDPStrategy())) is None
