"""The life of a fault whose target is on another machine. The controller observes the trigger; everything else happens
on the node of the target."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from torchaos.harness.interfaces import ChaosError
from torchaos.harness.protocol.agent_plan import Moment
from torchaos.harness.protocol.control_pages import ControlPage
from torchaos.harness.protocol.wire import Kind
from torchaos.harness.record.plan import After, PlannedFault
from torchaos.harness.running.engine.fault_life import FAR_S, Context, FaultPages
from torchaos.harness.running.launchers.remote_job import RemoteJob


class RemoteControlPage(ControlPage):
    """A control page on other machines. The words that the controller writes are sent to the nodes, where the ranks
    read them."""

    def __init__(self, job: RemoteJob, fault: str, rank: int) -> None:
        self._job, self._fault, self._rank = job, fault, rank

    def write(self, word: int, value: int) -> None:
        self._job.faults.write(self._fault, self._rank, word, value)


def remote_pages(fault: PlannedFault, job: RemoteJob) -> FaultPages:
    """The control pages that the nodes make for the fault."""
    pacer = (fault.trigger.pacer,) if isinstance(fault.trigger, Moment) else ()
    ranks: Sequence[int] = fault.target.ranks if fault.where == "rank" else pacer
    return FaultPages(fault, {rank: RemoteControlPage(job, fault.id, rank) for rank in ranks}, {})


class RemoteFaultLife:
    """The life of a fault on other machines, with the same methods as `FaultLife`."""

    def __init__(self, fault: PlannedFault, job: RemoteJob, on: Context) -> None:
        self.fault, self._job, self._on = fault, job, on
        self._thread = threading.Thread(target=self._run, name=f"fault {fault.id}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self, timeout_s: float, hurried: Callable[[], bool] = lambda: False) -> bool:
        end = time.monotonic() + timeout_s
        while self._thread.is_alive() and time.monotonic() < end and not hurried():
            self._thread.join(FAR_S)
        return self.fault.id not in self._job.faults.end()

    def undo(self) -> None:
        """Undoes the fault on all nodes. Each node records the result. If a node doesn't answer, the undo on it counts
        as not verified."""
        if wrong := self._job.faults.undo(self.fault.id):
            data = {"fault": self.fault.id, "verified": False, "reason": "; ".join(wrong)}
            self._on.journal.emit(Kind.ROLLED_BACK, data)

    def _run(self) -> None:
        try:
            if self._on.wait_until(self._on.steady.is_set) and self._await_trigger():
                if self._on.permits:
                    self._on.permits.check(self.fault.target.ranks, self.fault.target.nodes)
                self._job.faults.begin(self.fault)
        except ChaosError as error:
            self._on.journal.emit(Kind.MISSED, {"fault": self.fault.id, "reason": str(error)})

    def _await_trigger(self) -> bool:
        trigger = self.fault.trigger
        return not isinstance(trigger, After) or self._on.wait_until(self._on.due_by_events(trigger))
