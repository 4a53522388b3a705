"""The life of one fault: write the undo to disk, arm, apply, wait for the duration, undo.

A fault in a rank is armed ahead of time, and the agent fires it at its Moment; the harness is not in the hot path. The
control page of a fault is a memory-mapped file through which the harness and a rank exchange numbers. A fault from
outside is applied while its pacer (the rank that is held) waits at the Moment, or at once.

`LocalFaults` has the faults that this process applies: in a run on one machine all of them, on a node that
is another machine those that hit the node."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from torchaos.harness import registry
from torchaos.harness.fault_drivers.site import OutsideSite, Victim
from torchaos.harness.interfaces import ChaosError, Handle, Hits, Irreversible, RankProcess
from torchaos.harness.monitoring.probes.rank_probe import Sampling
from torchaos.harness.protocol.agent_plan import Moment, RankFault
from torchaos.harness.protocol.control_pages import ControlPage, State
from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.record.events.journal import Journal
from torchaos.harness.record.plan import PlannedFault
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.registry import phase_of
from torchaos.harness.rollback.file_handles import File
from torchaos.harness.rollback.handles import PageSlot
from torchaos.harness.rollback.reaper import UndoResult
from torchaos.harness.rollback.reaper_client import ReaperClient, UndoError
from torchaos.harness.running.fault_checks import NotPermitted, Permits
from torchaos.harness.running.launchers.fault_appliers import FaultApplier, ranks_with_page
from torchaos.harness.running.launchers.job import JobView


def ranks_now(fault: PlannedFault, job: JobView) -> Sequence[int]:
    """The ranks to hit. For a target node, these are the ranks that the node has now: after a restart, or with a
    standby node, they may differ from the plan. A fault inside a rank always hits the planned ranks, because it was
    armed there."""
    target = fault.target
    if not target.nodes or fault.where == "rank":
        return target.ranks
    return sorted(rank for rank, process in job.ranks().items() if process.node in target.nodes)


def victims_of(fault: PlannedFault, hits: Hits, job: JobView) -> list[Victim]:
    """The processes to hit. Empty if the fault hits nodes, files or endpoints. Raises ChaosError if a target has no
    process now."""
    if hits in ("nodes", "files", "endpoints"):
        return []
    if hits == "agents" or (hits == "as_targeted" and fault.target.nodes):
        return job.agents(fault.target.nodes)
    ranks, wanted = job.ranks(), ranks_now(fault, job)
    missing = [rank for rank in wanted if rank not in ranks]
    if missing:
        raise ChaosError(f"rank {missing[0]} has no process now")
    found = [ranks[rank] for rank in wanted]
    idle = set(fault.target.nodes) - {process.node for process in found}
    if idle and hits != "ranks_or_node":
        raise ChaosError(f"node {min(idle)} has no rank now")
    victims = [Victim(process.pid, process.start_ticks, process.rank, process.attempt) for process in found]
    return [*victims, *(_first_process(node, job) for node in sorted(idle))]


def _first_process(node: int, job: JobView) -> Victim:
    """The oldest process of the job on a node without ranks. Raises ChaosError if there is none."""
    there = next((live.processes() for live in job.nodes() if live.node.index == node), {})
    if not there:
        raise ChaosError(f"node {node} has no rank now, and no process of the job")
    return Victim(*min(there.items(), key=lambda item: (item[1], item[0])), rank=None)


LEASE_S = 3600.0  # seconds after which a fault in a rank ends even if no process is left to undo it


@dataclass(frozen=True)
class FaultPages:
    """The control pages of one fault, by rank, see `ranks_with_page`."""

    fault: PlannedFault
    pages: dict[int, ControlPage]
    paths: dict[int, Path]

    @classmethod
    def make(cls, fault: PlannedFault, folder: RunDir) -> FaultPages:
        paths = {rank: folder.pages / f"{fault.id}-rank{rank}.page" for rank in ranks_with_page(fault)}
        return cls(fault, {rank: ControlPage(path, create=True) for rank, path in paths.items()}, paths)

    def call_off(self) -> None:
        """Makes sure that the fault can't be applied any more. Ranks no longer wait to be armed, and a held rank
        continues."""
        for page in self.pages.values():
            page.write(page.ARMED_PID, page.CALLED_OFF)
            if self.fault.where == "node":
                page.write(page.GO, PageSlot.GO_ON)

    def rank_faults(self) -> Iterator[RankFault]:
        """The fault, as each of its ranks gets it. A fault inside the rank whose trigger is seen from outside fires
        when its rank next enters the injector's usual phase, or any phase if the injector has none."""
        fault = self.fault
        when = fault.trigger if isinstance(fault.trigger, Moment) else Moment(0, None, phase_of(fault.inject))
        lease_s = LEASE_S if fault.duration_s is None else fault.duration_s
        for rank, path in self.paths.items():
            if fault.where == "rank":
                moment = replace(when, pacer=rank)
                yield RankFault(fault.id, moment, str(path), fault.source, fault.injector, fault.params, lease_s)
            else:
                yield RankFault(fault.id, when, str(path))


CHECK_S = 1.0  # seconds between checks that an armed fault is still within the limits
SPARE_S = 30.0  # the reaper undoes a fault by itself if it lasts this much longer than planned
NEAR_S, FAR_S = 0.0005, 0.02  # seconds between looks at a control page: close to the Moment, and before


@dataclass(frozen=True)
class FaultContext:
    journal: Journal
    job: JobView
    reaper: ReaperClient
    limit_s: float  # the reaper undoes a fault by itself this long after its undo was written to disk
    undo_copies: Path = OutsideSite.undo_copies
    checkpoints: Path | None = None
    permits: Permits | None = None
    steady: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)

    def wait_until(self, found: Callable[[], bool], every_s: float = FAR_S) -> bool:
        """Waits until `found()` is true. Returns False if the run ended before that."""
        while not found():
            if self.ended.wait(every_s):
                return False
        return True


def report_missed(fault: PlannedFault, error: Exception, journal: Journal) -> None:
    """Records that a fault was missed. Does nothing if the journal is closed: then the run is over and recorded."""
    known = isinstance(error, (ChaosError, OSError))
    reason = str(error) if known else f"{type(error).__name__}: {error}"
    with suppress(ChaosError):
        journal.emit(Kind.MISSED, {"fault": fault.id, "reason": reason})


class FaultLife:
    """Carries one fault through its life, in a thread of its own. If the run ends before its Moment, nothing is
    applied."""

    def __init__(self, fault: PlannedFault, fault_pages: FaultPages, on: FaultContext) -> None:
        self.fault, self._fault_pages, self._on = fault, fault_pages, on
        self._injector = registry.injector_of(fault)
        on_standby = self._injector.hits == "ranks_or_node" and not fault.target.ranks  # it starts after the ranks
        self._late = self._injector.late or on_standby
        self._records, self._record = 0, ""
        self._recorded_for: Sequence[Victim] = ()
        self._begun = False  # the fault was applied, perhaps only in part
        self._checked_s = 0.0  # when the limits were last checked, CLOCK_MONOTONIC
        self._watching = Sampling((), on.journal.emit)
        self._progress: dict[int, int] = {}
        on.journal.listen(self._note_step)
        self._thread = threading.Thread(target=self._run, name=f"fault {fault.id}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self, timeout_s: float, hurried: Callable[[], bool] = lambda: False) -> bool:
        """Waits for the end of the fault's thread, at most `timeout_s` seconds and only until `hurried()` is true.
        True if the thread is over or was never started."""
        end = time.monotonic() + timeout_s
        while self._thread.is_alive() and time.monotonic() < end and not hurried():
            self._thread.join(FAR_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            if self.fault.where == "rank":
                self._in_the_ranks()
            elif isinstance(self.fault.trigger, Moment):
                for _ in range(self.fault.times):
                    self._at_the_moment(self.fault.trigger)
            else:
                self._record_undo_and_apply()
        except Exception as error:  # an injector may raise anything; the run goes on, and the verdict reports it
            if self._begun:  # after its fault, this thread ends
                with suppress(ChaosError):
                    self.undo()
            report_missed(self.fault, error, self._on.journal)
        finally:
            self._fault_pages.call_off()

    def _in_the_ranks(self) -> None:
        self._check_limits()
        self._record_undo(self._injector.changes(self._site_of(())))
        pages = self._fault_pages.pages.values()
        for page in pages:
            page.write(page.ALLOWED, self.fault.times)
        self._armed(self.fault.target.ranks)
        if self._on.wait_until(partial(self._all_fired, list(pages))):
            self._begun = True
            self._wait_and_undo()

    def _all_fired(self, pages: Sequence[ControlPage]) -> bool:
        if time.monotonic() - self._checked_s > CHECK_S:
            self._check_limits()
        return all(page.read(page.FIRED) >= self.fault.times for page in pages)

    def _check_limits(self) -> None:
        """Raises NotPermitted if the fault would exceed the limits, for example because the job came back with fewer
        ranks. Raises UndoError if the reaper is gone."""
        self._checked_s = time.monotonic()
        self._on.reaper.check()
        if self._on.permits:
            self._on.permits.check(ranks_now(self.fault, self._on.job), self.fault.target.nodes)

    def _at_the_moment(self, moment: Moment) -> None:
        page = self._fault_pages.pages[moment.pacer]
        fired = page.read(page.FIRED)
        armed, looked = None, 0.0
        while page.read(page.FIRED) == fired and page.read(page.STATE) != State.HELD:
            if time.monotonic() - looked >= FAR_S:  # the pacer's process rarely changes, and is costly to find
                armed, looked = self._arm(moment, page, fired, armed), time.monotonic()
            if self._on.ended.wait(NEAR_S if self._near(moment) else FAR_S):
                return
        if page.read(page.FIRED) == fired:  # the pacer is held, and did not go on by itself
            release = partial(page.write, page.GO, fired + 1)
            try:
                if self._late:
                    self._record_undo_for(self._site())
                self._apply(release)
            finally:
                release()

    def _arm(self, moment: Moment, page: ControlPage, fired: int, last_armed: RankProcess | None) -> RankProcess | None:
        """If the pacer (the rank at whose Moment the fault is due) has a new process, writes the undo to disk and arms
        that process. Returns the process that is armed now."""
        pacer = self._on.job.ranks().get(moment.pacer)
        if pacer is None or pacer == last_armed or moment.attempt not in (None, pacer.attempt):
            return last_armed
        self._record_undo(()) if self._late else self._record_undo_for(self._site())
        page.write(page.GO, fired)  # the undo of the last landing has told every later hold to go on
        page.write(page.ARMED_PID, pacer.own_pid)
        page.write(page.ALLOWED, fired + 1)
        self._armed([moment.pacer])
        return pacer

    def _record_undo_and_apply(self) -> None:
        self._record_undo_for(self._site())
        self._apply(lambda: None)

    def _record_undo_for(self, site: OutsideSite) -> None:
        self._record_undo(self._injector.changes(site))
        self._recorded_for = site.victims

    def _apply(self, release: Callable[[], None]) -> None:
        self._check_limits()
        site = self._site(release)
        if self._changes and site.victims != self._recorded_for:  # the processes were replaced meanwhile
            self._record_undo_for(site)
        site = replace(site, undo_on_disk=self._changes)
        about = {"fault": self.fault.id, "phase": site.phase and site.phase.value, "global_step": site.step}
        for victim in site.victims:
            data = {**about, "pid": victim.pid}
            self._on.journal.emit(Kind.APPLYING, data, rank=victim.rank, attempt=victim.attempt)
        hit: list[int | None] = [live.node.index for live in site.nodes]
        for node in hit or [None]:
            if not site.victims:  # the fault hits nodes, files or endpoints
                self._emit(Kind.APPLYING, {**about, "pid": None, "node": node})
        self._begun = True
        self._injector.apply(site)
        for change in self._changes:
            if isinstance(change, File):
                change.note()
        self._watching = Sampling(self._injector.probes(site), self._on.journal.emit)
        self._watching.start()  # before the rank goes on
        release()
        self._emit(Kind.APPLIED, {"fault": self.fault.id})
        self._wait_and_undo()

    def _wait_and_undo(self) -> None:
        """Called when the fault is applied. If the fault has a duration, waits that long, and undoes the fault."""
        lasts_s = self.fault.duration_s
        self._on.reaper.mark(self._record, "applied", None if lasts_s is None else lasts_s + SPARE_S)
        if lasts_s is not None:
            self._on.ended.wait(lasts_s)
            self.undo()

    def undo(self) -> None:
        """Undoes the changes of this fault, and records whether the undo was verified. Harmless if there were no
        changes."""
        self._watching.stop()
        try:
            results = self._on.reaper.undo(self.fault.id)
        except UndoError as error:
            results = [UndoResult(self.fault.id, {}, False, str(error))]
        if results:
            bad = [result.reason for result in results if not result.verified]
            self._emit(Kind.ROLLED_BACK, {"fault": self.fault.id, "verified": not bad, "reason": "; ".join(bad)})

    def _record_undo(self, changes: Sequence[Handle] | Irreversible | None) -> None:
        """Writes the undo of these changes to disk, before the fault can be applied. Raises UndoError if that fails.
        Raises NotPermitted if a change touches anything that does not belong to the job, or if the injector declares no
        changes."""
        if changes is None:
            raise NotPermitted(f"changes() of {self.fault.inject} returned neither handles nor Irreversible")
        if self._on.permits and not isinstance(changes, Irreversible):
            self._on.permits.check_changes(changes)
        self._changes: Sequence[Handle] = () if isinstance(changes, Irreversible) else changes
        self._records += 1
        slots = [PageSlot(str(path)) for path in self._fault_pages.paths.values()]
        self._record = f"{self.fault.id}#{self._records}"
        limit = self._on.limit_s
        if slots:
            self._on.reaper.record_undo(f"{self._record}.pages", slots, owner=self.fault.id, limit_s=limit)
        if changes or not slots:  # the changes of an injector with `late` are known only at the Moment
            self._on.reaper.record_undo(self._record, changes, owner=self.fault.id, limit_s=limit)
            self._on.reaper.mark(self._record, "maybe_applied")  # now, so that no rank waits for the disk
        else:
            self._record = f"{self._record}.pages"
        why = changes.why if isinstance(changes, Irreversible) else None
        names = [handle.kind for handle in (*slots, *(() if isinstance(changes, Irreversible) else changes))]
        self._emit(Kind.GUARDED, {"record": self.fault.id, "handles": names, "why": why})

    def _site(self, release: Callable[[], None] = lambda: None) -> OutsideSite:
        return self._site_of(victims_of(self.fault, self._injector.hits, self._on.job), release)

    def _site_of(self, victims: Sequence[Victim], release: Callable[[], None] = lambda: None) -> OutsideSite:
        when = self.fault.trigger if isinstance(self.fault.trigger, Moment) else None
        step, phase = (when.step, when.phase) if when else (None, None)
        on = self._on
        cluster = on.job.nodes() if self._injector.hits == "nodes" else ()
        nodes = [live for live in cluster if live.node.index in self.fault.target.nodes]
        return OutsideSite(
            self.fault.id, victims, self._emit, step, phase, release, on.ended, on.checkpoints, on.undo_copies,
            nodes, cluster, on.job.endpoints() if self._injector.hits == "endpoints" else {},
        )  # fmt: skip

    def _near(self, moment: Moment) -> bool:
        """Whether the Moment may come within the next two steps. Only then is the control page checked often, because
        checks slow the job."""
        return (
            moment.step is None or moment.attempt is not None or self._progress.get(moment.pacer, 0) >= moment.step - 2
        )

    def _note_step(self, event: Event) -> None:
        if event.kind is Kind.STEP and event.rank is not None and event.step is not None:
            self._progress[event.rank] = max(event.step, self._progress.get(event.rank, 0))

    def _armed(self, targets: Sequence[int]) -> None:
        self._emit(Kind.ARMED, {"fault": self.fault.id, "targets": list(targets)})

    def _emit(self, kind: Kind, data: Mapping[str, Any]) -> Event:
        return self._on.journal.emit(kind, data)


JOIN_S = 10.0


class LocalFaults(FaultApplier):
    """The faults that this process applies, on its own machine. `folder`: where their control pages are made.
    Thread-safe."""

    def __init__(self, faults: Sequence[PlannedFault], folder: RunDir, on: FaultContext) -> None:
        self._on = on
        self._fault_pages = {fault.id: FaultPages.make(fault, folder) for fault in faults}
        self._lives: dict[str, FaultLife] = {}
        self._lock = threading.Lock()

    def rank_faults(self) -> tuple[RankFault, ...]:
        """The faults for the agent's plan of the ranks on this machine."""
        return tuple(fault for pages in self._fault_pages.values() for fault in pages.rank_faults())

    def takes(self, fault: PlannedFault) -> bool:
        return fault.id in self._fault_pages

    def pages(self, fault: PlannedFault) -> Mapping[int, ControlPage]:
        return self._fault_pages[fault.id].pages

    def begin(self, fault: PlannedFault, job: JobView | None = None) -> None:
        """Starts the life of the fault. `job`: what the fault sees of the job, if it differs from the whole job."""
        with self._lock:
            if fault.id in self._lives or self._on.ended.is_set():
                return
            on = replace(self._on, job=job) if job else self._on
            life = self._lives[fault.id] = FaultLife(fault, self._fault_pages[fault.id], on)
            life.start()

    def end(self, wait_s: float = JOIN_S, hurried: Callable[[], bool] = lambda: False) -> list[str]:
        self._on.ended.set()
        with self._lock:
            lives = dict(self._lives)
        for name, pages in self._fault_pages.items():
            if name not in lives:
                pages.call_off()
        return [name for name, life in lives.items() if not life.join(wait_s, hurried)]

    def undo(self, fault: str | None = None) -> list[str]:
        """Undoes the fault; None: all faults, the last first. Returns an empty list, because the results are in the
        journal."""
        with self._lock:
            lives = [life for name, life in reversed(self._lives.items()) if fault in (None, name)]
        for life in lives:
            life.undo()
        return []
