"""Executes a plan as a list of stages.

prepare -> launch -> watch -> collect -> undo the faults -> stop job -> inventory -> release. Evidence is collected
before the clean-up, and the clean-up always happens, even after an error. The verdict comes later, and is made from the
run directory alone."""

from __future__ import annotations

import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path

from torchaos.harness.analysis.ending import has_aborted
from torchaos.harness.fault_drivers.storage_faults import OwnDisk
from torchaos.harness.host.disk import write_atomically
from torchaos.harness.interfaces import ChaosError, Handle, Need, Watched
from torchaos.harness.monitoring.observers import end_of_job
from torchaos.harness.monitoring.observers.end_of_job import Leftovers
from torchaos.harness.monitoring.observers.hang_watch import hangs_of
from torchaos.harness.monitoring.probes.gpu_probe import GpuWatch
from torchaos.harness.protocol.agent_plan import AgentPlan, Moment
from torchaos.harness.protocol.check_sums import sample_bytes_of_each
from torchaos.harness.protocol.control_pages import ControlPage
from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.record.environment import describe, installed, job_python
from torchaos.harness.record.events.journal import Journal
from torchaos.harness.record.events.merged import beside_steps
from torchaos.harness.record.history import base_of
from torchaos.harness.record.history.saves_and_loads import handled_paths
from torchaos.harness.record.plan import ENDED_BEFORE, Plan, PlannedFault
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.rollback.handles import JobProcesses
from torchaos.harness.rollback.orphaned_runs import PROBES
from torchaos.harness.rollback.reaper import UndoResult
from torchaos.harness.rollback.reaper_client import ReaperClient, UndoError
from torchaos.harness.running.engine.fault_lifecycle import JOIN_S, FaultContext, LocalFaults
from torchaos.harness.running.engine.supervision import ConditionWatches, FaultStart, SelfCheck
from torchaos.harness.running.fault_checks import Permits
from torchaos.harness.running.launchers.fault_appliers import FaultApplier
from torchaos.harness.running.launchers.job_factory import job_for, kind_of_job

PATIENCE_S = 2 * Moment.hold_s


class BaseWriter:
    """Writes the base of each attempt to the control pages of faults. The base is the number of global steps before the
    first step of the attempt.

    After the first step of an attempt that loaded a checkpoint, the agent waits for the base to appear on the page. If
    the witnesses do not show the base, nothing is written, and the trigger is missed: the base is never guessed."""

    def __init__(self, pages: Sequence[Mapping[int, ControlPage]]) -> None:
        """`pages`: for each fault, its control pages by rank."""
        self._pages = [item for of_fault in pages for item in of_fault.items()]
        self._ranks = {rank for rank, _page in self._pages}
        self._waiting: dict[
            int, Event
        ] = {}  # by rank: the first step of its newest attempt, whose base is not written yet

    def note(self, event: Event) -> None:
        """Must be called with each event of the run."""
        if event.kind is Kind.STEP and event.step == 1 and event.attempt is not None and event.rank in self._ranks:
            earlier = self._waiting.get(event.rank)
            if earlier is None or (earlier.attempt or 0) <= event.attempt:
                self._waiting[event.rank] = event

    def update(self, events: Sequence[Event]) -> None:
        """Writes the base of each attempt whose base `events` show. `events`: all events of the run so far."""
        bases: dict[int, int | None] = {}
        for rank, first in list(self._waiting.items()) if events else ():
            attempt = first.attempt or 0
            if events[-1].mono_s - PATIENCE_S > first.mono_s:  # no rank waits longer for an answer
                self._waiting.pop(rank)
                continue
            if attempt not in bases:
                bases[attempt] = base_of(events, attempt)[0]
            if (base := bases[attempt]) is not None:
                self._waiting.pop(rank)
                for page in (page for number, page in self._pages if number == rank):
                    page.write(page.BASE, base)
                    page.write(page.BASE_ATTEMPT, attempt)


WATCH_S = 0.1
STOP_GRACE_S = 5.0
LATE_S = 30.0  # seconds to wait at the end for a fault that is still being applied
_MOST_FILES = 20_000  # in the list of the files that the job left
SPARE_S = 60.0  # the reaper ends the job by itself if it lives this much longer than its time-out

Watcher = Callable[[Journal, Plan], AbstractContextManager[object]]


class Run:
    """A run of a plan in a run directory. `stop` may be called from a signal handler or another thread."""

    def __init__(
        self, plan: Plan, folder: RunDir, reproduce: Sequence[str] = (), watcher: Watcher | None = None,
        notes: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """`reproduce`: the command line that repeats the run. `watcher`: gets the journal while it is written. `notes`:
        texts that are recorded first."""
        self.plan, self.folder = plan, folder
        # All processes with this id are ended with the run, so no other run may ever have the same id.
        self.run_id = f"{folder.root.name}-{secrets.token_hex(4)}"
        self._reproduce, self._watcher, self._notes = list(reproduce), watcher, notes
        self._stopped: dict[str, object] | None = None
        self._hurried = False
        self.grace_s = STOP_GRACE_S  # seconds for the job to end when it is asked to; 0: it is killed at once
        self._appliers: list[tuple[FaultApplier, PlannedFault]] = []  # each fault, with who applies it
        self._disk: OwnDisk | None = None  # the disk of the checkpoints, once it is mounted
        self._unverified: dict[str, str] = {}  # by owner: why its undo is not verified; a later success removes it

    def stop(self, reason: str, interrupted: bool = True, enough: bool = False, timed_out: bool = False) -> None:
        """Ends the run early. Evidence is still collected, and everything is undone and stopped. `interrupted`: the end
        came from outside, so unfinished work says nothing about the job. `enough`: the scenario ended the run on
        purpose, by `until`. `timed_out`: the job's time-out was over."""
        if self._stopped is None:
            self._stopped = {
                "reason": reason, "interrupted": interrupted, "enough": enough, "timed_out": timed_out,
            }  # fmt: skip

    def hurry(self) -> None:
        """From now on, the run does not wait and reads no more evidence. All faults are still undone."""
        self._hurried = True

    @property
    def left(self) -> list[str]:
        """After the run: one sentence for each change that could not be undone."""
        return [f"{who} could not be undone: {why}" for who, why in self._unverified.items()]

    def __call__(self) -> None:
        """Carries out the run. Raises ChaosError if the job can't be started, if an undo can't be written to disk, or
        if the journal can't be written. Before that, the machine is cleaned up."""
        with ExitStack() as stack:
            self._prepare(stack)
            # All of these stages run, in reverse order, even if an earlier stage raised an error.
            for stage in (self._unmount_disk, self._take_inventory, self._stop_job, self._undo_faults, self._collect):
                stack.callback(stage)
            self._launch()
            self._watch()
        if self.journal.failed:
            raise ChaosError(f"{self.folder.root}: {self.journal.failed}; nothing is judged")

    def _prepare(self, stack: ExitStack) -> None:
        kind = kind_of_job(self.plan.launcher, self.plan.job.attach_pid)
        self.journal = Journal(self.folder.events, follow=kind.journals)
        stack.callback(self.journal.close)
        if self._watcher:
            stack.enter_context(self._watcher(self.journal, self.plan))
        for text in self._notes:
            self.journal.emit(Kind.NOTE, {"text": text})
        self._stage("prepare")
        plan = self.plan
        root = self._checkpoints()
        self._reaper = ReaperClient.start(self.folder.root, self.run_id)
        stack.callback(self._release)
        self._limit_s = plan.job.timeout_s + SPARE_S + kind.queue_s
        self._reaper.record_undo("probes", [JobProcesses(self.run_id + PROBES)], owner="probes")
        self._job = job_for(plan, self.folder, self.run_id, self.journal, self._record_undo_of_resources)
        self._leftovers = Leftovers(plan, self._job.members)
        self._self_check = SelfCheck(self.folder.root)
        self._watches = ConditionWatches(plan, Watched(self.folder.root, root, self.run_id + PROBES), self.journal.emit)
        stack.callback(self._watches.stop)
        self._gpus = GpuWatch(self._job.ranks if kind.is_here else dict, self.journal.emit)
        stack.callback(self._gpus.stop)
        self._hangs = hangs_of(plan, self.folder, self._job.ranks, self.journal.emit, self._gpus.seen)
        stack.callback(self._hangs.stop)
        permits = Permits(
            plan, self.run_id, [self.folder.root, *([root] if root else [])], self._job.members, self._world_size
        )
        self._context = FaultContext(
            self.journal, self._job, self._reaper, self._limit_s, self.folder.undo, root, permits
        )
        elsewhere = self._job.appliers(permits)
        ours = [fault for fault in plan.faults if not any(applier.takes(fault) for applier in elsewhere)]
        local = LocalFaults(ours, self.folder, self._context)
        appliers = (*elsewhere, local)
        self._appliers = [
            (next(applier for applier in appliers if applier.takes(fault)), fault) for fault in plan.faults
        ]
        AgentPlan(
            self.run_id, str(self.folder.events), plan.hooks, local.rank_faults(), str(root) if root else None,
            sample_bytes_of_each(plan.job.world_size),
        ).write(self.folder.agent_plan)  # fmt: skip
        self._bases = BaseWriter([applier.pages(fault) for applier, fault in self._appliers])
        self.journal.listen(self._bases.note)

    def _launch(self) -> None:
        self._stage("launch")
        if self._stopped:  # before the job was started
            return
        if self.plan.job.attach_pid is None:
            processes = JobProcesses(self.run_id)
            self._reaper.record_undo("job", [processes], owner="job", limit_s=self._limit_s)
        self._make_disk()
        self._job.start()
        python = job_python(self.plan.job.command)  # its packages are listed while the job starts
        threading.Thread(target=installed, args=[python], name="packages", daemon=True).start()
        self._leftovers.start()
        self._watches.start()
        self._gpus.start()
        self._hangs.start()
        for applier, fault in self._appliers:
            FaultStart(fault, applier, self._context).start()

    def _make_disk(self) -> None:
        root, size = self._checkpoints(), self.plan.job.checkpoints_size
        if root and size:
            disk = OwnDisk.of(root, size, self.run_id)
            self._reaper.record_undo("checkpoints", [disk.undo_handle], owner="checkpoints", limit_s=self._limit_s)
            disk.mount()
            self._disk = disk

    def _watch(self) -> None:
        self._stage("run")
        end = time.monotonic() + self.plan.job.timeout_s
        while not self._job.done and self._stopped is None:
            self._job.wait(WATCH_S)
            now, events = time.monotonic(), self.journal.snapshot()
            if not self._context.steady.is_set() and self._watches.steady(events, now):
                self._context.steady.set()
            broken = self._watches.broken(events, now)
            if trouble := self.journal.failed or self._self_check.trouble() or self._job.trouble:
                self.stop(trouble)
            elif broken:
                self.stop(broken[0], interrupted=not broken[1])
            elif enough := self._watches.enough(events, now):
                self.stop(enough, interrupted=False, enough=True)
            elif now > end:
                late = f"the job took longer than its time-out of {self.plan.job.timeout_s:g} s"
                self.stop(late, interrupted=False, timed_out=True)
            self._bases.update(events)
        if self._stopped:
            self.journal.emit(Kind.STOPPED, self._stopped)

    def _look_at_ranks(self) -> None:
        """Records what the job's ranks are doing, if the job is about to be ended. Does nothing if a job on other
        machines has no rank."""
        stopped = self._stopped
        if stopped is None or stopped["interrupted"] or stopped["enough"] or self._job.done or self._hurried:
            return
        if not (ranks := self._job.ranks()) and not self._job.is_here:
            return
        agents = None if self.plan.job.attached else self.folder.agent_plan.parent
        try:
            self.journal.emit(Kind.HANG_AT_END, end_of_job.look(ranks, agents))
        except (OSError, ValueError, KeyError) as error:  # a process or file has just disappeared
            text = f"what the ranks did at the end could not be read: {type(error).__name__}: {error}"
            self.journal.emit(Kind.NOTE, {"text": text})

    def _collect(self) -> None:
        self._stage("collect")
        self._look_at_ranks()
        if (left := self._leftovers.take(self._job.done and self._stopped is None, self._is_hurried)) is not None:
            self._save("leftovers", left)
        self._context.ended.set()
        self._watches.stop()
        self._hangs.stop()
        self._gpus.stop()
        for name in self._end_faults(JOIN_S, self._is_hurried):
            self.journal.emit(Kind.NOTE, {"text": f"fault {name} has not ended; it is rolled back now"})
        reported = {
            event.data["fault"]
            for event in beside_steps(self.journal.snapshot())
            if event.kind in (Kind.APPLYING, Kind.MISSED)
        }
        for fault in self.plan.faults:
            if fault.id not in reported:
                self.journal.emit(Kind.MISSED, {"fault": fault.id, "reason": ENDED_BEFORE, "ended_before": True})
        if (from_job := end_of_job.of_run(self.plan, self.folder)) is not None:
            self._save("report", from_job)
        self._save("environment", {**describe(self.plan), "reproduce": self._reproduce})

    def _undo_faults(self) -> None:
        self._stage("heal")
        for applier, fault in reversed(self._appliers):
            if wrong := applier.undo(fault.id):
                data = {"fault": fault.id, "verified": False, "reason": "; ".join(wrong)}
                self.journal.emit(Kind.ROLLED_BACK, data)
        rolled_back = (e.data for e in beside_steps(self.journal.snapshot()) if e.kind is Kind.ROLLED_BACK)
        bad = [data for data in rolled_back if not data["verified"]]
        self._unverified |= {rolled["fault"]: rolled["reason"] for rolled in bad}

    def _stop_job(self) -> None:
        self._stage("stop job")
        self._job.stop(self.grace_s, self._is_hurried)
        for owner in ("job", "launcher"):
            self._undo(owner, partial(self._reaper.undo, owner))

    def _take_inventory(self) -> None:
        if not self._hurried:
            self._save("files", files_below(self.folder.job))
        root = self._checkpoints()
        wanted = Need.INVENTORY in self.plan.collect or has_aborted(beside_steps(self.journal.snapshot()))
        if root and wanted and not self._hurried:
            from torchaos.harness.checkpoints import (
                inventory,  # imported late, so that the start of the job is not delayed
            )

            self._stage("inventory")
            seen = handled_paths(beside_steps(self.journal.snapshot()))
            found = inventory.take(root, self.folder.root, given_up=self._is_hurried, seen=seen)
            # The path of the run's own folder is replaced by {run}, so that paths in checkpoints are the same in each
            # run.
            named = json.dumps(found["checkpoints"], ensure_ascii=False).replace(str(self.folder.job), "{run}")
            self._save("inventory", {**found, "checkpoints": json.loads(named)})
        self._stage("end")

    def _unmount_disk(self) -> None:
        """Unmounts the run's own disk, if there is one. This happens after the inventory, because the files are lost
        with the disk."""
        if self._disk is None:
            return
        unmount = partial(self._undo, "checkpoints", partial(self._reaper.undo, "checkpoints"))
        if lost := self._disk.give_back(unmount, keep=not self._hurried):
            self.journal.emit(Kind.NOTE, {"text": lost})

    def _release(self) -> None:
        """The last stage: undoes everything that is left, and ends the reaper. First it waits for faults that are still
        being applied, because nothing could undo them after the end of the reaper."""
        late = self._end_faults(LATE_S)
        self._undo("all", self._reaper.close)
        for name in late:
            self._record_results([UndoResult(name, {}, False, "it was still being applied when the run was over")])

    def _end_faults(self, wait_s: float, hurried: Callable[[], bool] = lambda: False) -> list[str]:
        """Lets no further fault begin. Waits at most `wait_s` seconds for faults that are still being applied, and
        returns those that are not over."""
        appliers = {id(applier): applier for applier, _fault in self._appliers}.values()
        stuck = {name for applier in appliers for name in applier.end(wait_s, hurried)}
        return [fault.id for _applier, fault in self._appliers if fault.id in stuck]

    def _undo(self, owner: str, undo: Callable[[], Sequence[UndoResult]]) -> None:
        try:
            self._record_results(undo())
        except UndoError as error:  # recorded as a failed undo: then the exit code is 4, and the next stages still run
            self._record_results([UndoResult(owner, {}, False, str(error))])

    def _record_results(self, results: Sequence[UndoResult]) -> None:
        for result in results:
            self.journal.emit(Kind.HEALED, asdict(result))
        bad = {_owner(result): result.reason for result in results if not result.verified}
        good = {_owner(result) for result in results} - bad.keys()
        self._unverified = {who: why for who, why in (self._unverified | bad).items() if who not in good}

    def _record_undo_of_resources(self, resources: Sequence[Handle], submission: int) -> None:
        """Writes the undo of what a launcher is about to create to disk. If this raises UndoError, nothing may be
        created."""
        self._reaper.record_undo(f"launcher#{submission}", resources, owner="launcher", limit_s=self._limit_s)

    def _world_size(self) -> int | None:
        return next((rank.world_size for rank in self._job.ranks().values()), None)

    def _is_hurried(self) -> bool:
        return self._hurried

    def _checkpoints(self) -> Path | None:
        job = self.plan.job
        parts = (part.replace("{run}", str(self.folder.job)) for part in (job.cwd, job.checkpoints or ""))
        return Path(*parts) if job.checkpoints else None

    def _stage(self, name: str) -> None:
        self.journal.emit(Kind.STAGE, {"stage": name})

    def _save(self, name: str, data: object) -> None:
        write_atomically(self.folder.artifacts / f"{name}.json", json.dumps(data, indent=1), private=True)


def files_below(folder: Path) -> list[str]:
    """The paths of the files below a folder, relative to it, in order. At most _MOST_FILES of them."""
    walked = (Path(root, name) for root, _folders, names in os.walk(folder) for name in names)
    return sorted(str(path.relative_to(folder)) for path in islice(walked, _MOST_FILES))


def _owner(result: UndoResult) -> str:
    """The owner of an undo record, from the record's name: "freeze" for "freeze#1.pages"."""
    return result.record.partition("#")[0]


class Stoppable:
    """Base class for a command that carries out several runs, one after the other. `stop` and `hurry` may be called
    from a signal handler."""

    def __init__(self) -> None:
        self._current: Run | None = None
        self._stopped = ""  # the reason
        self._hurried = False
        self.left: list[str] = []  # changes that could not be undone, one sentence each

    def stop(self, reason: str) -> None:
        """Ends the current run in the normal way, and prevents further runs."""
        self._stopped = reason
        if self._current:
            self._current.stop(reason)

    def hurry(self, reason: str) -> None:
        """Ends the current run like `stop`, but skips everything slow except the undo."""
        self._hurried = True
        self.stop(reason)
        if self._current:
            self._current.hurry()

    def _carry_out(self, run: Run) -> None:
        self._current = run
        if self._stopped:  # `stop` was called before this run existed
            run.stop(self._stopped)
        if self._hurried:
            run.hurry()
        try:
            run()
        finally:
            self.left += run.left
            self._current = None
