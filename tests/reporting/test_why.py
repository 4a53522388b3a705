"""Why the verdict is what it is, in one line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from torchaos.harness.analysis.verdict import judge
from torchaos.harness.record.plan import last_words_in_words
from torchaos.harness.record.result import Case, Result, Verdict
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.reporting.terminal.console import why, without_words

GOLDEN = Path(__file__).parents[1] / "data" / "runs"


def _case(name: str, reason: str, **more: str) -> Case:
    return Case(name, "assertion", Verdict.FAILED, reason, **more)  # type: ignore[arg-type]


def test_the_root_cause_leads(results: dict[str, Result]) -> None:
    """If the case that decided follows from another, the words are about that other: its cause, then its symptom."""
    sampler = _case("sample_accounting", "16 were skipped. In all, 3.", cause="the sampler restarted")
    loss = _case("loss_continuity", "the loss differs", follows="sample_accounting", cause="the data")
    good = Case("completed", "assertion", Verdict.PASSED, "")
    result = replace(
        results["failed"], faults=(), cases=(good, loss, sampler), decided_by="loss_continuity",
        reason="sample_accounting: 16 were skipped. In all, 3.",
    )  # fmt: skip
    assert why(result)[:3] == (
        "Most likely, the sampler restarted",
        "2 of 3 assertions failed: sample accounting (1 more follows from it)",
        "16 were skipped",
    )


def test_without_a_cause_the_first_sentence_leads(results: dict[str, Result]) -> None:
    """The rest of the reason is in the list of cases, and only what the case does not say is added."""
    torn = _case("checkpoint_integrity", "model-0.pt is torn at byte 3.5. The others are whole.")
    result = replace(
        results["failed"], cases=(torn,), decided_by=torn.name,
        reason=f"checkpoint_integrity: {torn.reason}; the job's last error: OSError: disk full",
    )  # fmt: skip
    lead, count, more, _ = why(result)
    assert lead == "model-0.pt is torn at byte 3.5"
    assert count == "1 of 1 assertion failed: checkpoint integrity"
    assert more == "The job's last error: OSError: disk full"


def test_a_fault_that_was_not_outlived_leads(results: dict[str, Result]) -> None:
    """Failures that follow from the fault are counted as such, and the name of a fault keeps its small letter."""
    fallen = Case("faults", "faults", Verdict.FAILED, "process.kill: the job never got past step 12")
    others = [_case("restarts", ""), _case("completed", "", follows="faults"), _case("state", "", follows="faults")]
    result = replace(
        results["failed"], cases=(fallen, *others), decided_by="faults", reason=f"faults: {fallen.reason}"
    )  # fmt: skip
    assert why(result)[:2] == (
        "process.kill: the job never got past step 12",
        "3 of 3 assertions failed: restarts, and 2 because the fault was not outlived",
    )


@pytest.mark.parametrize(
    ("run", "lead", "count"),
    [
        ("kill", "Every fault was felt and outlived, and every assertion holds", ""),
        ("missed", "process.kill: it never landed", ""),
        ("no-such-script", "The job died before its first step was seen (exit code 2)", ""),
        ("interrupted", "The run was ended early: SIGTERM was received", ""),
        ("forgets-optimizer", "Most likely, the optimizer's state was not restored",
         "2 of 6 assertions failed: loss continuity (1 more follows from it)"),
        ("stale-store", "process.kill: the job never got past step 6",
         "3 of 3 assertions failed because the fault was not outlived"),
    ],
)  # fmt: skip
def test_recorded_runs(run: str, lead: str, count: str) -> None:
    """Each kind of verdict has its line; if no assertion decided, none is counted."""
    told = why(judge(RunDir(GOLDEN / run)))
    assert told.lead.startswith(lead)
    assert told.failures == count


def test_the_last_lines_of_a_log_are_told_as_lines(results: dict[str, Result]) -> None:
    """They stand in the reason too, for readers of one line; people read them once, as the job wrote them."""
    lines = ("Traceback (most recent call last):", "ModuleNotFoundError: No module named 'x'")
    reason = f"the job died before its first step was seen (exit code 1){last_words_in_words(lines)}"
    blind = _case("completed", f"{reason}; the job ended with exit code 1")
    result = replace(results["failed"], reason=reason, decided_by="", last_words=lines, cases=(blind,))
    told = why(result)
    assert (told.lead, told.log) == ("The job died before its first step was seen (exit code 1)", lines)
    assert lines[0] not in without_words(blind.reason, result)


@pytest.mark.parametrize("name", ["step-20 (step 20)", "out/model", "last.pt"])
def test_the_name_of_a_file_keeps_its_letters(results: dict[str, Result], name: str) -> None:
    """A sentence begins with a capital letter, a file does not."""
    torn = _case("checkpoint_integrity", f"{name} is torn")
    result = replace(results["failed"], cases=(torn,), decided_by=torn.name, reason=f"{torn.name}: {torn.reason}")
    assert why(result).lead == f"{name} is torn"


def test_an_inconclusive_assertion_is_counted(results: dict[str, Result]) -> None:
    """If the faults are proved, the reader learns which assertions could not be judged."""
    dark = Case("state_restored", "assertion", Verdict.INCONCLUSIVE, "no counter was seen")
    result = replace(
        results["passed"], verdict=Verdict.INCONCLUSIVE, cases=(*results["passed"].cases, dark),
        decided_by=dark.name, reason="state_restored: no counter was seen",
    )  # fmt: skip
    assert why(result).failures == "1 of 5 assertions is inconclusive: state restored"
