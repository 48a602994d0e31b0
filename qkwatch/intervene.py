"""What the callback does to a model in training: patch or clip, ramp, compare with the forecast, take back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from qkwatch.alerts import ALL_SITES, Alert, Level
from qkwatch.clip import QKClip
from qkwatch.midrun import Live, Recipe, clip_for, patch_, ramps_of, set_ramp, take_back_
from qkwatch.monitor import Monitor
from qkwatch.progress import Progress
from qkwatch.reading import Reading
from qkwatch.retrofit import RetrofitReport
from qkwatch.sharding import shards
from qkwatch.sites import Site
from qkwatch.wayback import LEAST, LossLine, Snapshot

UNCOMPARED = (
    "training ended, or went on elsewhere, before the losses after the retrofit could be compared with budget=: the "
    "retrofit stays"
)


class Intervention:
    """One run's retrofit, from the step on which it is made.

    Args:
        recipe: how it is patched; None for QK-clip.
        cap, ramp_steps, budget, budget_steps: as `QKWatch` has them.
        warn: called with (key, text); one warning a key.

    Attributes:
        new: parameters that are new in training, of the ranks' own models: nothing averages their gradients yet.
    """

    def __init__(
        self,
        recipe: Recipe | None,
        cap: float,
        ramp_steps: int,
        budget: float | None,
        budget_steps: int,
        warn: Callable[[str, str], None] = lambda key, text: None,
    ):
        self.recipe, self.cap, self.ramp_steps = recipe, cap, ramp_steps
        self.budget, self.budget_steps = budget, budget_steps
        self._warn = warn
        self.new: list[nn.Parameter] = []
        self._clip: QKClip | None = None
        self._line = LossLine()
        self._snapshot: Snapshot | None = None

    def note_loss(self, step: int, loss: Tensor | None) -> None:
        """A training loss, for the forecast: while there is a budget, and nothing was judged yet."""
        if self.budget is not None and (self._line.turned is None or self._snapshot is not None):
            self._line.note(step, loss)

    def make(self, live: Live, monitor: Monitor, sites: Sequence[Site], run: Progress, step: int) -> RetrofitReport:
        """Patch these of the watched sites, or put all under QK-clip. All or nothing.

        What is patched after a first retrofit, because it had not run before, has no budget of its own.
        """
        model = live.models[0]
        snapshot = self._copy_of(live) if self.budget is not None and self._line.turned is None else None
        new: Sequence[nn.Parameter] = ()
        if self.recipe is None:
            self._clip, report = clip_for(live, monitor.sites, monitor.ranks, self.cap)
        else:
            report, new = patch_(live, sites, monitor.ranks, self.recipe, monitor.known)
        if report.applied:
            if self._line.turned is None:
                self._snapshot, self._line.turned = snapshot, step + self.ramp_steps
                run.comparing = snapshot is not None
                if self.budget is not None and snapshot is None:
                    self._warn(
                        "budget", f"budget= has no effect {self._blind(model)}: this retrofit will not be taken back"
                    )
            unknown = monitor.ranks.size > 1 and not shards(model)  # to what averages gradients
            self.new += new if unknown else []
            monitor.rules.forget(report.applied)
            run.clipping = report.clip
            if not report.clip:
                monitor.reset_sites()
                if self.ramp_steps:
                    run.ramp_from, run.ramp_over, run.ramp_sites = step, self.ramp_steps, list(report.applied)
                self.ramp(model, run, step)
        return report

    def _copy_of(self, live: Live) -> Snapshot | None:
        """What there is to go back to, if there will be anything to judge by. Shards are not copied."""
        model = live.models[0]
        able = live.refusal is None and not shards(model) and self._line.drawn
        return Snapshot(model, live.optimizers) if able else None

    def _blind(self, model: nn.Module) -> str:
        if shards(model):
            return "on a model sharded by FSDP2"
        return (
            f"here: its forecast takes the losses of at least {LEAST} training batches before the retrofit, and fewer "
            "were seen (under manual optimization, those that training_step returns)"
        )

    def let_go(self, run: Progress) -> None:
        """Training ends: nothing is left to compare a retrofit with, nor to go back to."""
        self._snapshot = None
        if run.comparing:
            self._warn("budget", UNCOMPARED)
        run.comparing = False

    def ramp(self, model: nn.Module, run: Progress, step: int) -> None:
        """How far the patches that are on a ramp have come at this step."""
        if run.ramp_from is None:
            return
        alpha = (step - run.ramp_from) / run.ramp_over
        if alpha >= 1.0:
            run.ramp_from = None
        run.ramp = alpha if alpha < 1.0 else None
        set_ramp(model, run.ramp, run.ramp_sites)

    def take_up_ramp(self, model: nn.Module, run: Progress) -> str | None:
        """Go on with a ramp that an earlier run left unfinished on the model; returns what is done, in words."""
        ramps = ramps_of(model) if run.ramp_from is None else {}
        if not ramps:
            return None
        alpha, run.ramp_sites = min(ramps.values()), list(ramps)
        left = min(self.ramp_steps, max(1, round((1.0 - alpha) * self.ramp_steps)))
        run.ramp_over = max(self.ramp_steps, 1)
        run.ramp_from = run.steps + left - run.ramp_over
        how = f"over the next {left:,} steps" if left else "at once (ramp_steps=0)"
        return f"the model comes {alpha:.0%} of the way along a ramp to its normed function; it goes the rest {how}"

    def clip_heads(self, live: Live, monitor: Monitor, readings: Sequence[Reading]) -> int:
        """QK-clip: shrink what these readings ask for; returns the number of heads.

        After a resume its weights are looked up once more, on the first measured step, and so are those of sites
        that are seen for the first time.
        """
        known = [] if self._clip is None else [*self._clip.applied, *self._clip.refused]
        if self._clip is None or any(site.name not in known for site in monitor.sites):
            self._clip, _ = clip_for(live, monitor.sites, monitor.ranks, self.cap)
        return sum(map(len, self._clip.clip_(readings).values()))

    @property
    def can_go_back(self) -> bool:
        """Whether there is something to return to."""
        return self._snapshot is not None

    @property
    def ripe(self) -> bool:
        """Whether enough losses have come in to be judged by."""
        return self._snapshot is not None and self._line.seen >= self.budget_steps

    def judge(self, live: Live, monitor: Monitor, run: Progress, step: int) -> Alert | None:
        """Is the retrofit within its budget? If not, it is taken back."""
        if self._snapshot is None or self.budget is None:
            return None
        (snapshot, self._snapshot), run.comparing = (self._snapshot, None), False
        table = self._line.table()
        found = self._line.excess(monitor.ranks.gather(table).mean(0))
        if found is None:
            self._warn("budget", "the losses before the retrofit give no forecast to compare it with: it stays")
            return None
        if found[0] <= max(self.budget, found[1]):
            return None
        entry = run.retrofits[-1]
        take_back_(live, entry.report)
        snapshot.put_back()
        entry.undone = step
        self.new, self._clip = [], None
        run.clipping, run.ramp_from, run.ramp, run.outcome = False, None, None, "taken back"
        monitor.rules.forget(entry.report.applied)
        monitor.reset_sites()
        message = (
            f"over the last {self.budget_steps} batches the loss was {found[0]:.3g} above its forecast from before the "
            f"retrofit of step {entry.step:,} (budget {self.budget:g}): taken back, weights and optimizer state as then"
        )
        return Alert(Level.WARN, step, ALL_SITES, (), "budget", message)
