"""Runs one scenario from its plan to its result: a twin, the run with faults, more twins if the first one differs from
the run, and the verdict."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace

from torchaos.harness.analysis.ending import own_exit_code
from torchaos.harness.host.disk import owner_only, write_atomically
from torchaos.harness.interfaces import ChaosError, UsageError
from torchaos.harness.protocol.wire import EventFile, Kind
from torchaos.harness.record.events.journal import read_journal
from torchaos.harness.record.plan import Plan
from torchaos.harness.record.record import Record
from torchaos.harness.record.result import ExitCode, Result, Verdict
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.rollback.orphaned_runs import LeftBehind
from torchaos.harness.running.engine.stages import Run, Stoppable, Watcher
from torchaos.harness.running.engine.supervision import check_disk
from torchaos.harness.running.launchers.job_factory import check_cluster
from torchaos.harness.running.twin import Twins, check_reached, last_step_in, made_of, too_late
from torchaos.harness.running.twin_key import record_sources


class ScenarioRun(Stoppable):
    """One scenario that is run and judged. `text`: the text of the scenario, which is kept in the run directory. `stop`
    may be called from a signal handler; the current run is then ended in the normal way, and judged."""

    def __init__(
        self, plan: Plan, folder: RunDir, text: bytes, reproduce: Sequence[str], watcher: Watcher | None = None,
        places: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """`places`: for each fault, the place of its moment in the file of the scenario, for messages."""
        super().__init__()
        self._places = places or [fault.id for fault in plan.faults]
        self.plan, self.folder = plan, folder
        self._text, self._reproduce, self._watcher = text, reproduce, watcher
        self._began_s = time.time()
        self._notes: list[dict[str, object]] = []
        self._unsaid: list[str] = []
        # Of the run, and of its twins; None until they are judged.
        self.records: tuple[Record, list[Record]] | None = None

    def __call__(self) -> Result:
        """Runs the scenario and returns its result. Raises ChaosError or OSError if it could not be run or judged, and
        LeftBehind if a change could not be undone as well."""
        try:
            return self._result()
        except (ChaosError, OSError) as error:
            if self.left:
                raise LeftBehind(f"{error}; and {self.left[0]}; repair it, then run `torchaos recover`") from error
            raise

    def _result(self) -> Result:
        check_disk(self.folder.root)
        self.folder.create()
        self.plan.write(self.folder.plan)
        with open(self.folder.scenario, "wb", opener=owner_only) as file:
            file.write(self._text)
        check_cluster(self.plan, self.folder)  # before the twin, which may take hours
        twins = Twins(self.plan, self._execute, None, lambda: bool(self._stopped), self._note)
        wanted = int(self.plan.twin.get("runs", 0))
        has_twin = wanted > 0 and not self._stopped and twins.give(0, self.folder)
        unfinished = self._stopped or self._in_vain(twins, has_twin)
        if not (unfinished or has_twin) and twins.failed is not None and twins.died:
            end = [own_exit_code(twins.failed), last_step_in(twins.failed)]
            self._notes.append({"text": f"the fault-free twin failed: {twins.died}", "twin": end})
        if not unfinished:
            record_sources(self.plan, self.folder)
            self._execute(self.plan, self.folder)
            unfinished = self._more_twins(twins, wanted) if has_twin else None
        self._write_down(unfinished)
        result = self._judged()
        if self.left and result.exit_code is not ExitCode.ROLLBACK:  # a twin left it: the run's record does not show it
            result = replace(result, exit_code=ExitCode.ROLLBACK)
            if result.verdict is Verdict.PASSED:
                result = replace(result, verdict=Verdict.ERROR, reason=f"rollback: {self.left[0]}")
        write_atomically(self.folder.result, json.dumps(result.to_json(), indent=1) + "\n", private=True)
        return result

    def _in_vain(self, twins: Twins, has_twin: bool) -> str | None:
        """Why no run is made: the twin's job died by itself before any fault would come, so a run would prove nothing.
        None if the run is to be made. Raises UsageError if the scenario is wrong: the twin shows that no fault would
        come."""
        if has_twin:
            check_reached(self.plan, Record.load(RunDir(self.folder.twins / "0")), self._places)
            return None
        if twins.failed is None or not twins.died:
            return None
        died, last = f"the fault-free twin failed: {twins.died}", last_step_in(twins.failed)
        return died if last is None or len(too_late(self.plan, last)) == len(self.plan.faults) > 0 else None

    def _judged(self) -> Result:
        """Judges the run. Raises ChaosError if the run directory can't be read (elsewhere this is a UsageError): it was
        just written, so it was removed or damaged."""
        from torchaos.harness.analysis.verdict import records_of, verdict_of

        try:
            self.records = records_of(self.folder)
            return verdict_of(*self.records, str(self.folder.root))
        except UsageError as error:
            raise ChaosError(str(error)) from error

    def _more_twins(self, twins: Twins, wanted: int) -> str | None:
        """Adds twins as long as they help to judge. If it stops before that, returns why; otherwise None. If the cached
        twins turn out to belong to another job than the run, all twins are made again, once."""
        from torchaos.harness.analysis.comparison.agreement import wants_more

        renewed = False
        while True:
            run, have = self._records()
            if not have:
                return self._stopped
            more = len(have) < wanted and wants_more(run, have)
            if not renewed and not (more and twins.has(len(have))) and (why := self._why_stale(run, have)):
                renewed = True
                shutil.rmtree(self.folder.twins)
                self.folder.twins.mkdir(mode=0o700)
                if not twins.renew(why) or not twins.give(0, self.folder):
                    return self._stopped
            elif not more:
                return None
            elif self._stopped or not self._give_another(twins, run, have):
                refused = f"a further twin could not be made: {twins.refused}" if twins.refused else None
                return self._stopped or refused

    def _give_another(self, twins: Twins, run: Record, have: Sequence[Record]) -> bool:
        """Adds a twin. If the twin must be made now, tells the user why: one more run of the job is seen."""
        from torchaos.harness.analysis.comparison.agreement import what_differs

        differs = f"{what_differs(run, have)} differs from the twin's: a second twin shows whether that is noise"
        more = "the twins differ: a further twin shows how much of it is noise"
        self._unsaid.append(differs if len(have) == 1 else more)
        given = twins.give(len(have), self.folder)
        self._unsaid.clear()
        return given

    def _why_stale(self, run: Record, twins: Sequence[Record]) -> str:
        """Why twins from before this run can't be used to judge it, as a clause. Empty if they can."""
        from torchaos.harness.analysis.comparison import agreement

        made = [made_of(self.folder.twins / str(number)) for number in range(len(twins))]
        old = [
            twin for twin, inputs in zip(twins, made, strict=True) if inputs is None or inputs.made_s < self._began_s
        ]
        new = [twin for twin in twins if twin not in old]
        if old and agreement.are_of_another_job(run, old):
            return "it was made for an earlier run, and this run differs from it before any fault"
        if old and agreement.differ_by_age(old, new):
            return "it was made for an earlier run, and a twin that was made now differs from it"
        return ""

    def _note(self, text: str) -> None:
        """Keeps a note. It is recorded in the next run, and at the end of this scenario."""
        self._notes.append({"text": text})
        self._unsaid.append(text)

    def _write_down(self, unfinished: str | None) -> None:
        """Records what happened outside the run, because the run's own journal does not have it. A note gets the time
        at which the run ended, so that the run does not seem longer."""
        if not (unfinished or self._notes):
            return
        events = read_journal(self.folder.events)
        end_s = events[-1].mono_s if len(events) else None
        journal = EventFile(self.folder.events / "scenario.jsonl", "scenario")
        for note in self._notes:
            journal.emit(Kind.NOTE, note, mono_s=end_s)
        if unfinished:
            journal.emit(Kind.STOPPED, {"reason": unfinished, "interrupted": True})
        journal.close()

    def _execute(self, plan: Plan, folder: RunDir) -> None:
        if not folder.plan.exists():
            plan.write(folder.plan)
        notes, self._unsaid = self._unsaid, []
        self._carry_out(Run(plan, folder, self._reproduce, self._watcher, notes))

    def _records(self) -> tuple[Record, list[Record]]:
        return Record.load(self.folder), [Record.load(RunDir(path)) for path in sorted(self.folder.twins.iterdir())]


def error_result(plan: Plan, folder: RunDir, error: ChaosError, code: ExitCode) -> Result:
    return Result(
        plan.scenario, plan.description, plan.seed, Verdict.ERROR, code, str(error), str(folder.root), "", 0.0
    )
