"""Heat maps drawn with Pillow, legible at the size TensorBoard shows them, and their history."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

Floats = NDArray[np.float64]
Pixels = NDArray[np.uint8]  # (height, width, 3)
ABSENT = -math.inf  # in a grid: the model has no such head
UNKNOWN = (math.nan, math.nan)


def short_names(names: Sequence[str]) -> list[str]:
    """Names without the dotted parts that all of them begin or end with.

    >>> short_names(["model.layers.0.attn", "model.layers.1.attn"])
    ['0', '1']
    """
    parts = [name.split(".") for name in names]
    while len(parts) > 1 and all(len(p) > 1 and p[0] == parts[0][0] for p in parts):
        parts = [p[1:] for p in parts]
    while len(parts) > 1 and all(len(p) > 1 and p[-1] == parts[0][-1] for p in parts):
        parts = [p[:-1] for p in parts]
    return [name if len(name) <= 16 else "..." + name[-13:] for name in map(".".join, parts)]


Column = tuple[int, dict[str, tuple[float, float]]]  # first step, {site: (max logit, min entropy)}


class History:
    """Each site's worst figures over time in at most `limit` (even) columns: when full, pairs are merged."""

    def __init__(self, limit: int) -> None:
        self.limit, self.per_column, self.in_last = limit, 1, 0
        self.columns: list[tuple[int, dict[str, tuple[float, float]]]] = []
        self.sites: dict[str, None] = {}  # ordered set

    def add(self, step: int, worst: dict[str, tuple[float, float]]) -> None:
        """Append one reading's `{site: (largest logit, lowest entropy)}`; nan for not measured."""
        self.sites.update(dict.fromkeys(worst))
        if self.columns and self.in_last < self.per_column:
            self.columns[-1] = _merge(self.columns[-1], (step, worst))
            self.in_last += 1
            return
        if len(self.columns) >= self.limit:
            pairs = zip(self.columns[::2], self.columns[1::2], strict=True)
            self.columns = [_merge(a, b) for a, b in pairs]
            self.per_column *= 2
        self.columns.append((step, worst))
        self.in_last = 1


def _merge(a: Column, b: Column) -> Column:
    worst = dict(a[1])
    for site, (logit, entropy) in b[1].items():
        old = worst.get(site, UNKNOWN)
        worst[site] = (float(np.fmax(old[0], logit)), float(np.fmin(old[1], entropy)))
    return a[0], worst


class Scale(NamedTuple):
    """Colours for a figure: the bright end is the worrying one, so both maps read alike.

    `ticks` are the numbers on the colour bar, ascending; what lies beyond the ends gets the end's colour.
    """

    ticks: tuple[float, ...]
    labels: tuple[str, ...]
    log: bool = False
    bright_low: bool = False

    def place(self, values: Floats) -> Floats:
        """Position between the dark end (0) and the bright end (1), any shape; nan stays nan."""
        ends = np.array([self.ticks[0], self.ticks[-1]])
        if self.log:
            values, ends = np.log(np.maximum(values, ends[0])), np.log(ends)
        at: Floats = np.clip((values - ends[0]) / (ends[1] - ends[0]), 0, 1)
        return 1 - at if self.bright_low else at

    def colours(self, values: Floats) -> Pixels:
        """RGB of each value, shape + (3,): grey for nan, magenta for +inf, white for ABSENT."""
        at = np.nan_to_num(self.place(np.where(np.isinf(values), self.ticks[0], values)))
        anchors = np.linspace(0, 1, VIRIDIS.shape[1])
        rgb = np.stack([np.interp(at, anchors, channel) for channel in VIRIDIS], -1)
        for where, colour in (
            (np.isnan(values), GREY),
            (values == math.inf, MAGENTA),
            (values == ABSENT, WHITE),
        ):
            rgb[where] = colour
        return rgb.round().astype(np.uint8)


LOGITS = Scale((1.0, 10.0, 100.0, 1e3, 1e4), ("1", "10", "100", "1,000", "10,000+"), log=True)
ENTROPY = Scale((0.0, 0.25, 0.5, 0.75, 1.0), ("0", "0.25", "0.5", "0.75", "1"), bright_low=True)
# red, green, blue of viridis at nine even places: perceptually uniform, and safe for the colour-blind
VIRIDIS = np.array(
    [
        (68, 71, 59, 44, 33, 40, 94, 173, 253),
        (1, 45, 82, 114, 145, 174, 201, 220, 231),
        (84, 123, 139, 142, 140, 128, 98, 48, 37),
    ],
    dtype=np.float64,
)
WIDTH = 700
WHITE, GREY, MAGENTA, INK = (255, 255, 255), (190, 190, 190), (220, 0, 120), (40, 40, 40)


@lru_cache
def _font(size: int) -> Any:
    try:
        return ImageFont.load_default(size)
    except (TypeError, ImportError):  # Pillow before 10.1, or built without FreeType
        return ImageFont.load_default()


def heat_map(
    grid: Floats, scale: Scale, title: str, rows: Sequence[str], columns: Sequence[str], across: str
) -> Pixels:
    """A labelled heat map, 700 pixels wide: TensorBoard shows it at 350, so every second pixel must suffice.

    Args:
        grid: `(rows, columns)`; nan is shown as not measured, +inf as non-finite, ABSENT as nothing.
        scale: colours and colour bar.
        title: one line.
        rows, columns: labels, thinned out where they would overlap.
        across: name of the horizontal axis.

    Returns:
        `(height, 700, 3)` uint8.
    """
    small, (n_rows, n_columns) = _font(20), grid.shape
    left, top = 24 + int(max(map(small.getlength, ["layer", *rows]))), 84
    room = WIDTH - left - 130  # the colour bar and its numbers
    wide = room // n_columns * n_columns or room
    cell = min(max(540 // n_rows, 4), 44)
    tall = cell * n_rows
    bar_tall = max(tall, 150)
    canvas = Image.new("RGB", (WIDTH, top + bar_tall + 100), WHITE)
    pen = ImageDraw.Draw(canvas)
    cells = Image.fromarray(scale.colours(grid))
    canvas.paste(cells.resize((wide, tall), Image.Resampling.NEAREST), (left, top))
    if across == "head" and min(cell, wide / n_columns) >= 14:
        _gaps(pen, (left, top, wide, tall), grid.shape)
    pen.text((14, 12), title, INK, _font(24))
    pen.text((left - 10, top - 20), "layer", INK, small, "rm")
    pen.text((left + wide / 2, top + tall + 44), across, INK, small, "mm")
    for y in range(0, n_rows, _every(22 / cell)):
        pen.text((left - 10, top + (y + 0.5) * cell), rows[y], INK, small, "rm")
    pitch = wide / n_columns
    for x in range(0, n_columns, _every((max(map(small.getlength, columns)) + 16) / pitch)):
        pen.text((left + (x + 0.5) * pitch, top + tall + 18), columns[x], INK, small, "mm")
    _colour_bar(canvas, pen, scale, (left + room + 16, top, bar_tall))
    _legend(pen, grid, (left, canvas.height - 20))
    return np.asarray(canvas)


def _gaps(pen: ImageDraw.ImageDraw, box: tuple[int, int, int, int], shape: tuple[int, ...]) -> None:
    left, top, wide, tall = box
    for x in range(left, left + wide, wide // shape[1]):
        pen.line((x, top, x, top + tall), WHITE, 2)
    for y in range(top, top + tall, tall // shape[0]):
        pen.line((left, y, left + wide, y), WHITE, 2)


def _colour_bar(canvas: Image.Image, pen: ImageDraw.ImageDraw, scale: Scale, at: tuple[int, int, int]) -> None:
    x, top, tall = at
    low, high = scale.ticks[0], scale.ticks[-1]
    values = np.geomspace(high, low, tall) if scale.log else np.linspace(high, low, tall)
    ramp = Image.fromarray(scale.colours(values[:, None]))
    canvas.paste(ramp.resize((20, tall), Image.Resampling.NEAREST), (x, top))
    heights = scale._replace(bright_low=False).place(np.array(scale.ticks))
    for height, label in zip(heights, scale.labels, strict=True):
        y = top + (1 - float(height)) * (tall - 1)
        pen.line((x + 20, y, x + 26, y), INK, 2)
        pen.text((x + 30, y), label, INK, _font(20), "lm")


def _legend(pen: ImageDraw.ImageDraw, grid: Floats, at: tuple[int, int]) -> None:
    x, y = at
    for present, colour, text in (
        (bool(np.isnan(grid).any()), GREY, "not measured"),
        (bool((grid == math.inf).any()), MAGENTA, "non-finite"),
    ):
        if present:
            pen.rectangle((x, y - 8, x + 16, y + 8), colour)
            pen.text((x + 24, y), text, INK, _font(20), "lm")
            x += 190


def _every(least: float) -> int:
    """The smallest pleasant distance between labels that is at least `least`."""
    pleasant = (n * int(10**k) for k in range(9) for n in (1, 2, 5))
    return next(n for n in pleasant if n >= least)
