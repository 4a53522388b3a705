"""The outcome of a resume from one state, from the record of the run and its verdict. Pure.

If forked ranks fail from a state, this is only a suspicion: the failure counts when a cold start has shown it too. Cold
starts take much longer, so those that tell most come first."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any

from torchaos.harness.analysis.ending import last_error
from torchaos.harness.analysis.verdict import harm_of
from torchaos.harness.crash_explorer import synthetic_crash
from torchaos.harness.crash_explorer.synthetic_crash import DEATH
from torchaos.harness.interfaces import Harm
from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.record.record import Record
from torchaos.harness.record.result import ExitCode, Result, Verdict


class OutcomeClass(str, Enum):
    """The result of a resume from one state. The worst member is first, the best last."""

    WRONG = "silently wrong"  # it continued, and its results or checkpoints differ from a run without the death
    WONT_START = "won't start"  # it ended before it got past the step of the death
    HANGS = "hangs"
    LOST_WORK = "lost work"  # it continued from an older checkpoint than necessary
    UNCLEAR = "can't be told"
    RIGHT = "resumed correctly"

    @property
    def exit_code(self) -> ExitCode:
        if self is OutcomeClass.RIGHT:
            return ExitCode.PASSED
        return ExitCode.INCONCLUSIVE if self is OutcomeClass.UNCLEAR else ExitCode.FAILED


FATAL = (
    OutcomeClass.WRONG,
    OutcomeClass.WONT_START,
    OutcomeClass.HANGS,
)  # outcomes after which a person must repair something


@dataclass(frozen=True)
class Outcome:
    """The outcome of one state."""

    state: str  # the name of the state
    digest: str  # of the state's files
    model: str  # the model of death
    died_at_step: int  # the highest global step before the death
    kind: OutcomeClass
    reason: str
    assertion: str = ""  # the assertion that failed
    lost_steps: int | None = None  # steps lost against the newest complete checkpoint; None: none, or not known
    from_step: int | None = None  # the step from which it resumed; None: it did not resume, or the step is not known
    mended: bool | None = None  # whether a second start got past the death; None: there was no second start. False
    # too if the first start had changed no file
    warm: bool = False  # the ranks were forked, not started by the job's launcher
    seconds: float = 0.0
    operations: int = 0  # before the death
    last_operation: str = ""  # a description
    moments: tuple[tuple[float, float], ...] = ()  # (begin, end) of possible deaths, s of the recording
    files: tuple[tuple[str, str], ...] = ()  # (path, state in words) of each file that the story names
    run_dir: str = ""  # the run directory of the resume, if it was kept
    like: str = ""  # another state that was resumed instead: before its failure, the job sees no difference
    printed: str = ""  # if forked ranks did not start: a digest of what they printed
    shown_by: str = ""  # another state, whose cold start has shown the same failure

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "kind": self.kind.value}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Outcome:
        """The outcome, from its JSON. Raises ValueError, KeyError or TypeError if it is no outcome."""
        pairs = {name: tuple((pair[0], pair[1]) for pair in raw[name]) for name in ("moments", "files")}
        return cls(**{**raw, **pairs, "kind": OutcomeClass(raw["kind"])})


@dataclass(frozen=True)
class Seen:
    """The class of one resume, and the facts that decided it."""

    kind: OutcomeClass
    reason: str
    assertion: str = ""
    lost_steps: int | None = None
    from_step: int | None = None
    mended: bool | None = None


def seen_in(run: Record, result: Result, due: int | None, hung: bool) -> Seen:
    """The class of a resume, from the record and the verdict. `due`: the last step of the job without a death. `hung`:
    the resume was ended because nothing happened for too long."""
    found = _class_of(run, result, due, hung)
    back = [
        attempt for attempt in run.history.attempts if attempt.number > _died_in(run) and attempt.first_step is not None
    ]
    return replace(found, from_step=back[-1].base if back else None)


def failed_at_once(run: Record) -> bool:
    """Whether the first start after the death failed or hung, and no start made a step. Then the failure depends only
    on what the job found in its folder."""
    trained = any(execution.attempt > _died_in(run) for execution in run.history.executions)
    ends = _ends(run)
    return not trained and bool(ends[0] if ends else run.stopped and not run.stopped.data["interrupted"])


def _class_of(run: Record, result: Result, due: int | None, hung: bool) -> Seen:
    got_past = _came_back(run, result) or _was_done(run, due)
    failed_first = _first_start(run)
    if failed_first:
        again = any(event.data["submission"] > 0 for event in run.of_kind(Kind.JOB_STARTED))
        return Seen(OutcomeClass.WONT_START, failed_first, mended=got_past if again else None)
    if hung:
        return Seen(OutcomeClass.HANGS, run.stopped.data["reason"] if run.stopped else "nothing happened for too long")
    for harm, kind in ((Harm.WRONG_RESULT, OutcomeClass.WRONG), (Harm.LOST_WORK, OutcomeClass.LOST_WORK)):
        failed = (case for case in result.assertions(Verdict.FAILED) if harm_of(case.name) is harm and not case.follows)
        if case := next(failed, None):
            return Seen(kind, case.reason, case.name, case.measured.get("needless"))
    if not got_past:
        return _not_beyond(run, result)
    unclear = [case for case in result.cases if case.verdict in (Verdict.INCONCLUSIVE, Verdict.ERROR)]
    if result.verdict is Verdict.INCONCLUSIVE and not unclear:
        return Seen(OutcomeClass.UNCLEAR, result.reason)
    if unclear and not _was_done(run, due):
        return Seen(OutcomeClass.UNCLEAR, f"{unclear[0].name}: {unclear[0].reason}")
    if result.verdict is Verdict.FAILED and not _was_done(run, due):
        return Seen(OutcomeClass.UNCLEAR, result.reason)
    return Seen(OutcomeClass.RIGHT, "" if _came_back(run, result) else "there was nothing left to train")


def _not_beyond(run: Record, result: Result) -> Seen:
    """The class of a resume that was not seen to get past the step of the death."""
    if any(attempt > _died_in(run) for attempt in run.history.unplaced):
        return Seen(OutcomeClass.UNCLEAR, f"it is not known which steps it made: {result.reason}")
    if blind := _blind_hook(run):
        return Seen(OutcomeClass.UNCLEAR, f"its steps may not have been seen, because the agent's hook {blind} failed")
    if run.exit_code == 0:
        return Seen(OutcomeClass.WONT_START, "the job ended with exit code 0, and made no step beyond the death")
    why = run.stopped.data["reason"] if run.stopped else "it made no step beyond the death"
    return Seen(OutcomeClass.UNCLEAR, why)


def _came_back(run: Record, result: Result) -> bool:
    """Whether the job got past the step in which it had died. If the job had made no step: whether it made a step."""
    if _hit(run) is None:
        started_s = synthetic_crash.death_s(run)
        reached = run.history.highest_step(before_s=started_s) or 0
        again = run.history.executions.at(run.history.executions.mono_s > started_s)
        return len(again) > 0 and (not reached or int(again.global_step.max()) > reached)
    own = [recovery for recovery in result.recoveries if recovery.fault == DEATH]
    return bool(own) and own[-1].parts.get("caught_up") is not None


def _was_done(run: Record, due: int | None) -> bool:
    """Whether the job had done its last step when it died, and the resume then ended successfully."""
    died_s = synthetic_crash.death_s(run)
    reached = run.history.highest_step(before_s=died_s) or 0
    return due is not None and reached >= due and run.exit_code == 0 and run.exited is not None


def _first_start(run: Record) -> str:
    """Why the first start after the death failed, as a clause; empty if it did not end with an error."""
    ends = _ends(run)
    if not ends or not ends[0]:
        return ""
    error = last_error(run).partition("the job's last error: ")[2]
    return f"the job ended with exit code {ends[0]}" + (f": {error}" if error else "")


def _ends(run: Record) -> list[int | None]:
    """The exit codes of the job's command after the death, one for each start that ended by itself."""
    until_s = run.stopped.mono_s if run.stopped else float("inf")
    exits = [event for event in run.of_kind(Kind.JOB_EXITED) if event.data["submission"] >= 0]
    return [event.data["exit_code"] for event in exits if event.mono_s < until_s]


def _died_in(run: Record) -> int:
    """The number of the last attempt before the death."""
    if hit := _hit(run):
        return hit.attempt or 0
    before = (one.number for one in run.history.attempts if one.started_s < synthetic_crash.death_s(run))
    return max(before, default=0)


def _hit(run: Record) -> Event | None:
    """The first kill of a rank in the simulated death. None if the job died before a rank was up."""
    return next(run.of_fault(DEATH, Kind.APPLYING), None)


def _blind_hook(run: Record) -> str:
    """A hook of the agent that failed after the death, so that steps may be unseen. Empty if there is none."""
    failed = (event for event in run.of_kind(Kind.AGENT_FAILED) if (event.attempt or 0) > _died_in(run))
    return next((str(event.data["hook"]) for event in failed if event.data["hook"] in ("steps", "imported")), "")


SHOWN = (
    "failures without a cold start of their own: forked ranks failed in the same way and with the same words as in a "
    "state whose cold start has shown the failure"
)


def is_suspected(outcome: Outcome) -> bool:
    """Whether only forked ranks have failed from this state."""
    return outcome.warm and outcome.kind is not OutcomeClass.RIGHT and not outcome.shown_by


def with_proof(found: Outcome, before: Iterable[Outcome]) -> Outcome:
    """The same outcome. `shown_by` is set if the failure counts without a cold start of its own: a cold start of an
    earlier state has shown the failure, and forked ranks of that state had printed the same lines."""
    if not is_suspected(found) or not found.printed:
        return found
    shown = (one for one in before if not one.warm and not one.like and one.printed == found.printed)
    other = next((one for one in shown if failure(one) == failure(found)), None)
    return replace(found, shown_by=other.state) if other else found


def failure(outcome: Outcome) -> tuple[str, ...]:
    """A key that is equal for equal failures: class, assertion, and the reason without its numbers."""
    return outcome.kind, outcome.assertion, re.sub(r"\d+", "", outcome.reason)


def may_pay(suspected: Outcome, before: Collection[Outcome]) -> bool:
    """Whether a cold start now may save later resumes or cold starts: the failure came before the first step, and
    earlier cold starts of this failure have saved about as many as they cost."""
    same = [outcome for outcome in before if not outcome.warm and failure(outcome) == failure(suspected)]
    again = [outcome for outcome in before if outcome.shown_by and failure(outcome) == failure(suspected)]
    saved = len(again) + sum(bool(outcome.like) for outcome in same)
    return suspected.from_step is None and 2 * saved >= len(same)


def each_kind_first(outcomes: Sequence[Outcome], confirmed: Collection[OutcomeClass]) -> list[Outcome]:
    """The same outcomes in another order: first an outcome of each class that is not confirmed; then an outcome of each
    kind of failure, a second of each, and so on."""
    seen, classes = Counter[tuple[str, ...]](), {*confirmed}
    rounds: list[tuple[int, Outcome]] = []
    for outcome in outcomes:
        kind = failure(outcome)
        rounds.append((seen[kind] if outcome.kind in classes else -1, outcome))
        classes.add(outcome.kind)
        seen[kind] += 1
    return [outcome for _round, outcome in sorted(rounds, key=lambda pair: pair[0])]
