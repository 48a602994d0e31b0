"""Readings over time -> alerts: every row of the default table, what must not fire, forecasts, state."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Sequence

import pytest
import torch

from qkwatch.alerts import ALL_SITES, Alert, Level, Thresholds
from qkwatch.errors import QKWatchError
from qkwatch.reading import Reading
from qkwatch.rules import Rules

NAN = math.nan


def reading(site: str = "layers.0.attn", top: Sequence[float] = (5.0,), **values: Sequence[float]) -> Reading:
    """A calm reading of len(top) heads, norms as large as the logits; keywords replace what matters to a case."""
    heads = len(top)
    values = {"q_rms": [v / 10 for v in top], **values}

    def row(name: str, calm: float) -> torch.Tensor:
        return torch.tensor(list(values.get(name, [calm] * heads)), dtype=torch.float32)

    return Reading(
        site=site,
        max_logit=torch.tensor(list(top), dtype=torch.float32),
        product_logit=row("product_logit", 0.0) if "product_logit" in values else torch.tensor(list(top)),
        margin=row("margin", 3.0),
        entropy=row("entropy", 0.6),
        entropy_nats=row("entropy_nats", 2.0),
        saturated=row("saturated", 0.0),
        grad_signal=row("grad_signal", 0.8),
        q_rms=row("q_rms", 1.0),
        k_rms=row("k_rms", 1.0),
        entropy_corrected=row("entropy_corrected", 0.6),
        sink_mass=row("sink_mass", 0.1),
        over_100=row("over_100", 0.0),
        nonfinite=row("nonfinite", 0.0),
        rows=64,
        excluded_rows=0,
        exact=True,
    )


def run(
    rules: Rules, tops: Sequence[Sequence[float]], every: int = 10, start: int = 0, **values: Sequence[float]
) -> list[Alert]:
    """Feed one site's maxima, one reading every `every` steps."""
    alerts = []
    for i, top in enumerate(tops):
        alerts += rules.update(start + i * every, [reading(top=top, **values)])
    return alerts


def noisy(
    level: float, sigma: float, n: int, seed: int, growth: float = 0.0, correlation: float = 0.0
) -> list[list[float]]:
    """Log-normal maxima of one head around `level`, growing by `growth` (log units) a reading."""
    draw, x, out = random.Random(seed), 0.0, []
    for i in range(n):
        x = correlation * x + math.sqrt(1 - correlation**2) * draw.gauss(0, sigma)
        out.append([level * math.exp(x + growth * i)])
    return out


TABLE = [
    # maxima per reading of heads 0 and 1, other values, the loudest alert: level, rule, heads, step
    ("calm", [[20.0, 34.0]] * 9, {}, None),
    ("info", [[52.0, 40.0]] * 3, {}, (Level.INFO, "max_logit", (0,), 0)),
    ("early", [[30.0, 18.0], [30.0, 42.0], [30.0, 59.0]], {}, (Level.WARN, "early", (1,), 20)),
    ("rising", [[30.0, v] for v in (90.0, 99.0, 112.0, 130.0)], {}, (Level.WARN, "rising", (1,), 30)),
    ("share", [[30.0, 110.0]], {"over_100": [0.0, 2e-3]}, (Level.WARN, "over_100", (1,), 0)),
    ("harmless share", [[30.0, 110.0]] * 5, {"over_100": [0.0, 1e-4]}, (Level.INFO, "max_logit", (1,), 0)),
    ("doubling", [[30.0, 55.0], [30.0, 111.0]], {}, (Level.WARN, "doubling", (1,), 10)),
    ("over 1e3 once", [[30.0, 1100.0], [30.0, 90.0]], {}, (Level.INFO, "max_logit", (1,), 0)),
    ("critical", [[30.0, 1100.0], [30.0, 1050.0]], {}, (Level.CRITICAL, "max_logit", (1,), 10)),
    ("fatal", [[1.1e4, 30.0]], {}, (Level.FATAL, "max_logit", (0,), 0)),
    ("inf", [[30.0, math.inf]], {"nonfinite": [0.0, 3.0]}, (Level.FATAL, "non_finite", (1,), 0)),
    ("unmeasured", [[NAN, NAN]] * 4, {"entropy_corrected": [NAN, NAN], "q_rms": [NAN, NAN]}, None),
    ("sink", [[9.0, 9.0]] * 2, {"sink_mass": [0.1, 0.97]}, (Level.INFO, "sink", (1,), 0)),
    ("ALiBi", [[700.0, 1500.0]] * 5, {"product_logit": [10.0, 10.0]}, None),
]  # fmt: skip


@pytest.mark.parametrize(("tops", "values", "expected"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_table(tops, values, expected):
    alerts = run(Rules(Thresholds()), tops, **values)
    if expected is None:
        assert alerts == []
        return
    loudest = max(alerts, key=lambda a: a.level)
    assert (loudest.level, loudest.rule, loudest.heads, loudest.step) == expected
    assert loudest.site in loudest.message
    assert f"head{'s' if len(expected[2]) > 1 else ''} {expected[2][0]}" in loudest.message


def collapse_alerts(alerts: Sequence[Alert]) -> list[Alert]:
    return [a for a in alerts if a.rule == "collapse"]


def collapse(n: int, heads: int = 8, rms: Sequence[float] = (1.0, 1.5, 2.2, 3.0), **values) -> list[Alert]:
    rules, alerts = Rules(Thresholds()), []
    for i, size in enumerate(rms):
        entropy = [0.05] * n + [0.5] * (heads - n)
        r = reading(top=[130.0] * heads, q_rms=[size] * heads, **{"entropy_corrected": entropy, **values})
        alerts += rules.update(10 * i, [r])
    return collapse_alerts(alerts)


@pytest.mark.parametrize(("n", "levels"), [(1, []), (2, [Level.WARN]), (3, [Level.WARN]), (4, [Level.CRITICAL])])
def test_collapse_takes_a_share_of_the_heads_and_rising_norms(n, levels):
    alerts = collapse(n)
    assert [a.level for a in alerts] == levels
    assert all(a.heads == tuple(range(n)) and a.rule == "collapse" and a.step == 20 for a in alerts)


def test_sharp_heads_with_steady_norms_are_no_failure():
    assert collapse(8, rms=[1.0, 1.02, 0.99, 1.01, 1.0]) == []


def test_sharp_heads_with_ordinary_logits_are_no_failure():
    rules, alerts = Rules(), []
    for i, size in enumerate((1.0, 1.5, 2.2, 3.0)):
        r = reading(top=[70.0] * 8, q_rms=[size] * 8, entropy_corrected=[0.05] * 8)
        alerts += rules.update(10 * i, [r])
    assert collapse_alerts(alerts) == []


def test_sinks_and_unmeasured_heads_are_neither_collapsed_nor_counted():
    sinks = [NAN] * 6 + [0.5, 0.5]
    assert collapse(0, entropy_corrected=sinks) == []
    one_of_two = [NAN] * 6 + [0.05, 0.5]
    assert [a.level for a in collapse(0, entropy_corrected=one_of_two)] == [Level.CRITICAL]


def test_collapse_over_all_sites_names_them():
    rules, alerts = Rules(), []
    for i, size in enumerate((1.0, 1.6, 2.4)):
        rms = [size] * 4
        sharp = reading("h.0", [130.0] * 4, q_rms=rms, entropy_corrected=[0.05, 0.05, 0.5, 0.5])
        alerts += collapse_alerts(rules.update(10 * i, [sharp, reading("h.1", [30.0] * 4, q_rms=rms)]))
    everywhere = [a for a in alerts if a.site == ALL_SITES]
    assert [(a.level, a.heads, a.rule) for a in everywhere] == [(Level.WARN, (), "collapse")]
    assert "h.0 2 of 4" in everywhere[0].message
    assert "2 of 8" in everywhere[0].message
    assert [(a.level, a.site) for a in alerts if a.site != ALL_SITES] == [(Level.CRITICAL, "h.0")]


def test_an_alert_is_told_once_while_it_holds():
    alerts = run(Rules(), noisy(200.0, 0.03, 200, seed=1, growth=0.004))
    told = Counter((a.rule, a.level) for a in alerts)
    assert told
    assert max(told.values()) == 1, told


def test_it_is_told_again_once_it_ended_and_restarted():
    alerts = run(Rules(), [[60.0]] * 3 + [[18.0]] * 3 + [[60.0]] * 3)
    infos = [a.step for a in alerts if a.level == Level.INFO]
    warns = [a for a in alerts if a.level == Level.WARN]
    assert infos[0] == 0
    assert [a.rule for a in warns] == ["early"]
    assert warns[0].step == 60  # it tripled; INFO on the same head is not told beside it
    flicker = run(Rules(), [[60.0], [48.0]] * 20)
    assert [a.level for a in flicker] == [Level.INFO]


def test_new_heads_wait_for_repeat_after():
    """A head joins at each reading."""
    rules = Rules(Thresholds(repeat_after=5))
    tops = [[52.0] * min(i + 1, 6) + [48.0] * max(5 - i, 0) for i in range(12)]
    steps = [(a.step, a.heads) for a in run(rules, tops)]
    assert steps == [(0, (0,)), (50, (0, 1, 2, 3, 4, 5))]


def test_a_louder_alert_is_told_and_quieter_ones_on_the_same_heads_are_not():
    alerts = run(Rules(), [[30.0], [2e4], [2e4]])
    assert [(a.level, a.rule) for a in alerts] == [(Level.FATAL, "max_logit")]
    rising = run(Rules(), [[x] for x in (10.0, 30.0, 60.0, 120.0, 500.0, 1100.0, 2200.0, 12000.0)])
    levels = [a.level for a in rising]
    assert levels == sorted(levels)
    assert set(levels) == {Level.WARN, Level.CRITICAL, Level.FATAL}


@pytest.mark.parametrize(
    ("level", "sigma", "correlation", "most"),
    [(34.0, 0.1, 0.7, 0), (65.0, 0.03, 0.0, 0), (65.0, 0.05, 0.7, 0), (65.0, 0.1, 0.7, 0), (120.0, 0.05, 0.0, 2)],
)
def test_steady_noise_raises_no_warning(level, sigma, correlation, most):
    """40 heads x 200 readings; a head above the limits that stays where it is is no failure."""
    fired = 0
    for seed in range(40):
        alerts = run(Rules(), noisy(level, sigma, 200, seed, correlation=correlation))
        fired += any(a.level >= Level.WARN for a in alerts)
    assert fired <= most


@pytest.mark.parametrize(
    ("growth", "sigma", "n"), [(0.2, 0.1, 40), (0.05, 0.05, 80), (0.01, 0.05, 200), (0.002, 0.03, 900)]
)
def test_growth_is_seen_before_it_has_doubled_past_the_first_limit(growth, sigma, n):
    """From one doubling in 35 steps to one in 3,500: the slow scales see what a window of readings can't."""
    for seed in range(5):
        alerts = run(Rules(), noisy(40.0, sigma, n, seed, growth))
        warned = next(a.step for a in alerts if a.level >= Level.WARN)
        assert 40.0 * math.exp(growth * warned / 10) < 150.0


def test_one_odd_low_reading_is_no_base_for_doubling():
    steady = [[56.0], [55.0], [57.0], [20.0], [56.0], [55.0], [56.0]]
    assert [a.level for a in run(Rules(), steady)] == [Level.INFO]


def test_a_slow_rise_is_seen_on_a_slow_scale_only():
    """2 % per 100 steps: within a window of readings it is flat."""
    tops = [[60.0 * math.exp(0.002 * i)] for i in range(500)]
    assert any(a.level == Level.WARN for a in run(Rules(), tops))
    assert not any(a.level == Level.WARN for a in run(Rules(), tops[:60]))


def test_maxima_fall_after_a_calm_step():
    rules = Rules()
    run(rules, [[20.0], [300.0], [300.0]])
    run(rules, [[20.0]] * 3, start=30)
    assert not rules.state_dict()["active"]


def test_forecast_covers_the_crossing():
    hit = total = 0
    for seed in range(40):
        growth = random.Random(seed).uniform(10.0, 30.0)  # logits a reading
        noise = noisy(1.0, 0.05, 24, seed)
        for a in run(Rules(), [[(30.0 + growth * i) * noise[i][0]] for i in range(24)]):
            if a.forecast and (steps := a.forecast.steps_to[1e3]) and a.step >= 40:
                true = 10 * (1e3 - 30.0) / growth - a.step
                assert steps[0] <= steps[1] <= steps[2]
                hit, total = hit + (steps[0] <= true <= steps[2]), total + 1
    assert total > 10
    assert hit / total > 0.95


def test_forecast_goes_by_the_last_readings():
    """Growth that has tripled: the line through the last five readings, not through all."""
    tops = [30.0 + 5 * i for i in range(6)] + [55.0 + 15 * i for i in range(1, 6)]
    rules = Rules()
    run(rules, [[top] for top in tops])
    mid = rules.forecast("layers.0.attn", 0, 100).steps_to[1e3][1]
    assert mid == pytest.approx(10 * (1e3 - tops[-1]) / 15, rel=1e-3)


def test_a_noisy_line_widens_the_interval():
    rules = Rules(Thresholds(forecast_factor=1.0))
    run(rules, [[v] for v in (60.0, 75.0, 80.0, 102.0, 108.0, 130.0, 131.0)])
    low, mid, high = rules.forecast("layers.0.attn", 0, 60).steps_to[1e3]
    assert low < 0.9 * mid < 1.1 * mid < high


def test_forecast_of_a_clean_line_is_exact_and_in_the_message():
    alerts = run(Rules(), [[20.0 + 12 * i] for i in range(11)])
    alert = next(a for a in alerts if a.level == Level.WARN)
    low, mid, high = alert.forecast.steps_to[1e3]
    assert alert.step + mid == pytest.approx(10 * 980 / 12, abs=0.01)
    factor = Thresholds().forecast_factor  # a clean fit says nothing of how growth will change
    assert (low, high) == pytest.approx((mid / factor, mid * factor), rel=1e-3)
    assert f"at this rate 1,000 in ~{mid:.0f} steps" in alert.message
    assert set(alert.forecast.steps_to) == {100.0, 1e3, 1e4}


@pytest.mark.parametrize("tops", [[[60.0]] * 9, [[90.0 - 4 * i] for i in range(9)], [[60.0]], [[30.0], [70.0]]])
def test_no_forecast_when_flat_falling_or_too_few(tops):
    for a in run(Rules(), tops):
        assert a.forecast is None or set(a.forecast.steps_to.values()) == {None}


def story(seed: int, n: int = 60) -> list[list[Reading]]:
    """Two sites that grow, fall, collapse and come and go."""
    draw, steps, tops = random.Random(seed), [], {"a": [20.0] * 4, "b[x]": [20.0] * 3}
    for i in range(n):
        rows = []
        for site, top in tops.items():
            tops[site] = [min(max(v * math.exp(draw.gauss(0.02, 0.2)), 1.0), 2e4) for v in top]
            values = {
                "entropy_corrected": [draw.choice([NAN, 0.05, 0.05, 0.4]) for _ in top],
                "q_rms": [1.03**i] * len(top),
                "sink_mass": [draw.random() for _ in top],
                "over_100": [draw.choice([0.0, 0.0, 0.01]) for _ in top],
            }
            if draw.random() < 0.8:
                rows.append(reading(site, tops[site], **values))
        steps.append(rows)
    return steps


@pytest.mark.parametrize("seed", range(6))
def test_a_state_restored_midway_gives_the_same_alerts(seed):
    steps = story(seed)
    whole, half, rest = Rules(), Rules(), Rules()
    expected = [whole.update(10 * i, r) for i, r in enumerate(steps)]
    got = [half.update(10 * i, r) for i, r in enumerate(steps[:29])]
    rest.load_state_dict(json.loads(json.dumps(half.state_dict(), allow_nan=False)))
    got += [rest.update(10 * i, r) for i, r in enumerate(steps[29:], start=29)]
    assert got == expected
    assert sum(map(len, expected)) > 5
    assert rest.state_dict() == whole.state_dict()


def test_state_stays_bounded_and_foreign_states_are_refused():
    rules = Rules()
    run(rules, noisy(70.0, 0.1, 600, seed=0))
    early = len(json.dumps(rules.state_dict()))
    run(rules, noisy(70.0, 0.1, 600, seed=1), start=6000)
    assert len(json.dumps(rules.state_dict())) < 1.1 * early + 200
    with pytest.raises(QKWatchError, match="version 99"):
        rules.load_state_dict({"version": 99})


def test_forget_drops_the_past_of_a_patched_site_only():
    rules = Rules()
    for step in (0, 10, 20):
        rules.update(step, [reading("a", [60.0]), reading("b", [60.0])])
    rules.forget(["a"])
    both = [reading("a", [60.0]), reading("b", [60.0])]
    assert [(a.site, a.level) for a in rules.update(30, both)] == [("a", Level.INFO)]
    rules.forget()
    assert len(rules.update(40, both)) == 2


def test_no_forecast_of_a_limit_that_is_passed():
    """The line through the last readings may lie below the very last one."""
    rules = Rules()
    alerts = run(rules, [[v] for v in (20.0, 24.0, 31.0, 60.0, 101.0)])
    (last,) = [a for a in alerts if a.step == 40 and a.rule == "rising"]
    assert last.forecast is not None
    assert last.forecast.steps_to[100.0] is None
    assert "1,000 in" in last.message


def test_a_rewound_run_or_a_site_rebuilt_with_other_heads_starts_anew():
    rules = Rules()
    run(rules, [[60.0]] * 4, start=100)
    assert [a.step for a in run(rules, [[60.0]], start=50)] == [50]
    assert [a.heads for a in run(rules, [[60.0, 1.0]], start=60)] == [(0,)]


def test_odd_input_never_raises():
    rules, draw = Rules(), random.Random(0)
    odd = [0.0, -0.0, 1e-30, 3.4e38, math.inf, NAN, 99.9, 1e5]
    names = ("entropy_corrected", "q_rms", "k_rms", "sink_mass", "over_100", "nonfinite", "product_logit")
    for _ in range(300):
        heads = draw.choice([1, 2, 2, 2, 3])
        rows = [
            reading(draw.choice(["", "a", "b[0]"]), [draw.choice(odd) for _ in range(heads)],
                    **{name: [draw.choice(odd) for _ in range(heads)] for name in names})
            for _ in range(draw.randrange(4))
        ]  # fmt: skip
        for a in rules.update(draw.randrange(1000), rows):
            assert a.message
            json.dumps(rules.state_dict(), allow_nan=False)


def test_two_cores_of_one_site_in_one_step_count_once():
    rules = Rules()
    alerts = rules.update(0, [reading("shared", [20.0, 60.0]), reading("shared", [55.0, 20.0])])
    assert [(a.heads, a.level) for a in alerts] == [((0, 1), Level.INFO)]


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"warn_logit": -1.0}, "warn_logit"),
        ({"warn_logit": 2e3}, "warn_logit"),
        ({"fatal_logit": NAN}, "fatal_logit"),
        ({"patience": 1}, "patience"),
        ({"patience": 2.5}, "patience"),
        ({"window": 4}, "window"),
        ({"collapsed_entropy": 1.5}, "collapsed_entropy"),
        ({"warn_collapsed_share": 0.9}, "warn_collapsed_share"),
        ({"info_logit": "50"}, "info_logit"),
        ({"critical_readings": 20}, "critical_readings"),
        ({"over_100_share": True}, "over_100_share"),
    ],
)
def test_thresholds_are_validated(values, named):
    with pytest.raises(QKWatchError, match=named):
        Thresholds(**values)


def test_thresholds_from_a_command_line():
    jsonargparse = pytest.importorskip("jsonargparse")
    parser = jsonargparse.ArgumentParser()
    parser.add_argument("--thresholds", type=Thresholds, default=Thresholds())
    parsed = parser.instantiate_classes(parser.parse_args(["--thresholds.warn_logit=70", "--thresholds.patience=4"]))
    assert parsed.thresholds == Thresholds(warn_logit=70.0, patience=4)


# -- single entries -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("moves", ["nothing", "norms", "entropy", "unmeasured"])
def test_a_rise_counts_where_more_than_single_logits_moved(moves):
    tops = [12.0, 12.0, 12.0, 26.0, 55.0, 118.0, 250.0]
    rules, alerts = Rules(), []
    for i, top in enumerate(tops):
        values = {
            "nothing": {"q_rms": [1.0]},
            "norms": {"q_rms": [top / 10]},
            "entropy": {"q_rms": [1.0], "entropy_corrected": [0.6 - 0.02 * i]},
            "unmeasured": {"q_rms": [NAN], "entropy_corrected": [NAN]},
        }[moves]
        alerts += rules.update(10 * i, [reading(top=[top], **values)])
    warned = [a.rule for a in alerts if a.level >= Level.WARN]
    assert bool(warned) == (moves != "nothing")
