"""One scenario from its plan to its result: the twin, the run, more twins where the first one differs, the verdict."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torchaos.harness.agent.wire import EventFile, Kind
from torchaos.harness.contracts import ChaosError, UsageError
from torchaos.harness.engine.guards import check_disk
from torchaos.harness.engine.run import Run, Watcher
from torchaos.harness.engine.twin import Twins
from torchaos.harness.judging.agreement import wants_more
from torchaos.harness.judging.verdict import records_of, verdict_of
from torchaos.harness.plan import Plan
from torchaos.harness.record import Record
from torchaos.harness.result import ExitCode, Result, Verdict, write_atomically
from torchaos.harness.rundir import RunDir
from torchaos.harness.undo.disk import owner_only
from torchaos.harness.undo.recovery import LeftBehind


class ScenarioRun:
    """`stop` may be called from a signal handler; what is under way is then ended in order and judged."""

    def __init__(
        self, plan: Plan, folder: RunDir, source: Path, reproduce: Sequence[str], watcher: Watcher | None = None
    ) -> None:
        self.plan, self.folder = plan, folder
        self._source, self._reproduce, self._watcher = source, reproduce, watcher
        self._current: Run | None = None
        self._stopped: str | None = None
        self._hurried = False
        self._left: list[str] = []  # what could not be taken back, of the run or of a twin
        self.records: tuple[Record, list[Record]] | None = None  # what was judged, once it was

    def stop(self, reason: str) -> None:
        self._stopped = reason
        if self._current:
            self._current.stop(reason)

    def hurry(self, reason: str) -> None:
        """As `stop`, and without what takes long and is not rolling back."""
        self._hurried = True
        self.stop(reason)
        if self._current:
            self._current.hurry()

    def __call__(self) -> Result:
        """Raises ChaosError or OSError where the run could not be made, or not be judged; LeftBehind where moreover
        something could not be taken back."""
        try:
            return self._result()
        except (ChaosError, OSError) as error:
            if self._left:
                raise LeftBehind(f"{error}; and {self._left[0]}; mend it, then `torchaos recover`") from error
            raise

    def _result(self) -> Result:
        check_disk(self.folder.root)
        self.folder.create()
        self.plan.write(self.folder.plan)
        with open(self.folder.scenario, "wb", opener=owner_only) as file:
            file.write(self._source.read_bytes())
        twins = Twins(self.plan, self._execute, given_up=lambda: self._stopped is not None)
        wanted = int(self.plan.twin.get("runs", 0))
        have = int(wanted > 0 and not self._stopped and twins.give(0, self.folder))
        unfinished = self._stopped is not None
        if not unfinished:
            self._execute(self.plan, self.folder)
        while 0 < have < wanted and wants_more(*self._records()):
            if self._stopped or not twins.give(have, self.folder):
                unfinished = self._stopped is not None
                break
            have += 1
        if self._stopped and unfinished:
            self._note_stop(self._stopped)
        result = self._judged()
        if self._left and result.exit_code is not ExitCode.ROLLBACK:  # of a twin: its record is not the run's
            result = replace(result, exit_code=ExitCode.ROLLBACK)
            if result.verdict is Verdict.PASSED:
                result = replace(result, verdict=Verdict.ERROR, reason=f"rollback: {self._left[0]}")
        write_atomically(self.folder.result, json.dumps(result.to_json(), indent=1) + "\n", private=True)
        return result

    def _judged(self) -> Result:
        """What was run and can't be read any more is no bad usage: somebody took it away, or damaged it."""
        try:
            self.records = records_of(self.folder)
            return verdict_of(*self.records, str(self.folder.root))
        except UsageError as error:
            raise ChaosError(str(error)) from error

    def _note_stop(self, reason: str) -> None:
        """It was ended early outside the run itself, so that the run's own journal does not say so."""
        journal = EventFile(self.folder.events / "scenario.jsonl", "scenario")
        journal.emit(Kind.STOPPED, {"reason": reason, "interrupted": True})
        journal.close()

    def _execute(self, plan: Plan, folder: RunDir) -> None:
        if not folder.plan.exists():
            plan.write(folder.plan)
        self._current = Run(plan, folder, self._reproduce, self._watcher)
        if self._stopped:  # just before there was anything to stop
            self._current.stop(self._stopped)
        if self._hurried:
            self._current.hurry()
        try:
            self._current()
        finally:
            self._left += self._current.left
            self._current = None

    def _records(self) -> tuple[Record, list[Record]]:
        return Record.load(self.folder), [Record.load(RunDir(path)) for path in sorted(self.folder.twins.iterdir())]


def error_result(plan: Plan, folder: RunDir, error: ChaosError, code: ExitCode) -> Result:
    """What is reported of a scenario that could not be run to its end."""
    return Result(
        plan.scenario, plan.description, plan.seed, Verdict.ERROR, code, str(error), str(folder.root), "", 0.0
    )
