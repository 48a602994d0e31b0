"""Which attention does qkwatch find, read and patch? Over every model that can be built small, without downloads.

    python examples/coverage.py                          # all packages: an hour or so on one core
    python examples/coverage.py --package timm --filter 'swin*'
    python examples/coverage.py --jobs 4 --json coverage.json

Each model runs in a process of its own, under a time limit. For each one:

found      an independent watch of the operations lists every softmax whose result enters a matrix product, and every
           fused call; each must be one of the sites' readings.
readings   entropy (nats) and saturated share, once more in float64: from the probabilities that a transformers model
           itself returns (``output_attentions=True``), and from q, k, mask and scale (or the logits) of each core.
retrofit   all sites at once with ``l2``; then each site alone, its projections' weights times 1000: the logits may not
           move, nor exceed their gains; then undone: outputs, keys and parameters as they were.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import fnmatch
import json
import multiprocessing
import os
import time
import traceback
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import zoo
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from qkwatch import Site, find_sites, retrofit_, undo_, watch
from qkwatch.measure import measure_at
from qkwatch.probe import replay
from qkwatch.stats import Reading, merge, reading_from

TOLERANCE = 1e-4  # of a reading, in nats and in shares
GROWTH = 1000.0


@dataclass
class Result:
    """What became of one model. ``faults`` must be empty."""

    package: str
    name: str
    built: bool = False
    model: str = ""
    cores: int = 0  # by the independent watch
    error: float = 0.0  # of the readings, against a dense float64 recomputation
    own: int = 0  # attentions that the model itself returned
    own_error: float = 0.0
    sites: int = 0
    normed: int = 0
    verified: int = 0
    refused: dict[str, int] = field(default_factory=dict)  # reason -> sites
    faults: list[str] = field(default_factory=list)
    seconds: float = 0.0
    note: str = ""


# -- an independent watch -----------------------------------------------------------------------------------


@dataclass
class Seen:
    """One attention as float64 sees it: per-head figures where the heads are an axis, else the mean over all."""

    nats: Tensor
    saturated: Tensor
    shape: torch.Size

    @classmethod
    def of(cls, p: Tensor) -> Seen:
        """From probabilities (..., Tq, Tk); rows that see nothing, and rows of padding, do not count."""
        p, shape = p.detach().double(), p.shape
        p = p if p.ndim == 4 else p.reshape(-1, 1, *p.shape[-2:])
        live = p.sum(-1) > 0.5
        nats = -(p * p.clamp_min(1e-300).log()).sum(-1)
        several = live & ((p > 0).sum(-1) >= 2)
        sharp = (p.amax(-1) > 0.99) & several
        return cls(_mean(nats, live), _mean(sharp.double(), several), shape)

    def distance(self, reading: Reading) -> float:
        """Largest difference of a reading's figures, per head where both have the same heads."""
        worst = 0.0
        for mine, theirs in ((self.nats, reading.entropy_nats), (self.saturated, reading.saturated)):
            theirs = theirs.double()
            if mine.shape != theirs.shape:
                mine, theirs = mine.nanmean(), theirs.nanmean()
            gap = (mine - theirs).abs()
            gap = torch.where(mine.isnan() & theirs.isnan(), 0.0, gap).nan_to_num(torch.inf)
            worst = max(worst, float(gap.max()))
        return worst


def _mean(x: Tensor, where: Tensor) -> Tensor:
    return torch.where(where, x, 0.0).sum((0, 2)) / where.sum((0, 2))


class Witness(TorchDispatchMode):
    """Lists attention in its own way: whatever descends from a product of two activations, passes a softmax and is
    multiplied once more; and every fused call. It keeps all tensors of a forward pass alive, so that none is lost.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Seen | _Entry] = []
        self._marks: dict[int, tuple[Tensor, _Entry | None]] = {}  # None: a product that no softmax has seen yet

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = str(getattr(func, "overloadpacket", func)).removeprefix("aten.")
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        marks = [self._marks[id(t)][1] for t in inputs if id(t) in self._marks]
        entries = [mark for mark in marks if mark is not None]
        if name.startswith("_scaled_dot_product"):
            self.found.append(_dense(*args[:2], kwargs or {}, args))
        elif name in ("bmm", "mm", "baddbmm", "addmm"):
            factors = [t for t in args if isinstance(t, Tensor)][-2:]
            for entry in entries:
                entry.used = True
            if not entries and (marks or not any(map(_is_parameter, factors))):
                self._mark(out, None)
        elif name in ("_softmax", "_safe_softmax") and marks and not entries:
            probabilities = torch.softmax(args[0].detach().double(), args[1]).movedim(args[1], -1)
            self.found.append(entry := _Entry(Seen.of(probabilities)))
            self._mark(out, entry)
        elif marks:
            self._mark(out, entries[0] if entries else None)
        return out

    def _mark(self, out: Any, mark: _Entry | None) -> None:
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                self._marks[id(tensor)] = (tensor, mark)

    @property
    def seen(self) -> list[Seen]:
        both = [found if isinstance(found, Seen) else found.seen if found.used else None for found in self.found]
        return [seen for seen in both if seen is not None]


@dataclass
class _Entry:
    seen: Seen
    used: bool = False


def _is_parameter(tensor: Tensor) -> bool:
    base = tensor if tensor._base is None else tensor._base
    return isinstance(base, nn.Parameter) or isinstance(tensor, nn.Parameter)


def _dense(q: Tensor, k: Tensor, kwargs: dict[str, Any], args: Any) -> Seen:
    """A fused call in float64."""
    q, k = q.detach().double(), k.detach().double()
    scale = kwargs.get("scale") or q.shape[-1] ** -0.5
    k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
    logits = q @ k.transpose(-1, -2) * scale
    mask = kwargs.get("attn_mask")
    causal = kwargs.get("is_causal", args[4] if len(args) > 4 else False)
    if causal:
        logits = logits.masked_fill(~torch.ones(logits.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    if mask is not None:
        mask = mask.detach()
        hidden = ~mask if mask.dtype == torch.bool else mask < torch.finfo(mask.dtype).min / 2
        logits = logits + (0.0 if mask.dtype == torch.bool else mask.double())
        logits = logits.masked_fill(hidden, -torch.inf)
    return Seen.of(torch.softmax(logits, -1).nan_to_num(0.0))


# -- one model ----------------------------------------------------------------------------------------------


def study(package: str, name: str) -> Result:
    """Build one model and put it through everything."""
    result, start = Result(package, name), time.time()
    try:
        built = zoo.entries(package)[name]()
    except Exception as error:
        result.note = f"{type(error).__name__}: {error}"[:300]
        return result
    result.built, result.model = True, type(built.model).__name__
    try:
        _study(built, result)
    except Exception:
        result.faults.append("raised: " + traceback.format_exc(limit=-4)[-900:])
    result.seconds = round(time.time() - start, 2)
    return result


def _outputs(model: nn.Module, built: zoo.Built) -> list[Tensor]:
    torch.manual_seed(1)
    return [t for t in tree_leaves(model(*built.args, **built.kwargs)) if isinstance(t, Tensor)]


def _equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(a, b, strict=True))


def _study(built: zoo.Built, result: Result) -> None:
    model = built.model
    with torch.no_grad():
        before = _outputs(model, built)
        steady = _equal(before, _outputs(model, built))
    sites = _find(built, result)
    result.sites, result.normed = len(sites), sum(site.normed for site in sites)
    with torch.no_grad():
        if steady and not _equal(before, _outputs(model, built)):
            result.faults.append("find_sites changed what the model returns")
    _read(model, built, result, sites)
    if built.eager is not None and sites:
        _read_own(built, result)
    if sites:
        _patch(built, result, sites, before if steady else None)


def _find(built: zoo.Built, result: Result) -> list[Site]:
    """`find_sites`, which must leave everything as it was."""
    model = built.model
    state = {key: value.clone() for key, value in model.state_dict().items() if isinstance(value, Tensor)}
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    modes = [module.training for module in model.modules()]
    random = torch.get_rng_state()
    sites = find_sites(model, *built.args, **built.kwargs)
    if not torch.equal(random, torch.get_rng_state()):
        result.faults.append("find_sites moved the random state")
    if modes != [module.training for module in model.modules()]:
        result.faults.append("find_sites changed training flags")
    after = model.state_dict()
    if set(state) - set(after) or any(not torch.equal(after[k].nan_to_num(), v.nan_to_num()) for k, v in state.items()):
        result.faults.append("find_sites changed the state_dict")
    if any(not torch.equal(buffer.nan_to_num(), value.nan_to_num()) for buffer, value in buffers):
        result.faults.append("find_sites changed a buffer")
    if any(p.grad is not None for p in model.parameters()):
        result.faults.append("find_sites left gradients")
    return sites


def _read(model: nn.Module, built: zoo.Built, result: Result, sites: list[Site]) -> None:
    """Hold the readings of a live forward against the witness's."""
    with warnings.catch_warnings(record=True) as caught, torch.enable_grad(), watch(model, sites) as watcher:
        warnings.simplefilter("always")
        _outputs(model, built)
    if any("flex_attention" in str(w.message) for w in caught) or (not sites and _uses_flex(model, built)):
        result.note = "flex_attention: said to be unmeasured"
        return
    witness = Witness()
    with torch.enable_grad(), witness:
        _outputs(model, built)
    seen, readings = witness.seen, watcher.readings
    result.cores = len(seen)
    if len(seen) != len(readings):
        result.faults.append(f"{len(seen)} attentions ran, {len(readings)} were read")
    result.error = _match(seen, readings)
    if result.error > TOLERANCE:
        result.faults.append(f"readings are off by {result.error:.2g}")


def _uses_flex(model: nn.Module, built: zoo.Built) -> bool:
    from qkwatch.scout import Scout

    scout = Scout(model)
    with torch.no_grad(), scout:
        _outputs(model, built)
    return "flex_attention" in scout.unseen.values()


def _match(seen: list[Seen], readings: list[Reading]) -> float:
    """The largest distance of what was seen, to the readings in their order (or to the nearest of them)."""
    if len(seen) == len(readings):
        return max((s.distance(r) for s, r in zip(seen, readings, strict=True)), default=0.0)
    return max((min((s.distance(r) for r in readings), default=0.0) for s in seen), default=0.0)


def _read_own(built: zoo.Built, result: Result) -> None:
    """Hold the readings against the probabilities that the model itself returns."""
    assert built.eager is not None
    try:
        twin = built.eager()
        torch.manual_seed(1)
        with torch.no_grad():
            output = twin(*built.args, **built.kwargs, output_attentions=True, return_dict=True)
    except Exception as error:
        result.note = f"returns no attentions: {type(error).__name__}"
        return
    kept = [v for k, v in output.items() if k.endswith("attentions")] if hasattr(output, "items") else []
    own = [t for t in tree_leaves(kept) if isinstance(t, Tensor) and t.ndim == 4]
    own = [t for t in own if float((t.sum(-1) - 1).abs().max()) < 1e-3]
    witness = Witness()
    with torch.no_grad(), witness:
        _outputs(twin, built)
    shapes = {seen.shape for seen in witness.seen}  # others are no softmax of products: deformable sampling, say
    own = [t for t in own if t.shape in shapes]
    with torch.no_grad(), watch(twin) as watcher:
        _outputs(twin, built)
    result.own = len(own)
    if own:
        result.own_error = max(min((Seen.of(p).distance(r) for r in watcher.readings), default=9.0) for p in own)
        if result.own_error > TOLERANCE:
            result.faults.append(f"readings are off the model's own attentions by {result.own_error:.2g}")


# -- the retrofit -------------------------------------------------------------------------------------------


def _patch(built: zoo.Built, result: Result, sites: list[Site], before: list[Tensor] | None) -> None:
    model = built.model
    keys, parameters = list(model.state_dict()), list(model.parameters())
    report = retrofit_(model, sites, variant="l2")
    result.refused = dict(collections.Counter(report.refused.values()))
    names = {id(p) for p in model.parameters()}
    if not all(id(p) in names for p in parameters):
        result.faults.append("retrofit_ replaced a parameter")
    for site in sites:
        if site.name in report.applied:
            fault = _grown(site)
            result.verified += fault is None
            if fault is not None:
                result.faults.append(f"{site.name}: {fault}")
    if report.applied:
        _parity(built, result, steady=before is not None)
    undo_(model)
    if list(model.state_dict()) != keys or any(a is not b for a, b in zip(model.parameters(), parameters, strict=True)):
        result.faults.append("undo_ did not bring back the keys or parameters")
    with torch.no_grad():
        if before is not None and not _equal(before, _outputs(model, built)):
            result.faults.append("undo_ did not bring back the outputs")


def _parity(built: zoo.Built, result: Result, steady: bool) -> None:
    """A patched model must do the same with and without autograd (fast paths), whatever the mode."""
    with torch.no_grad():
        without = _outputs(built.model, built)
    with torch.enable_grad():
        within = _outputs(built.model, built)
    for a, b in zip(without, within, strict=True):
        if steady and a.is_floating_point() and not torch.allclose(a, b, rtol=1e-3, atol=1e-4, equal_nan=True):
            result.faults.append(f"patched, it differs with autograd by {float((a - b).abs().max()):.2g}")
            return


def _grown(site: Site) -> str | None:
    """What is wrong with a patched site once its projections are 1000 times as large; None if nothing is."""
    norm: Any = site.module._modules["qk_norm"]
    gain = norm.q.effective_gain().detach().float()
    before, inputs = _figures(site)
    with _scaled(site):
        after, grown = _figures(site)
    linear = all(torch.allclose(b, a * GROWTH, rtol=1e-3, atol=float(b.abs().max()) * 1e-5)
                 for a, b in zip(inputs, grown, strict=True))  # fmt: skip
    for reading in (before, after):
        bias = 0.0 if reading.bias_max is None else reading.bias_max.nan_to_num(0.0)
        if not bool((reading.max_logit - bias <= gain * 1.01 + 1e-3).all()):
            return f"|logit| {float(reading.max_logit.max()):.4g} is above the gain {float(gain.max()):.4g}"
    moved = float((after.max_logit - before.max_logit).abs().max())
    if linear and moved > 0.01 * float(before.max_logit.max()) + 1e-3:
        return f"its logits moved by {moved:.2g} as its projections grew"
    if linear and float((after.entropy_nats - before.entropy_nats).abs().max()) > 0.01:
        return "its entropy moved as its projections grew"
    return None


def _figures(site: Site) -> tuple[Reading, list[Tensor]]:
    """The site run again on its inputs: its reading, and what entered its norms."""
    norm: Any = site.module._modules["qk_norm"]
    packs: list[Any] = []
    inputs: list[Tensor] = []
    handles = [side.register_forward_pre_hook(lambda m, a: inputs.append(a[0].detach())) for side in (norm.q, norm.k)]
    assert site.call is not None
    try:
        replay(site.module, site.call, on_core=lambda core: packs.append(measure_at(site, core, "all")))
    finally:
        for handle in handles:
            handle.remove()
    return reading_from(merge(packs), site.name), inputs


@contextlib.contextmanager
def _scaled(site: Site) -> Any:
    """The parameters of the site's projections times 1000."""
    if site.taps is not None:
        owners: list[nn.Module] = [tap.module for tap in site.taps]
        parameters = {id(p): p for owner in owners for p in owner.parameters()}.values()
    else:
        own = [p for n, p in site.module.named_parameters() if n.startswith(("in_proj", "q_proj", "k_proj", "bias_k"))]
        parameters = {id(p): p for p in own}.values()
    saved = [(p, p.detach().clone()) for p in parameters]
    with torch.no_grad():
        for p in parameters:
            p.mul_(GROWTH)
    try:
        yield
    finally:
        with torch.no_grad():
            for p, value in saved:
                p.copy_(value)


# -- the study ----------------------------------------------------------------------------------------------


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
        "normed already": sum(r.normed for r in soft),
        "refused": dict(refused.most_common()),
        "faults": {r.name: r.faults for r in built if r.faults},
        "not built": {r.name: r.note for r in results if not r.built},
    }


def _table(totals: dict[str, dict[str, Any]]) -> Table:
    table = Table(title="qkwatch over every model that builds small")
    rows = ["tried", "built", "with softmax attention", "found", "readings right", "largest error",
            "own attentions right", "largest own error", "sites", "verified", "normed already"]  # fmt: skip
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
