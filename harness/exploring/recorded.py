"""The run that is recorded, and the twins that resumes are judged against."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from torchaos.harness.contracts import ChaosError, UsageError
from torchaos.harness.exploring.blobs import Blobs
from torchaos.harness.exploring.operations import Recording
from torchaos.harness.exploring.recorder import HOOKS, Recorder, events_of, read
from torchaos.harness.exploring.store.stored import Served, is_stored
from torchaos.harness.exploring.trials import asked_of, checkpoints_in
from torchaos.harness.judging.ending.unstarted import died_by_itself
from torchaos.harness.judging.twins.agreement import wants_more
from torchaos.harness.record.plan import Plan
from torchaos.harness.record.record import Record
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.running import capabilities
from torchaos.harness.running.engine.run import Run
from torchaos.harness.running.engine.stoppable import Stoppable
from torchaos.harness.running.twins.twin import Twins, fault_free, finished_well


def check(plan: Plan, now: RunDir) -> None:
    """Raises UsageError if the scenario can't be explored here. `now`: the folder in which the job will run."""
    checkpoints_in(plan, now)
    asked_of(plan)
    if plan.job.replicas > 1:
        raise UsageError(f"{plan.scenario}: the replicas of a job do not die together; leave job.replicas out")
    if plan.job.checkpoints_size:
        raise UsageError(f"{plan.scenario}: its checkpoints are on a disk of their own; leave job.checkpoints.size out")
    fuse = capabilities.check("fuse")
    if not fuse.present:
        raise UsageError(f"recording needs FUSE, which this machine lacks ({fuse.detail}); {fuse.remedy}")


class Recorded(Stoppable):
    """Records the job once, in the folder `now`, in which it is resumed later. Parts that exist already are not made
    again."""

    def __init__(self, plan: Plan, home: Path, tell: Callable[[str], None]) -> None:
        super().__init__()
        self._plan, self._home, self._tell = plan, home, tell
        self.now, self.run = RunDir(home / "now"), RunDir(home / "recorded")

    @property
    def twins(self) -> list[RunDir]:
        folder = self._home / "twins"
        return [RunDir(path) for path in sorted(folder.iterdir())] if folder.is_dir() else []

    def __call__(self) -> Recording | None:
        """The recording; None if it was stopped. Raises ChaosError if the job can't be run, or fails by itself."""
        if not self.run.root.exists():
            shutil.rmtree(self.now.root, ignore_errors=True)
            shutil.rmtree(self._home / "recording", ignore_errors=True)
            plan = self._staged()
            plan = replace(plan, hooks=tuple(sorted({*plan.hooks, *HOOKS})))
            recording = self._record(plan, self._home / "recording")
            if recording is None:
                return None
            self._check(Record.load(self.now))
            recording.write(self._home / "recording")
            self.now.root.rename(self.run.root)
        self._make_twins()
        return None if self._stopped else Recording.read(self._home / "recording")

    def _staged(self) -> Plan:
        """Makes the folder in which the job runs. Returns the plan of the run."""
        self._tell("The job is run once, and what it does to its checkpoint folder is recorded")
        self.now.create()
        return fault_free(self._plan)

    def _record(self, plan: Plan, home: Path) -> Recording | None:
        """Runs the job and records its operations in `home`. None if it was stopped."""
        root = checkpoints_in(self._plan, self.now)
        if is_stored(plan):
            with closing(Blobs(home / "blobs")) as blobs:
                base, began_s = blobs.take(root), time.monotonic()
            self._execute(plan, self.now, home)
            if self._stopped:
                return None
            found = read(home, base, events_of(home), began_s, time.monotonic(), stored=True)
            if not found.operations:
                self._check(Record.load(self.now))
                raise UsageError(
                    f"{plan.scenario}: the job has put no object below its job.checkpoints.path; it must take the "
                    "address of its store from AWS_ENDPOINT_URL"
                )
            return found
        with Recorder(root, home) as recorder:
            self._execute(plan, self.now)
        self.left += recorder.left
        return None if self._stopped else recorder.recording  # a recorder that dies may end the job too

    def _check(self, run: Record) -> None:
        if finished_well(run):
            return
        if died := died_by_itself(run):
            raise UsageError(f"{self._plan.scenario}: without any death, {died}")
        what = f"{len(run.history.attempts)} attempts and exit code {run.exit_code}"
        raise ChaosError(f"{self._plan.scenario}: the recorded run had {what}; see {self.now.root}, and try again")

    def _make_twins(self) -> None:
        """Makes twin 0, and more twins if the recorded run differs from it."""
        wanted = int(self._plan.twin.get("runs", 0))
        folder = self._home / "twins"
        folder.mkdir(mode=0o700, exist_ok=True)
        twins = Twins(self._plan, self._execute, None, lambda: bool(self._stopped), self._tell)
        while len(self.twins) < wanted and not self._stopped:
            have = [Record.load(twin) for twin in self.twins]
            if have and not wants_more(Record.load(self.run), have):
                return
            self._tell("The job is run without the recorder, as a twin, or its twin is taken from the cache")
            if not twins.give(len(have), RunDir(self._home)):
                if not self._stopped:
                    raise ChaosError(f"{self._plan.scenario}: {twins.died or twins.refused or 'no twin could be made'}")
                return

    def _execute(self, plan: Plan, folder: RunDir, notes: Path | None = None) -> None:
        if not folder.plan.exists():
            plan.write(folder.plan)
        with Served(plan, folder, folder.logs / "store.log", notes) as served:
            self._carry_out(Run(served.plan, folder))
