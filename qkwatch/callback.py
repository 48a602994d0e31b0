"""The Lightning callback. Thin: Lightning's life cycle calls the rest of the package."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Literal

import torch

from qkwatch import checkpoints, trainers
from qkwatch.adopt import adopt_
from qkwatch.errors import QKWatchError
from qkwatch.guard import Guard, guarded, text_of
from qkwatch.intervene import Intervention
from qkwatch.midrun import Retrofit
from qkwatch.monitor import Monitor
from qkwatch.options import check_options
from qkwatch.panels import Panels
from qkwatch.progress import Progress
from qkwatch.ranks import average_gradients
from qkwatch.report import alert_text, reading_table, retrofit_text, say, summary
from qkwatch.retrofit import RetrofitReport, patched_sites
from qkwatch.rules import Alert, Level, Thresholds
from qkwatch.sites import Site
from qkwatch.stats import Reading
from qkwatch.variants import CLIP, Variant, get_variant

HISTORY = 128  # steps of readings kept in `QKWatch.history`


class QKWatch(Guard, *trainers.callback_bases()):  # type: ignore[misc]
    r"""Watch the attention of the model in training; warn before it saturates; patch it to QK-norm if asked.

    Between measured steps nothing is attached to the model. Readings are logged to every logger of the Trainer,
    and as ``qkwatch/max_logit``, ``qkwatch/min_entropy`` and ``qkwatch/alert_level`` for EarlyStopping and
    ModelCheckpoint to monitor.

    Args:
        every_n_steps: optimizer steps between readings.
        retrofit: "off"; "auto": at the first WARN or worse, every watched site that can be patched; "now": after
            the first training batch.
        variant: a preset's name or a `Variant`; or "qkclip", which adds nothing to the model: from the retrofit on, it
            shrinks the projection weights of each head whose reading is above the cap (`QKClip`).
        cap: the largest logit a calibrated gain may start at, or a head may have under "qkclip".
        max_gain: the ceiling a learned gain can never pass; None for none.
        ramp_steps: above 0: pass from the old function, exactly, to the normed one over so many steps.
        budget: how far the training loss may lie above its forecast from before a retrofit, on the mean over the next
            `budget_steps` batches; beyond that it is taken back: weights and optimizer state as at the retrofit (a copy
            is kept in host memory until then), schedulers going on. None: no copy, and no way back.
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
        QKWatchError: an unknown option or variant at once; a layer glob that matches no site with the first forward.

    Example::

        Trainer(callbacks=[QKWatch(retrofit="auto")])
    """

    def __init__(
        self,
        every_n_steps: int = 10,
        retrofit: Literal["off", "auto", "now"] = "off",
        variant: str | Variant = "l2",
        cap: float = 20.0,
        max_gain: float | None = 100.0,
        ramp_steps: int = 0,
        budget: float | None = None,
        budget_steps: int = 20,
        thresholds: Thresholds | None = None,
        layers: str | Sequence[str] | None = None,
        rows: int | str = "auto",
        console: bool = True,
        on_error: Literal["warn", "raise"] = "warn",
    ):
        super().__init__()
        self.every_n_steps, self.retrofit = every_n_steps, retrofit
        self.variant = CLIP if variant == CLIP else get_variant(variant)
        self.cap, self.max_gain, self.ramp_steps = cap, max_gain, ramp_steps
        self.budget, self.budget_steps = budget, budget_steps
        self.thresholds, self.layers, self.rows = thresholds or Thresholds(), layers, rows
        self.console, self.on_error = console, on_error
        check_options(self)
        self._monitor: Monitor | None = None
        self._panels: Panels | None = None
        self._load_hooks: list[Any] = []  # so that models fit themselves to what they load
        self._stood_down = False
        self._warned: set[str] = set()
        self._saved: dict[str, Any] = {}  # of a checkpoint, until the fit starts
        self._groups: Any = None  # likewise
        self._intervention = self._fresh()
        self._step = 0  # when the batch began
        self.readings: list[Reading] = []
        self.history: deque[tuple[int, list[Reading]]] = deque(maxlen=HISTORY)
        self._run = Progress()

    def _fresh(self) -> Intervention:
        options = self.variant, self.cap, self.max_gain, self.ramp_steps, self.budget, self.budget_steps
        return Intervention(*options)

    @property
    def state_key(self) -> str:
        return "QKWatch"

    @property
    def sites(self) -> list[Site]:
        return self._monitor.sites if self._monitor is not None else []

    @property
    def alerts(self) -> list[Alert]:
        return self._run.alerts

    @property
    def retrofits(self) -> list[Retrofit]:
        return self._run.retrofits

    # -- before training ------------------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if sum(isinstance(callback, QKWatch) for callback in trainer.callbacks) > 1:
            raise QKWatchError("a Trainer takes one QKWatch; its layers= may be a list of globs")
        self._saved, self._groups = {}, None
        if stage == "fit" and not trainer.global_step:  # otherwise the same Trainer fits again, and we go on
            self._monitor, self._run, self.readings = None, Progress(), []
            self.history.clear()
        self._unfollow()
        # weight averages that were made before this point are told; later ones copy the hook with the model
        models = [pl_module, *trainers.averaged_models(trainer)]
        self._load_hooks = [checkpoints.follow(model) for model in models]

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self._groups = checkpoints.saved_groups(checkpoint)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = dict(state_dict)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        before = self._monitor
        self._monitor = Monitor(
            pl_module,
            every_n_steps=self.every_n_steps,
            layers=self.layers,
            rows=self.rows,
            thresholds=self.thresholds,
            on_fault=self._fault,
            on_unseen=self._unseen,
            ranks=trainers.ranks(trainer),
        )
        self._stood_down, self._warned, self._intervention = False, set(), self._fresh()
        if before is not None:
            self._monitor.rules, self._monitor.last_measured = before.rules, before.last_measured
        groups, self._groups = self._groups, None
        checkpoints.restore_groups(groups, pl_module, trainer.optimizers, trainers.schedulers(trainer))

    @guarded
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        assert self._monitor is not None
        saved, self._saved = self._saved, {}
        if saved:
            self._monitor.rules.load_state_dict(saved["rules"])
            self._monitor.last_measured = saved["last_measured"]
            self._run = Progress.from_state_dict(saved["run"])
            self._run.count(trainer.global_step)  # saved between the optimizer's step and our own hook
        elif self._run.counted_at != trainer.global_step:
            self._run.steps, self._run.counted_at = trainers.steps_done(trainer), trainer.global_step
        self._run.start(patched=bool(patched_sites(pl_module)))
        self._panels = Panels(trainer.loggers if trainer.is_global_zero and not trainer.fast_dev_run else [])
        # of a model that came patched: after the optimizers' state was loaded by index, no sooner
        if trainer.optimizers and trainers.refuses_patches(trainer) is None:
            adopt_(pl_module, trainer.optimizers, trainers.schedulers(trainer))

    # -- one step -------------------------------------------------------------------------------------------

    @guarded
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        assert self._monitor is not None
        step = self._step = self._run.steps
        if self.retrofit == "now" and not self._run.decided:
            self._run.pending = self._run.pending or 'retrofit="now"'
        if self._run.pending is not None and self._monitor.keep_due(step):
            self._monitor.begin(step, keep_calls=True)
        elif self._monitor.due(step):
            self._monitor.begin(step)
        self._intervention.ramp(pl_module, self._run, step)

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
        self._read(trainer, pl_module, outputs)
        self._consider(trainer, pl_module)

    @guarded
    def _read(self, trainer: Any, pl_module: Any, outputs: Any) -> None:
        """The readings of this step, if it was measured."""
        assert self._monitor is not None
        self._run.count(trainer.global_step)
        readings, alerts = self._monitor.collect(self._step)
        if readings:
            self._take(trainer, pl_module, readings, alerts)
        loss = trainers.loss_of(outputs)
        self._run.note_loss(lambda: None if loss is None else float(loss), self._step)
        self._intervention.note_loss(self._step, loss)
        if self._monitor.empty and self._first_time("empty"):
            self._say(trainer, "qkwatch: no softmax attention ran in this model's forward pass: nothing to watch")

    @guarded
    def _consider(self, trainer: Any, pl_module: Any) -> None:
        """A retrofit, if one is due: between two optimizer steps, never inside an accumulation window."""
        assert self._monitor is not None
        monitor, run = self._monitor, self._run
        if self.retrofit == "auto" and not run.decided and monitor.last_measured == self._step:
            run.pending = monitor.ranks.first(run.pending)
        # patched once something has run while its inputs were kept
        if run.pending is not None and not run.decided and run.steps != self._step and monitor.sites and monitor.kept:
            self._patch(trainer, pl_module)
        if run.clipping and self.variant == CLIP and self.history and self.history[-1][0] == self._step:
            clipped = self._intervention.clip_heads(trainer, monitor, self.readings)
            trainers.log(pl_module, {"qkwatch/clipped_heads": float(clipped)})
        alert = self._intervention.judge(trainer, pl_module, monitor, run, self._step)
        if alert is not None:
            run.alerts.append(alert)
            self._tell(trainer, [alert])
        if run.pending is None:
            monitor.drop_calls()

    def _take(self, trainer: Any, pl_module: Any, readings: list[Reading], alerts: list[Alert]) -> None:
        loud = [alert for alert in alerts if alert.level >= Level.WARN]
        if loud and self.retrofit == "auto" and not self._run.decided:
            self._run.pending = f"alert at step {self._step}"
        self.readings = readings
        self.history.append((self._step, readings))
        self._run.measured += 1
        self._run.alerts += alerts
        trainers.log(pl_module, trainers.aggregates(readings, alerts))
        if self._panels is not None:
            self._panels.readings(readings, self._step)
        self._tell(trainer, alerts)
        if loud:
            self._say(trainer, reading_table(readings, title=f"attention at step {self._step}", most=8))

    def _tell(self, trainer: Any, alerts: list[Alert]) -> None:
        if self._panels is not None and alerts:
            self._panels.alerts(alerts, self._step)
        for alert in alerts:
            if alert.level >= Level.WARN:
                self._say(trainer, alert_text(alert))

    # -- the retrofit ---------------------------------------------------------------------------------------

    def _patch(self, trainer: Any, pl_module: Any) -> None:
        assert self._monitor is not None
        self._run.decided, self._run.pending = True, None
        try:
            report = self._intervention.make(trainer, pl_module, self._monitor, self._run, self._step)
        except Exception as fault:
            if self.on_error == "raise":
                raise
            self._warn_once("retrofit", f"the retrofit failed ({text_of(fault)}): the model is as before, and watched")
            report = RetrofitReport(refused={site.name: text_of(fault) for site in self._monitor.sites})
        self.retrofits.append(Retrofit(self._step, report, loss_before=self._run.loss))
        text = retrofit_text(report)
        self._say(trainer, text)
        if self._panels is not None:
            self._panels.retrofit(text.plain, self._step)

    # -- afterwards -----------------------------------------------------------------------------------------

    @guarded
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self._panels is not None:
            self._panels.close()
        self._say(
            trainer,
            summary(
                sites=len({r.site for r in self.readings} | {s.name for s in self.sites}),
                readings=self._run.measured,
                alerts=self.alerts,
                retrofits=[entry.report for entry in self.retrofits],
                last=self.readings,
            ),
        )

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._detach()
        self._unfollow()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._detach()
        self._unfollow()

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoints.save_groups(checkpoint, pl_module, trainer.optimizers)

    def state_dict(self) -> dict[str, Any]:
        if self._monitor is None:
            return {}
        rules, last_measured = self._monitor.rules.state_dict(), self._monitor.last_measured
        return {"rules": rules, "last_measured": last_measured, "run": self._run.state_dict()}

    def _unfollow(self) -> None:
        for handle in self._load_hooks:
            handle.remove()
        self._load_hooks = []

    # -- saying things --------------------------------------------------------------------------------------

    def _say(self, trainer: Any, renderable: Any) -> None:
        if self.console and trainer.is_global_zero:
            say(renderable, trainer.progress_bar_callback)
