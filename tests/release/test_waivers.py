"""Waivers: the failures that they permit, how long, and when a waiver closes the gate itself."""

from __future__ import annotations

from datetime import date, datetime, timedelta, timezone
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchaos.harness.record.result import Case, Verdict
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.release.gate_file import Waiver
from torchaos.harness.release.gate_verdict import apply, is_waived, state

from .conftest import Release, change_json

BOTH = ("checkpoint_integrity", "loss_continuity")


def test_each_failure_needs_a_waiver_of_its_own(failing: Release) -> None:
    """One of two failures waived leaves the gate closed; with both it is open, and both are named as waived."""
    failing.waive("forgets-optimizer", BOTH[0])
    judged = failing.judged()
    assert judged.exit_code == 1
    assert judged.results[0].reason.startswith("loss_continuity")
    failing.waive("forgets-optimizer", BOTH[1])
    judged = failing.judged()
    assert judged.exit_code == 0
    assert judged.results[0].reason == "checkpoint_integrity, waived; loss_continuity, waived"
    case = next(one for one in judged.results[0].cases if is_waived(one))
    assert case.reason.startswith("failed, and waived until 2026-12-31 (TRAIN-1): ")


def test_a_waiver_ends_with_its_last_day(failing: Release) -> None:
    """It holds through that day, in UTC; from the next on the assertion and the waiver are red."""
    for name in BOTH:
        failing.waive("forgets-optimizer", name, expires="2026-11-22")
    failing.gate["max_age"] = "7d"
    last = datetime(2026, 11, 22, 23, 59, 59, tzinfo=timezone.utc)
    judged = failing.judged(now=last)
    assert judged.exit_code == 0
    assert "today is its last day" in judged.results[-1].cases[0].reason
    judged = failing.judged(now=last + timedelta(seconds=1))
    assert judged.exit_code == 1
    what = "repair the job, or write a later day under `expires` (TRAIN-1: it is known)"
    assert judged.results[-1].reason.endswith(f": this waiver no longer counts, it expired on 2026-11-22; {what}")
    assert judged.results[0].reason.startswith("checkpoint_integrity: ")
    assert judged.results[0].reason.endswith("(its waiver TRAIN-1 expired on 2026-11-22)")


def test_what_passes_again_needs_no_waiver(release: Release) -> None:
    """A waiver whose assertion passes closes the gate until it is removed."""
    release.waive("kill", "sample_accounting")
    judged = release.judged()
    assert judged.exit_code == 1
    assert "sample_accounting passes: remove the waiver (TRAIN-1: it is known)" in judged.results[-1].reason


def test_one_that_fails_now_and_then_still_needs_it(failing: Release) -> None:
    """Of several runs one that fails is enough for the waiver to stay."""
    failing.run("forgets-optimizer", seed=3, of="kill")
    for name in BOTH:
        failing.waive("forgets-optimizer", name)
    assert failing.judged().exit_code == 0


def test_without_a_run_nothing_is_said_of_the_waiver(release: Release) -> None:
    """A missing run closes the gate by itself, and proves nothing about what is waived."""
    release.gate["max_age"] = "1m"
    release.waive("kill", "sample_accounting")
    judged = release.judged()
    assert [one.verdict for one in judged.results] == [Verdict.FAILED, Verdict.PASSED]
    assert "no run shows whether it is still needed" in judged.results[-1].cases[0].reason


def test_an_environment_of_its_own(failing: Release) -> None:
    """It is looked at only in the environments that it names."""
    failing.gate["environments"] = {"ci": {}, "staging": {}}
    for name in BOTH:
        failing.waive("forgets-optimizer", name, environments=["staging"])
    assert failing.judged("staging").exit_code == 0
    assert failing.judged("ci").exit_code == 1


@pytest.mark.parametrize(("covers", "code"), [(["failed"], 2), (["inconclusive"], 0), (["failed", "inconclusive"], 0)])
def test_inconclusive_is_covered_only_where_it_says_so(tmp_path: Path, covers: list[str], code: int) -> None:
    """A fault that missed makes the run inconclusive; that is let through by two waivers that name the verdict."""
    release = Release(tmp_path / "release")
    release.scenario("missed")
    release.run("missed")
    for name in ("faults", "recovery_time"):
        release.waive("missed", name, covers=covers)
    judged = release.judged()
    assert judged.exit_code == code, judged.results
    if code:
        assert "waiver TRAIN-1 covers only what failed" in judged.results[0].reason


def test_a_job_that_does_not_outlive_a_fault(tmp_path: Path) -> None:
    """A scenario that is known to fail outright can be let through, by a waiver for each thing that fails."""
    release = Release(tmp_path / "release")
    release.scenario("stale-store")
    release.run("stale-store")
    for name in ("recovery_time", "loss_continuity", "completed"):
        release.waive("stale-store", name)
    assert release.judged().exit_code == 1
    release.waive("stale-store", "faults")
    assert release.judged().exit_code == 0


@pytest.mark.parametrize(("values", "code"), [
    ({"exit_code": 4}, 4), ({"exit_code": 5, "verdict": "error", "reason": "a bug"}, 5),
    ({"exit_code": 2, "verdict": "inconclusive", "reason": "the run was ended early"}, 2),
])  # fmt: skip
def test_what_no_waiver_covers(failing: Release, values: dict[str, object], code: int) -> None:
    """With everything waived, for every verdict, what a run left behind, an error of ours, and a run that was ended
    early close the gate all the same."""
    for name in ("faults", "recovery_time", *BOTH, "sample_accounting", "restarts", "completed"):
        failing.waive("forgets-optimizer", name, covers=["failed", "inconclusive"])
    (folder,) = map(RunDir, failing.runs.iterdir())
    change_json(folder.result, lambda result: result.update(values))
    assert failing.judged().exit_code == code


def test_an_incomplete_rollback_is_never_waived(failing: Release) -> None:
    """It is no assertion: no waiver can name it, and it is red in the result."""

    def undo(result: dict[str, object]) -> None:
        cases = result["cases"]
        assert isinstance(cases, list)
        cases[-1].update(verdict="error", reason="a rule is still there")
        result.update(exit_code=4)

    (folder,) = map(RunDir, failing.runs.iterdir())
    change_json(folder.result, undo)
    for name in BOTH:
        failing.waive("forgets-optimizer", name)
    judged = failing.judged()
    assert judged.exit_code == 4
    assert judged.results[0].reason == "rollback: a rule is still there"


VERDICTS = st.sampled_from([Verdict.PASSED, Verdict.FAILED, Verdict.INCONCLUSIVE, Verdict.ERROR])
COVERS = st.lists(st.sampled_from(["failed", "inconclusive"]), min_size=1, max_size=2, unique=True)
DAY = date(2026, 11, 22)


def waiver(covers: list[str], days: int = 0) -> Waiver:
    return Waiver.model_validate({
        "scenario": "kill", "assertion": "restarts", "reason": "it is known", "ticket": "T-1", "covers": covers,
        "expires": (DAY + timedelta(days=days)).isoformat(),
    })  # fmt: skip


@settings(max_examples=60)
@given(verdicts=st.lists(VERDICTS, min_size=1, max_size=4), covers=COVERS, days=st.integers(-3, 3))
def test_nothing_that_is_not_covered_passes(verdicts: list[Verdict], covers: list[str], days: int) -> None:
    """Of one assertion, as it was judged under several bounds: it passes just where each of them passed, or did not in
    a way that a waiver in force covers; an error never does."""
    one = waiver(covers, days)
    found = apply(one, [Case("restarts", "assertion", verdict, "why") for verdict in verdicts], DAY)
    allowed = {"passed", *(covers if days >= 0 else [])}
    assert (found.case.verdict is Verdict.PASSED) == all(verdict.value in allowed for verdict in verdicts)
    assert is_waived(found.case) == (found.case.verdict is Verdict.PASSED and set(verdicts) != {Verdict.PASSED})


@given(said=st.lists(VERDICTS, max_size=4), days=st.integers(-3, 3))
def test_when_a_waiver_is_red(said: list[Verdict], days: int) -> None:
    """Just where it has expired, or all runs of its assertion passed, and there are any."""
    found = state(waiver(["failed"], days), said, DAY)
    assert (found.verdict is Verdict.FAILED) == (days < 0 or set(said) == {Verdict.PASSED})
