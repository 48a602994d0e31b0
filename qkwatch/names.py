"""Names of layers and numbers of heads, short enough to read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_LONGEST = 28  # characters of a site's name in a table


def site_label(name: str) -> str:
    """A site's name; the model itself has none."""
    return name or "(the model itself)"


def few(names: Sequence[str], most: int = 8) -> str:
    """The first `most` names and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def short_sites(names: Sequence[str]) -> tuple[list[str], str]:
    """Names without the dotted parts that all share, and a note of what those are ("" for none).

    >>> short_sites(["net.layers.0.attn", "net.layers.1.attn"])
    (['layers.0', 'layers.1'], 'names without net. and .attn')
    """
    parts = [site_label(name).split(".") for name in names]
    head, tail = list[str](), list[str]()
    if len(set(names)) > 1:
        while all(len(p) > 2 and p[:2] == parts[0][:2] for p in parts):  # one shared part in front stays
            head.append(parts[0][0])
            parts = [p[1:] for p in parts]
        while all(len(p) > 1 and p[-1] == parts[0][-1] for p in parts):
            tail.insert(0, parts[0][-1])
            parts = [p[:-1] for p in parts]
    gone = [word for word in (".".join([*head, ""]), ".".join(["", *tail])) if word]
    short = [".".join(p) for p in parts]
    short = [name if len(name) <= _LONGEST else "…" + name[1 - _LONGEST :] for name in short]
    return short, f"names without {' and '.join(gone)}" if gone else ""


def abbreviate(names: Sequence[str]) -> list[str]:
    """Names that differ in one number only, as one.

    >>> abbreviate(["h.0.attn", "h.1.attn", "h.2.attn", "h.7.attn", "cross"])
    ['h.0-2,7.attn', 'cross']
    """
    rows = [tuple(name.split(".")) for name in names]
    for place in reversed(range(max(map(len, rows), default=0))):
        groups: dict[tuple[object, ...], list[tuple[str, ...]]] = {}
        for row in rows:
            numbered = place < len(row) and row[place].isdigit()
            groups.setdefault((row[:place], row[place + 1 :]) if numbered else row, []).append(row)
        rows = [
            (*g[0][:place], ranges((int(r[place]) for r in g), ","), *g[0][place + 1 :]) if len(g) > 1 else g[0]
            for g in groups.values()
        ]
    return [".".join(row) for row in rows]


def ranges(numbers: Iterable[int], comma: str = ", ") -> str:
    """Whole numbers in order, runs of them as one.

    >>> ranges([2, 0, 1, 5])
    '0-2, 5'
    """
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return comma.join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
