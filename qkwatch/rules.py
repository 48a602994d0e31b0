"""Readings over time -> alerts. Pure: no module, no Lightning, nothing printed.

The default table and every constant come from published runs and from measurements made for this project (see
`Thresholds`). Messages report what was read; a forecast extends a fit and promises nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from qkwatch.alerts import ALL_SITES, Alert, Forecast, Level, Thresholds
from qkwatch.errors import QKWatchError
from qkwatch.trends import History, Row, Values, doubled, forecast, reduce

if TYPE_CHECKING:
    from torch import Tensor

    from qkwatch.reading import Reading

_HUGE = 3.4e38  # stands for inf in a history: JSON has no infinity
_STATE_VERSION = 2


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
        self._past: dict[str, History] = {}
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

    @property
    def level(self) -> int:
        """The worst level that holds now: of alerts that have begun and not yet ended; 0 for none. Sinks are none."""
        return max((int(level) for _, rule, level in self._active if rule != "sink"), default=0)

    def forecast(self, site: str, head: int, step: int) -> Forecast:
        """Steps from ``step`` until the head's max logit passes each limit, from the readings taken so far."""
        return forecast(self._past.get(site, History()), head, step, self.thresholds)

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
            site: History(count, [[Row(*row) for row in rows[-self.thresholds.window :]] for rows in scales])
            for site, (count, scales) in state["past"].items()
        }
        self._active = {
            (site, rule, Level(level)): _Active(set(heads), set(waiting), calm, told)
            for site, rule, level, heads, waiting, calm, told in state["active"]
        }

    def _record(self, now: _Now) -> History:
        past = self._past.setdefault(now.site, History())
        last = past.scales[0][-1] if past.scales[0] else None
        if last is not None and (last.step > now.step or len(last.top) != len(now.top)):
            self.forget([now.site])  # the run was wound back, or the site was rebuilt with other heads
            past = self._past[now.site] = History()
        past.push(Row(now.step, now.top, now.rms, now.entropy), self.thresholds.window)
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
        past = self._past.setdefault(ALL_SITES, History())
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


def _findings(now: _Now, past: History, collapse: _Collapse, limits: Thresholds) -> list[_Finding]:
    """Every rule at one site. A sink is told once per head: its hold never ends."""
    sinks = {h for h, mass in enumerate(now.sink) if mass is not None and mass >= limits.sink_mass}
    sink = _Finding("sink", "sink", Level.INFO, sinks, set(range(len(now.sink))), "first seen as an attention sink")
    return [*_logit_findings(now, past, limits), *_collapse_findings(collapse, limits), sink]


def _logit_findings(now: _Now, past: History, limits: Thresholds) -> list[_Finding]:
    """The rules on the largest logit, strongest first."""

    def over(limit: float, values: Values = now.top) -> set[int]:
        return {h for h, value in enumerate(values) if value is not None and value > limit}

    recent = past.scales[0][-limits.critical_readings :]
    lasting = set.intersection(*(over(limits.critical_logit, row.top) for row in recent))
    if len(recent) < limits.critical_readings:
        lasting = set()
    info, early, warn = over(limits.info_logit), over(limits.early_logit), over(limits.warn_logit)
    critical, fatal, high = over(limits.critical_logit), over(limits.fatal_logit), over(limits.double_logit)
    rising = {h for h in warn if past.climbs(h, limits)}
    coming = {h for h in early if past.leaps(h, limits)}
    shared = {h for h in warn if (now.over_100[h] or 0.0) > limits.over_100_share}
    twice = {h for h in high if doubled([(row.step, row.top[h]) for row in past.scales[0]], limits)}
    twice = {h for h in twice if past.broad(0, h, limits)}
    bad, top = now.non_finite, "max logit above {:,g}".format
    table: list[tuple[str, Level, set[int], set[int], str]] = [
        ("non_finite", Level.FATAL, bad, bad, "NaN or inf among the logits"),
        ("max_logit", Level.FATAL, fatal - bad, fatal - bad, top(limits.fatal_logit)),
        ("max_logit", Level.CRITICAL, lasting, critical, top(limits.critical_logit)),
        ("rising", Level.WARN, rising, warn, top(limits.warn_logit) + " and rising"),
        (
            "over_100",
            Level.WARN,
            shared,
            shared,
            f"more than {limits.over_100_share:.2g} of the logits above 100",
        ),
        ("doubling", Level.WARN, twice, high, f"max logit doubled within {limits.double_within} steps"),
        ("early", Level.WARN, coming, early, top(limits.early_logit) + " and rising fast"),
        ("max_logit", Level.INFO, info, info, top(limits.info_logit)),
    ]
    return [_Finding("logit", *row) for row in table]


def _collapse(now: _Now, past: History, limits: Thresholds) -> _Collapse:
    countable = {h: e for h, e in enumerate(now.entropy) if e is not None}
    sharp = {h for h, entropy in countable.items() if entropy < limits.collapsed_entropy}
    collapsed = {h for h in sharp if (now.top[h] or 0.0) > limits.collapsed_logit}
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


def _alert(now: _Now, past: History, finding: _Finding, limits: Thresholds) -> Alert:
    """The finding in words and figures; figures and forecast are those of its head with the largest logit."""
    heads = tuple(sorted(finding.start))
    lead = max(heads, key=lambda h: now.top[h] or 0.0)
    ahead = forecast(past, lead, now.step, limits) if finding.kind != "sink" else None
    what = f"{now.site or 'the model itself'}: {_name_heads(heads)}: {finding.because}"
    parts = [what, _figures(now, lead), ahead.text() if ahead else ""]
    return Alert(finding.level, now.step, now.site, heads, finding.rule, "; ".join(filter(None, parts)), ahead)


def _now(step: int, r: Reading) -> _Now:
    """A reading as plain numbers. The largest logit is that of the product: a bias makes none saturate."""

    def plain(x: Tensor) -> Values:
        return [None if math.isnan(v) else max(min(v, _HUGE), -_HUGE) for v in x.tolist()]

    top = plain(r.product_logit)
    bad = {h for h, n in enumerate(plain(r.nonfinite)) if (n or 0) > 0 or top[h] == _HUGE}
    rms, entropy, sink, over = map(plain, (r.q_rms * r.k_rms, r.entropy_corrected, r.sink_mass, r.over_100))
    return _Now(r.site, step, top, rms, entropy, sink, over, bad)


def _merge(a: _Now, b: _Now) -> _Now:
    """Two cores of one site in one step: the larger logits, the mean entropy; other head counts can't."""
    if len(a.top) != len(b.top):
        return a

    def both(name: str, how: Callable[[list[float]], float]) -> Values:
        return [reduce(how, pair) for pair in zip(getattr(a, name), getattr(b, name), strict=True)]

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
    forms = ("max logit {:,.4g}", "entropy without sinks {:.2f}", "sink mass {:.2f}", "RMS(q)·RMS(k) {:.3g}")
    texts = [form.format(value) for form, value in zip(forms, values, strict=True) if value is not None]
    if head in now.non_finite:
        texts = ["max logit non-finite", *texts[1:]]
    return f"head {head}: {', '.join(texts)}" if texts else ""
