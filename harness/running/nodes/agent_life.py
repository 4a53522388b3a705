"""The life of a node's agent (`serving`), the signals that it passes on (`Relay`), and the undo for agents that
died."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from torchaos.harness.protocol.wire import Kind
from torchaos.harness.record.events.journal import Journal
from torchaos.harness.record.plan import Plan
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.rollback import recovery
from torchaos.harness.rollback.reaper_client import UndoError
from torchaos.harness.running import capabilities
from torchaos.harness.running.fault_checks import needs_of_controller
from torchaos.harness.running.nodes.agent_socket import JOB, make_place, remove_place, socket_of
from torchaos.harness.running.nodes.node_agent import Agent, NodeFaults, NodePart

_RECOVER_S = 120.0


def of_job(job: str) -> Iterator[Path]:
    """The folders of agents that ran in this Slurm job, of all users whose files the caller may read."""
    for folder in Path(tempfile.gettempdir()).glob("torchaos-*/*"):
        with suppress(OSError):
            owner = folder.lstat().st_uid
            theirs = folder.parent.name == f"torchaos-{owner}" and folder.parent.lstat().st_uid == owner
            if theirs and (folder / JOB).read_text() == job:
                yield folder


def undo_for_the_dead(journal: Journal) -> str:
    """Undoes the changes of this user's agents that died on this machine together with their reapers, as when a node
    goes down. Returns why that failed, or an empty text."""
    wrong = []
    for folder in (Path(tempfile.gettempdir()) / f"torchaos-{os.geteuid()}").glob("*"):
        if recovery.left_over(recovery.find([folder])[0]):
            failed = recover(folder)
            said = f"what {folder.name} left on this node is {f'not undone: {failed}' if failed else 'undone'}"
            journal.emit(Kind.NOTE, {"text": said})
            wrong += [said] if failed else []
    return "; ".join(wrong)


def recover(folder: Path) -> str:
    """Undoes the remaining changes of a dead agent. Returns why that failed, or an empty text. If the caller is root,
    this is done with the rights of the folder's owner, because the owner could have written the undo log."""
    owner = folder.stat()
    whose = {"user": owner.st_uid, "group": owner.st_gid, "extra_groups": []} if os.geteuid() == 0 else {}
    argv = [sys.executable, "-m", "torchaos.harness", "node", "--recover", folder.name]
    try:
        done = subprocess.run(
            argv, cwd="/", stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_RECOVER_S, check=False,
            **whose,  # type: ignore[call-overload]
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return "" if done.returncode == 0 else (done.stdout + done.stderr).strip()[-300:] or "it failed"


_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class Relay:
    """A context manager for the main thread, which passes signals on to the command of the node. A signal that comes
    before the command exists is passed on later. A signal after the command's end reaches no process, because signals
    are sent through a pidfd and not to a pid."""

    def __init__(self) -> None:
        self.on_signal: Callable[[], None] = lambda: None  # called before a signal is passed on; must be quick
        self._pidfd: int | None = None
        self._waiting: list[int] = []
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Relay:
        for number in _PASSED_ON:
            self._before[number] = signal.signal(number, self._take)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        if self._pidfd is not None:
            os.close(self._pidfd)

    def to(self, pidfd: int) -> None:
        """Sends signals to this process from now on. The caller closes its own descriptor."""
        self._pidfd = os.dup(pidfd)
        for number in self._waiting:
            self.send(number)

    def send(self, number: int) -> None:
        if self._pidfd is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def _take(self, number: int, _frame: FrameType | None) -> None:
        if number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            self.on_signal()
        if self._pidfd is None:
            self._waiting.append(number)
        else:
            self.send(number)


# Which capability a pod needs in place of another one: it makes no namespaces, but changes its own network.
_IN_A_POD = {"links": "own_network", "shaper": "tc"}
_MEET_S = 60.0  # seconds to wait for the controller, so that early faults are armed in time


@contextmanager
def serving(
    folder: RunDir, mark: str, node: int, part: NodePart, journal: Journal, relay: Relay
) -> Iterator[tuple[Agent, NodeFaults | None]]:
    """A context manager in which this process is the agent of its node. It begins when a controller has connected. It
    yields the agent and its faults; None in place of the faults if nothing can be injected here. At the end, everything
    is undone. If that is verified, the node's folder is removed."""
    place = make_place(mark)
    plan, faults, trouble = Plan.read(folder.plan), None, undo_for_the_dead(journal)
    try:
        faults = NodeFaults(plan, folder, place, mark, node, part, journal)
    except UndoError as error:  # the job runs, and the controller ends the run
        trouble = str(error)
    needs = set(plan.needs) - needs_of_controller(plan.launcher, (fault.inject for fault in plan.faults))
    if part.links:
        needs = {_IN_A_POD.get(name, name) for name in needs}
    findings = [capabilities.check(name) for name in sorted(needs)]
    missing = [f"{found.name} ({found.remedy})" for found in findings if not found.present]
    agent = Agent(
        socket_of(mark), node, journal, faults, relay.send, folder=folder.root, missing=missing, trouble=trouble
    )  # fmt: skip
    relay.on_signal = agent.undo_soon
    agent.await_controller(_MEET_S)
    try:
        yield agent, faults
    finally:
        clean = agent.settle()
        part.stop()
        agent.close()
        if clean:
            remove_place(mark)
