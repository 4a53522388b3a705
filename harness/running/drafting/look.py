"""One run of a job without faults. It is the twin that the scenario's first run needs anyway, and stays in the
cache."""

from __future__ import annotations

from pathlib import Path

from torchaos.harness.record.plan import Plan
from torchaos.harness.record.record import Record
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.running.engine.run import Run, Watcher
from torchaos.harness.running.twins.twin import Twins


class Look:
    """One run without faults. `stop` may be called from a signal handler; the run is then ended normally, and its
    changes are undone."""

    def __init__(self, plan: Plan, watcher: Watcher | None = None) -> None:
        self._watcher = watcher
        self._current: Run | None = None
        self._stopped = ""
        self._twins = Twins(plan, self._execute, given_up=lambda: bool(self._stopped))
        self.problem = ""  # why there is no usable record, as a clause

    @property
    def is_made(self) -> bool:
        """Whether the run without faults is in the cache already."""
        return self._twins.has(0)

    def stop(self, reason: str) -> None:
        self._stopped = reason
        if self._current:
            self._current.stop(reason)

    def hurry(self, reason: str) -> None:
        self.stop(reason)
        if self._current:
            self._current.hurry()

    def __call__(self, scratch: Path) -> Record | None:
        """The record of the job, or None. If the job did not end successfully, `problem` has the reason. `scratch`: an
        empty folder. Raises ChaosError if the job can't be run."""
        folder = RunDir(scratch)
        (folder.root / "twins").mkdir(parents=True, exist_ok=True)
        if self._twins.give(0, folder):
            return Record.load(RunDir(folder.twins / "0"))
        failed = self._twins.failed
        ended = str(failed.stopped.data["reason"]) if failed and failed.stopped else ""
        code = f"the job failed without a fault (exit code {failed.exit_code})" if failed else "the job was not run"
        self.problem = self._stopped or self._twins.died or (f"the job was ended: {ended}" if ended else code)
        return failed

    def _execute(self, plan: Plan, folder: RunDir) -> None:
        plan.write(folder.plan)
        self._current = Run(plan, folder, (), self._watcher)
        if self._stopped:  # just before there was a run to stop
            self._current.stop(self._stopped)
        try:
            self._current()
        finally:
            self._current = None
