"""The Lightning callback. Thin: Lightning's life cycle calls the rest of the package."""

from __future__ import annotations

import functools
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar, cast

import torch

from qkwatch import checkpoints, trainers
from qkwatch.adopt import adopt_
from qkwatch.errors import QKWatchError
from qkwatch.midrun import Retrofit, patch_, set_ramp
from qkwatch.monitor import Monitor
from qkwatch.norms import Variant, get_variant
from qkwatch.options import check_options
from qkwatch.panels import Panels
from qkwatch.ranks import average_gradients
from qkwatch.report import alert_text, reading_table, retrofit_text, say, summary
from qkwatch.retrofit import RetrofitReport, patched_sites
from qkwatch.rules import Alert, Level, Thresholds
from qkwatch.sites import Site
from qkwatch.stats import Reading

HISTORY = 128  # steps of readings kept in `QKWatch.history`

Hook = TypeVar("Hook", bound=Callable[..., Any])


def guarded(hook: Hook) -> Hook:
    """A fault of ours never stops training: one warning, and the monitor stands down.

    A `QKWatchError` is bad input and does stop it, and so does any fault under ``on_error="raise"``.
    """

    @functools.wraps(hook)
    def run(self: QKWatch, *args: Any, **kwargs: Any) -> Any:
        if self._stood_down:
            return None
        try:
            return hook(self, *args, **kwargs)
        except BaseException as fault:
            self._detach()
            if isinstance(fault, QKWatchError) or not isinstance(fault, Exception) or self.on_error == "raise":
                raise
            self._stand_down(hook.__name__, fault)
            return None

    return cast(Hook, run)


class QKWatch(*trainers.callback_bases()):  # type: ignore[misc]
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
        self._step = self._global_step = 0  # when the batch began
        self._forget()

    def _forget(self) -> None:
        """As at the start of a run."""
        self.readings: list[Reading] = []
        self.history: deque[tuple[int, list[Reading]]] = deque(maxlen=HISTORY)
        self.alerts: list[Alert] = []
        self.retrofits: list[Retrofit] = []
        self._measured = 0
        self._pending: str | None = None  # why a retrofit is due
        self._decided = False  # a retrofit was made or refused
        self._ramp_from: int | None = None
        self._loss: float | None = None

    @property
    def state_key(self) -> str:
        return "QKWatch"

    @property
    def sites(self) -> list[Site]:
        return self._monitor.sites if self._monitor is not None else []

    # -- before training ------------------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if sum(isinstance(callback, QKWatch) for callback in trainer.callbacks) > 1:
            raise QKWatchError("a Trainer takes one QKWatch; its layers= may be a list of globs")
        self._unfollow()
        # weight averages that were made before this point are told; later ones copy the hook with the model
        models = [pl_module, *trainers.averaged_models(trainer)]
        self._load_hooks = [checkpoints.follow(model) for model in models]

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self._groups = checkpoints.saved_groups(checkpoint)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = dict(state_dict)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        before, self._monitor = (
            self._monitor,
            Monitor(
                pl_module,
                every_n_steps=self.every_n_steps,
                layers=self.layers,
                rows=self.rows,
                thresholds=self.thresholds,
                on_fault=self._fault,
                on_unseen=self._unseen,
                ranks=trainers.ranks(trainer),
            ),
        )
        self._stood_down, self._new = False, []
        groups, self._groups = self._groups, None
        checkpoints.restore_groups(groups, pl_module, trainer.optimizers, trainers.schedulers(trainer))
        self._go_on(self._monitor, before if trainers.step(trainer) else None)
        self._decided = bool(patched_sites(pl_module)) or (self._decided and not _any_applied(self.retrofits))

    def _go_on(self, monitor: Monitor, before: Monitor | None) -> None:
        """From a checkpoint; where the same Trainer stopped; or from the start."""
        saved, self._saved = self._saved, {}
        if saved:
            self._forget()
            monitor.rules.load_state_dict(saved["rules"])
            monitor.last_measured, self._measured = saved["last_measured"], saved["measured"]
            self._decided, self._pending, self._ramp_from = saved["decided"], saved["pending"], saved["ramp_from"]
            self.alerts = [checkpoints.alert_from_list(alert) for alert in saved["alerts"]]
        elif before is not None:
            monitor.rules, monitor.last_measured = before.rules, before.last_measured
        else:
            self._forget()

    @guarded
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._panels = Panels(trainer.loggers if trainer.is_global_zero and not trainer.fast_dev_run else [])
        # of a model that came patched: after the optimizers' state was loaded by index, no sooner
        if trainer.optimizers and trainers.refuses_patches(trainer) is None:
            adopt_(pl_module, trainer.optimizers, trainers.schedulers(trainer))

    # -- one step -------------------------------------------------------------------------------------------

    @guarded
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        assert self._monitor is not None
        step = self._step = trainers.step(trainer)
        self._global_step = trainer.global_step
        if self.retrofit == "now" and not self._decided:
            self._pending = self._pending or 'retrofit="now"'
        if self._pending is not None and self._monitor.keep_due(step):
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

    @guarded
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert self._monitor is not None
        readings, alerts = self._monitor.collect(self._step)
        if readings:
            self._take(trainer, pl_module, readings, alerts)
        self._note_loss(outputs)
        if self._pending is not None and not self._decided and trainer.global_step != self._global_step:
            self._patch(trainer, pl_module)
        if self._pending is None:
            self._monitor.drop_calls()
        if self._monitor.empty and self._first_time("empty"):
            self._say(trainer, "qkwatch: no softmax attention ran in this model's forward pass: nothing to watch")

    def _take(self, trainer: Any, pl_module: Any, readings: list[Reading], alerts: list[Alert]) -> None:
        loud = [alert for alert in alerts if alert.level >= Level.WARN]
        if loud and self.retrofit == "auto" and not self._decided:
            self._pending = f"alert at step {self._step}"
        self.readings = readings
        self.history.append((self._step, readings))
        self._measured += 1
        self.alerts += alerts
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
        """Between two optimizer steps, never inside an accumulation window; all ranks the same."""
        assert self._monitor is not None
        sites, new = self._monitor.sites, []
        if not sites:
            return  # nothing has run yet; the next step may be another
        self._decided, self._pending = True, None
        try:
            report, new = patch_(trainer, pl_module, sites, self._monitor.ranks, self.variant, self.cap, self.max_gain)
        except Exception as fault:
            if self.on_error == "raise":
                raise
            self._warn_once("retrofit", f"the retrofit failed ({_text(fault)}): the model is as before, and watched")
            report = RetrofitReport(refused={site.name: _text(fault) for site in sites})
        if report.applied:
            self._new += new if self._monitor.ranks.size > 1 else []
            self._monitor.rules.forget(report.applied)
            self._monitor.reset_sites()
            self._ramp_from = self._step if self.ramp_steps else None
            self._ramp(pl_module, self._step)
        self.retrofits.append(Retrofit(self._step, report, loss_before=self._loss))
        text = retrofit_text(report)
        self._say(trainer, text)
        if self._panels is not None:
            self._panels.retrofit(text.plain, self._step)

    def _ramp(self, pl_module: Any, step: int) -> None:
        if self._ramp_from is None:
            return
        alpha = (step - self._ramp_from) / self.ramp_steps if self.ramp_steps else 1.0
        if alpha >= 1.0:
            self._ramp_from = None
        set_ramp(pl_module, alpha if alpha < 1.0 else None)

    def _note_loss(self, outputs: Any) -> None:
        """The loss around a retrofit; nothing is moved from the device on any other step."""
        last = self.retrofits[-1] if self.retrofits else None
        waiting = last is not None and last.loss_after is None and last.step != self._step
        if self._pending is not None or waiting:
            self._loss = trainers.loss_of(outputs)
        if last is not None and waiting:
            last.loss_after = self._loss

    # -- afterwards -----------------------------------------------------------------------------------------

    @guarded
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self._panels is not None:
            self._panels.close()
        self._say(
            trainer,
            summary(
                sites=len({r.site for r in self.readings} | {s.name for s in self.sites}),
                readings=self._measured,
                alerts=self.alerts,
                retrofits=[entry.report for entry in self.retrofits],
                last=self.readings,
            ),
        )

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._detach()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._detach()
        self._unfollow()

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoints.save_groups(checkpoint, pl_module, trainer.optimizers)

    def state_dict(self) -> dict[str, Any]:
        if self._monitor is None:
            return {}
        return {
            "rules": self._monitor.rules.state_dict(),
            "last_measured": self._monitor.last_measured,
            "measured": self._measured,
            "decided": self._decided,
            "pending": self._pending,
            "ramp_from": self._ramp_from,
            "alerts": [checkpoints.alert_to_list(alert) for alert in self.alerts],
        }

    def _detach(self) -> None:
        if self._monitor is not None:
            self._monitor.discard()

    def _unfollow(self) -> None:
        for handle in self._load_hooks:
            handle.remove()
        self._load_hooks = []

    # -- saying things --------------------------------------------------------------------------------------

    def _say(self, trainer: Any, renderable: Any) -> None:
        if self.console and trainer.is_global_zero:
            say(renderable, trainer.progress_bar_callback)

    def _first_time(self, key: str) -> bool:
        known = key in self._warned
        self._warned.add(key)
        return not known

    def _warn_once(self, key: str, text: str) -> None:
        if self._first_time(key):
            warnings.warn(f"QKWatch: {text}", stacklevel=4)

    def _stand_down(self, hook: str, fault: Exception) -> None:
        """With several ranks the others learn of it at the next measured step; until then this one keeps step."""
        alone = self._monitor is None or self._monitor.ranks.size == 1
        told = self._monitor is not None and self._monitor.told
        self._stood_down = alone or told
        if self._monitor is not None and not self._stood_down:
            self._monitor.broken = self._monitor.broken or fault
        self._warn_once(
            "fault", f'stands down after {_text(fault)} in {hook}. Training goes on; on_error="raise" shows where'
        )

    def _fault(self, site: str, fault: Exception) -> None:
        if self.on_error == "raise":
            raise fault
        self._warn_once(
            "measure", f"a measurement failed ({_text(fault)}){f' at {site}' if site else ''}: not measured"
        )

    def _unseen(self, site: str, operation: str) -> None:
        self._warn_once(site, f"{site or 'the model'} runs {operation}, which cannot be looked into: not measured")


def _any_applied(retrofits: Sequence[Retrofit]) -> bool:
    return any(entry.report.applied for entry in retrofits)


def _text(fault: BaseException) -> str:
    return f"{type(fault).__name__}: {fault}"
