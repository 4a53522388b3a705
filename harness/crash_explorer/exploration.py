"""An exploration: one run is recorded, and the job is resumed from each state that a death could have left.

out/NAME/scenario.yaml, plan.json   as in a run directory
         recorded/                  the run directory of the recorded run
         recording/                 its operations, and the bytes that it wrote
         twins/N                    the runs that resumes are judged against
         now/                       the run directory of the present resume
         outcomes.jsonl             a line for each state that was tried; a stopped exploration continues after it
         failing/STATE/             the run directory of a resume that failed, with state/ (the state's files) and
                                    reproduce.sh
         explored.json, report.html

A second failure can follow, in two ways. The job dies again during a resume: this resume is recorded, then explored
like the run itself. Or a `checkpoint.*` fault damages files before the job starts again: the job may then find its
newest checkpoint half-written and the one before it damaged."""

from __future__ import annotations

import json
import shlex
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from torchaos.harness.crash_explorer.exploration_summary import NAME as SCRIPT
from torchaos.harness.crash_explorer.exploration_summary import STATE, ExplorationSummary, files_of, script_of
from torchaos.harness.crash_explorer.folder_contents import Tree
from torchaos.harness.crash_explorer.fs_model import State
from torchaos.harness.crash_explorer.operations import Recording
from torchaos.harness.crash_explorer.recorded_run import Recorded
from torchaos.harness.crash_explorer.resume_chain import LIKE, ResumeChain
from torchaos.harness.crash_explorer.resume_outcomes import (
    SHOWN,
    Outcome,
    OutcomeClass,
    each_kind_first,
    is_suspected,
    may_pay,
)
from torchaos.harness.crash_explorer.resume_runs import ResumeRuns, checkpoints_in
from torchaos.harness.crash_explorer.resumers import LauncherResume, WarmResumes
from torchaos.harness.crash_explorer.s3_store import StoreServer
from torchaos.harness.crash_explorer.state_selection import Choice, chosen, nodes_of, state_named
from torchaos.harness.fault_drivers.checkpoint_damage import CheckpointFault, carry_out, decide
from torchaos.harness.fault_drivers.checkpoint_edits import Mode
from torchaos.harness.host.disk import owner_only, write_atomically
from torchaos.harness.interfaces import ChaosError, UsageError
from torchaos.harness.protocol.wire import Kind
from torchaos.harness.record.plan import Plan, PlannedFault, counted
from torchaos.harness.record.record import Record
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.registry import injector_of
from torchaos.harness.running.engine.supervision import check_disk

FOLDER = "again"  # files in the folder of the first exploration


class RecordedResume(Recorded):
    """Records a resume from the state `name` of the exploration in `first`, to the end of the job. The twins and the
    job's folder are those of that exploration. Raises UsageError if there is no such state."""

    def __init__(self, plan: Plan, home: Path, tell: Callable[[str], None], first: Path, name: str) -> None:
        super().__init__(plan, home, tell)
        self._first, self.now = first, RunDir(first / "now")
        if not (first / "recorded").is_dir() or not self.twins:
            raise UsageError(f"{first}: nothing was explored in it yet; leave --after out")
        self._recording = Recording.read(first / "recording")
        self._state = state_named(self._recording, nodes_of(plan.job), name)

    @property
    def twins(self) -> list[RunDir]:
        return [RunDir(path) for path in sorted((self._first / "twins").glob("*"))]

    def _staged(self) -> Plan:
        self._tell(f"The job resumes from {self._state.name}, and what it does to its checkpoint folder is recorded")
        twins = [Record.load(twin) for twin in self.twins]
        runs = ResumeRuns(self._plan, self.now, RunDir(self._first / "recorded"), twins, self._recording)
        runs.stage(self._state)
        return runs.plan

    def _check(self, run: Record) -> None:
        if run.exit_code != 0 or len(run.history.attempts) != 2:
            raise ChaosError(
                f"{self._plan.scenario}: from {self._state.name}, the job does not resume at the first start and end "
                f"well; --after needs such a state; see {self.now.root}"
            )


def faults_of(plan: Plan) -> tuple[PlannedFault, ...]:
    """The faults of the scenario that can hit a state. Raises UsageError if there are none."""
    found = tuple(fault for fault in plan.faults if isinstance(injector_of(fault), CheckpointFault))
    if not found:
        raise UsageError(f"{plan.scenario}: it has no fault checkpoint.*, with which --damage could hit each state")
    return found


def with_damage(choice: Choice, faults: Sequence[PlannedFault], root: Path) -> Choice:
    """The choice, and in addition each of its states after it was hit by each of the faults. `root`: the job's
    checkpoint folder, in which the states are made in order to be damaged; it is removed in the end. A state without a
    complete checkpoint can't be hit."""
    more = [found for state in choice.states for fault in faults for found in _hit(state, fault, root)]
    shutil.rmtree(root, ignore_errors=True)
    names = ", ".join(fault.inject for fault in faults)
    words = f"{choice.in_words}. With {names}, there are {len(more)} more"
    return Choice((*choice.states, *more), choice.there_are + len(more), words)


def _hit(state: State, fault: PlannedFault, root: Path) -> Iterator[State]:
    injector = injector_of(fault)
    assert isinstance(injector, CheckpointFault)
    said: list[Mapping[str, Any]] = []
    shutil.rmtree(root, ignore_errors=True)
    state.blobs.make_tree(state.tree, root)  # no hard links: the files are changed in place
    try:
        decided = decide(injector, root)
    except ChaosError:
        return
    if any(isinstance(edit, Mode) for _checkpoint, edit in decided.edits):
        raise UsageError(f"{fault.id}: {fault.inject} changes permissions, which a state does not have; leave it out")
    carry_out(decided, fault.id, said.append)
    files = dict(state.tree.files)
    for path in {edit.path for _checkpoint, edit in decided.edits}:
        name = path.relative_to(root).as_posix()
        files.pop(name, None)
        if path.exists():
            files[name] = state.blobs.take_file(path)
    tree = Tree(files, state.tree.folders, state.tree.links)
    yield replace(
        state, name=f"{state.name}-{fault.id}", model=f"{state.model}, {fault.inject}", tree=tree, damage=tuple(said)
    )


KEPT = 3  # the most run directories that are kept for each class of outcomes
_LEAST_PATIENCE_S, _PATIENCE = 60.0, 3.0  # seconds; and how many times the longest silence of the recorded run


@dataclass(frozen=True)
class Limits:
    """The limits of an exploration. `beyond`: how many steps a resume trains after the step of the death."""

    models: tuple[str, ...]
    states: int | None = None
    minutes: float | None = None
    beyond: int = 3
    seed: int = 0
    warm: bool = True
    damage: tuple[PlannedFault, ...] = ()  # each state is also tried after each of these faults has hit it


class Exploration:
    """Carries out an exploration. `stop` and `hurry` may be called from a signal handler; the exploration can be
    continued later."""

    def __init__(
        self, plan: Plan, home: Path, limits: Limits, reproduce: Sequence[str], tell: Callable[[str], None],
        on_outcome: Callable[[Outcome, int, int], None], recorded: Recorded | None = None,
    ) -> None:  # fmt: skip
        """`tell`: a function that shows a sentence. `on_outcome`: a function that shows an outcome, with its number and
        the number of states. `recorded`: the run whose deaths are explored; None: a run of the job from the beginning
        is recorded."""
        self.plan, self.home, self.limits = plan, home, limits
        self._reproduce, self._tell, self._on_outcome = reproduce, tell, on_outcome
        self._recorded = recorded or Recorded(plan, home, tell)
        self._chain: ResumeChain | None = None
        self._stopped = ""
        self._began_s = time.monotonic()

    @property
    def left(self) -> list[str]:
        """Sentences about changes that could not be undone."""
        return [*self._recorded.left, *(self._chain.left if self._chain else ())]

    def stop(self, reason: str) -> None:
        self._stopped = reason
        self._recorded.stop(reason)
        if self._chain:
            self._chain.stop(reason)

    def hurry(self, reason: str) -> None:
        self._stopped = reason
        self._recorded.hurry(reason)
        if self._chain:
            self._chain.hurry(reason)

    def __call__(self) -> ExplorationSummary | None:
        """Explores, or continues an exploration. None if it was stopped before the run was recorded. Raises ChaosError
        if the job can't be recorded, resumed or judged, OSError if files can't be read or written."""
        check_disk(self.home)
        recording = self._recorded()
        if recording is None or self._stopped:
            return None
        with StoreServer(self.plan, self._recorded.now, self.home / "store.log") as self._served:
            return self._explore(self._served.plan, recording)

    def _explore(self, plan: Plan, recording: Recording) -> ExplorationSummary:
        """`plan`: the plan of each resume."""
        twins = [Record.load(twin) for twin in self._recorded.twins]
        runs = ResumeRuns(plan, self._recorded.now, self._recorded.run, twins, recording)
        if why := runs.doubt():
            raise UsageError(f"{self.plan.scenario}: no resume can be judged, as a run without any death is not: {why}")
        limits = self.limits
        choice = chosen(recording, limits.models, nodes_of(self.plan.job), limits.states, limits.seed)
        if limits.damage:
            choice = with_damage(choice, limits.damage, checkpoints_in(plan, self._recorded.now))
        self._tell(choice.in_words)
        done = read_outcomes(self.home)
        launcher = LauncherResume(runs, limits.beyond, self._patience_s(runs.recorded), self._reproduce)
        good = {key for key, outcome in done.items() if outcome.kind is OutcomeClass.RIGHT}
        right = next((state for state in choice.states if _key(state) in good), None)
        forks = WarmResumes(runs, launcher, limits.beyond, self.home, right) if limits.warm else None
        chain = self._chain = ResumeChain(runs, launcher, forks, self.home, choice.states, done)
        try:
            unfinished = self._try_all(runs, chain, choice.states, done)
        finally:
            chain.close()
        seconds = recording.ended_s - recording.began_s
        outcomes = tuple(done[_key(state)] for state in choice.states if _key(state) in done)
        about = runs.recorded.artifacts.get("environment", {})
        return ExplorationSummary(
            outcomes, choice, recording, seconds, chain.in_words, unfinished, _notes(chain, tuple(done.values())),
            shlex.join(self._reproduce), {name: str(about.get(name, "")) for name in ("torchaos", "torch", "python")},
        )  # fmt: skip

    def _try_all(
        self, runs: ResumeRuns, chain: ResumeChain, states: Sequence[State], done: dict[tuple[str, str], Outcome]
    ) -> str:
        """Tries the states. Returns why some states were not tried, or some failures not confirmed. Empty if nothing is
        left to do."""
        numbers = {_key(state): number for number, state in enumerate(states, 1)}
        for state, attempt in _in_turn(chain, states, done):
            if why := self._over:
                known = done.get(_key(state))
                return self._stopped if known and not is_suspected(known) else why
            found = attempt()
            if found and not found.warm and not found.like and not self._stopped:
                found = self._kept(runs, state, found, done.values())
            if found:
                self._note(found, numbers[_key(state)], len(states), done)
        return self._stopped

    @property
    def _over(self) -> str:
        """Why no further state is tried now; empty if there is time."""
        minutes = self.limits.minutes
        if not self._stopped and minutes is not None and time.monotonic() - self._began_s > 60 * minutes:
            return f"--minutes {minutes:g} is over"
        return self._stopped

    def _note(self, outcome: Outcome, number: int, of: int, done: dict[tuple[str, str], Outcome]) -> None:
        """Notes an outcome. Does nothing if the exploration was stopped meanwhile."""
        if not self._stopped:
            self._served.check()
            done[_key(outcome)] = outcome
            _append(self.home, outcome)
            self._on_outcome(outcome, number, of)

    def _kept(self, runs: ResumeRuns, state: State, found: Outcome, before: Iterable[Outcome]) -> Outcome:
        """Keeps the run directory of a failed resume, if few of its class are kept already. Returns the outcome with
        the path."""
        if (
            found.kind is OutcomeClass.RIGHT
            or sum(outcome.kind is found.kind and bool(outcome.run_dir) for outcome in before) >= KEPT
        ):
            return found
        to = self.home / "failing" / state.name.replace("/", "-").replace(" ", "-")
        runs.keep(to)
        state.write_to(to / STATE)
        found = replace(found, run_dir=str(to), files=files_of(state, runs.recording))
        text = script_of(self.plan.job, runs.now, checkpoints_in(self.plan, runs.now), found)
        write_atomically(to / SCRIPT, text, private=True)
        return found

    @staticmethod
    def _patience_s(recorded: Record) -> float:
        """The seconds for which a resume may be silent: a multiple of the longest silence of the recorded run."""
        times = [event.mono_s for event in recorded.events if event.rank is not None or event.kind is Kind.JOB_STARTED]
        longest = max((after - before for before, after in pairwise(times)), default=0.0)
        return _LEAST_PATIENCE_S + _PATIENCE * longest


def _in_turn(
    chain: ResumeChain, states: Sequence[State], done: Mapping[tuple[str, str], Outcome]
) -> Iterator[tuple[State, Callable[[], Outcome | None]]]:
    """The states in the order in which they are tried, each with a function that tries it. A state comes twice if
    forked ranks fail from it, because the failure must be confirmed by a cold start. Cold starts take much longer, so
    most of them come after all forked resumes, and those whose failure a cold start of another state has already shown
    come last. The first failure of each class, and failures that may stand for many states, are confirmed at once."""
    by_key = {_key(state): state for state in states}
    asked = {one.kind for one in done.values() if not is_suspected(one)}  # classes with a cold start

    def first_time(state: State) -> Outcome | None:
        found = chain.without_start(state)
        if found and not is_suspected(found):
            return found
        if found and found.kind in asked and not may_pay(found, done.values()):
            return found
        asked.update([found.kind] if found else [])
        return chain.by_start(state, found)

    yield from ((state, partial(first_time, state)) for key, state in by_key.items() if key not in done)
    tried = [done[key] for key in by_key if key in done]
    for found in each_kind_first([one for one in tried if is_suspected(one)], asked):
        state = by_key[_key(found)]
        yield state, partial(chain.confirm, state, found)
    for found in [done[key] for key in by_key if key in done and done[key].shown_by]:
        state = by_key[_key(found)]
        yield state, partial(chain.by_start, state, replace(found, shown_by=""))


def _notes(chain: ResumeChain, outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    notes = list(chain.notes)
    if many_shown := sum(bool(outcome.shown_by) for outcome in outcomes):
        notes.append(f"{many_shown} {SHOWN}")
    if alike := sum(bool(outcome.like) for outcome in outcomes):
        notes.append(f"{counted(alike, 'state', 'was/were')} not resumed: {LIKE}")
    return (*notes, chain.doubt) if chain.doubt else tuple(notes)


def _key(one: State | Outcome) -> tuple[str, str]:
    return one.digest, one.model


def read_outcomes(home: Path) -> dict[tuple[str, str], Outcome]:
    """The outcomes so far, by digest and model of death. A torn last line is left out."""
    found: dict[tuple[str, str], Outcome] = {}
    path = home / "outcomes.jsonl"
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with suppress(ValueError, KeyError, TypeError):
            outcome = Outcome.from_json(json.loads(line))
            found[_key(outcome)] = outcome
    return found


def _append(home: Path, outcome: Outcome) -> None:
    with open(home / "outcomes.jsonl", "ab", opener=owner_only) as file:
        file.write(json.dumps(outcome.to_json()).encode() + b"\n")
