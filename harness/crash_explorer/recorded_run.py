"""Records what a run does to its checkpoint folder, and makes the twins against which resumes are judged.

During the recording, FUSE serves the folder over itself (fuse_servers.py). FUSE sees writes of native code (the zip
files of torch.save, safetensors, io_uring) and of all processes, in one order, and needs no hooks in the ranks. It
costs a copy and a digest of all bytes that are written."""

from __future__ import annotations

import json
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from torchaos.harness.analysis.comparison.agreement import wants_more
from torchaos.harness.analysis.ending import died_by_itself
from torchaos.harness.crash_explorer.folder_contents import Blobs, Tree
from torchaos.harness.crash_explorer.fuse_mount import FuseMount
from torchaos.harness.crash_explorer.operations import Operation, OperationKind, Recording, order, with_steps
from torchaos.harness.crash_explorer.recording_log import RecordingLog
from torchaos.harness.crash_explorer.resume_runs import assertions_for_resumes, checkpoints_in
from torchaos.harness.crash_explorer.s3_store import StoreServer, is_stored
from torchaos.harness.interfaces import ChaosError, UsageError
from torchaos.harness.protocol.agent_plan import AgentPlan
from torchaos.harness.protocol.collective_stamps import Stamp
from torchaos.harness.protocol.wire import Event
from torchaos.harness.record.events.journal import read_events
from torchaos.harness.record.plan import Plan
from torchaos.harness.record.record import Record
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.running import capabilities
from torchaos.harness.running.engine.stages import Run, Stoppable
from torchaos.harness.running.twin import Twins, fault_free, finished_well
from torchaos.harness.running.twin_key import record_sources

# The agent's hooks that show when ranks wait for each other (without them, only the recorded order of operations is
# tried), and the hook that shows what a rank imports, for forked ranks.
HOOKS = ("collectives", "imported", "stamps")


class Recorder(FuseMount):
    """Records the operations of a job in its checkpoint folder: `with Recorder(folder, home) as recorder: run the job`,
    and then read `recorder.recording`. `folder`: the checkpoint folder; it is made if it does not exist. `home`: the
    folder for the recording's own files, on a disk with room for all bytes that the run writes. The contents that
    `folder` had before are copied, and kept as `recording.base`."""

    server = "recording"
    notes = RecordingLog.NAMES

    def __enter__(self) -> Recorder:
        super().__enter__()
        self._began_s = time.monotonic()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended_s = time.monotonic()
        super().__exit__(kind, error, at)
        self._events = events_of(self.home)  # now, because the caller may move the run

    @property
    def recording(self) -> Recording:
        """The recording, after the `with` block. Raises ChaosError if it is not complete, OSError if it can't be
        read."""
        if self.failed:
            raise ChaosError(f"{self._folder}: the recording is not whole: {self.failed}")
        return read(self.home, self._base, self._events, self._began_s, self._ended_s)

    def _prepare(self) -> None:
        blobs = Blobs(self.home / "blobs")
        self._base = blobs.take(self._folder)
        blobs.close()


def read(
    home: Path, base: Tree, events: Sequence[Event], began_s: float, ended_s: float, stored: bool = False
) -> Recording:  # fmt: skip
    """The recording whose notes are in `home`. `events`: the events of the ranks. `stored`: the files are the objects
    of a store. Raises OSError if the notes can't be read."""
    operations = tuple(Operation(**{**raw, "kind": OperationKind(raw["kind"])}) for raw in _lines(home / "operations"))
    stamps = [Stamp(**{**raw, "ranks": raw["ranks"] and tuple(raw["ranks"])}) for raw in _lines(home / "collectives")]
    before, unsure = order(operations, stamps)
    doubts = (*unsure, *map(str, _lines(home / RecordingLog.DOUBTS)), *(_shared(operations) if stored else ()))
    blobs = Blobs(home / "blobs")
    return Recording(with_steps(operations, events), before, base, blobs, began_s, ended_s, doubts, stored)


def _shared(operations: Sequence[Operation]) -> Iterator[str]:
    """A sentence for each object that several ranks changed: it is chance which rank changed it last."""
    ranks = defaultdict[str, set[int | None]](set)
    for operation in operations:
        ranks[operation.path].add(operation.rank)
    for path in sorted(path for path in ranks if len(ranks[path]) > 1):
        yield f"several processes changed the object {path}: the order of these requests is tried only as it was seen"


def events_of(home: Path) -> list[Event]:
    """The events of the ranks whose agent plans are noted in `home`."""
    try:
        plans = [AgentPlan.read(line) for line in (home / "plans").read_text().splitlines()]
    except FileNotFoundError:
        return []
    return [event for plan in plans for event in read_events(Path(plan.events))]


def _lines(path: Path) -> list[Any]:
    try:
        return [json.loads(line) for line in path.read_text().splitlines()]
    except FileNotFoundError:
        return []


def check(plan: Plan, now: RunDir) -> None:
    """Raises UsageError if the scenario can't be explored here. `now`: the folder in which the job will run."""
    checkpoints_in(plan, now)
    assertions_for_resumes(plan)
    if plan.job.replicas > 1:
        raise UsageError(f"{plan.scenario}: the replicas of a job do not die together; leave job.replicas out")
    if plan.job.resubmit_command or plan.job.resubmit_env:
        why = "states are resumed by job.command"
        raise UsageError(f"{plan.scenario}: {why}; leave job.resubmit.command and job.resubmit.env out")
    if plan.job.checkpoints_size:
        raise UsageError(f"{plan.scenario}: its checkpoints are on a disk of their own; leave job.checkpoints.size out")
    fuse = capabilities.check("fuse")
    if not fuse.present:
        raise UsageError(f"recording needs FUSE, which this machine lacks ({fuse.detail}); {fuse.remedy}")


class Recorded(Stoppable):
    """Records the job once, in the folder `now`, where it is resumed later too. Parts that exist already are not made
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
        record_sources(self._plan, self.now)
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
        with StoreServer(plan, folder, folder.logs / "store.log", notes) as served:
            self._carry_out(Run(served.plan, folder))
