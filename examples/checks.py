"""Everything that one model is put through in `survey.py`, and what came of it."""

from __future__ import annotations

import collections
import contextlib
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import zoo
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from witness import Seen, Witness

from qkwatch import Site, find_sites, retrofit_, undo_, watch
from qkwatch.core import Core
from qkwatch.measure import measure_at
from qkwatch.probe import replay
from qkwatch.reading import Reading, merge, reading_from
from qkwatch.scout import Scout

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
    at_core: int = 0  # of the verified: normed where the softmax takes queries and keys
    notes: dict[str, int] = field(default_factory=dict)  # what stays unbounded -> verified sites
    faults: list[str] = field(default_factory=list)
    seconds: float = 0.0
    note: str = ""


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
    if not sites and _uses_flex(model, built):
        result.note = "flex_attention: said to be unmeasured"
        return
    with torch.enable_grad(), watch(model, sites) as watcher:
        _outputs(model, built)
    witness = Witness()
    with torch.enable_grad(), witness:
        _outputs(model, built)
    seen, readings = witness.seen, watcher.readings
    result.cores = len(seen)
    told = [r for r in readings if float(r.entropy_nats.abs().max()) > 0]  # one key alone makes a product no product
    extra = sum(min((s.distance(r) for s in seen), default=9.0) > TOLERANCE for r in told)
    if len(seen) > len(readings) or extra:  # logits that are read twice do no harm
        result.faults.append(f"{len(seen)} attentions ran, {len(readings)} were read")
    result.error = _match(seen, readings)
    if result.error > TOLERANCE:
        result.faults.append(f"readings are off by {result.error:.2g}")


def _uses_flex(model: nn.Module, built: zoo.Built) -> bool:
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
    own = [t for t in own if t.shape in shapes and not _is_average(t)]
    with torch.no_grad(), watch(twin) as watcher:
        _outputs(twin, built)
    result.own = len(own)
    if own:
        result.own_error = max(min((Seen.of(p).distance(r) for r in watcher.readings), default=9.0) for p in own)
        if result.own_error > TOLERANCE:
            result.faults.append(f"readings are off the model's own attentions by {result.own_error:.2g}")


def _is_average(p: Tensor) -> bool:
    return p.shape[1] > 1 and torch.equal(p, p[:, :1].expand(p.shape))


# -- the retrofit -------------------------------------------------------------------------------------------


def _patch(built: zoo.Built, result: Result, sites: list[Site], before: list[Tensor] | None) -> None:
    model = built.model
    keys, parameters = list(model.state_dict()), list(model.parameters())
    report = retrofit_(model, sites, variant="l2")
    result.refused = dict(collections.Counter(report.refused.values()))
    result.notes = dict(collections.Counter(report.notes.values()))
    names = {id(p) for p in model.parameters()}
    if not all(id(p) in names for p in parameters):
        result.faults.append("retrofit_ replaced a parameter")
    for site in sites:
        if site.name in report.applied:
            fault = _grown(site, site.name in report.notes)
            result.verified += fault is None
            result.at_core += fault is None and site.core_tap is not None
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


def _grown(site: Site, noted: bool) -> str | None:
    """What is wrong with a patched site once its projections are 1000 times as large; None if nothing is.

    Where the report notes something beside the projections, the logits are held to their place, not to the gains.
    """
    norm: Any = site.module._modules["qk_norm"]
    gain = norm.q.effective_gain().detach().float()
    before, inputs = _figures(site)
    with _scaled(site):
        after, grown = _figures(site)
    linear = all(torch.allclose(b, a * GROWTH, rtol=1e-3, atol=float(b.abs().max()) * 1e-5)
                 for a, b in zip(inputs, grown, strict=True))  # fmt: skip
    for reading in (before, after):
        bias = 0.0 if reading.bias_max is None else reading.bias_max.nan_to_num(0.0)
        if not noted and not bool((reading.max_logit - bias <= gain * 1.01 + 1e-3).all()):
            return f"|logit| {float(reading.max_logit.max()):.4g} is above the gain {float(gain.max()):.4g}"
    if before.bias_max is not None and not torch.allclose(
        before.bias_max, torch.zeros(()) if after.bias_max is None else after.bias_max, 1e-3, 1e-5, equal_nan=True
    ):
        # a bias out of the same projection grew with it
        return "what is added to its logits grew with its projections" if noted else None
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
        replay(site.module, site.call, on_core=lambda core: packs.append(measure_at(site, _keys_only(core), "all")))
    finally:
        for handle in handles:
            handle.remove()
    return reading_from(merge(packs), site.name), inputs


def _keys_only(core: Core) -> Core:
    """Without the logits of learned sinks, which come after those of the keys and are no products."""
    keys = core.keys().shape[-2]
    if core.logits is None or core.logits.shape[-1] <= keys or core.dim % core.logits.ndim != core.logits.ndim - 1:
        return core
    return replace(core, logits=core.logits[..., :keys])


@contextlib.contextmanager
def _scaled(site: Site) -> Iterator[None]:
    """The parameters of the site's projections times 1000; all of its own where it is normed at the softmax."""
    if site.core_tap is not None:
        own = [p for n, p in site.module.named_parameters() if not n.startswith("qk_norm") and p.ndim > 1]
        parameters = {id(p): p for p in own}.values()
    elif site.taps is not None:
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
