"""Readings over time -> alerts. Pure: no module, no Lightning, nothing printed.

The default table and every constant come from published runs and from measurements made for this project (see
`Thresholds`). Messages report what was read; a forecast extends a fit and promises nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, fields
from enum import IntEnum
from itertools import combinations, pairwise
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from qkwatch.errors import QKWatchError

if TYPE_CHECKING:
    from torch import Tensor

    from qkwatch.stats import Reading

ALL_SITES = "*"
"""The `Alert.site` of a rule that counts the heads of all sites together."""

_SCALES = 3  # time scales of a site's history: readings, blocks of readings, blocks of blocks
_BLOCK = 8  # entries of one scale that make one entry (their median) of the next
_HUGE = 3.4e38  # stands for inf in a history: JSON has no infinity
_STATE_VERSION = 1


class Level(IntEnum):
    """How bad it is, in rising order."""

    INFO = 1
    WARN = 2
    CRITICAL = 3
    FATAL = 4


@dataclass(frozen=True)
class Thresholds:
    """Every constant of the rules. A logit is what enters the softmax; a reading is one measured step.

    Args:
        info_logit: a head's largest |logit| above it is an INFO. Gemma 2 soft-caps logits at 50.
        early_logit: above it and rising is a WARN. Never fired on the healthy runs measured for this project.
        warn_logit: above it, and rising or with `over_100_share`, is a WARN. Kimi K2 clips at
            100 (2507.20534).
        critical_logit: above it on `critical_readings` readings in a row is CRITICAL. 1e3 degrades the loss
            (2309.14322).
        fatal_logit: above it at once is FATAL. Every run that passed 1e4 diverged in 2309.14322.
        over_100_share: share (0..1) of visible entries above 100 that matters. 1e-4 was harmless in Moonlight
            (2502.16982).
        double_logit: a max above it that doubled within `double_within` steps is a WARN.
        double_within: optimizer steps.
        collapsed_entropy: a head is collapsed below this sink-corrected normalised entropy (0..1).
        warn_collapsed_share: share (0..1) of the non-sink heads, of a layer or of all, that must be collapsed
            while RMS(q)·RMS(k) rises. Healthy runs measured for this project never reached 25 %.
        critical_collapsed_share: the same for CRITICAL.
        sink_mass: a head with at least this mean mass (0..1) on its sink keys is labelled a sink.
        patience: readings over which a trend must show; also calm readings in a row that end an alert.
        critical_readings: readings in a row for `critical_logit`.
        window: entries kept per time scale. Trends and forecasts see no more than these.
        rise_margin: smallest relative growth that counts as rising (0.2 is 20 %).
        rise_sigmas: growth must also exceed so many times the noise of one reading (robust, of log values).
        rise_noise: noise (log units) assumed at `patience` readings; it fades as readings come in.
        forecast_horizon: nothing is forecast further ahead than so many times the span that was fitted.
        repeat_after: readings between two alerts of one rule and site whose only news is that heads joined.

    Raises:
        QKWatchError: a value is out of range; the field is named.

    >>> Thresholds(warn_logit=200.0).warn_logit
    200.0
    """

    info_logit: float = 50.0
    early_logit: float = 50.0
    warn_logit: float = 100.0
    critical_logit: float = 1e3
    fatal_logit: float = 1e4
    over_100_share: float = 1e-3
    double_logit: float = 50.0
    double_within: int = 100
    collapsed_entropy: float = 0.1
    warn_collapsed_share: float = 0.25
    critical_collapsed_share: float = 0.5
    sink_mass: float = 0.95
    patience: int = 3
    critical_readings: int = 2
    window: int = 12
    rise_margin: float = 0.2
    rise_sigmas: float = 4.0
    rise_noise: float = 0.05
    forecast_horizon: float = 20.0
    repeat_after: int = 10

    def __post_init__(self) -> None:
        shares = {
            "over_100_share",
            "collapsed_entropy",
            "warn_collapsed_share",
            "critical_collapsed_share",
            "sink_mass",
        }
        least = {"patience": 2, "window": max(_BLOCK, 2 * self.patience), "critical_readings": 1}
        for f in fields(self):
            value = getattr(self, f.name)
            low = least.get(f.name, 1) if f.type == "int" else 0
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise QKWatchError(f"Thresholds.{f.name} must be a finite number, got {value!r}")
            if f.type == "int" and value != int(value):
                raise QKWatchError(f"Thresholds.{f.name} must be a whole number, got {value!r}")
            if value < low or (f.name in shares and value > 1):
                span = "in [0, 1]" if f.name in shares else f"at least {low}"
                raise QKWatchError(f"Thresholds.{f.name} must be {span}, got {value!r}")
        for lower, upper in pairwise(("early_logit", "warn_logit", "critical_logit", "fatal_logit")):
            if getattr(self, lower) > getattr(self, upper):
                raise QKWatchError(f"Thresholds.{lower} must not be above {upper}: alerts would skip a level")
        if self.warn_collapsed_share > self.critical_collapsed_share:
            raise QKWatchError("Thresholds.warn_collapsed_share must not be above critical_collapsed_share")
        if self.critical_readings > self.window:
            raise QKWatchError("Thresholds.critical_readings must not be above window: older readings are gone")


@dataclass(frozen=True)
class Forecast:
    """Steps until a head's max logit passes a limit, should it go on as in the window that was fitted.

    `steps_to[limit]` is (low, mid, high) in optimizer steps; `high` is inf where slower fits never arrive.
    It is None where the max is flat or falling, is already above the limit, or the limit is too far to say.
    """

    head: int
    steps_to: dict[float, tuple[float, float, float] | None]

    def text(self) -> str:
        """The nearest limit in words, or "" where there is none.

        >>> Forecast(0, {100.0: None, 1000.0: (81.0, 118.0, 204.0)}).text()
        'at this rate 1,000 in ~118 steps (81-204)'
        """
        for limit, steps in sorted(self.steps_to.items()):
            if steps is not None:
                low, mid, high = steps
                span = f"{low:,.0f}-{high:,.0f}" if math.isfinite(high) else f"{low:,.0f} or more"
                return f"at this rate {limit:,.0f} in ~{mid:,.0f} steps ({span})"
        return ""


@dataclass(frozen=True)
class Alert:
    """One rule that began to hold at one site.

    `heads` are all its heads there; none for `site == "*"` (all sites together): the message names the sites.
    """

    level: Level
    step: int
    site: str
    heads: tuple[int, ...]
    rule: str
    message: str
    forecast: Forecast | None = None


Values = list["float | None"]  # one per head; None is "not measured"


class _Row(NamedTuple):
    """What a site's past keeps of one reading: max logit and RMS(q)·RMS(k) per head."""

    step: int
    top: Values
    rms: Values


class _Now(NamedTuple):
    """One site's figures at this step."""

    site: str
    step: int
    top: Values
    rms: Values
    entropy: Values
    sink: Values
    over_100: Values
    non_finite: set[int]


class _Collapse(NamedTuple):
    """Heads that count (measured, no sink), those of them collapsed, those of these whose norms rise."""

    countable: set[int]
    collapsed: set[int]
    rising: set[int]


@dataclass
class _History:
    """A site's past on a few time scales; bounded by `_SCALES` x window rows."""

    count: int = 0
    scales: list[list[_Row]] = field(default_factory=lambda: [[] for _ in range(_SCALES)])

    def push(self, row: _Row, window: int) -> None:
        """Add a reading; each full block adds its median to the next, slower scale."""
        self.count += 1
        for depth, scale in enumerate(self.scales):
            scale.append(row)
            del scale[:-window]
            if (self.count // _BLOCK**depth) % _BLOCK:
                return
            block = scale[-_BLOCK:]
            step = int(median(r.step for r in block))
            row = _Row(step, _columns([r.top for r in block]), _columns([r.rms for r in block]))

    def series(self, depth: int, what: str, head: int) -> list[tuple[int, float]]:
        """(step, log value) of a head's "top" or "rms", oldest first, without what was not measured."""
        rows = ((r.step, getattr(r, what)[head]) for r in self.scales[depth])
        return [(step, math.log(max(value, 1e-9))) for step, value in rows if value is not None]

    def rising(self, what: str, head: int, limits: Thresholds) -> int | None:
        """The fastest scale on which the head's value rises; None where it does on none."""
        return next((d for d in range(_SCALES) if _rises(self.series(d, what, head), limits)), None)


@dataclass
class _Active:
    """A rule that holds at a site: heads told and yet to tell, calm readings in a row, count when told."""

    heads: set[int]
    waiting: set[int]
    calm: int
    told: int


class _Finding(NamedTuple):
    """A rule at a site now: `start` heads can begin an alert, `hold` (a superset) keep it going."""

    kind: str
    rule: str
    level: Level
    start: set[int]
    hold: set[int]
    because: str


class Rules:
    """Turns readings into alerts and keeps a bounded past per site.

    An alert is raised when a (site, rule, level) begins to hold; again only once it has ended (`patience`
    calm readings) and begun anew, or when more heads joined and `repeat_after` readings have passed. A weaker
    finding on the same heads is not told beside a stronger one of the same kind. Values are never held.

    >>> Rules(Thresholds()).update(0, [])
    []
    """

    def __init__(self, thresholds: Thresholds | None = None) -> None:
        self.thresholds = thresholds if thresholds is not None else Thresholds()
        self._past: dict[str, _History] = {}
        self._active: dict[tuple[str, str, Level], _Active] = {}

    def update(self, step: int, readings: Sequence[Reading]) -> list[Alert]:
        """Take one step's readings (sites may be missing or come twice); return what begins, worst first."""
        nows: dict[str, _Now] = {}
        for reading in readings:
            now = _now(step, reading)
            nows[now.site] = _merge(nows[now.site], now) if now.site in nows else now
        alerts: list[Alert] = []
        pooled: list[tuple[str, _Collapse]] = []
        for now in nows.values():
            past = self._record(now)
            collapse = _collapse(now, past, self.thresholds)
            pooled.append((now.site, collapse))
            findings = _findings(now, past, collapse, self.thresholds)
            news = self._news(now.site, past.count, findings)
            alerts += [_alert(now, past, finding, self.thresholds) for finding in news]
        if len(pooled) > 1:
            alerts += self._everywhere(step, pooled)
        return sorted(alerts, key=lambda a: -a.level)

    def forget(self, sites: Iterable[str] | None = None) -> None:
        """Drop the past of these sites (None: of all): after a patch it says nothing about what comes."""
        gone = {ALL_SITES, *(self._past if sites is None else sites)}  # the count over all changes with any
        self._past = {site: past for site, past in self._past.items() if site not in gone}
        self._active = {key: active for key, active in self._active.items() if key[0] not in gone}

    def state_dict(self) -> dict[str, Any]:
        """Lists, dicts, strings, numbers and None only: fits JSON and `torch.load(weights_only=True)`."""
        past = {
            site: [history.count, [[list(row) for row in rows] for rows in history.scales]]
            for site, history in self._past.items()
        }
        active = [
            [*key[:2], int(key[2]), sorted(a.heads), sorted(a.waiting), a.calm, a.told]
            for key, a in self._active.items()
        ]
        return {"version": _STATE_VERSION, "past": past, "active": active}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on as the `Rules` that gave this state. Raises QKWatchError for a state of another version."""
        if state.get("version") != _STATE_VERSION:
            raise QKWatchError(
                f"Rules.load_state_dict: state of version {state.get('version')!r}, this qkwatch reads "
                f"{_STATE_VERSION}; leave it out (only the alerts' past is lost)"
            )
        self._past = {
            site: _History(count, [[_Row(*row) for row in rows[-self.thresholds.window :]] for rows in scales])
            for site, (count, scales) in state["past"].items()
        }
        self._active = {
            (site, rule, Level(level)): _Active(set(heads), set(waiting), calm, told)
            for site, rule, level, heads, waiting, calm, told in state["active"]
        }

    def _record(self, now: _Now) -> _History:
        past = self._past.setdefault(now.site, _History())
        last = past.scales[0][-1] if past.scales[0] else None
        if last is not None and (last.step > now.step or len(last.top) != len(now.top)):
            self.forget([now.site])  # the run was wound back, or the site was rebuilt with other heads
            past = self._past[now.site] = _History()
        past.push(_Row(now.step, now.top, now.rms), self.thresholds.window)
        return past

    def _news(self, site: str, count: int, findings: list[_Finding]) -> list[_Finding]:
        """The findings to tell now, and the bookkeeping. `findings` come strongest first within a kind."""
        told: list[_Finding] = []
        for f in findings:
            key = (site, f.rule, f.level)
            active = self._active.get(key)
            if active is None:
                fresh = f.start
                if fresh:
                    self._active[key] = _Active(set(fresh), set(), 0, count)
            else:
                fresh = self._joined(key, active, f, count)
            if fresh and not self._covered(site, f, fresh, told, findings):
                told.append(f._replace(start=self._active[key].heads & f.hold))
        return told

    def _joined(self, key: tuple[str, str, Level], active: _Active, f: _Finding, count: int) -> set[int]:
        """Age a rule that is active; the heads that joined, once it is time to tell of them."""
        active.waiting = (active.waiting | (f.start - active.heads)) & f.hold
        active.calm = 0 if f.hold & (active.heads | active.waiting) else active.calm + 1
        if active.calm >= self.thresholds.patience:
            del self._active[key]
        fresh = active.waiting
        if not fresh or count - active.told < self.thresholds.repeat_after:
            return set()
        active.heads, active.waiting, active.told = (active.heads & f.hold) | fresh, set(), count
        return fresh

    def _covered(self, site: str, f: _Finding, fresh: set[int], told: list[_Finding], findings: list[_Finding]) -> bool:
        """Findings of the same kind say at least as much: told just now, or a higher level told before."""
        higher = (o for o in findings if o.kind == f.kind and o.level > f.level and o.hold)
        before = (self._active.get((site, o.rule, o.level)) for o in higher)
        known = [o.start for o in told if o.kind == f.kind] + [a.heads for a in before if a is not None]
        return fresh <= set[int]().union(*known)

    def _everywhere(self, step: int, pooled: list[tuple[str, _Collapse]]) -> list[Alert]:
        """The collapse rule over the heads of all sites read at this step."""
        past = self._past.setdefault(ALL_SITES, _History())
        past.count += 1
        sums = (sum(len(collapse[i]) for _, collapse in pooled) for i in range(3))
        findings = _collapse_findings(_Collapse(*(set(range(n)) for n in sums)), self.thresholds)
        worst = sorted((p for p in pooled if p[1].collapsed), key=lambda p: -len(p[1].collapsed))
        names = ", ".join(f"{site} {len(c.collapsed)} of {len(c.countable)}" for site, c in worst[:5])
        more = f" and {len(worst) - 5} more sites" if len(worst) > 5 else ""
        return [
            Alert(f.level, step, ALL_SITES, (), f.rule, f"all sites: {f.because} ({names}{more})")
            for f in self._news(ALL_SITES, past.count, findings)
        ]


def _findings(now: _Now, past: _History, collapse: _Collapse, limits: Thresholds) -> list[_Finding]:
    """Every rule at one site. A sink is told once per head: its hold never ends."""
    sinks = {h for h, mass in enumerate(now.sink) if mass is not None and mass >= limits.sink_mass}
    sink = _Finding("sink", "sink", Level.INFO, sinks, set(range(len(now.sink))), "first seen as an attention sink")
    return [*_logit_findings(now, past, limits), *_collapse_findings(collapse, limits), sink]


def _logit_findings(now: _Now, past: _History, limits: Thresholds) -> list[_Finding]:
    """The rules on the largest logit, strongest first."""

    def over(limit: float, values: Values = now.top) -> set[int]:
        return {h for h, value in enumerate(values) if value is not None and value > limit}

    recent = past.scales[0][-limits.critical_readings :]
    lasting = set.intersection(*(over(limits.critical_logit, row.top) for row in recent))
    if len(recent) < limits.critical_readings:
        lasting = set()
    info, early, warn = over(limits.info_logit), over(limits.early_logit), over(limits.warn_logit)
    critical, fatal, high = over(limits.critical_logit), over(limits.fatal_logit), over(limits.double_logit)
    rising = {h for h in early if past.rising("top", h, limits) is not None}
    shared = {h for h in warn if (now.over_100[h] or 0.0) > limits.over_100_share}
    doubled = {h for h in high if _doubled([(row.step, row.top[h]) for row in past.scales[0]], limits)}
    bad, top = now.non_finite, "max logit above {:,g}".format
    table: list[tuple[str, Level, set[int], set[int], str]] = [
        ("non_finite", Level.FATAL, bad, bad, "NaN or inf among the logits"),
        ("max_logit", Level.FATAL, fatal - bad, fatal - bad, top(limits.fatal_logit)),
        ("max_logit", Level.CRITICAL, lasting, critical, top(limits.critical_logit)),
        ("rising", Level.WARN, warn & rising, warn, top(limits.warn_logit) + " and rising"),
        (
            "over_100",
            Level.WARN,
            shared,
            shared,
            f"more than {limits.over_100_share:.2g} of the logits above 100",
        ),
        ("doubling", Level.WARN, doubled, high, f"max logit doubled within {limits.double_within} steps"),
        ("early", Level.WARN, rising, early, top(limits.early_logit) + " and rising"),
        ("max_logit", Level.INFO, info, info, top(limits.info_logit)),
    ]
    return [_Finding("logit", *row) for row in table]


def _collapse(now: _Now, past: _History, limits: Thresholds) -> _Collapse:
    countable = {h: e for h, e in enumerate(now.entropy) if e is not None}
    collapsed = {h for h, entropy in countable.items() if entropy < limits.collapsed_entropy}
    rising = {h for h in collapsed if past.rising("rms", h, limits) is not None}
    return _Collapse(set(countable), collapsed, rising)


def _collapse_findings(c: _Collapse, limits: Thresholds) -> list[_Finding]:
    """Sharp heads alone are no failure: it takes a share of them and, to begin, norms rising in half."""
    share = len(c.collapsed) / len(c.countable) if c.countable else 0.0
    rises = bool(c.rising) and 2 * len(c.rising) >= len(c.collapsed)
    because = f"{len(c.collapsed)} of {len(c.countable)} non-sink heads collapsed while RMS(q)·RMS(k) rises"
    found = []
    for level, least in (
        (Level.CRITICAL, limits.critical_collapsed_share),
        (Level.WARN, limits.warn_collapsed_share),
    ):
        hold = c.collapsed if share >= least else set()
        found.append(_Finding("entropy", "collapse", level, hold if rises else set(), hold, because))
    return found


def _rises(series: list[tuple[int, float]], limits: Thresholds) -> bool:
    """Whether a noisy log series rises: recent median over older median, in units of one reading's noise.

    The noise is the MAD about a robust line: a steady trend is no noise, slow wandering is no trend.
    """
    x = [value for _, value in series]
    p = limits.patience
    if len(x) < p or x[-1] <= x[-p]:
        return False
    growth = median(x[-p:]) - median(x[:-p]) if len(x) >= 2 * p else x[-1] - x[0]
    if growth < math.log1p(limits.rise_margin):
        return False
    slope = median(_slopes(list(enumerate(x))))
    offsets = [value - slope * i for i, value in enumerate(x)]
    base = median(offsets)
    noise = 1.4826 * median(abs(offset - base) for offset in offsets)
    return growth >= limits.rise_sigmas * max(noise, limits.rise_noise * p / len(x))


def _slopes(points: Sequence[tuple[int, float]]) -> list[float]:
    """The slopes between all pairs of points, sorted; their median is the Theil-Sen slope (Sen 1968)."""
    return sorted((b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(points, 2) if b[0] > a[0])


def _doubled(series: list[tuple[int, float | None]], limits: Thresholds) -> bool:
    """Whether the last value is twice the base of the last `double_within` steps; an odd low one is none."""
    (now, last), earlier = series[-1], series[:-1]
    base = sorted(v for step, v in earlier if v is not None and now - step <= limits.double_within)
    return last is not None and bool(base) and last >= 2 * base[1 if len(base) > 2 else 0]


def _forecast(past: _History, head: int, step: int, limits: Thresholds) -> Forecast:
    """Steps to each limit from a Theil-Sen line through log max, on the fastest scale that rises.

    The interval comes from the 10 % and 90 % quantiles of the pairwise slopes.
    """
    targets = (limits.warn_logit, limits.critical_logit, limits.fatal_logit)
    depth = past.rising("top", head, limits)
    points = past.series(depth, "top", head) if depth is not None else []
    slopes = _slopes(points)
    if not slopes or (slope := median(slopes)) <= 0:
        return Forecast(head, dict.fromkeys(targets))
    level = median(value + slope * (step - at) for at, value in points)
    slow, fast = (max(slopes[round(q * (len(slopes) - 1))], 0.0) for q in (0.1, 0.9))
    horizon = limits.forecast_horizon * (points[-1][0] - points[0][0])

    def steps(limit: float) -> tuple[float, float, float] | None:
        gap = math.log(max(limit, 1e-9)) - level
        if gap <= 0 or gap / slope > horizon:
            return None
        return gap / fast, gap / slope, gap / slow if slow else math.inf

    return Forecast(head, {limit: steps(limit) for limit in targets})


def _alert(now: _Now, past: _History, finding: _Finding, limits: Thresholds) -> Alert:
    """The finding in words and figures; figures and forecast are those of its head with the largest logit."""
    heads = tuple(sorted(finding.start))
    lead = max(heads, key=lambda h: now.top[h] or 0.0)
    forecast = _forecast(past, lead, now.step, limits) if finding.kind != "sink" else None
    what = f"{now.site or 'the model itself'}: {_name_heads(heads)}: {finding.because}"
    parts = [what, _figures(now, lead), forecast.text() if forecast else ""]
    return Alert(finding.level, now.step, now.site, heads, finding.rule, "; ".join(filter(None, parts)), forecast)


def _columns(rows: list[Values]) -> Values:
    """Per head the median over rows; None where nothing was measured."""
    return [_reduce(median, column) for column in zip(*rows, strict=True)]


def _reduce(how: Callable[[list[float]], float], values: Iterable[float | None]) -> float | None:
    measured = [v for v in values if v is not None]
    return how(measured) if measured else None


def _now(step: int, r: Reading) -> _Now:
    """A reading as plain numbers; an additive bias (ALiBi, masks of -100) is taken off the largest logit."""

    def plain(x: Tensor) -> Values:
        return [None if math.isnan(v) else max(min(v, _HUGE), -_HUGE) for v in x.tolist()]

    top = plain(r.max_logit)
    bad = {h for h, n in enumerate(plain(r.nonfinite)) if (n or 0) > 0 or top[h] == _HUGE}
    if r.bias_max is not None:
        biases = plain(r.bias_max)
        top = [m if m is None or h in bad else max(m - (biases[h] or 0.0), 0.0) for h, m in enumerate(top)]
    rms, entropy, sink, over = map(plain, (r.q_rms * r.k_rms, r.entropy_corrected, r.sink_mass, r.over_100))
    return _Now(r.site, step, top, rms, entropy, sink, over, bad)


def _merge(a: _Now, b: _Now) -> _Now:
    """Two cores of one site in one step: the larger logits, the mean entropy; other head counts can't."""
    if len(a.top) != len(b.top):
        return a

    def both(name: str, how: Callable[[list[float]], float]) -> Values:
        return [_reduce(how, pair) for pair in zip(getattr(a, name), getattr(b, name), strict=True)]

    return _Now(
        a.site,
        a.step,
        both("top", max),
        both("rms", max),
        both("entropy", median),
        both("sink", median),
        both("over_100", max),
        a.non_finite | b.non_finite,
    )


def _name_heads(heads: Collection[int]) -> str:
    names = ", ".join(map(str, sorted(heads)[:8]))
    more = f" and {len(heads) - 8} more" if len(heads) > 8 else ""
    return f"head{'s' if len(heads) != 1 else ''} {names}{more}"


def _figures(now: _Now, head: int) -> str:
    """The figures of one head; what was not measured is left out."""
    values = (now.top[head], now.entropy[head], now.sink[head], now.rms[head])
    forms = ("max logit {:,.4g}", "entropy {:.2f}", "sink mass {:.2f}", "RMS(q)·RMS(k) {:.3g}")
    texts = [form.format(value) for form, value in zip(forms, values, strict=True) if value is not None]
    if head in now.non_finite:
        texts = ["max logit non-finite", *texts[1:]]
    return f"head {head}: {', '.join(texts)}" if texts else ""
