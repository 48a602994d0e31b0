"""How far a run has come, as `QKWatch` counts it, and the form in which checkpoints keep it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, cast

from torch import Tensor

from qkwatch.alerts import Alert, Forecast, Level
from qkwatch.midrun import Retrofit
from qkwatch.retrofit import RetrofitReport
from qkwatch.sites import ELSEWHERE


@dataclass
class Progress:
    """Alerts, retrofits and cadence of one run.

    Attributes:
        steps: batches after which the optimizers had stepped. Lightning's own count of them is one too high after a
            resume from a checkpoint that was saved when an epoch or the fit ended.
        counted_at: the Trainer's global_step when they were counted.
        measured: steps on which readings were taken.
        alerts: all of them.
        retrofits: those of this process; a checkpoint does not keep them (the weights say what is patched).
        figures: the few of the last reading that other callbacks monitor.
        pending: why a retrofit is due; None where none is.
        decided: a retrofit was made, or refused for every site.
        outcome: of what was decided: "patched" (or put under QK-clip), "refused", "taken back".
        comparing: its losses are still to be compared with a budget.
        options: those under which it was decided.
        refused: names of the sites that were refused.
        ramp_from: the step at which a ramp began; None where none is under way.
        ramp_over: how many steps it takes; a run goes on with it whatever the options are then.
        ramp: how far it has come, 0 to 1; None where none is under way.
        ramp_sites: the sites that are on it; None: all that are patched.
        clipping: QK-clip is in force.
    """

    steps: int = 0
    counted_at: int = 0
    measured: int = 0
    alerts: list[Alert] = field(default_factory=list)
    retrofits: list[Retrofit] = field(default_factory=list)
    pending: str | None = None
    decided: bool = False
    ramp_from: int | None = None
    ramp_over: int = 1
    ramp: float | None = None
    clipping: bool = False
    ramp_sites: list[str] | None = None
    outcome: str | None = None
    comparing: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)

    def note_loss(self, loss: Tensor | None, step: int) -> None:
        """The loss after a retrofit; nothing is moved from the device on any other step."""
        last = self.retrofits[-1] if self.retrofits else None
        if last is not None and last.loss_after is None and last.step != step:
            last.loss_after = None if loss is None else float(loss)

    def settle(self, report: RetrofitReport) -> None:
        """A retrofit was made, of all sites or of those that had not run before."""
        self.decided, self.pending = True, None
        self.refused = sorted({*self.refused, *(n for n, why in report.refused.items() if why != ELSEWHERE)})
        if report.applied or self.outcome is None:
            self.outcome = "patched" if report.applied else "refused"

    def count(self, global_step: int) -> None:
        """A batch has ended."""
        self.steps += global_step != self.counted_at
        self.counted_at = global_step

    def start(self, patched: bool) -> None:
        """A fit begins, on a model that is patched or not: one whose patches were loaded away may get new ones."""
        applied = any(entry.report.applied and entry.undone is None for entry in self.retrofits)
        self.decided = patched or self.clipping or (self.decided and not applied)
        if not self.decided:
            self.reopen()

    def reopen(self) -> None:
        """Nothing is decided."""
        self.decided, self.clipping, self.outcome, self.refused = False, False, None, []

    def state_dict(self) -> dict[str, Any]:
        """Primitives only: checkpoints are read with ``weights_only=True``."""
        alerts = [_to_list(alert) for alert in self.alerts]
        state = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("alerts", "retrofits")}
        return {**state, "alerts": alerts}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> Progress:
        """What is not known here is left out (`unknown` names it)."""
        known = {name: value for name, value in state.items() if name not in cls.unknown(state)}
        return cls(**{**known, "alerts": [_from_list(alert) for alert in state["alerts"]]})

    @classmethod
    def unknown(cls, state: dict[str, Any]) -> set[str]:
        """Entries that another version of this package saved."""
        return state.keys() - {f.name for f in fields(cls)}


def _to_list(alert: Alert) -> list[Any]:
    ahead = alert.forecast
    steps = None if ahead is None else [[limit, span and list(span)] for limit, span in ahead.steps_to.items()]
    fields = [int(alert.level), alert.step, alert.site, list(alert.heads), alert.rule, alert.message]
    return [*fields, None if ahead is None else [ahead.head, steps]]


def _from_list(data: Sequence[Any]) -> Alert:
    level, step, site, heads, rule, message, ahead = data
    forecast = None
    if ahead is not None:
        forecast = Forecast(ahead[0], {limit: span and cast(Any, tuple(span)) for limit, span in ahead[1]})
    return Alert(Level(level), step, site, tuple(heads), rule, message, forecast)
