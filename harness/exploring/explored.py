"""All outcomes of an exploration: their classes, the share of the run in which a death would be fatal, and the result.
Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torchaos.harness.exploring.choice import Choice
from torchaos.harness.exploring.operations import Recording
from torchaos.harness.exploring.outcomes import FATAL, Class, Outcome
from torchaos.harness.exploring.suspected import is_suspected
from torchaos.harness.record.plan import Plan
from torchaos.harness.record.result import Case, ExitCode, Result, Verdict
from torchaos.harness.record.words import counted


@dataclass(frozen=True)
class Explored:
    """The result of an exploration: the choice of states, and their outcomes."""

    outcomes: tuple[Outcome, ...]
    choice: Choice  # how many states exist, and how many were wanted
    recording: Recording
    seconds: float  # of the recorded run
    warm: str  # how resumes were started: a sentence without its full stop
    unfinished: str = ""  # why not all wanted states were tried, as a clause
    notes: tuple[str, ...] = ()
    reproduce: str = ""  # the command line
    versions: Mapping[str, str] = field(default_factory=dict)

    def of(self, kind: Class) -> list[Outcome]:
        """The outcomes of a class, confirmed ones first, sorted by the number of operations before the death."""
        found = [outcome for outcome in self.outcomes if outcome.kind is kind]
        return sorted(found, key=lambda outcome: (is_suspected(outcome), outcome.operations, outcome.state))

    def unconfirmed(self, kind: Class) -> int:
        """How many states of a class only forked ranks have shown, and no cold start yet."""
        return sum(is_suspected(outcome) for outcome in self.of(kind))

    @property
    def smallest(self) -> Outcome | None:
        """The failing state of the worst class that is confirmed, or else of the worst class; of several, the state
        with the fewest operations before the death."""
        worst = [self.of(kind)[0] for kind in Class if kind.exit_code is ExitCode.FAILED and self.of(kind)]
        return min(worst, key=is_suspected, default=None)

    @property
    def fatal_s(self) -> float:
        """Seconds of the recorded run in which the death of the job would be fatal: the job would not start again,
        would hang, or would continue wrongly. Only deaths of processes are counted: for a loss of power, one moment can
        leave many states."""
        return self._fatal_s(self.outcomes)

    @property
    def unconfirmed_fatal_s(self) -> float:
        """The seconds of `fatal_s` of which no cold start has shown that a death is fatal."""
        return self.fatal_s - self._fatal_s(one for one in self.outcomes if not is_suspected(one))

    @staticmethod
    def _fatal_s(outcomes: Iterable[Outcome]) -> float:
        return _length(
            moment for outcome in outcomes if outcome.kind in FATAL and outcome.model == "process death"
            for moment in outcome.moments
        )  # fmt: skip

    @property
    def tried_s(self) -> float:
        """Seconds of the recorded run whose states were tried."""
        return _length(
            moment for outcome in self.outcomes if outcome.model == "process death" for moment in outcome.moments
        )

    @property
    def fatal_share(self) -> float | None:
        """The fatal part of the time that was tried. None if no time was tried."""
        return self.fatal_s / self.tried_s if self.tried_s else None

    @property
    def exit_code(self) -> ExitCode:
        """Only confirmed failures make it failed; with others alone it is inconclusive."""
        if any(one.kind.exit_code is ExitCode.FAILED and not is_suspected(one) for one in self.outcomes):
            return ExitCode.FAILED
        complete = {outcome.kind for outcome in self.outcomes} == {Class.RIGHT} and not self.unfinished
        return ExitCode.PASSED if complete else ExitCode.INCONCLUSIVE


def cases_of(found: Explored) -> list[Case]:
    """A case for each class of wrong outcomes, and a case for the right outcomes."""
    counts = Counter(outcome.kind for outcome in found.outcomes)
    right = f"{counts[Class.RIGHT]} of {counted(len(found.outcomes), 'state', 'was/were')} resumed rightly"
    cases = []
    for kind in Class:
        own = found.of(kind)
        measured = {"states": len(own), "of": len(found.outcomes)}
        if kind is Class.RIGHT:
            verdict = Verdict.PASSED if own else Verdict.INCONCLUSIVE
            cases.append(Case(kind.value, "assertion", verdict, right, measured))
        elif own:
            measured |= (
                {"lost_steps": max(outcome.lost_steps or 0 for outcome in own)} if kind is Class.LOST_WORK else {}
            )
            if unconfirmed := found.unconfirmed(kind):
                measured |= {"unconfirmed": unconfirmed}
            verdict = Verdict.INCONCLUSIVE if unconfirmed == len(own) else kind.exit_code.verdict
            cases.append(Case(kind.value, "assertion", verdict, told(own), measured))
        else:
            reason = f"none of {counted(len(found.outcomes), 'state')}"
            cases.append(Case(kind.value, "assertion", Verdict.PASSED, reason, measured))
    if found.unfinished:
        cases.append(Case("exploration", "assertion", Verdict.INCONCLUSIVE, f"not finished: {found.unfinished}"))
    return cases


def told(own: Sequence[Outcome]) -> str:
    """How many states have these outcomes, and the simplest of them, by preference a confirmed one."""
    many = "1 state" if len(own) == 1 else f"{len(own)} states"
    unconfirmed = sum(map(is_suspected, own))
    some = "" if unconfirmed == len(own) else f"{unconfirmed} of them "
    many += f" ({some}not confirmed by a cold start)" if unconfirmed else ""
    first = own[0]
    after = f" after {first.last_operation}" if first.last_operation else ""
    says = f"{first.assertion}: {first.reason}" if first.assertion else first.reason
    return f"{many}, such as {first.state} ({first.model}{after}): {says}"


def result_of(plan: Plan, found: Explored, home: str, started: str, seconds: float, left: Sequence[str]) -> Result:
    """The exploration's result in the form of a run's. `left`: sentences about changes that could not be undone."""
    cases = cases_of(found)
    code = ExitCode.ROLLBACK if left else found.exit_code
    bad = next((case for case in cases if case.verdict is found.exit_code.verdict), cases[-1])
    reason = f"all {counted(len(found.outcomes), 'state', 'was/were')} resumed rightly"
    if left or bad.verdict is not Verdict.PASSED:
        others = [one for one in cases if one is not bad and one.measured.get("unconfirmed")]
        also = ", ".join(f"{one.name} ({one.measured['states']})" for one in others)
        reason = left[0] if left else f"{bad.name}: {bad.reason}" + (f"; also seen: {also}" if also else "")
    return Result(
        plan.scenario, plan.description, plan.seed, code.verdict, code, reason, home, started, round(seconds, 3),
        cases=tuple(cases), twin="", notes=found.notes, reproduce=found.reproduce, versions=found.versions,
        decided_by="" if code is ExitCode.PASSED or left else bad.name,
    )  # fmt: skip


def _length(moments: Iterable[tuple[float, float]]) -> float:
    """The seconds that these times cover together."""
    total, end = 0.0, float("-inf")
    for since, until in sorted(moments):
        total += max(0.0, until - max(since, end))
        end = max(end, until)
    return total
