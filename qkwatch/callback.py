"""The Lightning callback. Thin: Lightning's life cycle calls the rest of the package."""

from __future__ import annotations

import functools
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast

import torch

from qkwatch import trainers
from qkwatch.errors import QKWatchError, unknown
from qkwatch.modules import named_modules
from qkwatch.monitor import Monitor
from qkwatch.norms import QKNorm, Variant, get_variant
from qkwatch.optim import group_names, regroup
from qkwatch.panels import Panels
from qkwatch.plan import RetrofitPlan
from qkwatch.report import alert_text, reading_table, retrofit_text, say, summary
from qkwatch.retrofit import (
    RetrofitReport,
    match_,
    norm_parameters,
    patched_sites,
    plan_of,
    retrofit_,
)
from qkwatch.rules import Alert, Level, Thresholds
from qkwatch.sites import Site
from qkwatch.stats import Reading

HISTORY = 128  # steps of readings kept in `QKWatch.history`
KEY = "qkwatch"  # of our entry in a checkpoint

Hook = TypeVar("Hook", bound=Callable[..., Any])


def guarded(hook: Hook) -> Hook:
    """A fault of the monitor never stops training: one warning, and the monitor stands down.

    A `QKWatchError` is bad input and does stop it, and so does any fault under ``on_error="raise"``.
    """

    @functools.wraps(hook)
    def run(self: QKWatch, *args: Any, **kwargs: Any) -> Any:
        if self._stood_down:
            return None
        try:
            return hook(self, *args, **kwargs)
        except QKWatchError:
            self._detach()
            raise
        except Exception as fault:
            self._detach()
            if self.on_error == "raise":
                raise
            self._stood_down = True
            warnings.warn(
                f"QKWatch stands down after {type(fault).__name__} in {hook.__name__}: {fault}. Training goes on; "
                'on_error="raise" shows where.',
                stacklevel=2,
            )
            return None

    return cast(Hook, run)


@dataclass
class Retrofit:
    """One entry of `QKWatch.retrofits`: what was done after which step, and the training loss around it."""

    step: int
    report: RetrofitReport
    loss_before: float | None = None
    loss_after: float | None = None


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
        self._check_options()
        self.readings: list[Reading] = []
        self.history: deque[tuple[int, list[Reading]]] = deque(maxlen=HISTORY)
        self.alerts: list[Alert] = []
        self.retrofits: list[Retrofit] = []
        self._measured = 0
        self._stood_down = False
        self._monitor: Monitor | None = None
        self._panels: Panels | None = None
        self._pending: str | None = None  # why a retrofit is due
        self._decided = False  # a retrofit was made or refused
        self._ramp_from: int | None = None
        self._new: list[torch.nn.Parameter] = []  # born after the strategy wrapped the model
        self._saved: dict[str, Any] = {}
        self._groups: list[Any] | None = None
        self._load_hook: Any = None
        self._said: set[str] = set()
        self._step_at_start = self._global_step = 0
        self._loss: float | None = None

    def _check_options(self) -> None:
        for name, value, known in (
            ("retrofit", self.retrofit, ("off", "auto", "now")),
            ("on_error", self.on_error, ("warn", "raise")),
        ):
            if value not in known:
                raise unknown(f"QKWatch {name}", value, known)
        if isinstance(self.rows, bool) or not (self.rows in ("all", "auto") or isinstance(self.rows, int)):
            raise unknown("QKWatch rows", self.rows, ("all", "auto", "a whole number"))
        if isinstance(self.rows, int) and self.rows < 1:
            raise QKWatchError(f"QKWatch rows must be at least 1, got {self.rows}")
        for name, least in (("every_n_steps", 1), ("ramp_steps", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise QKWatchError(f"QKWatch {name} must be a whole number of at least {least}, got {value!r}")
        for name, value in (("cap", self.cap), ("max_gain", self.max_gain)):
            if value is not None and not value > 0:
                raise QKWatchError(f"QKWatch {name} must be positive, got {value!r}")
        if not isinstance(self.thresholds, Thresholds):
            raise QKWatchError(f"QKWatch thresholds must be a Thresholds, got {type(self.thresholds).__name__}")

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
        if self._load_hook is None:
            self._load_hook = pl_module.register_load_state_dict_pre_hook(_match_incoming)

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self._groups = checkpoint.get(KEY, {}).get("groups")

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self._stood_down = False
        self._new = []
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
        self._regroup(trainer, pl_module)
        self._resume(pl_module)

    @guarded
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._panels = Panels(trainer.loggers if trainer.is_global_zero and not trainer.fast_dev_run else [])

    def _regroup(self, trainer: Any, pl_module: Any) -> None:
        """Optimizer groups as they were saved, before their state is loaded by index; gains out of weight decay."""
        schedulers = trainers.schedulers(trainer)
        groups, self._groups = self._groups, None
        if groups is not None and trainer.optimizers:
            regroup(trainer.optimizers, pl_module, groups, schedulers)
        if norm_parameters(pl_module) and trainer.optimizers:
            trainers.train_norms(trainer, pl_module)

    def _resume(self, pl_module: Any) -> None:
        """Go on from the callback's own saved state."""
        saved, self._saved = self._saved, {}
        self._decided = bool(patched_sites(pl_module))
        self._pending = None
        if not saved or self._monitor is None:
            self._ramp_from = None
            return
        self._monitor.rules.load_state_dict(saved["rules"])
        self._monitor.last_measured = saved["last_measured"]
        self._decided |= saved["decided"]
        self._pending, self._ramp_from = saved["pending"], saved["ramp_from"]
        self._measured = saved["measured"]
        self.alerts = [
            Alert(Level(level), step, site, tuple(heads), rule, message)
            for level, step, site, heads, rule, message in saved["alerts"]
        ]

    # -- one step -------------------------------------------------------------------------------------------

    @guarded
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        assert self._monitor is not None
        step = self._step_at_start = trainers.step(trainer)
        self._global_step = trainer.global_step
        self._ramp(pl_module, step)
        if self.retrofit == "now" and not self._decided and self._pending is None:
            self._pending = 'retrofit="now"'
        if self._pending is not None:
            self._monitor.begin(step, keep_calls=True)
        elif self._monitor.due(step):
            self._monitor.begin(step)

    @guarded
    def on_before_backward(self, trainer: Any, pl_module: Any, loss: torch.Tensor) -> None:
        assert self._monitor is not None
        self._monitor.end_forward()

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        trainers.average_gradients(trainer, self._new)

    @guarded
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert self._monitor is not None
        self._monitor.end_forward()
        step = self._step_at_start
        readings, alerts = self._monitor.collect(step)
        if readings:
            self._take(trainer, pl_module, step, readings, alerts)
        self._note_loss(outputs, step)
        if self._monitor.found_nothing:
            self._say_once(
                trainer, "no-attention", "QKWatch found no softmax attention in this model: nothing to watch"
            )
        if self._pending is not None and not self._decided and trainer.global_step != self._global_step:
            self._patch(trainer, pl_module, step)
        if self._pending is None:
            self._monitor.drop_calls()

    def _take(self, trainer: Any, pl_module: Any, step: int, readings: list[Reading], alerts: list[Alert]) -> None:
        self.readings = readings
        self.history.append((step, readings))
        self._measured += 1
        self.alerts += alerts
        aggregates = trainers.aggregates(readings, alerts)
        trainers.log(pl_module, aggregates)
        if self._panels is not None:
            self._panels.readings(readings, step)
            if alerts:
                self._panels.alerts(alerts, step)
        for alert in alerts:
            if alert.level >= Level.WARN:
                self._say(trainer, alert_text(alert))
        if any(a.level >= Level.WARN for a in alerts):
            self._say(trainer, reading_table(readings, title=f"attention at step {step}", most=8))
            if self.retrofit == "auto" and not self._decided:
                self._pending = f"alert at step {step}"

    # -- the retrofit ---------------------------------------------------------------------------------------

    def _patch(self, trainer: Any, pl_module: Any, step: int) -> None:
        """Patch between two optimizer steps; all ranks the same."""
        assert self._monitor is not None
        sites = [site for site in self._monitor.sites if site.call is not None or not site.retrofittable]
        if not sites:
            return  # nothing ran in this step; try again at the next
        self._decided, self._pending = True, None
        refusal = trainers.refuses_patches(trainer)
        if refusal is not None:
            report = RetrofitReport(refused={site.name: refusal for site in sites})
        else:
            report = self._retrofit(pl_module, sites)
        if report.applied:
            new = trainers.train_norms(trainer, pl_module)
            self._new += new if self._monitor.ranks.size > 1 else []
            self._monitor.rules.forget(report.applied)
            self._ramp_from = step if self.ramp_steps else None
            self._ramp(pl_module, step)
        self._monitor.reset_sites()
        self.retrofits.append(Retrofit(step, report, loss_before=self._loss))
        text = retrofit_text(report)
        self._say(trainer, text)
        if self._panels is not None:
            self._panels.retrofit(text.plain, step)

    def _retrofit(self, pl_module: Any, sites: list[Site]) -> RetrofitReport:
        """Rank zero measures and decides, the others do what it did."""
        assert self._monitor is not None
        ranks = self._monitor.ranks
        if ranks.size == 1:
            return retrofit_(pl_module, sites, self.variant, self.cap, self.max_gain)
        report = RetrofitReport()
        if trainers.is_rank_zero():
            report = retrofit_(pl_module, sites, self.variant, self.cap, self.max_gain)
        told = ranks.broadcast((report.refused, report.drift, report.plan.to_dict()))
        if trainers.is_rank_zero():
            return report
        refused, drift, plan = told
        report = retrofit_(pl_module, plan=RetrofitPlan.from_dict(plan))
        report.refused, report.drift = refused, drift
        return report

    def _ramp(self, pl_module: Any, step: int) -> None:
        if self._ramp_from is None:
            return
        alpha: float | None = (step - self._ramp_from) / self.ramp_steps if self.ramp_steps else 1.0
        if alpha is not None and alpha >= 1.0:
            alpha = self._ramp_from = None
        for module in named_modules(pl_module).values():
            if isinstance(module, QKNorm):
                module.set_ramp(alpha)

    def _note_loss(self, outputs: Any, step: int) -> None:
        """Loss around a retrofit; nothing is moved from the device on any other step."""
        waiting = self.retrofits[-1] if self.retrofits and self.retrofits[-1].loss_after is None else None
        if self._pending is None and (waiting is None or waiting.step == step):
            return
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        value = float(loss.detach()) if isinstance(loss, torch.Tensor) and loss.numel() == 1 else None
        self._loss = value
        if waiting is not None and waiting.step != step:
            waiting.loss_after = value

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
        if self._load_hook is not None:
            self._load_hook.remove()
            self._load_hook = None

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        if patched_sites(pl_module):
            checkpoint[KEY] = {"groups": [group_names(o, pl_module) for o in trainer.optimizers]}

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
            "alerts": [[int(a.level), a.step, a.site, list(a.heads), a.rule, a.message] for a in self.alerts],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = dict(state_dict)

    # -- saying things --------------------------------------------------------------------------------------

    def _detach(self) -> None:
        if self._monitor is not None:
            self._monitor.discard()

    def _say(self, trainer: Any, renderable: Any) -> None:
        if self.console and trainer.is_global_zero:
            say(renderable, trainer.progress_bar_callback)

    def _say_once(self, trainer: Any, key: str, text: str) -> None:
        if key not in self._said:
            self._said.add(key)
            self._say(trainer, text)

    def _fault(self, site: str, fault: Exception) -> None:
        if self.on_error == "raise":
            raise fault
        if site not in self._said:
            self._said.add(site)
            where = f"of {site!r} " if site else ""
            warnings.warn(
                f"QKWatch: a measurement {where}failed ({type(fault).__name__}: {fault}): not measured",
                stacklevel=2,
            )

    def _unseen(self, site: str, operation: str) -> None:
        if site not in self._said:
            self._said.add(site)
            warnings.warn(
                f"QKWatch: {site or 'the model'} runs {operation}, which cannot be looked into: not measured",
                stacklevel=2,
            )


def _match_incoming(module: torch.nn.Module, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
    """Patch, or unpatch, until the model's structure is that of the weights that are about to be loaded."""
    if not prefix:
        match_(module, plan_of(state_dict), present=state_dict)
