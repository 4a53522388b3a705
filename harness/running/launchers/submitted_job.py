"""A job that the harness submits, as a scheduler does: again after a failure, until no submission is left."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace

from torchaos.harness.agent.wire import ENV_ATTEMPT_BASE, ENV_RUN_ID, Kind
from torchaos.harness.contracts import ChaosError, Handle, JobSpec, Launcher, Node
from torchaos.harness.record.events.journal import Journal
from torchaos.harness.record.events.merged import beside_steps
from torchaos.harness.running.launchers.running_job import RunningJob
from torchaos.harness.watching.probes.ranks import RankWatch

_ATTEMPT_KINDS = (Kind.RANK_UP, Kind.AGENT_STARTED, Kind.ELASTIC_WORKER)


class SubmittedJob(RunningJob):
    """A job with all its submissions. `spec_for(n)` returns submission n, from 0. If a submission ends with an exit
    code other than 0, the next is started, if any is left. `guard` writes to disk the undo of everything that the
    launcher makes for a submission, or raises an error."""

    def __init__(
        self, spec_for: Callable[[int], JobSpec], launcher: Launcher, journal: Journal, *,
        resubmit_times: int = 0, resubmit_delay_s: float = 0.0,
        guard: Callable[[Sequence[Handle], int], None] | None = None,
    ) -> None:  # fmt: skip
        self._spec_for, self._launcher, self._journal = spec_for, launcher, journal
        self._times, self._delay_s, self._guard = resubmit_times, resubmit_delay_s, guard
        self._run_id = spec_for(0).env[ENV_RUN_ID]
        super().__init__(RankWatch(journal, self._run_id))
        self._nodes: list[Node] = []  # of this submission
        self._submission, self._base = 0, 0
        self._ending, self._lock = threading.Event(), threading.Lock()

    def start(self) -> None:
        try:
            self._submit()
        except ChaosError:
            self._done.set()
            raise
        self._thread.start()

    def _live(self) -> None:
        while True:
            self._exit_code = self._await_exit()
            again = self._exit_code != 0 and self._submission < self._times and not self._ending.is_set()
            self._put_away(again)
            if not again or self._ending.wait(self._delay_s) or not self._submit_again():
                break
        self._done.set()

    def _submit_again(self) -> bool:
        with self._lock:  # `stop` comes either before it, or finds what it started
            if self._ending.is_set():
                return False
            self._submission += 1
            try:
                self._submit()
            except ChaosError as error:
                self._journal.emit(Kind.NOTE, {"text": f"the job could not be submitted again: {error}"})
                return False
        return True

    def _submit(self) -> None:
        self._base = self._next_attempt()
        spec = self._spec_for(self._submission)
        spec = replace(spec, env={**spec.env, ENV_ATTEMPT_BASE: str(self._base)})
        if resources := self._launcher.resources(spec):
            if self._guard is None:
                raise ChaosError(f"the launcher {self._launcher.name} makes resources whose undo is not on disk")
            self._guard(resources, self._submission)  # on disk before anything is made
        self._nodes = list(self._launcher.create(spec))
        self._start_nodes(spec)

    def _next_attempt(self) -> int:
        """The number of the next attempt. Restarts and submissions share one counter."""
        seen = [event.attempt for event in beside_steps(self._journal.snapshot()) if event.kind in _ATTEMPT_KINDS]
        return max((attempt for attempt in seen if attempt is not None), default=-1) + 1

    @abstractmethod
    def _start_nodes(self, spec: JobSpec) -> None:
        """Starts the command on the nodes of this submission. Raises UsageError if the command can't be started."""

    @abstractmethod
    def _await_exit(self) -> int | None:
        """Waits for the end of this submission, and returns its exit code. None if the code is not known."""

    def _put_away(self, again: bool) -> None:
        """Cleans up after a submission. `again`: whether another submission may follow."""
