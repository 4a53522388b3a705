"""One run of a job without faults. It is the twin that the scenario's first run needs anyway, and stays in the
cache."""

from __future__ import annotations

from pathlib import Path

from torchaos.harness.record.plan import Plan
from torchaos.harness.record.record import Record
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.running.engine.run import Run, Watcher
from torchaos.harness.running.engine.stoppable import Stoppable
from torchaos.harness.running.twins.twin import Twins


class Look(Stoppable):
    """One run without faults. `stop` may be called from a signal handler; the run is then ended normally, and its
    changes are undone."""

    def __init__(self, plan: Plan, watcher: Watcher | None = None) -> None:
        super().__init__()
        self._watcher = watcher
        self._twins = Twins(plan, self._execute, given_up=lambda: bool(self._stopped))
        self.problem = ""  # why there is no usable record, as a clause

    @property
    def is_made(self) -> bool:
        """Whether the run without faults is in the cache already."""
        return self._twins.has(0)

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
        self._carry_out(Run(plan, folder, (), self._watcher))
