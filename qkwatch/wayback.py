"""What a retrofit may cost, and the way back: the loss forecast, and the weights and optimizer state to return to.

Nothing is kept, and no loss is looked at, unless a budget is asked for.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from qkwatch.schedulers import unwrap

BEFORE = 32  # losses that the forecast is drawn through
LEAST = 8  # with fewer there is no forecast
SIGMAS = 3.0  # a difference must also stand out of the noise of the mean


class LossLine:
    """The losses before a retrofit and those after it. They stay on their device until they are compared."""

    def __init__(self) -> None:
        self._before: deque[tuple[int, Tensor]] = deque(maxlen=BEFORE)
        self._after: list[tuple[int, Tensor]] = []
        self.turned: int | None = None  # the step from which losses count as after

    def note(self, step: int, loss: Tensor | None) -> None:
        """The loss of a training batch; steps between a retrofit and the end of its ramp count for neither side."""
        if loss is None:
            return
        if self.turned is None:
            self._before.append((step, loss.detach().float()))
        elif step > self.turned:
            self._after.append((step, loss.detach().float()))

    @property
    def seen(self) -> int:
        """Losses seen after the retrofit."""
        return len(self._after)

    @property
    def drawn(self) -> bool:
        """Whether there are losses enough before the retrofit to draw a forecast through."""
        return len(self._before) >= LEAST

    def table(self) -> Tensor:
        """Steps, from the first, and losses before and after, `(2, N)` float32 on the losses' device."""
        both = [*self._before, *self._after]
        losses = torch.stack([loss.reshape(()) for _, loss in both])
        return torch.stack([losses.new_tensor([step - both[0][0] for step, _ in both]), losses])

    def excess(self, table: Tensor) -> tuple[float, float] | None:
        """Mean excess of the later losses over the forecast, and what of it noise can be; None: no forecast.

        The forecast goes on from the last losses before: level, or rising where Theil and Sen's line through them
        rises. A falling line is not followed: loss curves flatten, and the retrofit would be blamed for that.
        """
        steps, losses = table.cpu().tolist()
        cut = len(self._before)
        if cut < LEAST or not all(map(math.isfinite, losses[:cut])):
            return None
        pairs = combinations(range(cut), 2)
        slope = median((losses[j] - losses[i]) / (steps[j] - steps[i]) for i, j in pairs if steps[j] > steps[i])
        line = [y - slope * x for x, y in zip(steps, losses, strict=True)]
        noise = 1.4826 * median(abs(y - median(line[:cut])) for y in line[:cut])
        slope = max(slope, 0.0)
        left = [y - slope * x for x, y in zip(steps, losses, strict=True)]
        level, after = median(left[cut - LEAST : cut]), left[cut:]
        return sum(after) / len(after) - level, SIGMAS * noise * math.sqrt(1 / len(after) + 1 / LEAST)


class Snapshot:
    """Copies, on the CPU, of a model's parameters and buffers and of its optimizers' state."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Any]) -> None:
        self._values = [(t, _copy(t)) for t in (*model.parameters(), *model.buffers())]
        self._states = [
            (o, {p: {k: _kept(v) for k, v in state.items()} for p, state in o.state.items()})
            for o in map(unwrap, optimizers)
        ]

    @torch.no_grad()
    def put_back(self) -> None:
        """Values into the same tensors; the optimizers' state as it was."""
        for tensor, value in self._values:
            tensor.copy_(value)
        for optimizer, states in self._states:
            optimizer.state.clear()
            for parameter, state in states.items():
                optimizer.state[parameter] = {k: v.back() if isinstance(v, _Kept) else v for k, v in state.items()}


@dataclass
class _Kept:
    """A tensor's values, and where they came from."""

    values: Tensor
    device: torch.device

    def back(self) -> Tensor:
        return self.values.to(self.device, copy=True)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _kept(value: Any) -> Any:
    return _Kept(_copy(value), value.device) if isinstance(value, Tensor) else value
