"""All outcomes of an exploration: their classes, the share of the run in which a death would be fatal, and for each
failure what the death left of each file (whole, cut short, missing, or older than the death) and a script that shows
it."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from torchaos.harness.crash_explorer.folder_contents import Content
from torchaos.harness.crash_explorer.fs_model import State, joined
from torchaos.harness.crash_explorer.operations import Operation, OperationKind, Recording
from torchaos.harness.crash_explorer.resume_outcomes import FATAL, Outcome, OutcomeClass, is_suspected
from torchaos.harness.crash_explorer.s3_store import store_in_shell
from torchaos.harness.crash_explorer.state_selection import Choice
from torchaos.harness.record.plan import Plan, PlannedJob, counted
from torchaos.harness.record.redaction import mask_env, mask_words
from torchaos.harness.record.result import Case, ExitCode, Result, Verdict
from torchaos.harness.record.rundir import RunDir

_NEAR = 40  # how many operations before and after the death; the files of these are named


def files_of(state: State, recording: Recording) -> tuple[tuple[str, str], ...]:
    """Each file that was about to change when the job died, with its state after the death in words. Paths are relative
    to the checkpoint folder. If a folder is missing, only the folder is listed, not its files. In a store, which has no
    folders, each missing object is listed."""
    last = state.last_operation.number if state.last_operation else -1
    numbers = {operation.number: place for place, operation in enumerate(recording.operations)}
    at = numbers.get(last, -1)
    episode = _episode(recording.operations, at)
    sizes = _wanted_sizes(episode, last)
    paths = (path for operation in episode for path in (operation.path, operation.to) if path)
    put = {operation.path for operation in episode if operation.kind is OperationKind.PUT}
    named = (path for path in paths if path in put or path.rpartition("/")[0] in state.tree.names)
    told = {path: _in_words(path, state, sizes) for path in named}
    return tuple(sorted(told.items()))


def _episode(operations: tuple[Operation, ...], at: int) -> tuple[Operation, ...]:
    """The operations of the save in which the job died: operations that follow each other without a longer pause."""
    if not operations:
        return ()
    at = max(0, at)
    gaps = [after.begun_s - before.ended_s for before, after in pairwise(operations)]
    usual = sorted(gaps)[int(len(gaps) * 0.8)] if gaps else 0.0
    pause = max(0.05, 5 * usual)
    first = at
    while first > 0 and gaps[first - 1] < pause and at - first < _NEAR:
        first -= 1
    end = at + 1
    while end < len(operations) and gaps[end - 1] < pause and end - at < _NEAR:
        end += 1
    return operations[first:end]


def _wanted_sizes(episode: tuple[Operation, ...], last: int) -> Mapping[str, int]:
    """The size that each file had, or was about to get, when the job died; by path. `last`: the number of the last
    operation before the death."""
    sizes: dict[str, int] = {}
    done: set[str] = set()  # files that were closed after the death; later operations on them belong to another save
    for operation in episode:
        path = operation.path
        if path in done:
            continue
        if operation.kind in (OperationKind.CREATE, OperationKind.TRUNCATE):
            sizes[path] = operation.size
        elif operation.kind is OperationKind.WRITE:
            sizes[path] = max(sizes.get(path, 0), operation.offset + operation.size)
        elif operation.kind is OperationKind.CLOSE and operation.number > last:
            done.add(path)
        elif operation.kind is OperationKind.RENAME and operation.to and operation.number <= last:
            moved = {old: size for old, size in sizes.items() if _is_below(old, path)}
            sizes |= {operation.to + old[len(path) :]: size for old, size in moved.items()}
    return sizes


def _in_words(path: str, state: State, sizes: Mapping[str, int]) -> str:
    content: Content | None = state.tree.files.get(path)
    if content is None:
        return "a folder" if path in state.tree.folders else "a link" if path in state.tree.links else "missing"
    written = sum(extent.size for extent in content.extents)
    wanted = sizes.get(path)
    if not content.size:
        return "empty"
    if wanted is None or (content.size >= wanted and written >= content.size):
        return "complete"
    if written < content.size:
        return f"torn: {written} of {content.size} bytes are there"
    return f"torn: {content.size} of {wanted} bytes"


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder}/")


NAME, STATE = "reproduce.sh", "state"


def script_of(job: PlannedJob, now: RunDir, checkpoints: Path, outcome: Outcome) -> str:
    """The script that shows the failure, for the folder that contains STATE. `now`, `checkpoints`: the folder in which
    the job ran, and its checkpoint folder there; the state's files may contain these paths."""

    def filled(text: str) -> str:
        """The text with `$run` in place of `{run}`."""
        return '"$run"'.join(shlex.quote(part) if part else "" for part in text.split("{run}")) or "''"

    stored, variables = store_in_shell(job.env)
    env = [f"export {name}={filled(value)}" for name, value in mask_env(variables).items()]
    lines = [
        "#!/bin/sh",
        f"# The job dies at step {outcome.died_at_step} ({outcome.model}), and is started again on what is left:",
        f"# {outcome.kind.value}: {' '.join(outcome.reason.split())}"[:500],
        "# RUN: an empty or missing folder for the job; by default the one in which it was recorded, which is emptied.",
        "set -eu",
        'here=$(cd "$(dirname "$0")" && pwd)',
        f"run=${{RUN:-{shlex.quote(str(now.job))}}}",
        '[ -n "${RUN:-}" ] || rm -rf "$run"',
        f'checkpoints="$run"/{shlex.quote(str(checkpoints.relative_to(now.job)))}',
        'mkdir -p "$checkpoints"',
        f'cp -a "$here/{STATE}/." "$checkpoints/"',
        *stored,
        *env,
        f"cd {filled(job.cwd)}",
        f"{'' if stored else 'exec '}{' '.join(map(filled, mask_words(job.command)))}",
    ]
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class ExplorationSummary:
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

    def of(self, kind: OutcomeClass) -> list[Outcome]:
        """The outcomes of a class, confirmed ones first, sorted by the number of operations before the death."""
        found = [outcome for outcome in self.outcomes if outcome.kind is kind]
        return sorted(found, key=lambda outcome: (is_suspected(outcome), outcome.operations, outcome.state))

    def unconfirmed(self, kind: OutcomeClass) -> int:
        """How many states of a class have failed only with forked ranks, without a cold start so far."""
        return sum(is_suspected(outcome) for outcome in self.of(kind))

    @property
    def smallest(self) -> Outcome | None:
        """A failing state of the worst confirmed class or, if none is confirmed, of the worst class; of its states, the
        one with the fewest operations before the death. None if no state fails."""
        worst = [self.of(kind)[0] for kind in OutcomeClass if kind.exit_code is ExitCode.FAILED and self.of(kind)]
        return min(worst, key=is_suspected, default=None)

    @property
    def fatal_s(self) -> float:
        """Seconds of the recorded run in which the death of the job would be fatal: the job would not start again,
        would hang, or would continue wrongly. Only deaths of processes are counted, because a power loss at one moment
        can leave many states."""
        return self._fatal_s(self.outcomes)

    @property
    def unconfirmed_fatal_s(self) -> float:
        """The seconds of `fatal_s` that only forked ranks have shown, and no cold start."""
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
        """Failed if a failure is confirmed; inconclusive if there are only failures that are not confirmed."""
        if any(one.kind.exit_code is ExitCode.FAILED and not is_suspected(one) for one in self.outcomes):
            return ExitCode.FAILED
        complete = {outcome.kind for outcome in self.outcomes} == {OutcomeClass.RIGHT} and not self.unfinished
        return ExitCode.PASSED if complete else ExitCode.INCONCLUSIVE


def cases_of(found: ExplorationSummary) -> list[Case]:
    """A case for each class of wrong outcomes, and a case for the right outcomes. If the exploration was ended early, a
    class that was not seen is inconclusive: the states that were not tried may show it."""
    wanted = len(found.choice.states)
    if not found.outcomes:
        why = f": {found.unfinished}" if found.unfinished else ""
        return [Case("exploration", "assertion", Verdict.INCONCLUSIVE, f"none of {wanted} states was tried{why}")]
    counts = Counter(outcome.kind for outcome in found.outcomes)
    right = f"{counts[OutcomeClass.RIGHT]} of {counted(len(found.outcomes), 'state', 'was/were')} resumed correctly"
    cases = []
    for kind in OutcomeClass:
        own = found.of(kind)
        measured = {"states": len(own), "of": len(found.outcomes)}
        if kind is OutcomeClass.RIGHT:
            verdict = Verdict.PASSED if own else Verdict.INCONCLUSIVE
            cases.append(Case(kind.value, "assertion", verdict, right, measured))
        elif own:
            measured |= (
                {"lost_steps": max(outcome.lost_steps or 0 for outcome in own)}
                if kind is OutcomeClass.LOST_WORK
                else {}
            )
            if unconfirmed := found.unconfirmed(kind):
                measured |= {"unconfirmed": unconfirmed}
            verdict = Verdict.INCONCLUSIVE if unconfirmed == len(own) else kind.exit_code.verdict
            cases.append(Case(kind.value, "assertion", verdict, told(own), measured))
        else:
            left = wanted - len(found.outcomes) if found.unfinished else 0
            verdict = Verdict.INCONCLUSIVE if left else Verdict.PASSED
            reason = f"none of {counted(len(found.outcomes), 'state')}{f'; {left} were not tried' if left else ''}"
            cases.append(Case(kind.value, "assertion", verdict, reason, measured))
    if found.unfinished:
        cases.append(Case("exploration", "assertion", Verdict.INCONCLUSIVE, f"not finished: {found.unfinished}"))
    return cases


def told(own: Sequence[Outcome]) -> str:
    """The number of states with these outcomes, and the simplest of these states; if possible, a confirmed one."""
    many = "1 state" if len(own) == 1 else f"{len(own)} states"
    unconfirmed = sum(map(is_suspected, own))
    some = "" if unconfirmed == len(own) else f"{unconfirmed} of them "
    many += f" ({some}not confirmed by a cold start)" if unconfirmed else ""
    first = own[0]
    after = f" after {first.last_operation}" if first.last_operation else ""
    says = f"{first.assertion}: {first.reason}" if first.assertion else first.reason
    return f"{many}, such as {first.state} ({first.model}{after}): {says}"


def result_of(
    plan: Plan, found: ExplorationSummary, home: str, started: str, seconds: float, left: Sequence[str]
) -> Result:
    """The exploration's result in the form of a run's. `left`: sentences about changes that could not be undone."""
    cases = cases_of(found)
    code = ExitCode.ROLLBACK if left else found.exit_code
    telling = [one for one in cases if one.verdict is found.exit_code.verdict and one.measured.get("states", 1)]
    bad = next(iter(telling), cases[-1])
    reason = f"all {counted(len(found.outcomes), 'state', 'was/were')} resumed correctly"
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
    """The length of these times together, in seconds. Overlaps count once."""
    return sum(until - since for since, until in joined(moments))
