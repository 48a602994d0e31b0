"""The same watch for the Trainer of `transformers`, which is needed for this module only.

from qkwatch.transformers import QKWatchCallback

Trainer(model, args, train_dataset=data, callbacks=[QKWatchCallback(retrofit="auto")])
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from qkwatch.adopt import like_fresh
from qkwatch.errors import QKWatchError
from qkwatch.guard import guarded
from qkwatch.midrun import Live
from qkwatch.norms import Variant
from qkwatch.ranks import Ranks
from qkwatch.report import say
from qkwatch.retrofit import patched_sites
from qkwatch.rules import Thresholds
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

    Of each measured step the first micro-batch is read. ``qkwatch/max_logit``, ``qkwatch/min_entropy`` and
    ``qkwatch/alert_level`` join what the Trainer logs next: in ``state.log_history`` and for callbacks behind this
    one. Loggers come before it in the Trainer's list, so for TensorBoard and its kin give it the Trainer's own log::

        callback = QKWatchCallback()
        trainer = Trainer(model, args, train_dataset=data, callbacks=[callback])
        callback.log = trainer.log

    Checkpoints hold the patch. To go on from one, or to load it, patch the fresh model first:
    ``qkwatch.restore_(model, "out/checkpoint-500")``, then ``trainer.train(resume_from_checkpoint=...)``.

    Args:
        log: takes the few figures of each measured step, e.g. ``trainer.log``.
        variant, thresholds, options: as of `QKWatch`, less `budget`; in several processes patching is refused.

    Raises:
        QKWatchError: an option is out of range; on resume, the checkpoint is of a patched model and the model is not.
    """

    def __init__(
        self,
        log: Callable[[dict[str, float]], None] | None = None,
        *,
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
        super().__init__(variant=variant, thresholds=thresholds, **options)
        self.log = log
        self._figures: dict[str, float] = {}
        self._restore: Callable[[], None] | None = None

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

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._release()
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
        self._run.start(patched=bool(patched_sites(model)))

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

    @guarded
    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._release()
        self._say({"state": state}, self._summary())

    def _release(self) -> None:
        restore, self._restore = self._restore, None
        if restore is not None:
            restore()

    # -- what `Watching` leaves open ------------------------------------------------------------------------

    def _say(self, host: Any, renderable: Any) -> None:
        if self.console and host["state"].is_world_process_zero:
            say(renderable)

    def _log(self, host: Any, model: nn.Module, figures: dict[str, float]) -> None:
        self._figures = figures
        if self.log is not None:
            self.log(dict(figures))

    def _live(self, host: Any, model: nn.Module) -> Live:
        optimizer, schedulers = host["optimizer"], [host["lr_scheduler"]]
        several = self._monitor is not None and self._monitor.ranks.size > 1
        reason = "in several processes patch before the Trainer wraps the model: qkwatch.retrofit_ or restore_"
        settle = functools.partial(like_fresh, optimizer, model, schedulers)
        return Live([model], [optimizer], schedulers, reason if several else None, settle)
