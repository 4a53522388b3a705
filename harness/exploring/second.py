"""A second death, while the job goes on after the first: the resume from a state of an exploration is recorded, and is
then explored like the run itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torchaos.harness.contracts import ChaosError, UsageError
from torchaos.harness.exploring.choice import nodes_of, state_named
from torchaos.harness.exploring.operations import Recording
from torchaos.harness.exploring.recorded import Recorded
from torchaos.harness.exploring.trials import Trials
from torchaos.harness.record.plan import Plan
from torchaos.harness.record.record import Record
from torchaos.harness.record.rundir import RunDir

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
        trials = Trials(self._plan, self.now, RunDir(self._first / "recorded"), twins, self._recording)
        trials.stage(self._state)
        return trials.plan

    def _check(self, run: Record) -> None:
        if run.exit_code != 0 or len(run.history.attempts) != 2:
            raise ChaosError(
                f"{self._plan.scenario}: from {self._state.name}, the job does not resume at the first start and end "
                f"well; --after needs such a state; see {self.now.root}"
            )
