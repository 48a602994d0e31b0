"""The Lightning callback. Thin: Lightning's life cycle calls the rest of the package."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence
from typing import Any, Literal

import torch

from qkwatch import checkpoints, trainers
from qkwatch.adopt import adopt_
from qkwatch.errors import QKWatchError
from qkwatch.guard import Guard, guarded, text_of
from qkwatch.midrun import Retrofit, patch_, set_ramp
from qkwatch.monitor import Monitor
from qkwatch.norms import Variant, get_variant
from qkwatch.options import check_options
from qkwatch.panels import Panels
from qkwatch.progress import Progress
from qkwatch.ranks import average_gradients
from qkwatch.report import alert_text, reading_table, retrofit_text, say, summary
from qkwatch.retrofit import RetrofitReport, patched_sites
from qkwatch.rules import Alert, Level, Thresholds
from qkwatch.sharding import reshard, shards
from qkwatch.sites import Site
from qkwatch.stats import Reading

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
        variant: a preset's name or a `Variant`.
        cap: the largest logit a calibrated gain may start at.
        max_gain: the ceiling a learned gain can never pass; None for none.
        ramp_steps: above 0: pass from the old function, exactly, to the normed one over so many steps.
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
        thresholds: Thresholds | None = None,
        layers: str | Sequence[str] | None = None,
        rows: int | str = "auto",
        console: bool = True,
        on_error: Literal["warn", "raise"] = "warn",
    ):
        super().__init__()
        self.every_n_steps, self.retrofit, self.variant = every_n_steps, retrofit, get_variant(variant)
        self.cap, self.max_gain, self.ramp_steps = cap, max_gain, ramp_steps
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
        self._new: list[torch.nn.Parameter] = []  # born after the strategy wrapped the model
        self._step = 0  # when the batch began
        self.readings: list[Reading] = []
        self.history: deque[tuple[int, list[Reading]]] = deque(maxlen=HISTORY)
        self._run = Progress()

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
        if trainers.loads_by_itself(trainer):
            self._load_hooks.append(checkpoints.BeforeLoad(trainer.strategy, functools.partial(self._fit_to, trainer)))

    @staticmethod
    def _fit_to(trainer: Any, *args: Any, **options: Any) -> None:
        optimizers, schedulers = trainer.optimizers, trainers.schedulers(trainer)
        checkpoints.fit_sharded(trainer.lightning_module, optimizers, schedulers, *args, **options)

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
        self._stood_down, self._new, self._warned = False, [], set()
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
        reshard(pl_module)
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
        self._ramp(pl_module, step)

    @guarded
    def on_before_backward(self, trainer: Any, pl_module: Any, loss: torch.Tensor) -> None:
        assert self._monitor is not None
        if pl_module.automatic_optimization:  # otherwise more forward passes may follow, of other submodules
            self._monitor.end_forward()

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        if self._new:
            average_gradients(self._new)

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
        self._run.note_loss(lambda: trainers.loss_of(outputs), self._step)
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
            if alerts:
                self._panels.alerts(alerts, self._step)
        for alert in loud:
            self._say(trainer, alert_text(alert))
        if loud:
            self._say(trainer, reading_table(readings, title=f"attention at step {self._step}", most=8))

    # -- the retrofit ---------------------------------------------------------------------------------------

    def _patch(self, trainer: Any, pl_module: Any) -> None:
        assert self._monitor is not None
        sites, new = self._monitor.sites, list[torch.nn.Parameter]()
        self._run.decided, self._run.pending = True, None
        try:
            report, new = patch_(trainer, pl_module, sites, self._monitor.ranks, self.variant, self.cap, self.max_gain)
        except Exception as fault:
            if self.on_error == "raise":
                raise
            self._warn_once("retrofit", f"the retrofit failed ({text_of(fault)}): the model is as before, and watched")
            report = RetrofitReport(refused={site.name: text_of(fault) for site in sites})
        if report.applied:
            unknown = self._monitor.ranks.size > 1 and not shards(pl_module)  # to what averages gradients
            self._new += new if unknown else []
            self._monitor.rules.forget(report.applied)
            self._monitor.reset_sites()
            self._run.ramp_from = self._step if self.ramp_steps else None
            self._ramp(pl_module, self._step)
        self.retrofits.append(Retrofit(self._step, report, loss_before=self._run.loss))
        text = retrofit_text(report)
        self._say(trainer, text)
        if self._panels is not None:
            self._panels.retrofit(text.plain, self._step)

    def _ramp(self, pl_module: Any, step: int) -> None:
        if self._run.ramp_from is None:
            return
        alpha = (step - self._run.ramp_from) / self.ramp_steps if self.ramp_steps else 1.0
        if alpha >= 1.0:
            self._run.ramp_from = None
        self._run.ramp = alpha if alpha < 1.0 else None
        set_ramp(pl_module, self._run.ramp)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Evaluating a checkpoint outside a fit: as far on its ramp as it was when it was saved."""
        if self._saved and trainer.state.fn != "fit":
            set_ramp(pl_module, self._saved["run"].get("ramp"))

    on_test_start = on_predict_start = on_validation_start

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
        reshard(pl_module)
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
