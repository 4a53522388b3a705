"""The result of a run that has not finished. Every case is an error, so that a gate that reads it stays closed."""

from __future__ import annotations

from pathlib import Path

from torchaos.harness.record.plan import Plan
from torchaos.harness.record.result import Case, ExitCode, Result, Verdict

_NOT_FINISHED = "not finished"


def placeholder_result(plan: Plan, run_dir: Path | str) -> Result:
    """The result of an unfinished run. It has the same cases, in the same order, as the result that will replace it."""
    faults = [Case("faults", "faults", Verdict.ERROR, _NOT_FINISHED)] if plan.faults else []
    asserts = [Case(one.name, "assertion", Verdict.ERROR, _NOT_FINISHED, bound=one.params) for one in plan.asserts]
    return Result(
        scenario=plan.scenario,
        description=plan.description,
        seed=plan.seed,
        verdict=Verdict.ERROR,
        exit_code=ExitCode.INTERNAL,
        reason=_NOT_FINISHED,
        run_dir=str(run_dir),
        started="",
        duration_s=0.0,
        cases=(*faults, *asserts, Case("rollback", "rollback", Verdict.ERROR, _NOT_FINISHED)),
    )
