"""What every integration's callback does in a step, whoever trains: read, alert, patch when it is due, report."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Any, Literal

import torch
from rich.text import Text
from torch import Tensor, nn

from qkwatch.alerts import Alert, Level, Thresholds
from qkwatch.guard import Guard, guarded, text_of
from qkwatch.intervene import Intervention
from qkwatch.midrun import Live, Recipe, Retrofit
from qkwatch.monitor import Monitor
from qkwatch.options import check_options
from qkwatch.panels import Panels
from qkwatch.progress import Progress
from qkwatch.ranks import Ranks
from qkwatch.reading import Reading
from qkwatch.reconsider import options_of, reconsider
from qkwatch.report import alert_texts, reading_table, retrofit_text, summary
from qkwatch.retrofit import RetrofitReport
from qkwatch.rules import Rules
from qkwatch.sites import ELSEWHERE, Site
from qkwatch.surgery import patched_sites
from qkwatch.variants import CLIP, Calibrate, Variant, get_variant

TABLE_EVERY = 10  # readings between two tables of alerts that are no worse
OTHER_VERSION = "the checkpoint's alert history is of another qkwatch version"
HISTORY = 128  # steps of readings kept in `history`


class Watching(Guard):
    """Options, and the course of a step; ``host`` is whatever the training library hands to its callbacks.

    begin      before the forward pass of a step
    read       after the step: figures, alerts
    consider   then: a retrofit, if one is due
    """

    def __init__(
        self,
        every_n_steps: int = 10,
        retrofit: Literal["off", "auto", "now"] = "off",
        variant: str | Variant = "l2",
        cap: float = 20.0,
        max_gain: float | None = 100.0,
        ramp_steps: int = 0,
        calibrate: Calibrate | None = None,
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
        self.cap, self.max_gain, self.ramp_steps, self.calibrate = cap, max_gain, ramp_steps, calibrate
        self.budget, self.budget_steps = budget, budget_steps
        self.thresholds, self.layers, self.rows = Thresholds() if thresholds is None else thresholds, layers, rows
        self.console, self.on_error = console, on_error
        check_options(self)
        self._panels: Panels | None = None
        self._stood_down = False
        self._warned: set[str] = set()
        self._step = 0  # when the batch began
        self._tabled = (Level.INFO, 0)  # level and number of the readings that were last printed as a table
        self._loss: Tensor | None = None  # of the batch that ended
        self.history: deque[tuple[int, list[Reading]]] = deque(maxlen=HISTORY)
        self._forget()

    def _forget(self) -> None:
        """As if nothing had been watched yet."""
        self._monitor: Monitor | None = None
        self._run = Progress()
        self._intervention = self._fresh()
        self.readings: list[Reading] = []
        self.history.clear()

    def _fresh(self) -> Intervention:
        recipe = None
        if not isinstance(self.variant, str):
            # where logits run away, the variant's own start gained more than that as measured
            usual: Calibrate = "needed" if self.retrofit == "auto" else "raised"
            calibrate = usual if self.calibrate is None else self.calibrate
            recipe = Recipe(self.variant, self.cap, self.max_gain, calibrate)
        return Intervention(recipe, self.cap, self.ramp_steps, self.budget, self.budget_steps, self._warn_once)

    @property
    def sites(self) -> list[Site]:
        return self._monitor.sites if self._monitor is not None else []

    @property
    def alerts(self) -> list[Alert]:
        return self._run.alerts

    @property
    def retrofits(self) -> list[Retrofit]:
        return self._run.retrofits

    # -- what the integrations say for themselves -----------------------------------------------------------

    @abstractmethod
    def _print(self, host: Any, renderable: Any) -> None:
        """Print, on one rank, if `console` is on."""

    def _say(self, host: Any, renderable: Any) -> None:
        self._aside("printing", lambda: self._print(host, renderable))

    @abstractmethod
    def _log(self, host: Any, model: nn.Module, figures: dict[str, float]) -> None:
        """Give the few figures of the whole model to the training library; every rank has the same."""

    @abstractmethod
    def _live(self, host: Any, model: nn.Module) -> Live:
        """What a retrofit would change."""

    # -- a run ----------------------------------------------------------------------------------------------

    def _watch(self, model: nn.Module, ranks: Ranks) -> None:
        """A fit begins."""
        before = self._monitor
        self._monitor = Monitor(
            model,
            every_n_steps=self.every_n_steps,
            layers=self.layers,
            rows=self.rows,
            thresholds=self.thresholds,
            on_fault=self._fault,
            on_unseen=self._unseen,
            ranks=ranks,
        )
        self._stood_down, self._warned, self._intervention = False, set(), self._fresh()
        if before is not None:
            self._monitor.rules, self._monitor.last_measured = before.rules, before.last_whole

    def state_dict(self) -> dict[str, Any]:
        """Where the run is; primitives only."""
        if self._monitor is None:
            return {}
        rules, last_measured = self._monitor.rules.state_dict(), self._monitor.last_whole
        return {"rules": rules, "last_measured": last_measured, "run": self._run.state_dict()}

    def _go_on_from(self, saved: dict[str, Any]) -> bool:
        """From where the run was whose `state_dict` this is; False where that cannot be read. No reason to stop."""
        assert self._monitor is not None
        try:
            self._run = Progress.from_state_dict(saved["run"])
            self._monitor.last_measured = saved["last_measured"]
            whole = not Progress.unknown(saved["run"])
        except Exception:
            self._warn_once("state", f"{OTHER_VERSION}: the watch begins anew")
            return False
        try:
            self._monitor.rules.load_state_dict(saved["rules"])
        except Exception:
            self._monitor.rules, whole = Rules(self.thresholds), False
        if not whole:
            self._warn_once("state", f"{OTHER_VERSION}: starting a new one")
        return True

    def _start(self, host: Any, model: nn.Module) -> None:
        """What the model brings with it, once it is known where the run is."""
        self._intervention.let_go(self._run)  # of a comparison that another process began
        patched = bool(patched_sites(model))
        self._run.start(patched)
        anew = reconsider(self._run, options_of(self), patched)
        assert self._monitor is not None
        loud = self._monitor.rules.level >= Level.WARN  # it began before, and is not told again
        if loud and self.retrofit == "auto" and not self._run.decided:
            self._run.pending = self._run.pending or "an alert that holds"
        for text in (anew, self._intervention.take_up_ramp(model, self._run)):
            if text is not None:
                self._say(host, f"qkwatch: {text}")

    # -- one step -------------------------------------------------------------------------------------------

    def _begin(self, model: nn.Module, step: int) -> None:
        assert self._monitor is not None
        self._step = step
        if self.retrofit == "now" and not self._run.decided:
            self._run.pending = self._run.pending or 'retrofit="now"'
        if self._run.pending is not None and self._monitor.keep_due(step):
            self._monitor.begin(step, keep_calls=True)
        elif self._monitor.due(step):
            self._monitor.begin(step, keep_calls=bool(self._newcomers(model)))
        self._intervention.ramp(model, self._run, step)

    @guarded
    def _read(self, host: Any, model: nn.Module, loss: Tensor | None, global_step: int) -> None:
        """The readings of this step, if it was measured."""
        assert self._monitor is not None
        self._run.count(global_step)
        readings, alerts = self._monitor.collect(self._step)
        if readings:
            self._take(host, model, readings, alerts)
        self._loss = loss
        self._run.note_loss(loss, self._step)
        self._intervention.note_loss(self._step, loss)
        if self._monitor.empty and self._first_time("empty"):
            self._say(host, "qkwatch: no softmax attention has run in this model so far: nothing to watch yet")
        for pattern in self._monitor.waiting:
            text = f"layers={pattern!r} matches nothing that has run so far; it may match what runs later"
            self._warn_once(f"layers {pattern}", text)

    @guarded
    def _consider(self, host: Any, model: nn.Module) -> None:
        """A retrofit, if one is due: between two optimizer steps, never inside an accumulation window."""
        assert self._monitor is not None
        monitor, run = self._monitor, self._run
        if self.retrofit == "auto" and not run.decided and monitor.last_measured == self._step:
            run.pending = monitor.ranks.first(run.pending)
        between = run.steps != self._step
        # patched once something has run while its inputs were kept
        if run.pending is not None and not run.decided and between and monitor.sites and monitor.kept:
            self._patch(host, model, monitor.ready())
        elif between and monitor.last_measured == self._step and (new := self._newcomers(model)):
            mine = [site for site in monitor.ready() if site in new and site.reason != ELSEWHERE]
            if monitor.ranks.broadcast(bool(mine)):  # rank zero is who measures
                self._patch(host, model, mine)
        if run.clipping and self.variant == CLIP and self.history and self.history[-1][0] == self._step:
            clipped = self._intervention.clip_heads(self._live(host, model), monitor, self.readings)
            figures = {"qkwatch/clipped_heads": float(clipped)}
            self._aside("logging the figures", lambda: self._log(host, model, figures))
        if self._intervention.ripe and between:
            self._judge(host, model)
        if run.pending is None and between:
            monitor.drop_calls()

    def _newcomers(self, model: nn.Module) -> list[Site]:
        """Sites that had not run when the others were patched. They are patched too, one ramp or budget at a time."""
        assert self._monitor is not None
        run = self._run
        asked = self.retrofit != "off" and self.variant != CLIP and run.outcome in ("patched", "refused")
        if not asked or run.ramp_from is not None or self._intervention.can_go_back:
            return []
        dealt_with = {*run.refused, *patched_sites(model)}
        return [site for site in self._monitor.sites if site.name not in dealt_with]

    def _judge(self, host: Any, model: nn.Module) -> None:
        """Was the retrofit within its budget?"""
        assert self._monitor is not None
        alert = self._intervention.judge(self._live(host, model), self._monitor, self._run, self._step)
        if alert is not None:
            self._run.alerts.append(alert)
            self._tell(host, [alert])

    def _take(self, host: Any, model: nn.Module, readings: list[Reading], alerts: list[Alert]) -> None:
        assert self._monitor is not None
        loud = [alert for alert in alerts if alert.level >= Level.WARN]
        if loud and self.retrofit == "auto" and not self._run.decided:
            self._run.pending = f"alert at step {self._step}"
        self.readings = readings
        self.history.append((self._step, readings))
        self._run.measured += 1
        self._run.alerts += alerts
        self._run.figures = aggregates(readings, self._monitor.rules.level)
        self._aside("logging the figures", lambda: self._log(host, model, self._run.figures))
        if (panels := self._panels) is not None:
            self._aside("a logger", lambda: panels.readings(readings, self._step))
        self._tell(host, alerts)
        worst, since = max((alert.level for alert in loud), default=None), self._run.measured - self._tabled[1]
        if worst is not None and (worst > self._tabled[0] or since >= TABLE_EVERY):
            self._tabled = (worst, self._run.measured)
            self._say(host, reading_table(readings, title=f"attention at step {self._step}", most=8))

    def _tell(self, host: Any, alerts: list[Alert]) -> None:
        if (panels := self._panels) is not None and alerts:
            self._aside("a logger", lambda: panels.alerts(alerts, self._step))
        for text in alert_texts([alert for alert in alerts if alert.level >= Level.WARN]):
            self._say(host, text)

    def _patch(self, host: Any, model: nn.Module, sites: list[Site]) -> None:
        assert self._monitor is not None
        try:
            report = self._intervention.make(self._live(host, model), self._monitor, sites, self._run, self._step)
        except Exception as fault:
            if self.on_error == "raise":
                raise
            self._warn_once("retrofit", f"the retrofit failed ({text_of(fault)}): the model is as before, and watched")
            report = RetrofitReport(refused={site.name: text_of(fault) for site in sites})
        self._run.settle(report)
        before = None if self._loss is None else float(self._loss)
        self.retrofits.append(Retrofit(self._step, report, loss_before=before))
        text = retrofit_text(report, after=self._step, ramp_steps=self.ramp_steps)
        self._say(host, text)
        if (panels := self._panels) is not None:
            self._aside("a logger", lambda: panels.retrofit(text.plain, self._step))

    def _summary(self) -> Any:
        return summary(
            sites=len({r.site for r in self.readings} | {s.name for s in self.sites}),
            readings=self._run.measured,
            alerts=self.alerts,
            retrofits=[self._told(entry) for entry in self.retrofits] or self._untold(),
            last=self.readings,
        )

    def _told(self, entry: Retrofit) -> Text:
        """A retrofit at the end of the run: what was done, and the loss around it."""
        text = retrofit_text(entry.report, after=entry.step, ramp_steps=self.ramp_steps)
        if entry.report.applied and entry.loss_before is not None and entry.loss_after is not None:
            text.append(f"\n  training loss {entry.loss_before:.4g} before, {entry.loss_after:.4g} after", "not bold")
        if entry.undone is not None:
            text.append(f"\n  taken back after step {entry.undone:,}", "yellow not bold")
        return text

    def _untold(self) -> list[Text]:
        """Why nothing was patched, or what could be."""
        if self.retrofit == "auto" and not self._run.decided:
            return [Text('  retrofit="auto": no WARN, so nothing was patched')]
        if self.retrofit == "off" and any(alert.level >= Level.WARN for alert in self.alerts):
            return [Text('  nothing was patched (retrofit="off"); "auto" patches at the first WARN, "now" at once')]
        return []


def aggregates(readings: Sequence[Reading], level: int) -> dict[str, float]:
    """The few figures that EarlyStopping and ModelCheckpoint may monitor; what was not measured is left out.

    The level is that of the alerts that hold, whenever they began.

    An infinite logit is logged as the largest float32: it must not stop a logger, and nothing exceeds it.
    """
    largest = torch.cat([r.max_logit for r in readings])
    entropy = torch.cat([r.entropy for r in readings])
    figures = {"qkwatch/alert_level": float(level)}
    if not largest.isnan().all():
        figures["qkwatch/max_logit"] = float(largest[~largest.isnan()].max().clamp_max(torch.finfo(torch.float32).max))
    if not entropy.isnan().all():
        figures["qkwatch/min_entropy"] = float(entropy[~entropy.isnan()].min())
    return figures
