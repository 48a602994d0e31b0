"""Which attention does qkwatch find, read and patch? Over every model that can be built small, without downloads.

    python examples/survey.py                          # all packages: an hour or so on one core
    python examples/survey.py --package timm --filter 'swin*'
    python examples/survey.py --jobs 4 --json survey.json

Each model runs in a process of its own, under a time limit. For each one:

found      an independent watch of the operations lists every softmax whose result enters a matrix product, and every
           fused call; each must be one of the sites' readings.
readings   entropy (nats) and saturated share, once more in float64: from the probabilities that a transformers model
           itself returns (``output_attentions=True``), and from q, k, mask and scale (or the logits) of each core.
retrofit   all sites at once with ``l2``; then each site alone, its projections' weights times 1000: the logits may not
           move, nor exceed their gains (not held to them where the report notes learned biases beside the projections);
           then undone: outputs, keys and parameters as they were.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import fnmatch
import json
import multiprocessing
import os
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import zoo
from checks import TOLERANCE, Result, study
from rich.console import Console
from rich.table import Table


def _child(package: str, name: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing), contextlib.redirect_stderr(nothing):
        pipe.send(asdict(study(package, name)))


def isolated_study(package: str, name: str, limit: float) -> Result:
    """`study` in a process of its own, which may hang or die."""
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(package, name, theirs))
    process.start()
    theirs.close()
    result = Result(package, name, note=f"took longer than {limit:.0f} s")
    if mine.poll(limit):
        try:
            result = Result(**mine.recv())
        except EOFError:
            result.note = "its process died"
    process.kill()
    process.join()
    return result


def tally(results: list[Result]) -> dict[str, Any]:
    """The totals that may be quoted."""
    built = [r for r in results if r.built]
    soft = [r for r in built if r.cores]
    refused: collections.Counter[str] = collections.Counter()
    for r in soft:
        refused.update(r.refused)
    notes: collections.Counter[str] = collections.Counter()
    for r in soft:
        notes.update(r.notes)
    own = [r for r in soft if r.own]
    return {
        "tried": len(results),
        "built": len(built),
        "with softmax attention": len(soft),
        "found": sum(not any("were read" in f for f in r.faults) and r.sites > 0 for r in soft),
        "readings right": sum(r.sites > 0 and r.error <= TOLERANCE for r in soft),
        "largest error": max((r.error for r in soft), default=0.0),
        "own attentions right": f"{sum(r.own_error <= TOLERANCE for r in own)} of {len(own)}",
        "largest own error": max((r.own_error for r in own), default=0.0),
        "sites": sum(r.sites for r in soft),
        "verified": sum(r.verified for r in soft),
        "of them at the softmax": sum(r.at_core for r in soft),
        "of them with a note": sum(notes.values()),
        "normed already": sum(r.normed for r in soft),
        "notes": dict(notes.most_common()),
        "refused": dict(refused.most_common()),
        "faults": {r.name: r.faults for r in built if r.faults},
        "not built": {r.name: r.note for r in results if not r.built},
    }


def _table(totals: dict[str, dict[str, Any]]) -> Table:
    table = Table(title="qkwatch over every model that builds small")
    rows = ["tried", "built", "with softmax attention", "found", "readings right", "largest error",
            "own attentions right", "largest own error", "sites", "verified", "of them at the softmax",
            "of them with a note", "normed already"]  # fmt: skip
    table.add_column("")
    for package in totals:
        table.add_column(package, justify="right")
    for row in rows:
        cells = [totals[p][row] for p in totals]
        table.add_row(row, *[f"{c:.1e}" if isinstance(c, float) else str(c) for c in cells])
    table.add_row("refused", *[str(sum(totals[p]["refused"].values())) for p in totals])
    table.add_row("models with faults", *[str(len(totals[p]["faults"])) for p in totals])
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--package", action="append", choices=list(zoo.PACKAGES), help="default: all")
    parser.add_argument("--filter", default="*", help="glob over the models' names")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for one model")
    parser.add_argument("--json", type=Path, help="write everything to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    console, everything, totals = Console(), [], {}
    for package in options.package or zoo.PACKAGES:
        names = [n for n in zoo.entries(package) if fnmatch.fnmatchcase(n, options.filter)]
        results = []
        with ThreadPoolExecutor(options.jobs) as pool:
            for result in pool.map(lambda n, p=package: isolated_study(p, n, options.limit), names):
                results.append(result)
                console.print(_line(result), highlight=False, soft_wrap=True, markup=False)
        totals[package] = tally(results)
        everything += [asdict(result) for result in results]
        if options.json:
            options.json.write_text(json.dumps({"totals": totals, "models": everything}, indent=1))
    console.print(_table(totals))
    for package, total in totals.items():
        for note, count in total["notes"].items():
            console.print(f"{package}: {count} noted: {note}", highlight=False, markup=False)
        for reason, count in total["refused"].items():
            console.print(f"{package}: {count} refused: {reason}", highlight=False, markup=False)


def _line(r: Result) -> str:
    if not r.built:
        return f"  -  {r.package} {r.name}: not built ({r.note})"
    mark = "FAIL" if r.faults else " ok "
    refused = "; ".join(f"{n} refused: {reason}" for reason, n in r.refused.items())
    text = f"{mark} {r.package} {r.name}: {r.cores} cores, {r.sites} sites, {r.verified} verified, error {r.error:.0e}"
    return " | ".join([text, f"own {r.own} {r.own_error:.0e}", *filter(None, [refused]), *r.faults])


if __name__ == "__main__":
    main()
