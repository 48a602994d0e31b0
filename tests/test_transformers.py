"""`QKWatchCallback` in a real `transformers.Trainer`, with a small Llama on the CPU."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import together
from safetensors.torch import load_file
from test_callback import nothing_is_attached
from tiny import assert_same, weights
from tqdm.auto import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import qkwatch
from qkwatch import QKWatchError
from qkwatch.surgery import norm_parameters, patched_sites
from qkwatch.transformers import QKWatchCallback

pytestmark = pytest.mark.filterwarnings("ignore")
SITES = ["model.layers.0.self_attn", "model.layers.1.self_attn"]
IDS = torch.randint(0, 17, (64, 9), generator=torch.Generator().manual_seed(3))


def llama(sharp: bool = False) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=17, num_key_value_heads=2, **sizes))
    if sharp:
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.q_proj.weight.mul_(3000)
    return model


def watch(**options: Any) -> QKWatchCallback:
    return QKWatchCallback(**{"every_n_steps": 2, "console": False, "on_error": "raise", **options})


def trainer(folder: Path, model: Any, *callbacks: Any, **options: Any) -> Trainer:
    settings: dict[str, Any] = {
        "max_steps": 6,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        **options,
    }
    data: Any = [{"input_ids": ids, "labels": ids} for ids in IDS]
    sets = {"train_dataset": data, "eval_dataset": data[:8]}
    return Trainer(model, TrainingArguments(str(folder), **settings), callbacks=list(callbacks), **sets)


class Notes(TrainerCallback):
    """A copy of the model before each step, and the first micro-batch that it was given."""

    def __init__(self, model: Any) -> None:
        self.steps: list[tuple[Any, Any]] = []
        model.register_forward_pre_hook(self._note, with_kwargs=True)

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        hooks, model._forward_pre_hooks = model._forward_pre_hooks, type(model._forward_pre_hooks)()
        self.steps.append((copy.deepcopy(model), None))
        model._forward_pre_hooks = hooks

    def _note(self, module: Any, args: Any, kwargs: Any) -> None:
        if self.steps and self.steps[-1][1] is None:
            self.steps[-1] = (self.steps[-1][0], dict(kwargs))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_readings_are_those_of_the_first_micro_batch(accumulate: int, tmp_path: Path) -> None:
    model, callback = llama(), watch()
    notes = Notes(model)
    trainer(tmp_path, model, notes, callback, gradient_accumulation_steps=accumulate).train()
    assert [step for step, _ in callback.history] == [0, 2, 4]
    for step, readings in callback.history:
        then, batch = notes.steps[step]
        with qkwatch.watch(then, rows="auto") as watcher:
            then(**batch)
        assert [r.site for r in readings] == SITES
        for ours, theirs in zip(readings, watcher.readings, strict=True):
            assert_same({**vars(ours), "step": None}, {**vars(theirs), "step": None})


@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True}, {"bf16": True}])
def test_watching_changes_no_bit(options: dict[str, Any], tmp_path: Path) -> None:
    results = []
    for callbacks in ([watch(every_n_steps=1)], []):
        model = llama()
        trainer(tmp_path, model, *callbacks, **options).train()
        results.append(weights(model))
        for callback in callbacks:
            assert [r.rows for r in callback.readings] == [4 * 9, 4 * 9]
    assert_same(results[0], results[1])


def test_alerts_are_printed_and_figures_logged(tmp_path: Path, capsys: Any) -> None:
    callback = watch(console=True)
    run = trainer(tmp_path, llama(sharp=True), callback)
    run.train()
    assert callback.alerts and callback.alerts[0].site in SITES
    assert SITES[0] in capsys.readouterr().out.replace("\n", "")
    logged = [record for record in run.state.log_history if "qkwatch/max_logit" in record]
    assert [record["step"] for record in logged] == [1, 3, 5]
    assert all("loss" in record for record in logged)
    for record, (_, readings) in zip(logged, callback.history, strict=True):
        assert record["qkwatch/max_logit"] == max(float(r.max_logit.max()) for r in readings)


def test_figures_through_the_log_of_the_trainer_reach_every_logger(tmp_path: Path) -> None:
    callback, seen = watch(), []

    class Logger(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            seen.append((state.global_step, dict(logs)))

    run = trainer(tmp_path, llama(), Logger(), callback)
    callback.log = run.log
    run.train()
    assert [step for step, logs in seen if "qkwatch/min_entropy" in logs] == [1, 3, 5]


@pytest.mark.parametrize("retrofit", ["now", "auto"])
def test_a_patch_in_mid_run_keeps_the_optimizer_s_state(retrofit: str, tmp_path: Path) -> None:
    model, callback = llama(sharp=True), watch(retrofit=retrofit)
    run = trainer(tmp_path, model, callback, gradient_accumulation_steps=2, max_grad_norm=1.0)
    run.train()
    [entry] = callback.retrofits
    assert entry.report.applied == patched_sites(model) == SITES
    gains = dict(norm_parameters(model))
    state = {n: int(run.optimizer.state[p]["step"]) for n, p in model.named_parameters()}
    assert {state[name] for name in state if name not in gains} == {6}
    assert {state[name] for name in gains} == {6 - entry.step - 1}
    decayed = {id(p) for g in run.optimizer.param_groups if g["weight_decay"] for p in g["params"]}
    assert len(run.optimizer.param_groups) == 2 and decayed.isdisjoint(map(id, gains.values()))
    for site in entry.report.plan.sites:
        gain = gains[f"{site.site}.qk_norm.q.gain"]
        assert not torch.equal(torch.tensor(site.gains.get("q.gain", [10.0] * len(gain))), gain), "it did not move"
    assert max(float(r.max_logit.max()) for r in callback.readings) < 25


@pytest.mark.parametrize("options", [{}, {"optim": "adafactor"}, {"lr_scheduler_type": "cosine"}])
@pytest.mark.parametrize("ramp_steps", [0, 4])
@pytest.mark.parametrize("by_hand", [True, False])
def test_resume_goes_on_bit_for_bit(options: dict[str, Any], ramp_steps: int, by_hand: bool, tmp_path: Path) -> None:
    settings = {"save_strategy": "steps", "save_steps": 1, **options}
    model, callback = llama(sharp=True), watch(retrofit="auto", ramp_steps=ramp_steps)
    trainer(tmp_path, model, callback, **settings).train()
    straight, kept = weights(model), callback.state()
    for step in (1, 3, 4):
        folder = tmp_path / f"checkpoint-{step}"
        model, callback = llama(), watch(retrofit="auto", ramp_steps=ramp_steps)
        if by_hand:
            assert qkwatch.restore_(model, folder) == (SITES if step > 1 else [])
        trainer(tmp_path / "again", model, callback, **settings).train(resume_from_checkpoint=str(folder))
        assert_same(weights(model), straight)
        assert callback.state() == kept


@pytest.mark.parametrize("patched", [True, False])
def test_the_best_model_is_loaded_as_it_was_saved(patched: bool, tmp_path: Path) -> None:
    """Also where it was saved before the patch."""
    model, callback = llama(sharp=True), watch(retrofit="now" if patched else "auto", every_n_steps=4)
    settings = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1, "max_steps": 8}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_rank", "greater_is_better": patched}
    run = trainer(tmp_path, model, callback, **settings, **best)
    evaluate = run.evaluation_loop

    def ranked(*args: Any, **options: Any) -> Any:
        output = evaluate(*args, **options)
        output.metrics["eval_rank"] = run.state.global_step
        return output

    run.evaluation_loop = ranked
    run.train()
    folder = run.state.best_model_checkpoint
    assert folder.endswith("-8" if patched else "-1")
    assert len(callback.retrofits) == 1
    assert patched_sites(model) == (SITES if patched else [])
    reference = llama()
    qkwatch.restore_(reference, folder)
    reference.load_state_dict(load_file(Path(folder) / "model.safetensors"))
    assert_same(weights(model), weights(reference))
    nothing_is_attached(model)


def test_adapters_alone_would_lose_the_gains(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(llama(sharp=True), LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    callback = watch(retrofit="now")
    trainer(tmp_path, model, callback).train()
    [entry] = callback.retrofits
    assert not entry.report.applied
    assert all("merge_and_unload" in reason for reason in entry.report.refused.values())


def test_what_is_logged_is_the_worst_since_the_last_time(tmp_path: Path) -> None:
    callback = watch(every_n_steps=1)
    run = trainer(tmp_path, llama(sharp=True), callback, logging_steps=3)
    run.train()
    logged = [record for record in run.state.log_history if "qkwatch/max_logit" in record]
    assert [record["step"] for record in logged] == [3, 6]
    for record, steps in zip(logged, (range(3), range(3, 6)), strict=True):
        readings = [r for step, found in callback.history if step in steps for r in found]
        assert record["qkwatch/max_logit"] == max(float(r.max_logit.max()) for r in readings)
        assert record["qkwatch/min_entropy"] == min(float(r.entropy.min()) for r in readings)
    assert logged[0]["qkwatch/alert_level"] == max(a.level for a in callback.alerts if a.step < 3)


def test_panels_beside_the_trainer_s_own_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    callback = watch(retrofit="now")
    trainer(tmp_path, llama(sharp=True), callback, report_to=["tensorboard"]).train()
    log = EventAccumulator(str(next(tmp_path.glob("runs/qkwatch/*")))).Reload()
    points = {event.step: event.value for event in log.Scalars("qkwatch/max_logit")}
    assert points == pytest.approx(
        {step: max(float(r.max_logit.max()) for r in readings) for step, readings in callback.history}
    )
    assert "qkwatch/retrofits/text_summary" in log.Tags()["tensors"]


@pytest.mark.parametrize("shown", [True, False])
def test_what_is_said_while_a_bar_is_shown_is_written_above_it(
    shown: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    written: list[str] = []
    monkeypatch.setattr(tqdm, "write", classmethod(lambda cls, text, *args, **options: written.append(text)))
    trainer(tmp_path, llama(sharp=True), watch(console=True), disable_tqdm=not shown).train()
    assert any("qkwatch WARN" in text for text in written) == shown
    assert ("qkwatch WARN" in capsys.readouterr().out) != shown


def test_log_is_a_function_and_has_a_name() -> None:
    with pytest.raises(QKWatchError, match=r"trainer\.log"):
        QKWatchCallback(log=10)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        QKWatchCallback(10)  # type: ignore[misc]


def test_resume_without_the_patch_says_what_to_do(tmp_path: Path) -> None:
    """Of a callback that the Trainer was not made with: it cannot patch the model before it loads."""
    settings = {"save_strategy": "steps", "save_steps": 3, "save_only_model": True}
    trainer(tmp_path, llama(sharp=True), watch(retrofit="now"), **settings).train()
    run = trainer(tmp_path, llama(sharp=True), **settings)
    run.add_callback(watch())
    with pytest.raises(QKWatchError, match=r"qkwatch\.restore_"):
        run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


def test_the_trainer_may_make_the_callback_anew(tmp_path: Path) -> None:
    settings = {"save_strategy": "steps", "save_steps": 3}
    options = {"variant": "qwen3", "thresholds": qkwatch.Thresholds(patience=4), "layers": "*.0.*", "retrofit": "now"}
    model, callback = llama(sharp=True), watch(**options)
    trainer(tmp_path, model, callback, **settings).train()
    assert patched_sites(model) == SITES[:1]
    model = llama()
    qkwatch.restore_(model, tmp_path / "checkpoint-3")
    run = trainer(tmp_path, model, watch(), restore_callback_states_from_checkpoint=True, **settings)
    run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    [made] = [c for c in run.callback_handler.callbacks if isinstance(c, QKWatchCallback)]
    assert (made.variant, made.thresholds, made.layers) == (callback.variant, callback.thresholds, "*.0.*")
    assert made.state() == callback.state()


def test_a_checkpoint_for_inference(tmp_path: Path) -> None:
    model = llama(sharp=True)
    trainer(tmp_path, model, watch(retrofit="now"), save_strategy="steps", save_steps=6).train()
    fresh, file = llama(), tmp_path / "checkpoint-6" / "model.safetensors"
    assert qkwatch.restore_(fresh, file) == SITES
    assert_same(dict(norm_parameters(fresh)), dict(norm_parameters(model)))
    fresh.load_state_dict(load_file(file))
    assert torch.equal(fresh.eval()(IDS[:2]).logits, model.eval()(IDS[:2]).logits)
    with pytest.raises(QKWatchError, match="neither"):
        qkwatch.restore_(fresh, tmp_path)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_no_hook_outlives_an_exception(where: str, tmp_path: Path) -> None:
    model = llama()

    def fail(*args: Any) -> None:
        raise KeyboardInterrupt

    if where == "forward":
        handle = model.model.layers[1].mlp.register_forward_hook(fail)
    else:
        handle = model.lm_head.register_full_backward_hook(fail)
    run = trainer(tmp_path, model, watch(every_n_steps=1))
    with pytest.raises(KeyboardInterrupt):
        run.train()
    handle.remove()
    nothing_is_attached(model)
    assert "forward" not in model.__dict__


@pytest.mark.parametrize("how", ["by the Trainer", "in place", "wrapped"])
def test_a_compiled_model(how: str, tmp_path: Path) -> None:
    model, callback = llama(sharp=True), watch(retrofit="auto", every_n_steps=3)
    inner = model
    if how == "in place":
        model.compile(backend="eager")
    elif how == "wrapped":
        model = torch.compile(model, backend="eager")
    flags = {"torch_compile": True, "torch_compile_backend": "eager"} if how == "by the Trainer" else {}
    trainer(tmp_path, model, callback, remove_unused_columns=False, **flags).train()
    assert [step for step, _ in callback.history] == [0, 1, 3]
    assert callback.retrofits[0].report.applied == patched_sites(inner) == SITES
    assert max(float(r.max_logit.max()) for r in callback.readings) < 25
    nothing_is_attached(inner)


def test_transformers_stays_optional() -> None:
    script = "import sys; sys.modules['transformers'] = None; import qkwatch; qkwatch.find_sites, qkwatch.retrofit_"
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_two_processes_are_read_together_and_patched_beforehand(tmp_path: Path) -> None:
    def work(rank: int) -> Any:
        results = []
        for patched in (False, True):
            model, callback = llama(sharp=True), watch(retrofit="off" if patched else "now")
            if patched:
                qkwatch.retrofit_(model, qkwatch.find_sites(model, IDS[:4]))
            trainer(tmp_path, model, callback, ddp_backend="gloo", max_steps=3).train()
            refused = callback.retrofits[0].report.refused if callback.retrofits else {}
            readings = [(r.site, r.rows, r.max_logit) for r in callback.readings]
            results.append((weights(model), readings, refused))
        return results

    first, second = together(work, tmp_path)
    assert_same(first, second)
    (_, readings, refused), (_, bounded, _) = first
    assert [(site, rows) for site, rows, _ in readings] == [(site, 2 * 4 * 9) for site in SITES]
    assert "retrofit_" in refused[SITES[0]]
    assert max(float(m.max()) for _, _, m in bounded) < 25
