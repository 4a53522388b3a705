"""A job that runs, started by a launcher or attached to: what faults know of it, and what is common to all jobs that
the harness submits."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torchaos.harness.agent.wire import ENV_ATTEMPT_BASE, ENV_RUN_ID, Kind
from torchaos.harness.fault_drivers.proxy import Endpoint
from torchaos.harness.fault_drivers.site import Victim
from torchaos.harness.interfaces import ChaosError, Handle, JobSpec, Launcher, LiveNode, Node, RankProcess
from torchaos.harness.monitoring.probes.rank_probe import RankWatch
from torchaos.harness.record.events.journal import Journal
from torchaos.harness.record.events.merged import beside_steps

# What faults know of a running job: the ranks, agents, nodes and endpoints that a fault can hit.


class JobView(ABC):
    """The parts of a running job that a fault can hit, as they are now. It can't start or end the job."""

    def __init__(self, watch: RankWatch) -> None:
        self._watch = watch

    def ranks(self) -> dict[int, RankProcess]:
        """The live ranks, by number, without the ranks that are ambiguous or not up yet."""
        return self._watch.ranks()

    def agents(self, nodes: Sequence[int] = ()) -> list[Victim]:
        """Torchelastic's agents of these nodes, or of all nodes if `nodes` is empty. Raises ChaosError if a node has no
        agent now."""
        found = self._watch.agents()
        missing = [node for node in nodes if node not in found]
        if missing or not found:
            raise ChaosError(f"node {missing[0] if missing else 0} has no torchelastic agent now")
        return [Victim(*found[node], rank=None) for node in nodes or sorted(found)]

    def nodes(self) -> Sequence[LiveNode]:
        """The nodes, in order of their index."""
        return []

    def endpoints(self) -> Mapping[str, Endpoint]:
        """The endpoints that have a proxy, by name."""
        return {}

    @abstractmethod
    def members(self) -> dict[int, int]:
        """Every living process of the job: start times (clock ticks since boot) by pid."""


# A running job, started by a launcher or attached to.


class RunningJob(JobView):
    """A job that the harness starts (or attaches to), follows to its end, and stops."""

    def __init__(self, watch: RankWatch) -> None:
        super().__init__(watch)
        self._exit_code: int | None = None
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._live, name="job", daemon=True)

    @abstractmethod
    def start(self) -> None:
        """Starts the job. Raises UsageError if the command can't be started."""

    @property
    def done(self) -> bool:
        """Whether the last submission has ended. Some of its processes may still be alive until `stop`."""
        return self._done.is_set()

    @property
    def trouble(self) -> str:
        """Why the run can't go on, as a clause; empty if nothing is wrong."""
        return ""

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Waits until the last submission has ended, and returns its exit code (negative: the number of a signal). None
        while it runs, or if only the job's parent process can know the code."""
        return self._exit_code if self._done.wait(timeout_s) else None

    @abstractmethod
    def stop(self, grace_s: float = 0.0, hurried: Callable[[], bool] = lambda: False) -> list[int]:
        """Ends every process of the job. Returns the pids that could not be ended."""

    @abstractmethod
    def _live(self) -> None:
        """Follows the job to its end. Runs in its own thread."""


# A job that the harness submits, as a scheduler does: again after a failure, until no submission is left.

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
