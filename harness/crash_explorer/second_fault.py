"""What goes wrong after the first death. While the job goes on, it dies again: the resume from a state of an
exploration is recorded, and is then explored like the run itself. Or before the job is started again, a `checkpoint.*`
fault hits the files: so a job may find its newest checkpoint half-written, and the one before it damaged."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchaos.harness.crash_explorer.crash_state import State
from torchaos.harness.crash_explorer.folder_contents import Tree
from torchaos.harness.crash_explorer.operations import Recording
from torchaos.harness.crash_explorer.recorded_run import Recorded
from torchaos.harness.crash_explorer.resume_runs import ResumeRuns
from torchaos.harness.crash_explorer.selection import Choice, nodes_of, state_named
from torchaos.harness.fault_drivers.checkpoint_edits import Mode
from torchaos.harness.fault_drivers.damage_fault import CheckpointFault, carry_out, decide
from torchaos.harness.interfaces import ChaosError, UsageError
from torchaos.harness.record.plan import Plan, PlannedFault
from torchaos.harness.record.record import Record
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.registry import injector_of

FOLDER = "again"  # in the folder of the first exploration


class RecordedResume(Recorded):
    """Records how the job resumes from the state `name` of the exploration in `first`, and goes on to its end. It has
    the twins and the job's folder of that exploration. Raises UsageError if there is no such state."""

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
        trials = ResumeRuns(self._plan, self.now, RunDir(self._first / "recorded"), twins, self._recording)
        trials.stage(self._state)
        return trials.plan

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
    """The choice, and each of its states again with each of the faults. `root`: the job's checkpoint folder, in which
    the states are made to be damaged; it is removed in the end. A state without a complete checkpoint can't be hit."""
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
