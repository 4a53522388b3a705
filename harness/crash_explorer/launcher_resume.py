"""A cold resume: the job's own launcher starts the job on the files that a death left. Also decides, from the events of
the live run, when a resume has shown enough, and when it hangs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from torchaos.harness.crash_explorer.fs_model import State
from torchaos.harness.crash_explorer.read_trace import ReadTracers
from torchaos.harness.crash_explorer.resume_runs import Resume, ResumeRuns
from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.record.events.journal import Journal
from torchaos.harness.record.history import base_of
from torchaos.harness.record.plan import Plan
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.running.engine.run import Run, Stoppable

_LIFE = frozenset({  # events that show that a rank is alive, or is started again
    Kind.STEP, Kind.LOSS, Kind.SAVE_BEGIN, Kind.SAVE_END, Kind.LOAD_BEGIN, Kind.LOAD_END, Kind.AGENT_STARTED,
    Kind.RANK_UP, Kind.GROUP_JOINED, Kind.JOB_STARTED,
})  # fmt: skip


class StopRule:
    """Decides when a resume has shown enough: when every rank has trained some steps beyond the death, in the newest
    attempt."""

    def __init__(self, died_at: int, beyond: int, ranks: int) -> None:
        """`died_at`: the highest global step before the death; `beyond`: how many more steps are wanted."""
        self._due, self._least, self._ranks = died_at + beyond, beyond, ranks
        self._seen = 0  # events that were seen
        self._newest = 0  # attempt
        self._done: dict[int, int] = {}  # local steps of the newest attempt by rank
        self._looked = 0  # the fewest steps of a rank at the last look at the history
        self._open = 0  # saves that have begun and have not ended

    def is_reached(self, events: Sequence[Event]) -> bool:
        """Whether the goal is reached, and no rank is in the middle of a save: an interrupted save would look torn."""
        if len(events) == self._seen:
            return False
        for event in events[self._seen :]:
            self._note(event)
        self._seen = len(events)
        slowest = min(self._done.values()) if len(self._done) >= self._ranks else 0
        if slowest < self._least or slowest <= self._looked or self._open > 0:
            return False
        self._looked = slowest
        base, _witnesses = base_of(list(events), self._newest)
        return base is not None and base + slowest >= self._due

    def _note(self, event: Event) -> None:
        if event.attempt is None or event.attempt < self._newest:
            return
        if event.attempt > self._newest:
            self._newest, self._done, self._looked, self._open = event.attempt, {}, 0, 0
        if event.attempt and event.rank is not None and event.kind is Kind.STEP and event.step is not None:
            self._done[event.rank] = max(self._done.get(event.rank, 0), event.step)
        self._open += (event.kind is Kind.SAVE_BEGIN) - (event.kind is Kind.SAVE_END)


class Patience:
    """The time in which a resume must show a sign of life; otherwise it counts as hung."""

    def __init__(self, limit_s: float, now_s: float) -> None:
        self.limit_s, self._since_s, self._seen = limit_s, now_s, 0

    def is_over(self, events: Sequence[Event], now_s: float) -> bool:
        if any(event.kind in _LIFE for event in events[self._seen :]):
            self._since_s = now_s
        self._seen = len(events)
        return now_s - self._since_s > self.limit_s


_LOOK_S = 0.05


class LauncherResume(Stoppable):
    """Cold resumes, one after the other. `stop` may be called from a signal handler."""

    def __init__(self, trials: ResumeRuns, beyond: int, patience_s: float, reproduce: Sequence[str]) -> None:
        super().__init__()
        self._trials, self._beyond, self.patience_s = trials, beyond, patience_s
        self._reproduce = list(reproduce)
        self.on_event: Callable[[Event], None] = lambda event: None

    def __call__(self, state: State, again: bool = True, tracers: ReadTracers | None = None) -> Resume:
        """Resumes from the state and judges it. `again`: if the first start fails, the job is started once more.
        `tracers` note what the job asks of the checkpoint folder. Raises ChaosError if the job can't be started or
        judged."""
        plan = self._trials.plan
        once = replace(plan, job=replace(plan.job, resubmit_times=0))

        def carry_out(folder: RunDir) -> bool:
            watch = _Watch(StopRule(self._trials.died_at(state), self._beyond, plan.job.world_size), self.patience_s)
            watch.listen = self.on_event
            run = watch.run = Run(plan if again else once, folder, self._reproduce, watch)
            run.grace_s = 0.0  # killed at once: a job that is asked to end may save, which its twin did not
            self._carry_out(run)
            return watch.hung

        return self._trials.resume(state, carry_out, tracers)


class _Watch:
    """Ends a resume when it has shown enough, or hangs."""

    run: Run

    def __init__(self, goal: StopRule, patience_s: float) -> None:
        self._goal, self._patience_s = goal, patience_s
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
            if self._goal.is_reached(events):
                self.run.stop("the resume went on beyond the death", interrupted=False, enough=True)
                return
            if patience.is_over(events, time.monotonic()):
                self.hung = True
                why = f"nothing was seen of its ranks for {patience.limit_s:.0f} s"
                self.run.stop(why, interrupted=False)
                return
