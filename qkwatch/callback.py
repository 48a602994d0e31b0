"""The Lightning callback. Thin: Lightning's life cycle calls the rest of the package."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from qkwatch import checkpoints, trainers
from qkwatch.adopt import adopt_
from qkwatch.errors import QKWatchError
from qkwatch.guard import guarded
from qkwatch.midrun import Live, set_ramp
from qkwatch.panels import Panels
from qkwatch.ranks import average_gradients
from qkwatch.report import say
from qkwatch.sharding import reshard
from qkwatch.watching import Watching


class QKWatch(Watching, *trainers.callback_bases()):  # type: ignore[misc]
    r"""Watch the attention of the model in training; warn before it saturates; patch it to QK-norm if asked.

    Between measured steps nothing is attached to the model. Readings are logged to every logger of the Trainer,
    and as ``qkwatch/max_logit``, ``qkwatch/min_entropy`` and ``qkwatch/alert_level`` (the worst level of the alerts
    that hold: 0 none, 1 INFO, 2 WARN, 3 CRITICAL, 4 FATAL) for EarlyStopping and ModelCheckpoint to monitor.

    Args:
        every_n_steps: optimizer steps between readings.
        retrofit: "off"; "auto": at the first WARN or worse, every watched site that can be patched; "now": after
            the first training batch.
        variant: a preset's name or a `Variant`; or "qkclip", which adds nothing to the model: from the retrofit on, it
            shrinks the projection weights of each head whose reading is above the cap (`QKClip`).
        cap: the largest logit a calibrated gain may start at, or a head may have under "qkclip".
        max_gain: the ceiling a learned gain can never pass; None for none.
        ramp_steps: above 0: pass from the old function, exactly, to the normed one over so many steps.
        calibrate: how the gains start, as in `retrofit_`: True from the measured sizes of q and k; "raised" likewise,
            but at least as the variant's own system starts them ("l2" at 10); False as that starts them; "needed"
            likewise, but measured where that could pass the cap. None: what did best in `examples/study.py`, "needed"
            for "auto" and "raised" for "now".
        budget: how far the training loss may lie above its forecast from before a retrofit, on the mean over the next
            `budget_steps` batches; beyond that it is taken back: weights and optimizer state as at the retrofit (a copy
            is kept in host memory until then), schedulers going on. None: no copy, and no way back. There is none
            either for models sharded by FSDP2, and before eight losses were seen ("now").
        budget_steps: batches to compare, counted from the retrofit or the end of its ramp.
        thresholds: every constant of the alert rules.
        layers: glob or globs over module names; a leading "!" excludes.
        rows: query rows per site and reading: "all", "auto" (exact where it is cheap beside the layer) or a number.
        console: print alerts, retrofits and a summary.
        on_error: "warn": a fault of the monitor is one warning and training goes on; "raise" for debugging.

    Attributes:
        sites: the watched sites, known after the first measured step.
        readings: the last measured step's, one per site, over all ranks.
        history: (step, readings) of the last 128 measured steps.
        alerts: all `Alert`\ s so far.
        retrofits: what was patched, when, and the loss around it.

    Raises:
        QKWatchError: an unknown option or variant at once; with the first forward a layer glob that matches no site,
            and nothing that has yet to run.

    Example::

        Trainer(callbacks=[QKWatch(retrofit="auto")])
    """

    _load_hooks: Sequence[Any] = ()  # so that models fit themselves to what they load
    _before_start: Sequence[Any] = ()  # likewise, for what is loaded before anything runs
    _saved: dict[str, Any] | None = None  # of a checkpoint, until the fit starts
    _groups: Any = None  # likewise
    _unlogged = False  # figures of a checkpoint that other callbacks may monitor

    @property
    def state_key(self) -> str:
        return "QKWatch"

    # -- before training ------------------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if sum(isinstance(callback, QKWatch) for callback in trainer.callbacks) > 1:
            raise QKWatchError("a Trainer takes one QKWatch; its layers= may be a list of globs")
        self._saved, self._groups = None, None
        if stage == "fit" and not trainer.global_step:  # otherwise the same Trainer fits again, and we go on
            self._forget()
        self._unfollow()
        # weight averages that were made before this point are told; later ones copy the hook with the model
        models = [pl_module, *trainers.averaged_models(trainer)]
        hooks = [checkpoints.follow(model) for model in models]
        self._before_start = [checkpoints.end_ramps(model) for model in models]
        if trainers.loads_by_itself(trainer):
            hooks.append(checkpoints.BeforeLoad(trainer.strategy, functools.partial(self._fit_to, trainer)))
        self._load_hooks = hooks

    @staticmethod
    def _fit_to(trainer: Any, *args: Any, **options: Any) -> None:
        optimizers, schedulers = trainer.optimizers, trainers.schedulers(trainer)
        checkpoints.fit_sharded(trainer.lightning_module, optimizers, schedulers, *args, **options)

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self._groups = checkpoints.saved_groups(checkpoint)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = dict(state_dict)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self._watch(pl_module, trainers.ranks(trainer))
        groups, self._groups = self._groups, None
        checkpoints.restore_groups(groups, pl_module, trainer.optimizers, trainers.schedulers(trainer))

    @guarded
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._started()
        saved, self._saved = self._saved, None
        if saved and self._go_on_from(saved):
            self._unlogged = True
            self._run.count(trainer.global_step)  # saved between the optimizer's step and our own hook
        elif self._run.counted_at != trainer.global_step:
            self._run.steps, self._run.counted_at = trainers.steps_done(trainer), trainer.global_step
        self._start(trainer, pl_module)
        loggers = trainer.loggers if trainer.is_global_zero and not trainer.fast_dev_run else []
        self._panels = Panels(loggers, marks=self.thresholds.marks)
        # of a model that came patched: after the optimizers' state was loaded by index, no sooner
        reshard(pl_module)
        if trainer.optimizers and trainers.refuses_patches(trainer) is None:
            adopt_(pl_module, trainer.optimizers, trainers.schedulers(trainer))

    # -- one step -------------------------------------------------------------------------------------------

    @guarded
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._begin(pl_module, self._run.steps)

    @guarded
    def on_before_backward(self, trainer: Any, pl_module: Any, loss: torch.Tensor) -> None:
        assert self._monitor is not None
        if pl_module.automatic_optimization:  # otherwise more forward passes may follow, of other submodules
            self._monitor.end_forward()

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        if self._intervention.new:
            average_gradients(self._intervention.new)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        # guarded one by one: a rank on which the first fails still has to take part in what is collective of the rest
        self._read(trainer, pl_module, trainers.loss_of(trainer, outputs), trainer.global_step)
        if self._unlogged:
            self._relog(pl_module)
        self._consider(trainer, pl_module)

    @guarded
    def _relog(self, pl_module: Any) -> None:
        """The last figures from before a resume: its first epoch may take no reading, and others monitor them."""
        self._unlogged = False
        if not self.history or self.history[-1][0] != self._step:
            self._aside("logging the figures", lambda: trainers.log(pl_module, self._run.figures))

    def _log(self, host: Any, model: Any, figures: dict[str, float]) -> None:
        trainers.log(model, figures)

    def _live(self, host: Any, model: Any) -> Live:
        models = [model, *trainers.averaged_models(host)]
        return Live(models, host.optimizers, trainers.schedulers(host), trainers.refuses_patches(host))

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Evaluating a checkpoint outside a fit: as far on its ramp as it was when it was saved."""
        self._started()
        if self._saved and trainer.state.fn != "fit":
            run = self._saved.get("run", {})
            set_ramp(pl_module, run.get("ramp"), run.get("ramp_sites"))

    on_test_start = on_predict_start = on_validation_start

    # -- afterwards -----------------------------------------------------------------------------------------

    @guarded
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self._panels is not None:
            self._aside("a logger", self._panels.close)
        self._intervention.let_go(self._run)
        self._say(trainer, self._summary())

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._detach()
        self._intervention.let_go(self._run)
        self._unfollow()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._detach()
        self._unfollow()

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        reshard(pl_module)
        checkpoints.save_groups(checkpoint, pl_module, trainer.optimizers)

    def _started(self) -> None:
        for handle in self._before_start:
            handle.remove()
        self._before_start = ()

    def _unfollow(self) -> None:
        self._started()
        for handle in self._load_hooks:
            handle.remove()
        self._load_hooks = ()

    # -- saying things --------------------------------------------------------------------------------------

    def _print(self, host: Any, renderable: Any) -> None:
        if self.console and host.is_global_zero:
            say(renderable, host.progress_bar_callback)
