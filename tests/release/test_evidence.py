"""Runs whose faults are in doubt: a gate decides as the run itself does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from torchaos.harness.analysis.verdict import judge
from torchaos.harness.record.result import Case, Result, Verdict
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.release import gate_verdict

from .conftest import Release

UNKNOWN = "the run was ended on purpose before the job had recovered"


def told(result: Result, verdict: Verdict, decided_by: str, cases: Mapping[str, tuple[Verdict, str | None]]) -> Result:
    """The result with these verdicts of its cases, and what each follows from."""

    def case_of(one: Case) -> Case:
        of, follows = cases.get(one.name, (one.verdict, None))
        return replace(one, verdict=of, reason=UNKNOWN if of is Verdict.INCONCLUSIVE else one.reason, follows=follows)

    return replace(
        result, verdict=verdict, exit_code=verdict.exit_code, decided_by=decided_by, reason=f"{decided_by}: {UNKNOWN}",
        cases=tuple(map(case_of, result.cases)),
    )  # fmt: skip


@pytest.mark.parametrize(("verdict", "decided_by"), [(Verdict.FAILED, "completed"), (Verdict.INCONCLUSIVE, "faults")])
def test_a_failed_assertion_is_hidden_only_by_a_fault_that_proves_nothing(
    release: Release, monkeypatch: pytest.MonkeyPatch, verdict: Verdict, decided_by: str
) -> None:
    """A fault that landed and was felt, and of which nobody knows whether it was outlived, leaves the run failed by its
    assertion; one that was not felt makes it inconclusive. The gate says what the run says."""
    cases = {"faults": (Verdict.INCONCLUSIVE, None), "completed": (Verdict.FAILED, None)}
    (folder,) = map(RunDir, release.runs.iterdir())
    view = told(judge(folder), verdict, decided_by, cases)
    monkeypatch.setattr(gate_verdict, "judged_again", lambda run, layers: [view])
    (result,) = release.judged().results
    assert (result.verdict, result.decided_by) == (verdict, decided_by), result.reason


def test_the_cause_is_told_and_not_what_follows_from_it(release: Release, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several failures the gate names the one that decided in the run, wherever it stands in the list."""
    cases = {"loss_continuity": (Verdict.FAILED, "sample_accounting"), "sample_accounting": (Verdict.FAILED, None)}
    (folder,) = map(RunDir, release.runs.iterdir())
    view = told(judge(folder), Verdict.FAILED, "sample_accounting", cases)
    monkeypatch.setattr(gate_verdict, "judged_again", lambda run, layers: [view])
    (result,) = release.judged().results
    assert result.decided_by == "sample_accounting"
