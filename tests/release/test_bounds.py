"""Bounds of a gate: the tighter of the scenario's bound and the gate's bound counts, whichever direction is tight."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torchaos.harness.analysis.verdict import judge
from torchaos.harness.record.rundir import RunDir

from .conftest import Release, change_json

MEASURED_S = 4.010365  # until the recorded run had caught up


def bounded(release: Release, *bounds: float, lost: int | None = None) -> None:
    """Each under a pattern of its own."""
    patterns = ("*", "k*", "kill")
    more = {} if lost is None else {"lost_steps": lost}
    release.gate["environments"] = {"ci": {"bounds": {
        pattern: [{"recovery_time": {"catch_up": f"{bound:.6f}s", **more}}]
        for pattern, bound in zip(patterns, bounds, strict=False)
    }}}  # fmt: skip


@pytest.mark.parametrize(("bound", "lost", "code"), [(5.0, None, 0), (4.0, None, 1), (5.0, 2, 0), (5.0, 1, 1)])
def test_a_bound_that_the_scenario_does_not_have(release: Release, bound: float, lost: int | None, code: int) -> None:
    """The run passed without one. Judged again under the gate's, offline, it fails where it measured more; the reason
    and the bound are in the result."""
    bounded(release, bound, lost=lost)
    judged = release.judged()
    assert judged.exit_code == code
    case = next(one for one in judged.results[0].cases if one.name == "recovery_time")
    assert case.bound["catch_up"] == bound
    assert case.measured["catch_up"] == pytest.approx(MEASURED_S)
    assert ("more than allowed" in case.reason or "are allowed" in case.reason) == (code == 1)


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.lists(st.floats(0.1, 10.0).map(lambda one: round(one, 3)), min_size=1, max_size=3))
def test_all_that_match_hold_at_once(release: Release, bounds: list[float]) -> None:
    """Under several patterns that match, it is open just where the tightest bound is kept."""
    bounded(release, *bounds)
    assert (release.judged().exit_code == 0) == (min(bounds) >= MEASURED_S)


def test_a_looser_bound_changes_nothing(release: Release) -> None:
    """A run that broke the scenario's own bound stays failed, however much the gate allows."""
    (folder,) = map(RunDir, release.runs.iterdir())
    change_json(folder.plan, lambda plan: plan["asserts"][0].update(params={"catch_up": 1.0}))
    began = json.loads(folder.result.read_text())["started"]
    folder.result.write_text(json.dumps({**judge(folder).to_json(), "started": began}))
    bounded(release, 60.0)
    judged = release.judged()
    assert judged.exit_code == 1
    assert "3.01 s more than allowed" in judged.results[0].reason


def test_bounds_are_those_of_the_environment(release: Release) -> None:
    """The same runs pass in one environment and fail in another, which may also ask for fresher ones."""
    release.gate["environments"] = {
        "ci": {"bounds": {"*": [{"recovery_time": {"catch_up": "60s"}}]}},
        "staging": {"bounds": {"*": [{"recovery_time": {"catch_up": "2s"}}]}},
        "nightly": {"max_age": "30m"},
    }
    assert release.judged("ci").exit_code == 0
    assert "2.01 s more than allowed" in release.judged("staging").results[0].reason
    assert "is stale" in release.judged("nightly").results[0].reason
