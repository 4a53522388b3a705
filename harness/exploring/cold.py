"""A cold resume: the job's own launcher starts the job on the files that a death left, as after a real death."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from torchaos.harness.agent.wire import Event
from torchaos.harness.exploring.goal import Goal, Patience
from torchaos.harness.exploring.looks import Looked, Lookout, Looks
from torchaos.harness.exploring.outcomes import Outcome
from torchaos.harness.exploring.states.state import State
from torchaos.harness.exploring.trials import Trials, checkpoints_in
from torchaos.harness.record.events.journal import Journal
from torchaos.harness.record.plan import Plan
from torchaos.harness.record.record import Record
from torchaos.harness.running.engine.run import Run
from torchaos.harness.running.engine.stoppable import Stoppable

_LOOK_S = 0.05


class Cold(Stoppable):
    """Cold resumes, one after the other. `stop` may be called from a signal handler."""

    def __init__(self, trials: Trials, beyond: int, patience_s: float, reproduce: Sequence[str]) -> None:
        super().__init__()
        self._trials, self._beyond, self.patience_s = trials, beyond, patience_s
        self._reproduce = list(reproduce)
        self.looks: Looks | None = None  # of the last resume; None: not known
        self.on_event: Callable[[Event], None] = lambda event: None

    def __call__(self, state: State, again: bool = True, lookout: Lookout | None = None) -> tuple[Outcome, Record]:
        """Resumes from the state and judges it. `again`: if the first start fails, the job is started once more.
        `lookout`: notes what the job asks of the checkpoint folder. Raises ChaosError if the job can't be started or
        judged."""
        began_s = time.monotonic()
        folder = self._trials.stage(state)
        plan = self._trials.plan
        watch = _Watch(Goal(self._trials.died_at(state), self._beyond, plan.job.world_size), self.patience_s)
        watch.listen = self.on_event
        once = replace(plan, job=replace(plan.job, resubmit_times=0))
        run = Run(plan if again else once, folder, self._reproduce, watch)
        run.grace_s = 0.0  # killed at once: a job that is asked to end may save, which its twin did not
        watch.run = run
        self.looks = None
        looked = Looked(checkpoints_in(plan, folder), lookout)
        with looked:
            self._carry_out(run)
        self.left += looked.left
        if looked.failed:  # and with it, perhaps, the job
            return self(state, again)
        outcome, record = self._trials.judge(state, watch.hung, time.monotonic() - began_s)
        self.looks = looked.before_inventory(record)
        return outcome, record


class _Watch:
    """Ends a resume when it has shown enough, or hangs."""

    run: Run

    def __init__(self, goal: Goal, patience_s: float) -> None:
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
