"""The life of a job over its submissions, on any platform: output, ranks, exit, starting it again, and its end."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from torchaos.harness.agent.wire import ENV_ATTEMPT_BASE, ENV_RUN_ID, Kind
from torchaos.harness.contracts import ChaosError, JobSpec, Launcher, RankProcess
from torchaos.harness.engine.site import Victim
from torchaos.harness.journal import Journal
from torchaos.harness.launchers.command import Command
from torchaos.harness.launchers.ending import ask_to_end, end
from torchaos.harness.probes.job_log import JobLog
from torchaos.harness.probes.log_adapters import Adapter
from torchaos.harness.probes.metrics_file import MetricsFile
from torchaos.harness.probes.ranks import RankWatch
from torchaos.harness.probes.sampling import Sampling
from torchaos.harness.undo import proc

_TELL_ATTEMPT = (Kind.RANK_UP, Kind.AGENT_STARTED, Kind.ELASTIC_WORKER)
_DRAIN_S = 1.0  # the last lines of the output come after the exit


class Job:
    """`spec_for(n)` is the nth submission, from 0. One that ends with anything but 0 is followed by another while
    any are left. The methods may be called from any thread."""

    def __init__(
        self, spec_for: Callable[[int], JobSpec], launcher: Launcher, journal: Journal, *,
        resubmit_times: int = 0, resubmit_delay_s: float = 0.0, log_adapter: Adapter | None = None,
        metrics: Path | None = None,
    ) -> None:  # fmt: skip
        self._spec_for, self._launcher, self._journal = spec_for, launcher, journal
        self._times, self._delay_s = resubmit_times, resubmit_delay_s
        self._run_id = spec_for(0).env[ENV_RUN_ID]
        self._log = JobLog(journal, log_adapter)
        self._watch = RankWatch(journal, self._run_id)
        self._sampling = Sampling([MetricsFile(metrics)] if metrics else [], self._log.emit)
        self._commands: list[Command] = []
        self._submission = 0
        self._exit_code: int | None = None
        self._ending, self._done, self._lock = threading.Event(), threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._live, name="job", daemon=True)

    def start(self) -> None:
        """Raises UsageError when the command can't be started."""
        self._watch.start()
        try:
            self._submit()
        except ChaosError:
            self._watch.stop()
            self._done.set()
            raise
        self._sampling.start()
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether the last submission has ended. Processes of it may still be there until `stop`."""
        return self._done.is_set()

    def wait(self, timeout_s: float | None = None) -> int | None:
        """The exit code of the last submission (negative: the signal's number); None while it is not done."""
        return self._exit_code if self._done.wait(timeout_s) else None

    def ranks(self) -> dict[int, RankProcess]:
        """The live ranks. One that is not clear, or not up, is left out."""
        return self._watch.ranks()

    def agents(self, nodes: Sequence[int] = ()) -> list[Victim]:
        """Torchelastic's agents of these nodes (none named: of all). Raises ChaosError where one has none now."""
        return agents_of(self._watch, nodes)

    def stop(self, grace_s: float = 0.0) -> list[int]:
        """End every process of the job: a job that still runs gets SIGTERM and `grace_s` seconds first. Returns the
        pids of those that could not be ended (none, as a rule). No event comes after this; it may be called again."""
        with self._lock:
            self._ending.set()
        started = self._thread.ident is not None
        if started and not self._done.is_set() and grace_s > 0:
            ask_to_end(self._members(), [command.pid for command in self._commands])
            self._done.wait(grace_s)
        left = end(self._members)
        if left:
            text = f"processes of the job could not be ended: {', '.join(map(str, left))}"
            self._journal.emit(Kind.NOTE, {"text": text})
        if started and not left:
            self._thread.join()
            for command in self._commands:
                command.drain(_DRAIN_S)
        self._sampling.stop()
        self._watch.stop()
        self._done.set()
        return left

    def _live(self) -> None:
        while True:
            self._exit_code = self._await_exit()
            again = self._exit_code != 0 and self._submission < self._times and not self._ending.is_set()
            if again:
                self._clear_away()
            for command in self._commands:
                command.drain(_DRAIN_S)
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
        base = self._next_attempt()
        spec = self._spec_for(self._submission)
        env = {**spec.env, ENV_ATTEMPT_BASE: str(base)}
        self._log.begin(base)
        self._commands = []
        for node in self._launcher.create(replace(spec, env=env)):
            command = Command(node.argv(spec.argv), spec.cwd, env, spec.log, self._log.line)
            self._commands.append(command)
            self._watch.add_root(command.pid)
            data = {"submission": self._submission, "pid": command.pid, "node": node.index}
            self._journal.emit(Kind.JOB_STARTED, data, attempt=base)

    def _await_exit(self) -> int:
        """The exit code of the whole submission: the first that is not 0."""
        codes, waiting, poll = [], {command.pidfd: command for command in self._commands}, select.poll()
        for pidfd in waiting:
            poll.register(pidfd, select.POLLIN)
        while waiting:
            for pidfd, _events in poll.poll():
                at_s = time.monotonic()
                poll.unregister(pidfd)
                command = waiting.pop(pidfd)
                codes.append(command.wait())
                data = {"submission": self._submission, "pid": command.pid, "exit_code": codes[-1]}
                self._journal.emit(Kind.JOB_EXITED, data, mono_s=at_s)
        return next((code for code in codes if code != 0), 0)

    def _clear_away(self) -> None:
        """A scheduler ends what a job leaves behind before it starts the job again."""
        leftover = self._members()
        if leftover:
            text = f"{len(leftover)} processes outlived submission {self._submission}; they were ended before the next"
            self._journal.emit(Kind.NOTE, {"text": text})
            end(self._members)

    def _next_attempt(self) -> int:
        """One counter over restarts and submissions."""
        seen = [event.attempt for event in self._journal.snapshot() if event.kind in _TELL_ATTEMPT]
        return max((attempt for attempt in seen if attempt is not None), default=-1) + 1

    def _members(self) -> dict[int, int]:
        """By the tree, as it was seen, and by the mark in the environment: either may miss one."""
        living = {pid: ticks for pid, ticks in self._watch.members().items() if _is_alive(pid, ticks)}
        return {**living, **proc.family(self._run_id)}


def agents_of(watch: RankWatch, nodes: Sequence[int]) -> list[Victim]:
    found = watch.agents()
    missing = [node for node in nodes if node not in found]
    if missing or not found:
        raise ChaosError(f"node {missing[0] if missing else 0} has no torchelastic agent now")
    return [Victim(*found[node], rank=None) for node in nodes or sorted(found)]


def _is_alive(pid: int, ticks: int) -> bool:
    found = proc.stat(pid)
    return found is not None and found.ticks == ticks and found.state not in "ZX"
