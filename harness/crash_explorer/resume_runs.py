"""Prepares the run directory of each resume, and judges the resume. The recorded run and all resumes use the same path:
a checkpoint may contain absolute paths, such as those of a tracker or a link, and a resume at another path would read
the files of another state."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torchaos.harness import registry
from torchaos.harness.analysis.checkpointing.checkpoint_contents import checkpoints_of
from torchaos.harness.analysis.checkpointing.resumed_from import resumes
from torchaos.harness.analysis.ending import final_step
from torchaos.harness.analysis.verdict import verdict_of
from torchaos.harness.checkpoints import inventory
from torchaos.harness.crash_explorer import synthetic_crash
from torchaos.harness.crash_explorer.fs_model import State
from torchaos.harness.crash_explorer.fuse_mount import ReadSet, ReadTracers, TracedResume
from torchaos.harness.crash_explorer.operations import Operation, Recording
from torchaos.harness.crash_explorer.recording_log import Stats, stats_of
from torchaos.harness.crash_explorer.resume_outcomes import Outcome, seen_in
from torchaos.harness.crash_explorer.s3_store import date_objects
from torchaos.harness.crash_explorer.synthetic_crash import truncate_all
from torchaos.harness.host.disk import owner_only, write_atomically
from torchaos.harness.interfaces import Harm, Need, UsageError
from torchaos.harness.protocol.agent_plan import AgentPlan
from torchaos.harness.protocol.wire import MANIFESTS, Event, Kind
from torchaos.harness.record.history import base_of
from torchaos.harness.record.history.saves_and_loads import handled_paths
from torchaos.harness.record.plan import Named, Plan
from torchaos.harness.record.record import Record
from torchaos.harness.record.result import Result, Verdict
from torchaos.harness.record.rundir import RunDir

_NUMBER = re.compile(r"\d+")  # in the name of a manifest: rank, attempt, its number, pid
_JUDGED = (Harm.WRONG_RESULT, Harm.LOST_WORK)


def assertions_for_resumes(plan: Plan) -> tuple[Named, ...]:
    """The scenario's assertions that judge a resume. Assertions about its speed or its end are left out: the harness
    starts the launcher, and ends the resume a few steps after the death."""
    found = tuple(
        assertion for assertion in plan.asserts if registry.find("assertions", assertion.name).harm in _JUDGED
    )
    if not found:
        known = "loss_continuity, sample_accounting, state_restored, no_lost_work or checkpoint_integrity"
        raise UsageError(f"{plan.scenario}: no assertion judges what a resume computes; add {known}")
    return found


def checkpoints_in(plan: Plan, folder: RunDir) -> Path:
    """The job's checkpoint folder. Raises UsageError unless it is below `{run}`, because the files of states are put
    there."""
    job = plan.job
    if not job.checkpoints:
        raise UsageError(f"{plan.scenario}: write job.checkpoints.path, the folder to explore")
    path = Path(*(part.replace("{run}", str(folder.job)) for part in (job.cwd, job.checkpoints)))
    if not path.is_relative_to(folder.job) or path == folder.job:
        raise UsageError(
            f"{plan.scenario}: states of the checkpoint folder are made anew for each resume, and "
            f"{job.checkpoints} may have other files; write a folder below {{run}}"
        )
    return path


@dataclass(frozen=True)
class Resume:
    """One resume from a state. `reads`: what the job asked of its checkpoint folder; None: not known."""

    outcome: Outcome
    record: Record
    reads: ReadSet | None = None


class ResumeRuns:
    """Prepares and judges one resume after the other, from states of the checkpoint folder. Has the recorded run, its
    twins, and the folder in which the job always runs."""

    _root = -1  # a descriptor of the checkpoint folder with the last state's files

    def __init__(
        self, plan: Plan, now: RunDir, recorded: RunDir, twins: Sequence[Record], recording: Recording
    ) -> None:  # fmt: skip
        """`now`: the folder of resumes; `recorded`: the present folder of the recorded run."""
        self.now, self.twins, self.recording = now, twins, recording
        self.recorded = Record.load(recorded)
        self.imported = recorded.imported  # a file; an exploration of an older version lacks it
        self.staged_s = (0.0, 0.0)  # when the last state was put on disk: CLOCK_MONOTONIC, and since the epoch
        self.staged: Stats = {}  # its files
        self.left: list[str] = []  # mounts that could not be removed, one sentence each
        self._last: tuple[Record, Sequence[Record], Result]  # the record, twins and result of the last resume
        self._manifests = saves_of(recorded.agent_plan.parent / MANIFESTS, self.recorded)
        job = replace(plan.job, resubmit_times=1, resubmit_delay_s=0.0)  # a second start may succeed
        self.plan = replace(
            plan, job=job, faults=(), steady_state=(), stop=(), until=(), asserts=assertions_for_resumes(plan)
        )
        self.due = final_step(twins[0]) if twins else self.recorded.history.last_step
        self.died_in_attempt = max((attempt.number for attempt in self.recorded.history.attempts), default=0)
        ends = self.recorded.of_kind(Kind.AGENT_ENDED, Kind.RANK_EXITED, Kind.JOB_EXITED)
        self._ended_s = min(
            (end.mono_s for end in ends if end.mono_s > synthetic_crash.death_s(self.recorded)), default=math.inf
        )

    @property
    def manifests(self) -> frozenset[str]:
        """The names of the recorded run's manifests."""
        return frozenset(path.name for path in self._manifests)

    def doubt(self) -> str:
        """Why resumes can't be judged, as a clause: an assertion fails or lacks data even in the recorded run, in which
        nothing died. Empty if all assertions pass there."""
        if next(self.recorded.of_kind(Kind.AGENT_STARTED), None) is None:
            return "no agent was loaded in any rank, and a resume is followed by what the agent sees"
        run = replace(self.recorded, plan=replace(self.recorded.plan, asserts=self.plan.asserts))
        cases = verdict_of(run, self.twins, "").cases
        bad = next((one for one in cases if one.kind == "assertion" and one.verdict is not Verdict.PASSED), None)
        return f"{bad.name}: {bad.reason}" if bad else ""

    def death(self, state: State) -> tuple[float, dict[int, float]]:
        """When the job died in the recorded run (CLOCK_MONOTONIC); and, if the state needs another order of the ranks
        than the recorded one, when ranks died earlier. The death comes just before the next operation after the state's
        last one, because then it is clearest which checkpoints were complete."""
        if state.moments:
            return min(state.moments[-1][1], self._ended_s), {}
        lines, done = self.recording.lines, self._done(state)
        ends = [math.nextafter(operations[-1].ended_s, math.inf) for operations in done.values() if operations]
        died_s = min(max(ends, default=self.recording.began_s), self._ended_s)
        early = {rank: lines[rank][len(done[rank])].begun_s for rank in lines if len(done[rank]) < len(lines[rank])}
        return died_s, {rank: at_s for rank, at_s in early.items() if rank is not None and at_s < died_s}

    def _done(self, state: State) -> dict[int | None, tuple[Operation, ...]]:
        """The operations that each rank had done before the death."""
        lines = self.recording.lines
        last = state.last_operation.number if state.last_operation else -1
        upto = state.done or {rank: sum(operation.number <= last for operation in line) for rank, line in lines.items()}
        return {rank: lines[rank][: upto.get(rank, 0)] for rank in lines}

    def died_at(self, state: State) -> int:
        """The highest global step before the death."""
        return synthetic_crash.highest_step(self.recorded, self.death(state)[0])

    def stage(self, state: State, at_s: float | None = None) -> RunDir:
        """The run directory for a resume from the state, with the state's files and the events before the death.
        `at_s`: when the resume began, if it was before now (CLOCK_MONOTONIC)."""
        shutil.rmtree(self.now.root, ignore_errors=True)
        self.now.create()
        self.staged_s = time.monotonic() if at_s is None else at_s, time.time()
        died_s, by_rank = self.death(state)
        moved = (self.now.events, self.recorded, died_s, by_rank, self.staged_s[0], self.recording.lines)
        synthetic_crash.write(*moved, state.damage)
        synthetic_crash.with_death(replace(self.plan, faults=self.recorded.plan.faults)).write(self.now.plan)
        self._link_manifests(died_s, by_rank)
        root = checkpoints_in(self.plan, self.now)
        state.write_to(root)
        if self.recording.stored:
            done = (operation for own in self._done(state).values() for operation in own)
            date_objects(root, state.tree, done, self.recording.began_s, self.staged_s[1])
        self.staged = stats_of(root)
        self.close()
        self._root = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        return self.now

    def close(self) -> None:
        if self._root >= 0:
            os.close(self._root)
            self._root = -1

    def is_untouched(self) -> bool:
        """Whether the job has changed nothing in its folder since the last state was put there. If a file system covers
        the folder, the files below it are read, so that this does not count as a question of the job."""
        return stats_of(Path(f"/proc/self/fd/{self._root}")) == self.staged

    def resume(
        self, state: State, carry_out: Callable[[RunDir], bool], tracers: ReadTracers | None, warm: bool = False
    ) -> Resume:  # fmt: skip
        """Stages the state, lets `carry_out` resume the job, and judges the resume. `carry_out` returns whether the job
        hangs. `tracers`: note what the job asks of the checkpoint folder."""
        began_s = time.monotonic()
        folder = self.stage(state)
        traced = TracedResume(checkpoints_in(self.plan, folder), tracers)
        with traced:
            hung = carry_out(folder)
        self.left += traced.left
        if traced.failed:  # and with it, perhaps, the job
            return self.resume(state, carry_out, None, warm)
        if warm:
            self.take_inventory()  # now, because reading is slow while the folder's questions are noted
        made = self.judge(state, hung, time.monotonic() - began_s, warm)
        return replace(made, reads=traced.before_inventory(made.record))

    def judge(self, state: State, hung: bool, seconds: float, warm: bool = False) -> Resume:
        """The outcome of the resume that is in the folder. Raises ChaosError if it can't be read."""
        run, twins = truncate_all(Record.load(self.now), self.twins, self.plan.job.world_size)
        run = synthetic_crash.without_missed_death(run)
        if not any(_checkpoints(record) for record in (run, *twins)):  # the death came before the first checkpoint
            run = replace(run, plan=_without_inventory(run.plan))
        result = judged(run, twins, self.recorded, str(self.now.root), empty=not state.tree.files)
        self._last = run, twins, result
        seen = seen_in(run, result, self.due, hung)
        last = state.last_operation
        outcome = Outcome(
            state.name, state.digest, state.model, self.died_at(state), seen.kind, seen.reason, seen.assertion,
            seen.lost_steps, seen.from_step, seen.mended, warm, round(seconds, 3), state.operations,
            str(last) if last else "", state.moments,
        )  # fmt: skip
        return Resume(outcome, run)

    def keep(self, to: Path) -> None:
        """Moves the run directory of the last resume to `to`, with its twins, so that `torchaos judge`, `explain` and
        `report` can read it."""
        shutil.rmtree(to, ignore_errors=True)
        to.parent.mkdir(parents=True, exist_ok=True)
        run, twins, result = self._last
        run.plan.write(self.now.plan)
        write_atomically(self.now.result, json.dumps(result.to_json(), indent=1) + "\n", private=True)
        _write(run, self.now)
        for number, twin in enumerate(twins):
            folder = RunDir(self.now.twins / str(number)).create()
            twin.plan.write(folder.plan)
            _write(twin, folder)
        self.now.root.rename(to)

    def agent_plan(self, run_id: str, *hooks: str) -> AgentPlan:
        """The plan for the ranks of a resume, as the engine writes it, with more hooks."""
        root = checkpoints_in(self.plan, self.now)
        return AgentPlan(run_id, str(self.now.events), (*self.plan.hooks, *hooks), (), str(root))

    def take_inventory(self) -> None:
        """Reads the checkpoints after a resume, as the engine does, if an assertion needs them."""
        if Need.INVENTORY not in self.plan.collect:
            return
        seen = handled_paths(self.recorded.events)
        found = inventory.take(checkpoints_in(self.plan, self.now), self.now.root, seen=seen)
        named = json.dumps(found["checkpoints"], ensure_ascii=False).replace(str(self.now.job), "{run}")
        told = json.dumps({**found, "checkpoints": json.loads(named)}, indent=1)
        write_atomically(self.now.artifacts / "inventory.json", told, private=True)

    def _link_manifests(self, died_s: float, by_rank: Mapping[int, float]) -> None:
        """Links the manifests of the saves that had ended when their rank died. Leaves out saves that were still to be
        renamed: the file with the final name is another file."""
        first = self.recorded.events[0]
        died_wall_s = first.wall_s - first.mono_s + died_s
        folder = self.now.agent_plan.parent / MANIFESTS
        folder.mkdir(mode=0o700)
        begun = synthetic_crash.unfinished(self.recorded, died_s, self.recording.lines, by_rank)
        ended = {
            end.mono_s for end in self.recorded.of_kind(Kind.SAVE_END)
            if end.mono_s < by_rank.get(end.rank or 0, died_s) and (end.source, end.seq, end.kind) not in begun
        }  # fmt: skip
        for path, (written_s, saved_s) in self._manifests.items():
            if written_s < died_wall_s if saved_s is None else saved_s in ended:
                os.link(path, folder / path.name)


def judged(
    run: Record, twins: Sequence[Record], recorded: Record, folder: str, empty: bool = False
) -> Result:  # fmt: skip
    """The verdict on a resume. If the job rightly began from scratch, because the recorded run had no checkpoint yet,
    inconclusive assertions about checkpoints do not count. `empty`: whether there was no file in the checkpoint
    folder."""
    result = verdict_of(run, twins, folder)
    if result.verdict is not Verdict.INCONCLUSIVE or not _had_no_checkpoint(run, recorded, empty):
        return result
    unsure = {
        case.name for case in result.assertions(Verdict.INCONCLUSIVE)
        if Need.CHECKPOINTS in registry.find("assertions", case.name).needs
    }  # fmt: skip
    kept = tuple(assertion for assertion in run.plan.asserts if assertion.name not in unsure)
    return verdict_of(replace(run, plan=replace(run.plan, asserts=kept)), twins, folder) if kept else result


def _had_no_checkpoint(run: Record, recorded: Record, empty: bool) -> bool:
    """Whether the job loaded nothing after its death and began with the first step, and no save could have become a
    checkpoint before the death. False if that is not certain: the job had made a step, there were files, and not all
    saves of the recorded run were seen."""
    seen = recorded.history.saves and all(one.saved_s is not None for one in checkpoints_of(recorded) or ())
    died_s = synthetic_crash.death_s(run)
    had_trained = bool(run.history.highest_step(before_s=died_s))
    loaded = any(load.mono_s > died_s for load in run.history.loads)
    trained = set(run.history.executions.attempt.tolist())
    again = [each for each in run.history.attempts if each.started_s >= died_s and each.number in trained]
    return (
        bool(again and (seen or empty or not had_trained)) and not loaded
        and all(attempt.base == 0 for attempt in again)
        and all(one.best is None and one.newer is None for one in resumes(run))
    )  # fmt: skip


def _checkpoints(record: Record) -> bool:
    return bool((record.artifacts.get("inventory") or {}).get("checkpoints"))


def _without_inventory(plan: Plan) -> Plan:
    """The plan without the assertions that need the inventory of checkpoints."""
    kept = (
        assertion
        for assertion in plan.asserts
        if Need.INVENTORY not in registry.find("assertions", assertion.name).needs
    )
    return replace(plan, asserts=tuple(kept) or plan.asserts)


def saves_of(folder: Path, recorded: Record) -> Mapping[Path, tuple[float, float | None]]:
    """For each manifest: when it was written (seconds since the epoch), and when its save ended (CLOCK_MONOTONIC; None:
    not known). A manifest may be written much later than its save, because digests are made in the background."""
    written: dict[Path, float] = {}
    groups: dict[tuple[int, str], list[Path]] = defaultdict(list)
    for path in sorted(folder.glob("*.json"), key=lambda path: [int(number) for number in _NUMBER.findall(path.name)]):
        raw = json.loads(path.read_text())
        written[path] = float(raw["wall_s"])
        groups[int(_NUMBER.findall(path.name)[0]), os.path.abspath(raw["save"])].append(path)
    ended: dict[Path, float] = {}
    for (rank, saved), paths in groups.items():
        ends = [
            event.mono_s for event in recorded.of_kind(Kind.SAVE_END)
            if event.rank == rank and os.path.abspath(str(event.data["path"])) == saved
        ]  # fmt: skip
        if len(ends) == len(paths):
            ended |= dict(zip(paths, ends, strict=True))
    return {path: (at_s, ended.get(path)) for path, at_s in written.items()}


def _write(record: Record, folder: RunDir) -> None:
    """Replaces the events and the artifacts in a run directory by those of the record."""
    for path in folder.events.glob("*.jsonl"):
        path.unlink()
    numbers = Counter[str]()
    with open(folder.events / "judged.jsonl", "wb", opener=owner_only) as file:
        for event in record.events:
            file.write(replace(event, seq=numbers[event.source]).to_line())
            numbers[event.source] += 1
    for name, artifact in record.artifacts.items():
        write_atomically(folder.artifacts / f"{name}.json", json.dumps(artifact), private=True)


_LIFE = frozenset({  # events that show that a rank is alive, or is started again
    Kind.STEP, Kind.LOSS, Kind.SAVE_BEGIN, Kind.SAVE_END, Kind.LOAD_BEGIN, Kind.LOAD_END, Kind.AGENT_STARTED,
    Kind.RANK_UP, Kind.GROUP_JOINED, Kind.JOB_STARTED,
})  # fmt: skip


class StopRule:
    """Decides when a resume has shown enough: when every rank has trained some steps beyond the death, in the newest
    attempt."""

    def __init__(self, died_at: int, beyond: int, ranks: int) -> None:
        """`died_at`: the highest global step before the death; `beyond`: how many more steps are wanted."""
        self._due, self._least, self._ranks = died_at + beyond, beyond, ranks
        self._seen = 0  # events that were seen
        self._newest = 0  # attempt
        self._done: dict[int, int] = {}  # local steps of the newest attempt by rank
        self._looked = 0  # the fewest steps of a rank at the last look at the history
        self._open = 0  # saves that have begun and have not ended

    def is_reached(self, events: Sequence[Event]) -> bool:
        """Whether every rank has trained enough, and no rank is in the middle of a save: an interrupted save would look
        torn."""
        if len(events) == self._seen:
            return False
        for event in events[self._seen :]:
            self._note(event)
        self._seen = len(events)
        slowest = min(self._done.values()) if len(self._done) >= self._ranks else 0
        if slowest < self._least or slowest <= self._looked or self._open > 0:
            return False
        self._looked = slowest
        base, _witnesses = base_of(list(events), self._newest)
        return base is not None and base + slowest >= self._due

    def _note(self, event: Event) -> None:
        if event.attempt is None or event.attempt < self._newest:
            return
        if event.attempt > self._newest:
            self._newest, self._done, self._looked, self._open = event.attempt, {}, 0, 0
        if event.attempt and event.rank is not None and event.kind is Kind.STEP and event.step is not None:
            self._done[event.rank] = max(self._done.get(event.rank, 0), event.step)
        self._open += (event.kind is Kind.SAVE_BEGIN) - (event.kind is Kind.SAVE_END)


class Patience:
    """The time in which a resume must show a sign of life; otherwise it counts as hung."""

    def __init__(self, limit_s: float, now_s: float) -> None:
        self.limit_s, self._since_s, self._seen = limit_s, now_s, 0

    def is_over(self, events: Sequence[Event], now_s: float) -> bool:
        if any(event.kind in _LIFE for event in events[self._seen :]):
            self._since_s = now_s
        self._seen = len(events)
        return now_s - self._since_s > self.limit_s
