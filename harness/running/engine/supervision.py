"""Evaluates the conditions of a run and runs their probes, each in a thread of its own. `FaultStart` waits until a
fault may begin, and tells its applier, on whatever machine. `SelfCheck` watches the harness itself: its memory, its run
directory, and the free space on the disk of that directory."""

from __future__ import annotations

import os
import resource
import shutil
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from torchaos.harness import registry
from torchaos.harness.base_classes import Condition
from torchaos.harness.interfaces import Emit, Probe, UsageError, Watched
from torchaos.harness.protocol.wire import Event
from torchaos.harness.record.events.merged import last_reason
from torchaos.harness.record.plan import After, Named, Plan, PlannedFault
from torchaos.harness.running.conditions.progress import after_is_due
from torchaos.harness.running.engine.fault_lifecycle import FaultContext, report_missed
from torchaos.harness.running.launchers.fault_appliers import FaultApplier
from torchaos.harness.scenario.field_types import size_in_words

DISK_AT_START = 256 << 20  # bytes that must be free where the run directory is
DISK_LEAST = 64 << 20  # bytes; with less, the run is ended while there is still space to record that
MEMORY_MOST = 8 << 30  # bytes; or a quarter of the machine's memory, if that is less
EVERY_S = 1.0


def check_disk(run_dir: Path) -> None:
    """Raises UsageError if there is too little free space to record a run."""
    place = next(path for path in (run_dir, *run_dir.parents) if path.exists())
    free = shutil.disk_usage(place).free
    if free < DISK_AT_START:
        raise UsageError(
            f"{run_dir}: {size_in_words(free)} are free there, and a run needs {size_in_words(DISK_AT_START)}; "
            "make room (`torchaos prune` removes old runs), or choose another --out"
        )


class SelfCheck:
    """Checks for problems of the harness itself, at most once in EVERY_S seconds."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir, self._looked = run_dir, 0.0
        pages = os.sysconf("SC_PHYS_PAGES") * resource.getpagesize()
        self._memory = min(MEMORY_MOST, pages // 4)

    def trouble(self) -> str | None:
        """Why the run can't go on, as a sentence. None if there is no problem, or if the last check was less than
        EVERY_S seconds ago."""
        now = time.monotonic()
        if now - self._looked < EVERY_S:
            return None
        self._looked = now
        try:
            if not self._run_dir.is_dir():
                return f"the run directory {self._run_dir} was removed"
            free = shutil.disk_usage(self._run_dir).free
        except OSError as error:
            return f"the run directory {self._run_dir} can't be read: {error.strerror}"
        if free < DISK_LEAST:
            return f"only {size_in_words(free)} are free on the disk of the run directory"
        if (used := _resident()) > self._memory:
            return (
                f"torchaos itself uses {size_in_words(used)} of memory, and {size_in_words(self._memory)} is its limit"
            )
        return None


def _resident() -> int:
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


SHARE = 10  # times the CPU time of a throttled check: the pause before the next one


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


class FaultStart:
    """Waits, in a thread of its own, for the steady state and, if the trigger is seen from outside, until it is due.
    Then the applier begins the fault. (A fault at a step then waits for the step in the rank.) If the run ends earlier,
    nothing begins."""

    def __init__(self, fault: PlannedFault, applier: FaultApplier, on: FaultContext) -> None:
        self._fault, self._applier, self._on = fault, applier, on
        self._throttle = Throttle()
        self._thread = threading.Thread(target=self._run, name=f"begin {fault.id}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        try:
            if self._on.wait_until(self._on.steady.is_set) and self._on.wait_until(self._is_due):
                self._applier.begin(self._fault)
        except Exception as error:  # of a plug-in; the run goes on, and the verdict reports it
            report_missed(self._fault, error, self._on.journal)

    def _is_due(self) -> bool:
        """Whether the fault may begin. In a long run the check is more costly, and is made less often."""
        if not isinstance(self._fault.trigger, After):
            return True
        if not self._throttle.due():
            return False
        with self._throttle:
            return after_is_due(self._fault.trigger, self._on.journal.snapshot(), time.monotonic())


_LEAVE_S = 5.0


class ConditionWatches:
    def __init__(self, plan: Plan, at: Watched, emit: Emit) -> None:
        self._steady, self._stop, self._at = _conditions(plan.steady_state), _conditions(plan.stop), at
        self._until = _conditions(plan.until)
        self._enough_throttle, self._broken_throttle = Throttle(), Throttle()
        conditions = (*self._steady.values(), *self._stop.values(), *self._until.values())
        probes = {probe for condition in conditions for probe in condition.probes(at)}
        self._threads = [
            threading.Thread(target=self._look, args=(probe, emit), name="condition", daemon=True) for probe in probes
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._at.ended.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(_LEAVE_S)

    def steady(self, events: Sequence[Event], now_s: float) -> bool:
        """Whether all steady-state conditions hold, so that faults may be applied."""
        return all(condition.holds(events, now_s) for condition in self._steady.values())

    def broken(self, events: Sequence[Event], now_s: float) -> tuple[str, bool] | None:
        """The stop condition that holds now, as a clause; and whether this condition is about the job. None if no stop
        condition holds. The longer the run, the less often this is checked."""
        if not self._stop or not self._broken_throttle.due():
            return None
        with self._broken_throttle:
            name = next((name for name, condition in self._stop.items() if condition.holds(events, now_s)), None)
        if name is None:
            return None
        why = last_reason(events, name)
        return f"the stop condition {name} holds{f': {why}' if why else ''}", self._stop[name].about_job

    def enough(self, events: Sequence[Event], now_s: float) -> str | None:
        """Why the run may end on purpose: all `until` conditions hold. None if they do not hold yet. The longer the
        run, the less often this is checked."""
        if not self._until or not self._enough_throttle.due():
            return None
        with self._enough_throttle:
            holds = all(condition.holds(events, now_s) for condition in self._until.values())
        return f"enough was seen: {' and '.join(self._until)}" if holds else None

    def _look(self, probe: Probe, emit: Emit) -> None:
        while not self._at.ended.is_set():
            probe.sample(emit)
            self._at.ended.wait(probe.period_s)


def _conditions(named: tuple[Named, ...]) -> dict[str, Condition]:
    return {condition.name: registry.find("conditions", condition.name)(**condition.params) for condition in named}
