"""Statistics against a dense float64 reference, written row by row from the definitions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from qkwatch.errors import QKWatchError
from qkwatch.stats import COLUMNS, Packed, Reading, logit_stats, merge, qk_stats, reading_from, row_budget

INF = math.inf
FIGURES = [f.name for f in fields(Reading) if f.type == "Tensor"]
# bfloat16 and float16 inputs are rounded before both sides see them; what is left is float32 arithmetic
CLOSE: dict[str, Any] = {"rtol": 2e-5, "atol": 2e-5, "equal_nan": True}


def dense_logits(
    q: Tensor, k: Tensor, scale: float, mask: Tensor | None, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """Float64 logits and visibility, both (B, H, Tq, Tk)."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    logits = torch.einsum("bhid,bhjd->bhij", q.double(), k.double()) * scale
    visible = torch.ones_like(logits, dtype=torch.bool)
    if mask is not None:
        if mask.dtype == torch.bool:
            visible &= mask
        else:
            logits = logits + mask.double()
            visible &= ~(mask <= torch.finfo(mask.dtype).min / 2)
    if is_causal:
        visible = visible.tril()
    return logits, visible


def entropy_of(p: Tensor) -> float:
    p = p[p > 0]
    return float(-(p * p.log()).sum())


def mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def reference(logits: Tensor, visible: Tensor, self_attention: bool = True) -> dict[str, Any]:
    """Every figure but the RMS, by the definitions, one row after another."""
    batch, heads, q_len, k_len = logits.shape
    out: dict[str, list[float]] = {name: [] for name in FIGURES if not name.endswith("rms")}
    row_counts = []
    for h in range(heads):
        rows: dict[str, list[float]] = {}

        def put(name: str, value: float, rows: dict[str, list[float]] = rows) -> None:
            rows.setdefault(name, []).append(value)

        for b in range(batch):
            kept: list[tuple[Tensor, Tensor]] = []
            for i in range(q_len):
                shown = visible[b, h, i]
                padding = self_attention and q_len == k_len and not visible[b, h, :, i].any()
                if padding or not shown.any():
                    put("excluded", 1)
                    continue
                put("measured", 1)
                s = logits[b, h, i][shown]
                if not s.isfinite().all():
                    put("nonfinite", 1)
                    continue
                p = torch.softmax(s, 0)
                n = len(s)
                put("max_logit", float(s.abs().max()))
                put("margin", float(s.max() - s.mean()))
                put("nats", entropy_of(p))
                put("grad", float(1 - (p**2).sum()))
                rows.setdefault("over", []).extend((s.abs() > 100).double().tolist())
                if n >= 2:
                    put("sharp", float(p.max() > 0.99))
                    put("hn2", entropy_of(p) / math.log(n))
                if n >= 16:
                    put("hn16", entropy_of(p) / math.log(n))
                full = torch.zeros(k_len, dtype=torch.float64)
                full[shown] = p
                kept.append((full, shown))
            if kept:
                mass = torch.stack([p for p, _ in kept]).mean(0)
                sink = mass > 0.3
                sink[0] = True
                for p, shown in kept:
                    rest = p[shown & ~sink]
                    left, n = float(rest.sum()), len(rest)
                    put("sink", 1 - left)
                    if left >= 1e-4 and n >= 2:
                        put("c2", entropy_of(rest / left) / math.log(n))
                        if n >= 16:
                            put("c16", entropy_of(rest / left) / math.log(n))
        bad = len(rows.get("nonfinite", []))
        out["nonfinite"].append(bad)
        out["max_logit"].append(INF if bad else max(rows.get("max_logit", [math.nan])))
        out["margin"].append(max(rows.get("margin", [math.nan])))
        out["entropy"].append(mean(rows.get("hn16") or rows.get("hn2", [])))
        out["entropy_nats"].append(mean(rows.get("nats", [])))
        out["saturated"].append(mean(rows.get("sharp", [])))
        out["grad_signal"].append(mean(rows.get("grad", [])))
        out["over_100"].append(mean(rows.get("over", [])))
        out["sink_mass"].append(mean(rows.get("sink", [])))
        corrected = mean(rows.get("c16") or rows.get("c2", []))
        out["entropy_corrected"].append(math.nan if out["sink_mass"][-1] > 0.95 else corrected)
        row_counts.append((len(rows.get("measured", [])), len(rows.get("excluded", []))))
    result: dict[str, Any] = {name: torch.tensor(values, dtype=torch.float64) for name, values in out.items()}
    result["rows"] = max(r for r, _ in row_counts)
    result["excluded_rows"] = max(e for _, e in row_counts)
    return result


def rms(x: Tensor, heads: int) -> Tensor:
    return x.double().pow(2).mean(-1).sqrt().mean((0, 2)).repeat_interleave(heads // x.shape[1])


def check(reading: Reading, want: dict[str, Any], **close: Any) -> None:
    for name, value in want.items():
        got = getattr(reading, name)
        if isinstance(value, int):
            assert got == value, name
            continue
        assert got.dtype == torch.float32, name
        assert got.device.type == "cpu", name
        torch.testing.assert_close(
            got.double(), value, **{**CLOSE, **close}, msg=lambda m, n=name: f"{n}: {m}"
        )


def make(batch: int, heads: int, groups: int, q_len: int, k_len: int, dim: int = 8, seed: int = 0) -> Any:
    """q and k whose heads range from flat to sharp; some keys are loud, so that there are sinks to drop."""
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, heads, q_len, dim, generator=g)
    k = torch.randn(batch, groups, k_len, dim, generator=g)
    q = q * torch.linspace(0.3, 4, heads).view(1, heads, 1, 1)
    shared = torch.randn(dim, generator=g)
    q[:, ::2] += shared
    k[:, :, k_len // 5] += 2 * shared
    return q, k


def qk_reading(q: Tensor, k: Tensor, **kwargs: Any) -> Reading:
    kwargs.setdefault("scale", q.shape[-1] ** -0.5)
    return reading_from(qk_stats(q, k, **kwargs), "site", step=3)


def both(
    q: Tensor, k: Tensor, *, scale: float | None = None, mask: Tensor | None = None, is_causal: bool = False,
    self_attention: bool = True, **close: Any,
) -> Reading:  # fmt: skip
    """Check `qk_stats` and `logit_stats` against the reference; return the former's reading."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    logits, visible = dense_logits(q, k, scale, mask, is_causal)
    want = reference(logits, visible, self_attention)
    want |= {"q_rms": rms(q, q.shape[1]), "k_rms": rms(k, q.shape[1])}
    reading = qk_reading(q, k, scale=scale, mask=mask, is_causal=is_causal, self_attention=self_attention)
    check(reading, want, **close)
    hidden = logits.masked_fill(~visible, -INF).float()
    check(reading_from(logit_stats(hidden, q=q, k=k, self_attention=self_attention), "site"), want, **close)
    return reading


def sliding(t: int, window: int) -> Tensor:
    i = torch.arange(t)
    return (i[:, None] >= i) & (i[:, None] - i < window)


def padding(t: int, sizes: list[int], left: bool) -> Tensor:
    """(B, 1, 1, T): key padding."""
    i = torch.arange(t)
    keep = torch.stack([(i >= t - n) if left else (i < n) for n in sizes])
    return keep[:, None, None]


def additive(visible: Tensor, low: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, low)


def alibi(heads: int, t: int) -> Tensor:
    slopes = 2.0 ** -torch.arange(1, heads + 1)
    i = torch.arange(t)
    return (slopes[:, None, None] * (i - i[:, None]).clamp(max=0))[None]


def random_mask(*shape: int, seed: int = 1) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.6


T = 40
MIN = torch.finfo(torch.float32).min
CASES: dict[str, dict[str, Any]] = {
    "no mask": {},
    "causal": {"is_causal": True},
    "bool mask": {"mask": random_mask(2, 1, T, T)},
    "bool mask per head": {"mask": random_mask(2, 4, T, T)},
    "2-d mask": {"mask": random_mask(T, T)},
    "3-d mask": {"mask": random_mask(4, T, T)},
    "mask of one key column": {"mask": random_mask(2, 1, T, 1)},
    "-inf additive": {"mask": additive(random_mask(2, 1, T, T), -INF)},
    "dtype-min additive": {"mask": additive(random_mask(2, 1, T, T), MIN)},
    "half dtype-min additive": {
        "mask": additive(random_mask(2, 1, T, T), torch.finfo(torch.float16).min, torch.float16)
    },
    "float64 min additive": {
        "mask": additive(random_mask(2, 1, T, T), torch.finfo(torch.float64).min, torch.float64)
    },
    "large bias that is no mask": {"mask": additive(random_mask(2, 1, T, T), -200.0)},
    "alibi": {"mask": alibi(4, T), "is_causal": True},
    "sliding window": {"mask": sliding(T, 7)},
    "custom scale": {"scale": 1.7, "is_causal": True},
    "left padding, causal": {"mask": padding(T, [T, 23], left=True), "is_causal": True},
    "right padding": {"mask": padding(T, [T - 1, 5], left=False)},
    "right padding, causal": {"mask": padding(T, [T, 9], left=False), "is_causal": True},
    "left padding, whole mask": {"mask": padding(T, [T, 23], left=True) & sliding(T, T)},
    "left padding, dtype min": {"mask": additive(padding(T, [T, 23], left=True) & sliding(T, T), MIN)},
    "causal and bool mask": {"mask": random_mask(2, 1, T, T), "is_causal": True},
    "causal and bias": {"mask": torch.randn(1, 4, T, T, generator=torch.Generator().manual_seed(7)), "is_causal": True},
    "fully masked rows": {"mask": random_mask(2, 1, T, T) & (torch.arange(T) % 5 > 0)[:, None]},
    "all masked": {"mask": torch.zeros(1, 1, 1, T, dtype=torch.bool)},
    "one visible key": {"mask": (torch.arange(T) == 4).view(1, 1, 1, T), "self_attention": False},
    "one visible key each": {"mask": torch.eye(T, dtype=torch.bool)},
    "key 0 hidden": {"mask": (torch.arange(T) > 0).view(1, 1, 1, T)},
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES)
def test_against_dense_reference(case: str, dtype: torch.dtype) -> None:
    q, k = make(2, 4, 2, T, T, seed=len(case))
    both(q.to(dtype), k.to(dtype), **CASES[case])


@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("is_causal", [False, True])
def test_grouped_and_multi_query(groups: int, is_causal: bool) -> None:
    q, k = make(2, 8, groups, 33, 33, seed=groups)
    both(q, k, is_causal=is_causal)
    both(q, k, is_causal=is_causal, mask=random_mask(2, 8, 33, 33))


@pytest.mark.parametrize(("q_len", "k_len"), [(5, 70), (70, 5), (1, 30), (30, 1), (30, 2)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_cross_lengths(q_len: int, k_len: int, is_causal: bool) -> None:
    q, k = make(2, 2, 1, q_len, k_len)
    both(q, k, is_causal=is_causal)
    both(q, k, is_causal=is_causal, mask=random_mask(2, 1, 1, k_len))


@pytest.mark.parametrize("size", [1, 2, 16, 17, 63, 64, 65, 257])
@pytest.mark.parametrize("kind", ["plain", "causal", "mask"])
def test_block_boundaries(size: int, kind: str) -> None:
    q, k = make(1, 2, 2, size, size, seed=size)
    both(q, k, is_causal=kind == "causal", mask=random_mask(1, 1, size, size) if kind == "mask" else None)


@pytest.mark.parametrize("budget", [1, 100, 700, 5000])
@pytest.mark.parametrize("case", ["no mask", "causal", "bool mask per head", "left padding, causal", "alibi"])
def test_any_block_size(budget: int, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qkwatch.kernels.CPU_BLOCK", budget)
    q, k = make(2, 4, 2, T, T)
    both(q, k, **CASES[case])
