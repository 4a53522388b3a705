"""What happened in a run, in a sentence, and its figures against their bounds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from recorded import judged, recorded

from torchaos.harness.analysis.verdict import judge
from torchaos.harness.protocol.wire import Kind
from torchaos.harness.record.record import Record
from torchaos.harness.record.result import Case, Recovery, Result, Verdict
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.reporting.terminal.headline import cards, failures_first, gauges, happened, outcome_in_words

GOLDEN = Path(__file__).parents[1] / "data" / "runs"


def test_each_recovery_gets_a_sentence(tmp_path: Path) -> None:
    """What hit whom and when, and what came of it; a job that went on by itself was not restarted. Several faults are
    numbered."""
    folder = recorded(tmp_path / "run")
    kill, freeze = happened(Record.load(folder), judged(folder))
    assert kill.startswith(
        "1. process.kill hit rank 1 of 2 in step 12 (backward). The job was restarted and went on from "
    )
    assert kill.endswith("It caught up 20.68 s after the fault.")
    assert freeze.startswith("2. process.freeze hit rank 0 of 2")
    assert "The job went on without a restart after" in freeze


def test_a_fault_before_the_job_had_recovered_has_no_recovery_of_its_own(tmp_path: Path) -> None:
    """What was done to a job that was still down is not said to have been outlived without a restart."""
    folder = recorded(tmp_path / "run")
    run, result = Record.load(folder), judged(folder)
    kill, freeze = (event.mono_s for event in run.of_kind(Kind.APPLYING))
    late = replace(result.recoveries[0], parts={**result.recoveries[0].parts, "caught_up": freeze - kill + 1.0})
    _kill, second = happened(run, replace(result, recoveries=(late, *result.recoveries[1:])))
    assert second.endswith("The job had not yet recovered from the fault before.")


def test_a_job_that_never_came_back_is_told(tmp_path: Path) -> None:
    """Without a step beyond the highest step before the fault, the sentence says so."""
    folder = recorded(tmp_path / "run")
    result = judged(folder)
    never = replace(result.recoveries[0], parts={**result.recoveries[0].parts, "caught_up": None})
    (kill,) = happened(Record.load(folder), replace(result, recoveries=(never,)))
    assert kill.endswith("and never caught up.")


def test_a_stall_is_told_with_its_own_length() -> None:
    """Of a fault that lasts, the sentence and the recovery say how long it was on; a kill has no length."""
    stalled, killed = (judge(RunDir(GOLDEN / name)) for name in ("stalled-a-step-later", "kill"))
    (sentence,) = happened(Record.load(RunDir(GOLDEN / "stalled-a-step-later")), stalled)
    assert "in step 20 (forward) and lasted 4.03 s. The job went on without a restart" in sentence
    words = outcome_in_words(stalled.recoveries[0])
    assert words == "went on without a restart after 4.03 s (the fault itself lasted 4.03 s), no steps done again"
    assert killed.recoveries[0].lasted_s is None


def test_a_fault_that_stayed_until_the_end_has_no_length() -> None:
    """A freeze that was taken back only because the run was ended did not last for a time of its own."""
    assert judge(RunDir(GOLDEN / "freeze")).recoveries[0].lasted_s is None


def test_a_run_without_recoveries_is_told(results: dict[str, Result], tmp_path: Path) -> None:
    """A fault that never landed is named; a run without faults says how many steps there were."""
    run = Record.load(recorded(tmp_path / "run"))
    empty = replace(run, events=())
    missed = replace(results["passed"].faults[0], applied=None)
    assert happened(empty, replace(results["passed"], faults=(missed,), recoveries=())) == [
        "process.kill at rank 1 never landed; it was planned for: step 25, backward.", "The job made 60 steps.",
    ]  # fmt: skip
    assert happened(empty, replace(results["passed"], faults=(), recoveries=())) == [
        "No fault was planned. The job made 60 steps."
    ]


def test_each_figure_stands_against_its_bound(results: dict[str, Result]) -> None:
    """A figure within its bound passes, one beyond it fails, and one without a bound is neither."""
    passed = results["passed"]
    time, steps, samples = gauges(passed)
    assert (time.value, time.bound, time.state) == ("6.84 s", "60 s allowed", "passed")
    assert time.share == pytest.approx(6.841 / 60)
    assert (steps.value, steps.bound, steps.state, steps.share) == ("5", "no bound", "unbounded", None)
    assert samples.value == "not known"
    strict = Case("recovery_time", "assertion", Verdict.FAILED, "", {}, {"catch_up": 5.0, "lost_steps": 5})
    lost = Case("sample_accounting", "assertion", Verdict.FAILED, "", {"skipped": 56, "repeated": 8})
    time, steps, samples = gauges(replace(passed, cases=(strict, lost)))
    assert [(one.value, one.state, one.share) for one in (time, steps, samples)] == [
        ("6.84 s", "failed", 1.0), ("5", "passed", 1.0), ("56 / 8", "failed", 1.0),
    ]  # fmt: skip


def test_what_is_not_known_is_not_drawn(results: dict[str, Result]) -> None:
    """A job that never caught up has no figure, and a run in which no fault landed has no gauges."""
    never = Recovery("kill", {"caught_up": None}, None)
    time, steps, _samples = gauges(replace(results["passed"], recoveries=(never,)))
    assert [(one.value, one.share) for one in (time, steps)] == [("never", None), ("not known", None)]
    assert gauges(replace(results["passed"], recoveries=())) == []


def test_the_first_card_shows_what_failed(results: dict[str, Result]) -> None:
    """Three good figures above a verdict that is red would puzzle the reader."""
    first, *others = cards(results["failed"])
    assert (first.name, first.value, first.bound, first.state) == ("failed", "loss continuity", "", "failed")
    assert others == gauges(results["failed"])
    assert cards(results["several"])[0].bound == "and 1 more"
    assert cards(results["passed"]) == gauges(results["passed"])


def test_failures_come_first(results: dict[str, Result]) -> None:
    """A failure comes before its consequences, and both before what passed."""
    sampler = Case("sample_accounting", "assertion", Verdict.FAILED, "")
    loss = Case("loss_continuity", "assertion", Verdict.FAILED, "", follows="sample_accounting")
    good = Case("completed", "assertion", Verdict.PASSED, "")
    assert failures_first((good, loss, sampler)) == [sampler, loss, good]


@pytest.mark.parametrize(
    ("run", "first", "last"),
    [
        ("no-such-script", "The job died by itself, before any fault. No step was seen.", ""),
        ("missed", "process.kill at rank 1 never landed; it was planned for: step 900.", "The job made 12 steps."),
        ("freeze", "process.freeze hit rank 0 of 2",
         "Then the run was ended after step 9: the stop condition no_progress holds."),
    ],
)  # fmt: skip
def test_the_end_of_a_run_is_told(run: str, first: str, last: str) -> None:
    """A job that died before any fault, a job that ended before its fault, and a job that hung and was ended."""
    folder = RunDir(GOLDEN / run)
    found = happened(Record.load(folder), judge(folder))
    assert found[0].startswith(first)
    assert found[-1].endswith(last)
