"""The study in `examples/`: its labels, its made cases, its tables, and that what it ran is not run again."""

from __future__ import annotations

import importlib
import io
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from qkwatch import Thresholds

KEY = {"task": "vit", "optimizer": "adamw", "lr": 0.03, "seed": 0}


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs of thirty steps."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "examples"))
    for name in ("study_models", "study_runs", "study_made", "study_figures", "study_report", "study"):
        sys.modules.pop(name, None)
    monkeypatch.setattr(importlib.import_module("study_runs"), "STEPS", 30)
    return importlib.import_module("study")


def test_harm_is_three_probes_in_a_row(study: Any) -> None:
    harm = sys.modules["study_runs"].harm_step
    assert harm([3.0, 3.0, 3.0, 3.0], [2.95] * 4) is None
    assert harm([3.0, 3.2, 3.0, 3.2, 3.2, 3.2], [3.0] * 6) == 30
    assert harm([3.0, 3.2, 3.2], [3.0] * 3) is None


def made_run(half: str, harm: int | None, tops: list[list[float]]) -> dict[str, Any]:
    """A run of which only the largest logits of two heads matter, one reading every ten steps."""
    names = ("margin", "entropy", "entropy_corrected", "saturated", "grad_signal", "over_100", "q_rms", "k_rms")
    calm = {name: [0.0, 0.0] for name in names}
    readings = [[{"step": 10 * i, "max_logit": top, **calm}] for i, top in enumerate(tops)]
    return {"kind": "run", "half": half, "harm": harm, "readings": readings}


def test_a_limit_is_the_strictest_that_warns_of_all_tuning_runs_before_harm(study: Any) -> None:
    rows = [
        made_run("tune", 20, [[1.0, 1.0], [9.0, 40.0], [99.0, 99.0]]),  # harm at 20: the third reading is too late
        made_run("tune", 30, [[1.0, 1.0], [9.0, 70.0], [20.0, 60.0]]),
        made_run("tune", None, [[1.0, 1.0], [3.0, 50.0], [3.0, 3.0]]),
        made_run("held-out", 20, [[1.0, 1.0], [8.0, 45.0], [99.0, 99.0]]),
        made_run("held-out", None, [[1.0, 30.0], [1.0, 30.0], [1.0, 30.0]]),
    ]
    found = {asked: (tune, held_out) for asked, tune, held_out in sys.modules["study_figures"].candidates(rows)}
    assert found["max_logit above 40 in one head"] == ((2, 0, 1), (1, 0, 0))
    assert found["max_logit above 9 in all heads"] == ((2, 0, 0), (0, 1, 0))


CASES = ["first-token sinks", "previous-token heads", "windows", "padding", "sparse spike above 100"]


@pytest.mark.parametrize("case", CASES)
def test_made_cases_do_not_alarm(study: Any, case: str) -> None:
    warned = sys.modules["study_made"].warned
    found = [warned(case, seed, Thresholds()) for seed in (3, 5, 16)]
    assert not any(alarm for alarm, _ in found)
    if case.startswith("sparse"):
        assert min(top for _, top in found) > 100


def test_runs_actions_and_tables(study: Any, tmp_path: Path) -> None:
    out = io.StringIO()
    console = Console(file=out, width=200)
    results = study.Results(tmp_path / "study.jsonl", console)
    key = {"kind": "run", **KEY, "half": "held-out"}
    results.once(key, study.labelled)
    row = results.rows[0]
    assert len(row["probes"]) == len(row["twin"]) == 4
    assert row["readings"]
    assert row["losses"]
    row["harm"], row["probes"][-1] = 20, row["twin"][-1] + 1.0  # so that there is a gap to recover
    for action in ("l2, constant 10", "l2, constant 10, ramp 20", "qkclip, 100"):
        results.once(study.action_key(row, action, 10), study.act)
    assert all(torch.isfinite(torch.tensor([r["final"], r["jump"]])).all() for r in results.rows[1:])
    ramped = next(r for r in results.rows if r.get("action") == "l2, constant 10, ramp 20")
    assert abs(ramped["jump"]) < 1e-4
    again = study.Results(tmp_path / "study.jsonl", console)
    again.once(key, lambda key: pytest.fail("it was run already"))
    study.report(results.rows, console, None)
    for title in ("labelled runs", "held-out seeds, a reading", "made case", "recovered share"):
        assert title in out.getvalue()
