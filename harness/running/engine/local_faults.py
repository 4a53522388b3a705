"""Who applies the faults of a run, and when they begin. `LocalFaults` is the host of the faults that this process
applies: in a run on one machine all of them, on a node that is another machine those that hit the node. `Beginning`
waits until a fault may begin, and tells its host, wherever that is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torchaos.harness.protocol.agent_plan import RankTrigger
from torchaos.harness.protocol.control_pages import ControlPage
from torchaos.harness.record.plan import After, PlannedFault
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.running.conditions.progress import after_is_due
from torchaos.harness.running.engine.fault_life import Context, FaultLife, FaultPages, report_missed
from torchaos.harness.running.launchers.fault_hosts import FaultHost
from torchaos.harness.running.launchers.job import JobView

JOIN_S = 10.0


class LocalFaults(FaultHost):
    """The faults that this process applies, on its own machine. `folder`: where their control pages are made.
    Thread-safe."""

    def __init__(self, faults: Sequence[PlannedFault], folder: RunDir, on: Context) -> None:
        self._on = on
        self._fault_pages = {fault.id: FaultPages.make(fault, folder) for fault in faults}
        self._lives: dict[str, FaultLife] = {}
        self._lock = threading.Lock()

    def triggers(self) -> tuple[RankTrigger, ...]:
        """The triggers for the agent's plan of the ranks on this machine."""
        return tuple(trigger for of_fault in self._fault_pages.values() for trigger in of_fault.triggers())

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
        """Undoes the fault, or all faults if it is None, the last first. Returns an empty list, because the results are
        in the journal."""
        with self._lock:
            lives = [life for name, life in reversed(self._lives.items()) if fault in (None, name)]
        for life in lives:
            life.undo()
        return []


SHARE = 10  # a throttled check is not made again for this many times its own CPU time


class Throttle:
    """Decides when a costly check may be made again. Use: `if throttle.due():`, then `with throttle:` around the check,
    whose CPU time is measured."""

    def __init__(self) -> None:
        self._spent_s = self._next_s = 0.0

    def due(self) -> bool:
        return time.monotonic() >= self._next_s

    def __enter__(self) -> None:
        self._spent_s = time.thread_time()

    def __exit__(self, *_: object) -> None:
        self._next_s = time.monotonic() + SHARE * (time.thread_time() - self._spent_s)


class Beginning:
    """Waits, in a thread of its own, until the steady state is reached and the trigger of a fault is due, if it is seen
    from outside. Then the host begins the fault. If the run ends before that, nothing begins."""

    def __init__(self, fault: PlannedFault, host: FaultHost, on: Context) -> None:
        self._fault, self._host, self._on = fault, host, on
        self._throttle = Throttle()
        self._thread = threading.Thread(target=self._run, name=f"begin {fault.id}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        try:
            if self._on.wait_until(self._on.steady.is_set) and self._on.wait_until(self._is_due):
                self._host.begin(self._fault)
        except Exception as error:  # of a plug-in; the run goes on, and the verdict reports it
            report_missed(self._fault, error, self._on.journal)

    def _is_due(self) -> bool:
        """Whether the fault may begin. The check gets more costly in a long run, and is then made less often."""
        if not isinstance(self._fault.trigger, After):
            return True
        if not self._throttle.due():
            return False
        with self._throttle:
            return after_is_due(self._fault.trigger, self._on.journal.snapshot(), time.monotonic())
