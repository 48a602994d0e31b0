"""A sample of `examples/survey.py`: hard structures of every package, held to what is known of them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import checks
import survey
import zoo

NORMED = "normed already"

# package, model, sites, of them verified, of them normed, a part of the reason for the others
CASES: list[tuple[str, str, int, int, int, str]] = [
    # projections: separate, fused, interleaved, transposed; keys shared by heads
    ("transformers", "llama", 2, 2, 0, ""),
    ("transformers", "gpt2", 2, 2, 0, ""),
    ("transformers", "gpt_neox", 2, 2, 0, ""),
    ("transformers", "falcon", 2, 2, 0, ""),
    ("transformers", "bloom", 2, 2, 0, ""),
    ("transformers", "codegen", 2, 2, 0, ""),
    ("transformers", "mpt", 2, 2, 0, ""),
    ("transformers", "albert", 1, 1, 0, ""),
    ("transformers", "t5", 6, 6, 0, ""),
    # sinks, soft-caps, windows, old masks
    ("transformers", "gpt_oss", 2, 2, 0, ""),
    ("transformers", "gemma2", 2, 2, 0, ""),
    ("transformers", "swin", 2, 2, 0, ""),
    ("transformers", "openai-gpt", 2, 2, 0, ""),
    # normed already; a learned bias between projection and softmax; latent keys; raw weights
    ("transformers", "qwen3", 2, 0, 2, NORMED),
    ("transformers", "parakeet_encoder", 2, 2, 0, ""),
    ("transformers", "funnel", 14, 14, 0, ""),
    ("transformers", "deepseek_v3", 2, 2, 0, ""),
    ("timm", "eva", 12, 12, 0, ""),
    ("timm", "beit", 12, 12, 0, ""),
    ("transformers", "resnet", 0, 0, 0, ""),
    ("timm", "swin_transformer_v2", 12, 0, 12, NORMED),
    ("timm", "xcit", 14, 2, 12, NORMED),
    ("timm", "levit", 14, 14, 0, ""),
    ("diffusers", "UNet2DConditionModel", 8, 8, 0, ""),
    ("diffusers", "SD3Transformer2DModel", 2, 2, 0, ""),
    ("x-transformers", "one key head", 2, 2, 0, ""),
    ("x-transformers", "soft cap", 2, 2, 0, ""),
    ("x-transformers", "memory keys", 2, 2, 0, ""),
    ("x-transformers", "talking heads", 2, 0, 0, "multiplies its logits"),
    ("vit-pytorch", "vit_for_small_dataset", 2, 0, 0, "'temperature' multiplies its logits"),
    ("vit-pytorch", "xcit", 3, 1, 2, NORMED),
    ("torch", "MultiheadAttention bias_kv", 1, 1, 0, ""),
    ("torch", "TransformerDecoder", 4, 4, 0, ""),
]


@pytest.mark.parametrize(
    ("package", "name", "sites", "verified", "normed", "reason"), CASES, ids=[f"{case[0]}-{case[1]}" for case in CASES]
)
def test_family(package: str, name: str, sites: int, verified: int, normed: int, reason: str) -> None:
    result = checks.study(package, name)
    assert result.built, result.note
    assert result.faults == []
    assert (result.sites, result.verified, result.normed) == (sites, verified, normed), result.refused
    assert result.sites == result.verified + sum(result.refused.values())
    assert result.error < 1e-4
    assert result.own_error < 1e-4
    assert all(reason in stated for stated in result.refused), result.refused


def test_own_attentions_are_compared() -> None:
    assert checks.study("transformers", "gpt2").own == 2


def test_a_fault_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The study can fail: a reading of other logits than those that ran is found out."""
    monkeypatch.setattr("qkwatch.observe.measure_at", _measured_at_half)
    faults = checks.study("x-transformers", "plain").faults
    assert any("readings are off" in fault for fault in faults), faults


def _measured_at_half(site: object, core: object, rows: object) -> object:
    from dataclasses import replace

    from qkwatch.core import Core
    from qkwatch.measure import measure

    assert isinstance(core, Core)
    halved = replace(core, logits=None if core.logits is None else core.logits * 0.5, scale=core.scale / 2)
    return measure(halved, site.layout, rows, True)  # type: ignore[attr-defined, arg-type]


def test_tally_counts() -> None:
    results = [
        checks.Result("p", "a", built=True, cores=2, sites=2, verified=1, normed=1, refused={"why": 1}, error=1e-7),
        checks.Result("p", "b", built=True, cores=1, sites=0, faults=["1 attentions ran, 0 were read"], error=9.0),
        checks.Result("p", "c", note="too large"),
    ]
    totals = survey.tally(results)
    assert (totals["tried"], totals["built"], totals["with softmax attention"], totals["found"]) == (3, 2, 2, 1)
    assert (totals["readings right"], totals["sites"], totals["verified"]) == (1, 2, 1)
    assert totals["refused"] == {"why": 1}
    assert list(totals["faults"]) == ["b"]


def test_every_package_has_entries() -> None:
    counts = {package: len(zoo.entries(package)) for package in zoo.PACKAGES}
    assert counts["transformers"] > 300
    assert counts["timm"] > 80
    assert min(counts.values()) >= 10, counts
