"""Statistics against a dense float64 reference, written row by row from the definitions."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from qkwatch import kernels
from qkwatch.errors import QKWatchError
from qkwatch.reading import COLUMNS, Packed, Reading, gather_heads, merge, reading_from
from qkwatch.stats import logit_stats, qk_stats, row_budget, with_bias

INF = math.inf
FIGURES = [f.name for f in fields(Reading) if f.type == "Tensor"]
# bfloat16 and float16 inputs are rounded before both sides see them; what is left is float32 arithmetic
CLOSE: dict[str, Any] = {"rtol": 2e-5, "atol": 2e-5, "equal_nan": True}
# rows with as little as 1e-4 of their mass off the sinks count, and lose up to four of float32's seven digits
CORRECTED: dict[str, Any] = {"rtol": 0.0, "atol": 3e-3, "equal_nan": True}


def dense_logits(q: Tensor, k: Tensor, scale: float, mask: Tensor | None, is_causal: bool) -> tuple[Tensor, Tensor]:
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
        out["product_logit"].append(out["max_logit"][-1])  # without a bias
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
        limits = {**CLOSE, **close, **(CORRECTED if name == "entropy_corrected" else {})}
        torch.testing.assert_close(got.double(), value, **limits, msg=lambda m, n=name: f"{n}: {m}")


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
    "causal and bias": {"mask": random_mask(1, 4, T, T).float() * 3, "is_causal": True},
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


def test_non_contiguous_and_expanded_inputs() -> None:
    q, k = make(2, 4, 2, 65, 65)
    mask = random_mask(2, 1, 1, 65)
    want = qk_stats(q, k, scale=0.3, mask=mask).values
    q_view = q.transpose(1, 2).contiguous().transpose(1, 2)
    k_view = torch.stack([k, k], dim=-1)[..., 0]
    got = qk_stats(q_view, k_view, scale=0.3, mask=mask.expand(2, 4, 65, 65)).values
    torch.testing.assert_close(got, want)
    logits = (q @ q.transpose(-1, -2)).transpose(2, 3)
    torch.testing.assert_close(logit_stats(logits).values, logit_stats(logits.contiguous()).values)
    one = q[:, :1].expand(2, 4, 65, 8)
    values = qk_stats(one, k[:, :1], scale=1.0).values
    torch.testing.assert_close(values[0], values[3])


@pytest.mark.parametrize("rows", [1, 7, 64, 100])
@pytest.mark.parametrize("kind", ["plain", "causal", "mask", "logits"])
def test_sampled_rows_are_those_rows(rows: int, kind: str) -> None:
    size = 130
    q, k = make(2, 2, 1, size, size)
    mask = random_mask(2, 1, size, size) & padding(size, [size, 100], left=False) if kind == "mask" else None
    logits, visible = dense_logits(q, k, 0.3, mask, kind == "causal")
    positions = [(r + 1) * size // rows - 1 for r in range(rows)]
    assert positions[-1] == size - 1
    padded = ~visible.any(2, keepdim=True).transpose(2, 3)
    visible = visible & ~padded
    want = reference(logits[:, :, positions], visible[:, :, positions], self_attention=False)
    if kind == "logits":
        packed = logit_stats(logits.float(), rows=rows)
    else:
        packed = qk_stats(q, k, scale=0.3, mask=mask, is_causal=kind == "causal", rows=rows)
    reading = reading_from(packed, "site")
    assert not packed.exact
    assert not reading.exact
    check(reading, want)


def test_a_sample_is_close_and_all_rows_are_exact() -> None:
    q, k = make(2, 4, 4, 512, 512, dim=16)
    full, sample = (qk_reading(q, k, is_causal=True, rows=rows) for rows in (512, 128))
    assert full.exact
    assert not sample.exact
    assert sample.rows == 256
    torch.testing.assert_close(sample.entropy, full.entropy, atol=0.03, rtol=0)
    torch.testing.assert_close(sample.grad_signal, full.grad_signal, atol=0.05, rtol=0)
    assert (sample.max_logit <= full.max_logit + 1e-4).all()
    torch.testing.assert_close(sample.q_rms, full.q_rms)


def test_merged_batches_equal_one_big_batch() -> None:
    q, k = make(5, 4, 2, 33, 33)
    mask = padding(33, [33, 20, 9, 0, 33], left=False)
    whole = qk_stats(q, k, scale=0.5, mask=mask)
    parts = [qk_stats(q[s], k[s], scale=0.5, mask=mask[s]) for s in (slice(0, 2), slice(2, 5))]
    torch.testing.assert_close(merge(parts).values, whole.values)
    assert merge(parts).exact
    assert not merge([*parts, qk_stats(q, k, scale=0.5, rows=3)]).exact
    assert not reading_from(Packed(merge([*parts, qk_stats(q, k, scale=0.5, rows=3)]).values, True), "x").exact


def test_few_keys_in_one_call_and_many_in_another() -> None:
    """Rows with >= 2 visible keys stand in only where no row of any call has 16."""
    few, many = (qk_stats(*make(1, 2, 2, t, t), scale=0.5) for t in (5, 20))
    torch.testing.assert_close(
        reading_from(merge([few, many]), "x").entropy, reading_from(many, "x").entropy, rtol=0, atol=0
    )
    assert reading_from(few, "x").entropy.isfinite().all()


def test_gather_heads_folds_as_a_batch_would() -> None:
    q, k = make(1, 6, 6, 20, 20)
    folded = gather_heads(qk_stats(q, k, scale=0.5), torch.arange(6) % 2, 2)
    batch = qk_stats(q.view(3, 2, 20, 8), k.view(3, 2, 20, 8), scale=0.5)
    torch.testing.assert_close(folded.values, batch.values)


@pytest.mark.parametrize("bad", [math.nan, INF, -INF])
@pytest.mark.parametrize("where", ["q", "k"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_nonfinite_rows_stay_out_and_other_heads_are_untouched(bad: float, where: str, is_causal: bool) -> None:
    q, k = make(1, 2, 2, 70, 70)
    clean = qk_reading(q, k, is_causal=is_causal)
    (q if where == "q" else k)[0, 1, 50, :] = bad
    logits, visible = dense_logits(q, k, 8**-0.5, None, is_causal)
    reading = qk_reading(q, k, is_causal=is_causal)
    check(reading, reference(logits, visible))
    for name in FIGURES:
        torch.testing.assert_close(getattr(reading, name)[0], getattr(clean, name)[0], rtol=1e-6, atol=1e-6)
    expected = 1 if where == "q" else 20 if is_causal else 70
    assert reading.nonfinite.tolist() == [0, expected]
    assert reading.max_logit[1] == INF
    assert reading.q_rms.isfinite().all()
    assert reading.k_rms.isfinite().all()


def test_hidden_nan_does_not_count() -> None:
    q, k = make(2, 2, 2, 30, 30)
    mask = padding(30, [30, 20], left=False)
    want = qk_stats(q, k, scale=0.5, mask=mask).values
    q[1, :, 20:] = math.nan
    k[1, :, 20:] = math.nan
    got = qk_stats(q, k, scale=0.5, mask=mask).values
    cut = COLUMNS.index("q_rms")
    torch.testing.assert_close(got[:, :cut], want[:, :cut])


def test_nan_and_inf_in_given_logits() -> None:
    q, k = make(1, 3, 3, 40, 40)
    logits, visible = dense_logits(q, k, 0.3, None, False)
    logits[0, 1, 7, 3] = math.nan
    logits[0, 1, 9, 5] = INF
    logits[0, 2, 9, 5] = -INF
    visible[0, 2, 9, 5] = False
    check(reading_from(logit_stats(logits.float()), "site"), reference(logits, visible))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_given_logits_hide_below_half_the_minimum_of_their_own_dtype(dtype: torch.dtype) -> None:
    q, k = make(2, 2, 2, 24, 24)
    logits = dense_logits(q, k, 0.3, None, False)[0].to(dtype)
    visible = random_mask(2, 1, 24, 24).expand(2, 2, 24, 24)
    for low in (-INF, torch.finfo(dtype).min):
        check(reading_from(logit_stats(logits.masked_fill(~visible, low)), "x"), reference(logits.double(), visible))


@pytest.mark.parametrize("look", [True, False])
@pytest.mark.parametrize("shift", [150.0, -150.0])
def test_key_0_alone_can_be_above_100(look: bool, shift: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """All other logits are small enough for the short way, which must not forget the first key."""
    monkeypatch.setattr(kernels, "LOOK", look)
    logits = torch.randn(2, 3, T, T, generator=torch.Generator().manual_seed(0))
    logits[:, 0, :, 0] += shift
    logits[:, 1, ::2, 0] += shift
    logits = logits.masked_fill(torch.ones(T, T).triu(1).bool(), -INF)
    check(reading_from(logit_stats(logits), "site"), reference(logits.double(), logits > -INF))


@pytest.mark.parametrize("lowest", [-30.0, -1e3, -9e3])
def test_a_bias_is_taken_off_the_largest_logit_where_it_can_have_made_it(lowest: float) -> None:
    """Never above the largest |scale q k|; and what a bias cannot have made (all of ALiBi lowers logits) is seen."""
    q, k = make(2, 4, 4, T, T)
    q[:, 0] *= 100
    products = (q.double() @ k.double().transpose(-1, -2)).abs().amax((0, 2, 3))
    linear = alibi(4, T) * (lowest / alibi(4, T).min())
    upper = products * 1.001 + 1e-3
    for bias in (linear, linear + 50, -linear, random_mask(1, 1, T, T).float() * lowest):
        reading = reading_from(with_bias(qk_stats(q, k, scale=1.0, mask=bias), bias), "site")
        assert reading.bias_max is not None
        assert bool((reading.product_logit <= upper).all() and (reading.product_logit <= reading.max_logit).all())
        assert bool((reading.product_logit >= 0).all())
    reading = reading_from(with_bias(qk_stats(q, k, scale=1.0, mask=linear), linear), "site")
    assert float(reading.product_logit[0]) > 0.2 * float(products[0])
    torch.testing.assert_close(reading.bias_max, -linear.amin((0, 2, 3)))
    hides = additive(random_mask(2, 1, T, T), -1e4)
    assert float(reading_from(with_bias(qk_stats(q, k, scale=1.0, mask=hides), hides), "site").bias_max.max()) == 0


def test_large_logits_and_shift() -> None:
    q, k = make(1, 2, 2, 64, 64)
    both(q * 1000, k, is_causal=True, rtol=1e-4, atol=1e-3)
    assert (qk_reading(q * 1000, k).over_100 > 0.5).all()
    both(q, k, mask=torch.full((1, 1, 64, 64), 500.0), rtol=1e-4, atol=1e-4)  # an offset is no saturation


def test_not_measured_is_nan_never_zero() -> None:
    q, k = make(1, 2, 2, 6, 6)
    reading = qk_reading(q, k, mask=torch.zeros(6, 6, dtype=torch.bool))
    for name in ("max_logit", "margin", "entropy", "entropy_nats", "saturated", "grad_signal", "sink_mass"):
        assert getattr(reading, name).isnan().all(), name
    assert (reading.rows, reading.excluded_rows) == (0, 6)
    assert reading_from(logit_stats(torch.zeros(1, 2, 3, 3)), "x").q_rms.isnan().all()
    empty = reading_from(qk_stats(torch.zeros(0, 2, 3, 4), torch.zeros(0, 2, 3, 4), scale=1.0), "x")
    assert empty.max_logit.isnan().all()
    one = qk_reading(q[:, :, :1], k[:, :, :1])  # entropy of one visible key is 0 by construction: not collapse
    assert one.entropy.isnan().all()
    assert one.entropy_nats.tolist() == [0, 0]


def test_sink_head_is_labelled() -> None:
    q = torch.ones(1, 1, 32, 4)
    k = torch.zeros(1, 1, 32, 4)
    k[:, :, 0] = 10.0
    sink = qk_reading(q, k, scale=1.0)
    assert sink.entropy_corrected.isnan().all()
    assert (sink.sink_mass > 0.999).all()
    assert (sink.entropy < 0.01).all()
    k[:, :, 0] = 0.5  # half a sink: what is left is uniform
    torch.testing.assert_close(qk_reading(q, k, scale=1.0).entropy_corrected, torch.ones(1))


@pytest.fixture
def no_looking(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an accelerator: values are not at hand."""
    monkeypatch.setattr(kernels, "LOOK", False)


class Watch(TorchDispatchMode):
    """Records the largest tensor any op made, and forbids waiting for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert "_local_scalar_dense" not in str(func), "a host sync"
        assert "nonzero" not in str(func), "a host sync"
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(t, Tensor):
                self.largest = max(self.largest, t.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("kind", ["plain", "causal", "mask", "bias"])
@pytest.mark.usefixtures("no_looking")
def test_memory_and_no_sync(kind: str) -> None:
    size = 8192 if kind == "causal" else 3000
    q, k = torch.randn(1, 8, size, 8), torch.randn(1, 1 if kind == "plain" else 8, size, 8)
    mask = sliding(size, 500) if kind == "mask" else None
    mask = torch.zeros(1, 1, size, size) if kind == "bias" else mask
    rows = 256 if kind == "causal" else None  # the size of a block does not depend on the number of rows
    with Watch() as watch:
        qk_stats(q, k, scale=0.3, mask=mask, is_causal=kind == "causal", rows=rows)
    given = 0 if mask is None else mask.untyped_storage().nbytes()
    assert watch.largest < max(size * size, given + 1), "something of the size of the matrix was made"


@pytest.mark.usefixtures("no_looking")
def test_logit_stats_makes_no_second_matrix() -> None:
    logits = torch.randn(1, 4, 1500, 1500)
    with Watch() as watch:
        logit_stats(logits)
    assert watch.largest <= logits.untyped_storage().nbytes()


def test_modes_do_not_change_it() -> None:
    q, k = make(1, 2, 2, 40, 40)
    want = qk_stats(q, k, scale=0.3).values
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(qk_stats(q, k, scale=0.3).values, want, rtol=0, atol=0)
    with torch.inference_mode():
        torch.testing.assert_close(qk_stats(q + 0, k + 0, scale=0.3).values, want, rtol=0, atol=0)
        frozen = q + 0
    torch.testing.assert_close(qk_stats(frozen, k, scale=0.3).values, want, rtol=0, atol=0)
    learned = q.clone().requires_grad_()
    assert not qk_stats(learned, k, scale=0.3).values.requires_grad
    before = q.clone(), k.clone()
    mask = random_mask(40, 40).float()
    kept = mask.clone()
    qk_stats(q, k, scale=0.3, mask=mask)
    assert torch.equal(q, before[0])
    assert torch.equal(k, before[1])
    assert torch.equal(mask, kept)


@pytest.mark.parametrize(
    ("q", "k", "kwargs", "says"),
    [
        ((1, 4, 5, 8), (1, 3, 5, 8), {}, "divide"),
        ((1, 4, 5, 8), (1, 4, 5, 9), {}, "q must be"),
        ((4, 5, 8), (4, 5, 8), {}, "q must be"),
        ((1, 4, 5, 8), (1, 4, 5, 8), {"mask": torch.ones(6, 5) > 0}, "mask must"),
        ((1, 4, 5, 8), (1, 4, 5, 8), {"mask": torch.ones(5, 5, dtype=torch.long)}, "mask must"),
        ((1, 4, 5, 8), (1, 4, 5, 8), {"rows": 0}, "rows must"),
    ],
)
def test_errors(q: tuple[int, ...], k: tuple[int, ...], kwargs: dict[str, Any], says: str) -> None:
    with pytest.raises(QKWatchError, match=says):
        qk_stats(torch.zeros(q), torch.zeros(k), scale=1.0, **kwargs)


def test_merge_errors_and_row_budget() -> None:
    with pytest.raises(QKWatchError, match="nothing"):
        merge([])
    packs = [qk_stats(*make(1, h, h, 4, 4), scale=1.0) for h in (1, 2)]
    with pytest.raises(QKWatchError, match="same heads"):
        merge(packs)
    assert row_budget(1, 1, 10, 10, 10, 1000) is None
    assert row_budget(1, 1, 10, 10, 10, 999) == 9
    assert row_budget(8, 8, 4096, 4096, 64, 1) == 1


@pytest.mark.parametrize("size", [1.0, 4.0, 9.0])
def test_looking_at_values_changes_no_figure(size: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shortcuts of the CPU (gentle logits, nothing above 100, nothing to scrub) against the way without."""
    q, k = torch.randn(2, 4, 130, 16) * size, torch.randn(2, 2, 130, 16) * size
    mask = random_mask(2, 1, 130, 130)
    for kwargs in ({"is_causal": True}, {"mask": mask}, {}):
        monkeypatch.setattr(kernels, "LOOK", True)
        quick = qk_stats(q, k, scale=0.25, **kwargs)
        monkeypatch.setattr(kernels, "LOOK", False)
        torch.testing.assert_close(quick.values, qk_stats(q, k, scale=0.25, **kwargs).values, rtol=2e-4, atol=2e-4)
