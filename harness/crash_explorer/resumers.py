"""Resumes the job for real. Cold: its own launcher starts it on the files that a death left, until it has shown enough,
or hangs. Warm: its ranks are forked instead. One of the first states is resumed both ways, and the two resumes must be
equal, bit for bit. If they differ, or if ranks can't be forked, all states are resumed cold, and the report says
why."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torchaos.harness.crash_explorer.forked_ranks import ForkedResume, ForkServer, RankCommand
from torchaos.harness.crash_explorer.fs_model import State
from torchaos.harness.crash_explorer.fuse_mount import ReadTracers
from torchaos.harness.crash_explorer.resume_outcomes import OutcomeClass
from torchaos.harness.crash_explorer.resume_runs import Patience, Resume, ResumeRuns, StopRule
from torchaos.harness.crash_explorer.synthetic_crash import RECORDED
from torchaos.harness.interfaces import ChaosError
from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.record.events.journal import Journal
from torchaos.harness.record.plan import Plan
from torchaos.harness.record.record import Record
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.running.engine.stages import Run, Stoppable

_LOOK_S = 0.05


class LauncherResume(Stoppable):
    """Cold resumes, one after the other. `stop` may be called from a signal handler."""

    def __init__(self, runs: ResumeRuns, beyond: int, patience_s: float, reproduce: Sequence[str]) -> None:
        super().__init__()
        self._runs, self._beyond, self.patience_s = runs, beyond, patience_s
        self._reproduce = list(reproduce)
        self.on_event: Callable[[Event], None] = lambda event: None

    def __call__(self, state: State, again: bool = True, tracers: ReadTracers | None = None) -> Resume:
        """Resumes from the state and judges the resume. `again`: if the first start fails, the job is started once
        more. `tracers`: note what the job asks of the checkpoint folder. Raises ChaosError if the job can't be started
        or judged."""
        plan = self._runs.plan
        once = replace(plan, job=replace(plan.job, resubmit_times=0))

        def carry_out(folder: RunDir) -> bool:
            watch = _Watch(StopRule(self._runs.died_at(state), self._beyond, plan.job.world_size), self.patience_s)
            watch.listen = self.on_event
            run = watch.run = Run(plan if again else once, folder, self._reproduce, watch)
            run.grace_s = 0.0  # killed at once: a job that is asked to end may save, and its twin did not
            self._carry_out(run)
            return watch.hung

        return self._runs.resume(state, carry_out, tracers)


class _Watch:
    """Ends a resume when it has shown enough, or hangs."""

    run: Run

    def __init__(self, stop_rule: StopRule, patience_s: float) -> None:
        self._stop_rule, self._patience_s = stop_rule, patience_s
        self.hung = False
        self.listen: Callable[[Event], None] = lambda event: None

    @contextmanager
    def __call__(self, journal: Journal, plan: Plan) -> Iterator[None]:
        journal.listen(self.listen)
        ended = threading.Event()
        watch = threading.Thread(target=self._look, args=(journal, ended), name="goal", daemon=True)
        watch.start()
        try:
            yield
        finally:
            ended.set()
            watch.join()

    def _look(self, journal: Journal, ended: threading.Event) -> None:
        patience = Patience(self._patience_s, time.monotonic())
        while not ended.wait(_LOOK_S):
            events = journal.snapshot()
            if self._stop_rule.is_reached(events):
                self.run.stop("the resume went on beyond the death", interrupted=False, enough=True)
                return
            if patience.is_over(events, time.monotonic()):
                self.hung = True
                why = f"nothing was seen of its ranks for {patience.limit_s:.0f} s"
                self.run.stop(why, interrupted=False)
                return


_NUMBER = re.compile(r"0x[0-9a-f]+|\d+")
_COMPARED = ("losses", "lr", "samples", "parameters", "moments", "opt_step", "sched_step")  # of an Execution
_TRIES = 3  # the most states that are resumed cold, until one succeeds with which forked ranks can be compared


class WarmResumes:
    """Makes warm resumes, one after the other. A call with a state returns its resume. The first calls make cold
    resumes, until a resume is right; its state is also resumed warm, and the two are compared. Returns None if ranks
    can't be forked, or if the two differed. `stop` may be called from a signal handler."""

    def __init__(
        self, runs: ResumeRuns, cold: LauncherResume, beyond: int, home: Path, right: State | None = None
    ) -> None:
        """`right`: a state from which the job is known to resume correctly. Warm and cold resumes are compared with
        it."""
        self._right = right
        self._runs, self._cold, self._beyond, self._home = runs, cold, beyond, home
        self._run_id = f"{home.name}-warm-{secrets.token_hex(4)}"
        self._ranks: dict[int, RankCommand] = {}
        self._parent: ForkServer | None = None
        self._imported: list[str] = []  # modules of the parent, in order
        self._seen: set[str] = set()  # modules that a rank had to import itself
        self._off = ""  # why ranks are not forked, as a clause
        self._checked, self._tries = False, 0
        self._stopped = False
        self._current: ForkedResume | None = None

    @property
    def in_words(self) -> str:
        if self._off:
            return f"by the job's own launcher: ranks could not be forked, because {self._off}"
        if not self._checked:
            return "by the job's own launcher: no resume by it was right, with which forked ranks could be compared"
        return (
            "by forking ranks from a process that had imported the job's libraries; one state was resumed both ways, "
            "bit for bit the same, and whatever failed was started once more: by the job's own launcher, or, if it had "
            "shown the same failure before, by new interpreters"
        )

    def stop(self) -> None:
        self._stopped = True
        if self._current:
            self._current.stop()

    def close(self) -> None:
        if self._parent:
            self._parent.close()
            self._parent = None

    def __call__(self, state: State, tracers: ReadTracers | None = None) -> Resume | None:
        """`tracers`: as for a cold resume."""
        if not self._off and not self._checked:
            try:
                made = self._check(self._right or state)
                if not self._right:
                    return made
            except (ChaosError, OSError, ValueError) as error:
                self._off = str(error)
        if self._off or self._stopped or not self._checked:
            return None
        try:
            return self._resume(state, tracers)
        except ChaosError as error:  # for example, the parent died
            self._off = str(error)
            self.close()
            return None

    def new_interpreters(self, state: State, again: bool, tracers: ReadTracers | None) -> Resume | None:
        """Resumes with each rank started as a new Python process, without the job's launcher. `again`: ranks that fail
        are started once more. None if no ranks can be started."""
        if self._off or self._stopped or not self._checked:
            return None
        try:
            made = self._resume(state, tracers, 2 if again else 1, new_interpreters=True)
        except ChaosError:
            return None
        return replace(made, outcome=replace(made.outcome, warm=False))

    def _check(self, state: State) -> Resume | None:
        """Resumes a state cold and, if the outcome is right, also warm, and compares the two. Returns the cold outcome
        with the record of the last resume."""
        commands: dict[int, RankCommand | str] = {}
        self._cold.on_event = lambda event: _note_rank(event, commands)
        cold = self._cold(state)
        self._cold.on_event = lambda event: None
        if self._stopped:
            return None
        if cold.outcome.kind is not OutcomeClass.RIGHT:  # tries again with another state
            self._tries += 1
            why = f"none of the first {self._tries} states was resumed correctly, so there was nothing to compare with"
            self._off = why if self._tries == _TRIES else ""
            return cold
        self._checked, shown = True, ResumeTrace.of(cold.record)
        if wrong := next((command for command in commands.values() if isinstance(command, str)), ""):
            self._off = wrong
            return cold
        self._ranks = {rank: command for rank, command in sorted(commands.items()) if isinstance(command, RankCommand)}
        if len(self._ranks) != self._runs.plan.job.world_size:
            self._off = f"{len(self._ranks)} of {self._runs.plan.job.world_size} ranks were seen"
            return cold
        self._parent = self._new_parent()
        if not self._learn(self._runs.imported):
            self._resume(state)  # from here on, the parent has imported what this resume imports
        warm = self._resume(state) if not self._off else None
        if warm and not self._stopped:
            self._off = difference(shown, ResumeTrace.of(warm.record))
        return replace(cold, record=warm.record) if warm else cold

    def _new_parent(self) -> ForkServer:
        return ForkServer(self._ranks[0], self._run_id, self._home / "warm.log")

    def _learn(self, imported: Path) -> bool:
        """Imports in the parent, in the same order, the modules that rank 0 of a resume or of the recorded run had to
        import itself; not the job's own modules. This is repeated, because the first resume may load no checkpoint and
        later ones import more. Returns whether there was anything to import. Raises ChaosError if the parent is
        gone."""
        assert self._parent
        names = dict.fromkeys(imported.read_text().splitlines()) if imported.exists() else {}
        new = [name for name in names if name not in self._seen and self._is_installed(name)]
        self._seen.update(names)
        if not new or self._stopped:
            return False
        why, good = self._parent.imports(new)
        if why:  # a parent without the module that started threads can still fork
            self._parent.close()
            self._parent, new = self._new_parent(), new[:good]
            why, good = self._parent.imports([*self._imported, *new])
        self._off = why
        self._imported += new
        return True

    def _is_installed(self, name: str) -> bool:
        """Whether the module is installed, and is not the job's own. The job's own modules may do anything when they
        are imported, such as looking at RANK."""
        rank, top = self._ranks[0], name.partition(".")[0]
        own = [rank.cwd, os.path.dirname(os.path.join(rank.cwd, rank.argv[0]))]
        own += rank.env.get("PYTHONPATH", "").split(os.pathsep)
        paths = (os.path.join(folder, top) for folder in own if folder)
        return not name.startswith(("_torchaos", "__main__", "sitecustomize", "usercustomize")) and not any(
            os.path.isdir(path) or os.path.exists(f"{path}.py") for path in paths
        )

    def _resume(
        self, state: State, tracers: ReadTracers | None = None, starts: int = 2, new_interpreters: bool = False
    ) -> Resume:  # fmt: skip
        """Resumes by forked ranks, or by new interpreters. Raises ChaosError if the parent is gone."""
        assert self._parent
        parent, runs = self._parent, self._runs
        untouched = False

        def carry_out(folder: RunDir) -> bool:
            nonlocal untouched
            runs.agent_plan(self._run_id, *(() if new_interpreters else ("imported",))).write(folder.agent_plan)
            stop_rule = StopRule(runs.died_at(state), self._beyond, len(self._ranks))
            run = self._current = ForkedResume(
                parent, list(self._ranks.values()), self._run_id, folder, stop_rule, self._cold.patience_s,
                runs.died_in_attempt, starts, new_interpreters,
            )  # fmt: skip
            if self._stopped:
                run.stop()
            hung = run(runs.is_untouched)
            untouched = runs.is_untouched()
            return hung

        made = runs.resume(state, carry_out, tracers, warm=True)
        self._learn(runs.now.imported)
        outcome = made.outcome
        if outcome.kind is not OutcomeClass.WONT_START or outcome.from_step is not None:
            return made
        mended = False if untouched and outcome.mended is None else outcome.mended
        printed = digest_of((runs.now.logs / "job-0.log").read_text())
        return replace(made, outcome=replace(outcome, mended=mended, printed=printed))


def digest_of(printed: str) -> str:
    """A digest of the lines that the ranks printed, without numbers. The order of the lines, and which rank printed a
    line, makes no difference."""
    lines = {_NUMBER.sub("", line).strip() for line in printed.splitlines()}
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest() if lines else ""


def _note_rank(event: Event, commands: dict[int, RankCommand | str]) -> None:
    """Reads the command of a rank while the rank is alive. If that fails, notes as a text why ranks can't be forked."""
    if event.kind is Kind.RANK_UP and event.source != RECORDED and event.rank is not None:
        try:
            commands[event.rank] = RankCommand.of(event.data["pid"])
        except (OSError, ValueError) as error:
            commands[event.rank] = str(error)


@dataclass(frozen=True)
class ResumeTrace:
    """The parts of a resume that are compared. `steps`: the values of _COMPARED, by step and rank. `loads`: path, rank,
    whether it succeeded."""

    steps: Mapping[tuple[int, int], Sequence[Any]]
    loads: frozenset[tuple[str, int, bool]]

    @classmethod
    def of(cls, record: Record) -> ResumeTrace:
        """Reads the record's files now, because they are gone when the next resume is prepared."""
        last = max((attempt.number for attempt in record.history.attempts), default=0)
        steps = {
            (execution.global_step, execution.rank): [getattr(execution, name) for name in _COMPARED]
            for execution in record.history.executions
            if execution.attempt == last and execution.global_step is not None
        }
        return cls(steps, frozenset((load.path, load.rank, load.ok) for load in record.history.loads))


def difference(cold: ResumeTrace, warm: ResumeTrace) -> str:
    """The first difference between the two resumes, as a clause; empty if there is none. Compares the steps that both
    made: losses, learning rates, samples, parameters, and the saves and loads."""
    common = cold.steps.keys() & warm.steps.keys()
    if not common:
        return "a warm resume made none of the steps of a cold one"
    for step, rank in sorted(common):
        for name, ours, theirs in zip(_COMPARED, cold.steps[step, rank], warm.steps[step, rank], strict=True):
            if ours != theirs:
                return f"in step {step} of rank {rank}, a warm resume has other {name} than a cold one"
    same = cold.loads == warm.loads
    return "" if same else "a warm resume loads other files than a cold one, or not all its loads are seen"
