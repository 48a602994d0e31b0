"""The same watch for the Trainer of `transformers`, which is needed for this module only.

from qkwatch.transformers import QKWatchCallback

Trainer(model, args, train_dataset=data, callbacks=[QKWatchCallback(retrofit="auto")])
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from qkwatch import checkpoints
from qkwatch.adopt import like_fresh
from qkwatch.alerts import Thresholds
from qkwatch.errors import QKWatchError
from qkwatch.guard import guarded
from qkwatch.midrun import Live
from qkwatch.panels import Panels
from qkwatch.ranks import Ranks
from qkwatch.report import say
from qkwatch.surgery import patched_sites
from qkwatch.variants import Variant
from qkwatch.watching import Watching

_PLAIN = (
    "every_n_steps",
    "retrofit",
    "cap",
    "max_gain",
    "ramp_steps",
    "calibrate",
    "layers",
    "rows",
    "console",
    "on_error",
)


class QKWatchCallback(Watching, TrainerCallback, ExportableState):
    """`QKWatch` for `transformers.Trainer`: the same options, readings, alerts and retrofits.

    Of each measured step the first micro-batch is read. The panels are drawn where ``args.report_to`` has
    "tensorboard", as a run of their own beside the Trainer's, and by ``loggers``. Of what was measured since, the worst
    ``qkwatch/max_logit``, ``qkwatch/min_entropy`` and ``qkwatch/alert_level`` join what the Trainer logs next: in
    ``state.log_history`` and for callbacks behind this one. Loggers come before it in the Trainer's list; where they
    should have these figures too, give it the Trainer's own log::

        callback = QKWatchCallback()
        trainer = Trainer(model, args, train_dataset=data, callbacks=[callback])
        callback.log = trainer.log

    Checkpoints hold the patch, and a Trainer that was made with this callback patches (or unpatches) its model for each
    that it loads: on resume, and for ``load_best_model_at_end``. To load one without a Trainer, patch the fresh model
    first: ``qkwatch.restore_(model, "out/checkpoint-500")``.

    Args:
        log: takes the few figures of each measured step, e.g. ``trainer.log``.
        loggers: loggers of Lightning's make that draw the panels, e.g. ``TensorBoardLogger("out/runs")``.
        variant, thresholds, options: as of `QKWatch`, less `budget`. In several processes, and with adapters of `peft`
            (whose checkpoints hold nothing else), patching is refused.

    Raises:
        QKWatchError: an option is out of range; on resume, the checkpoint is of a patched model and the model is not.
    """

    def __init__(
        self,
        *,
        log: Callable[[dict[str, float]], None] | None = None,
        loggers: Sequence[Any] = (),
        variant: str | Variant | Mapping[str, Any] = "l2",
        thresholds: Thresholds | Mapping[str, Any] | None = None,
        **options: Any,
    ):
        if isinstance(variant, Mapping):  # as a checkpoint keeps it
            variant = Variant.from_dict(variant)
        if isinstance(thresholds, Mapping):
            thresholds = Thresholds(**thresholds)
        if options.get("budget") is not None:
            raise QKWatchError("QKWatchCallback has no budget: this Trainer does not hand its loss to callbacks")
        if log is not None and not callable(log):
            raise QKWatchError(f"QKWatchCallback log must take a dict of figures, as trainer.log does, got {log!r}")
        super().__init__(variant=variant, thresholds=thresholds, **options)
        self.log, self.loggers = log, list(loggers)
        self._figures: dict[str, float] = {}
        self._restore: Callable[[], None] | None = None
        self._load_hook: Any = None  # so that the model fits itself to what it loads

    def state(self) -> dict[str, Any]:
        """What the Trainer keeps with a checkpoint."""
        args = {name: getattr(self, name) for name in _PLAIN}
        args |= {
            "variant": self.variant if isinstance(self.variant, str) else self.variant.to_dict(),
            "thresholds": asdict(self.thresholds),
        }
        patched = patched_sites(self._monitor.model) if self._monitor is not None else []
        return {"args": args, "attributes": {"saved": {"patched": patched, **self.state_dict()}}}

    # -- the Trainer's events -------------------------------------------------------------------------------

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if self._load_hook is None and not _has_adapters(model):
            self._load_hook = checkpoints.follow(model)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._release()
        self.on_init_end(args, state, control, model)  # it may have been added since
        kept = state.stateful_callbacks.get(type(self).__name__) if state.global_step else None
        saved = (kept[0] if isinstance(kept, list) else kept or {}).get("attributes", {}).get("saved", {})
        missing = sorted(set(saved.get("patched", ())) - set(patched_sites(model)))
        if missing:
            raise QKWatchError(
                f"the checkpoint is of a model that was patched at {', '.join(missing[:3])} ({len(missing)} in all), "
                "and this model is not: call qkwatch.restore_(model, the checkpoint's folder) before training goes on"
            )
        several = torch.distributed.is_available() and torch.distributed.is_initialized()
        self._forget()
        self._watch(model, Ranks.of_process_group() if several else Ranks())
        if saved.get("run"):
            self._go_on_from(saved)
        self._run.steps = self._run.counted_at = state.global_step
        self._start({"state": state}, model)
        loggers = [*self.loggers, *_tensorboard(args)] if state.is_world_process_zero else []
        self._panels = Panels(loggers, marks=self.thresholds.marks)

    @guarded
    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._release()
        self._begin(model, state.global_step)
        measured = self._monitor is not None and self._monitor.last_measured == self._step
        # inside compiled code nothing can be detached: there it stays until the first micro-batch has ended
        if measured and not args.torch_compile and model._compiled_call_impl is None:
            self._end_with_forward(model)

    def _end_with_forward(self, model: nn.Module) -> None:
        """Detach as this one forward ends, also where it raises: the Trainer has an event for neither."""
        own, inner = model.__dict__.get("forward"), model.forward

        def restore() -> None:
            model.__dict__.pop("forward")
            if own is not None:
                model.forward = own

        @functools.wraps(inner)
        def forward(*args: Any, **kwargs: Any) -> Any:
            try:
                output = inner(*args, **kwargs)
            except BaseException:
                self._detach()
                self._release()
                raise
            self._release()
            self._end_forward()
            return output

        self._restore, model.forward = restore, forward

    @guarded
    def _end_forward(self) -> None:
        if self._monitor is not None:
            self._monitor.end_forward()

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._end_forward()  # of a model that is trained through its parts
        self._release()

    on_pre_optimizer_step = on_substep_end

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        host = {"state": state, **kwargs}
        self._read(host, model, None, state.global_step)
        self._consider(host, model)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if self.log is None and logs is not None and "loss" in logs:
            for record in (logs, *state.log_history[-1:]):
                record.update(self._figures)
            self._figures = {}

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._release()
        if self._load_hook is not None:
            self._load_hook.remove()
            self._load_hook = None
        self._end({"state": state})

    @guarded
    def _end(self, host: Any) -> None:
        if self._panels is not None:
            self._panels.close()
        self._say(host, self._summary())

    def _release(self) -> None:
        restore, self._restore = self._restore, None
        if restore is not None:
            restore()

    # -- what `Watching` leaves open ------------------------------------------------------------------------

    def _print(self, host: Any, renderable: Any) -> None:
        if self.console and host["state"].is_world_process_zero:
            say(renderable, _Bars())

    def _log(self, host: Any, model: nn.Module, figures: dict[str, float]) -> None:
        for name, value in figures.items():
            worse = min if name.endswith("min_entropy") else max
            self._figures[name] = worse(self._figures.get(name, value), value)
        if self.log is not None:
            self.log(dict(figures))

    def _live(self, host: Any, model: nn.Module) -> Live:
        optimizer, schedulers = host["optimizer"], [host["lr_scheduler"]]
        reason = None
        if self._monitor is not None and self._monitor.ranks.size > 1:
            reason = "in several processes patch before the Trainer wraps the model: qkwatch.retrofit_ or restore_"
        elif _has_adapters(model):
            reason = (
                "checkpoints of a model with adapters hold the adapters alone, and the gains would be lost: merge them "
                "first (merge_and_unload), or train with Lightning's Trainer, whose checkpoints hold all"
            )
        settle = functools.partial(like_fresh, optimizer, model, schedulers)
        return Live([model], [optimizer], schedulers, reason, settle)


def _has_adapters(model: nn.Module) -> bool:
    """Whether `peft` has put adapters on the model, by a wrapper or from inside."""
    return getattr(model, "peft_config", None) is not None


def _tensorboard(args: Any) -> list[Any]:
    """A logger for the panels where the Trainer writes to TensorBoard: into the same folder of runs."""
    if "tensorboard" not in (args.report_to or ()):
        return []
    from lightning.pytorch.loggers import TensorBoardLogger

    folder = os.environ.get("TENSORBOARD_LOGGING_DIR") or os.path.join(args.output_dir, "runs")
    return [TensorBoardLogger(os.path.expanduser(folder), name="qkwatch")]


class _Bars:
    """What is printed while the Trainer's bars are on screen goes above them."""

    @property
    def train_progress_bar(self) -> Any:
        return next(iter(getattr(tqdm, "_instances", ())), None)

    def print(self, text: str) -> None:
        tqdm.write(text)
