"""The agent of a node: obeys the controller's messages, applies the faults that hit the node, and undoes everything if
the messages stop.

Faults are applied by the same code as in a run on one machine, with an undo log, a reaper and control pages on this
node."""

from __future__ import annotations

import base64
import copy
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torchaos.harness.fault_drivers.network.links import Link
from torchaos.harness.host import processes
from torchaos.harness.interfaces import ChaosError, Target
from torchaos.harness.monitoring.probes.rank_probe import RankWatch
from torchaos.harness.protocol.agent_plan import AgentPlan
from torchaos.harness.protocol.control_pages import ControlPage
from torchaos.harness.protocol.wire import ENV_NODE, Kind
from torchaos.harness.record.events.journal import Journal
from torchaos.harness.record.plan import Plan
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.rollback.handles import JobProcesses
from torchaos.harness.rollback.reaper import UndoResult
from torchaos.harness.rollback.reaper_client import ReaperClient, UndoError
from torchaos.harness.running.engine.fault_lifecycle import FaultContext, LocalFaults
from torchaos.harness.running.fault_checks import Permits
from torchaos.harness.running.launchers.job import JobView, StartedNode
from torchaos.harness.running.launchers.local import LocalNode
from torchaos.harness.running.launchers.node_channel import LEASE_S, VERSION, files_to_send
from torchaos.harness.running.nodes.agent_socket import Connection, Server


class NodePart(JobView):
    """This node's part of a job. `mark`: the mark that all its processes have. `env`: the variables in their
    environment that tell to which node they belong; by default the number of the node. `links`: the link of each node,
    if faults can change the link of this node."""

    def __init__(
        self, watch: RankWatch, node: int, mark: str, env: Mapping[str, str] | None = None, links: Sequence[Link] = ()
    ) -> None:  # fmt: skip
        super().__init__(watch, mark)
        self._node, self.links = node, links
        self._beside: Collection[int] = ()
        self._env = {ENV_NODE: str(node)} if env is None else env

    def stop(self) -> None:
        """Stops watching."""
        self._watch.stop()

    def beside(self, nodes: Collection[int]) -> NodePart:
        """This part of the job, for a fault that other agents apply too, on the nodes `nodes`: the fault does not cut
        this node off from those."""
        other = copy.copy(self)
        other._beside = [node for node in nodes if node != self._node]
        return other

    def nodes(self) -> list[StartedNode]:
        """This node. If faults can change its link, the other nodes, too."""
        if not self.links:
            return [self._live(LocalNode(self._node, self._env))]
        nodes = [LocalNode(index, self._env, link) for index, link in enumerate(self.links)]
        return [self._live(node) for node in nodes if node.index not in self._beside]

    def _live(self, node: LocalNode) -> StartedNode:
        return StartedNode(node, self._mark, self._whole)

    def _whole(self) -> dict[int, int]:
        """All processes of the job on this node. Raises ChaosError if a fault can't reach one of them."""
        found = self.members()
        if 1 in found:
            raise ChaosError(
                "torchrun is the first process of its container, which the kernel shields from signals of that "
                "container; aim at ranks, or attach from a sidecar of a pod with shareProcessNamespace"
            )
        return found


SPARE_S = 60.0  # seconds after the job's time-out; then the node's reaper ends the node's part of the job


class NodeFaults(LocalFaults):
    """The faults on this node. `shared`: the run directory. `place`: this node's own folder. Raises UndoError if the
    reaper can't be started; then nothing may be injected here. Thread-safe."""

    def __init__(
        self, plan: Plan, shared: RunDir, place: RunDir, mark: str, node: int, part: NodePart, journal: Journal
    ) -> None:  # fmt: skip
        self._node, self._part, self._journal, self._place = node, part, journal, place
        self._planned = {fault.id: fault for fault in plan.faults}
        job = plan.job
        parts = (word.replace("{run}", str(shared.job)) for word in (job.cwd, job.checkpoints or ""))
        checkpoints = Path(*parts) if job.checkpoints else None
        self._reaper = ReaperClient.start(place.root, mark)
        limit_s = job.timeout_s + SPARE_S
        try:
            self._reaper.record_undo("job", [JobProcesses(mark)], owner="job", limit_s=limit_s)
        except UndoError:
            self._reaper.close()  # removes the entry that a dead reaper leaves in the registry of runs
            raise
        folders = [place.root, shared.root, *([checkpoints] if checkpoints else [])]
        permits = Permits(plan, mark, folders, part.members, lambda: _world_size(part), has_network=bool(part.links))
        on = FaultContext(journal, part, self._reaper, limit_s, place.undo, checkpoints, permits)
        super().__init__(plan.faults, place, on)

    def write_plan(self, shared: AgentPlan) -> Path:
        """Writes the agent's plan for the ranks of this node, and returns its path. `shared`: the plan for all nodes.
        In the copy, the faults refer to the control pages of this node."""
        replace(shared, faults=self.rank_faults()).write(self._place.agent_plan)
        return self._place.agent_plan

    def start(self, fault: str, ranks: Sequence[int]) -> None:
        """Begins the fault on this node. `ranks`: the ranks of the target that the fault may hit here."""
        planned = self._planned[fault]
        target = Target(tuple(ranks), tuple(node for node in planned.target.nodes if node == self._node))
        self.begin(replace(planned, target=target), self._part.beside(planned.target.nodes))

    def write(self, fault: str, rank: int, word: int, value: int) -> None:
        """Writes a word of a control page. `FIRED` is never lowered: if a rank on another node has fired, no rank fires
        here."""
        page = self.pages(self._planned[fault]).get(rank)
        if page is not None and (word != ControlPage.FIRED or page.read(word) < value):
            page.write(word, value)

    def close(self) -> bool:
        """Undoes everything, and ends the remaining processes of this node's part of the job. Returns whether all of
        that is verified."""
        self.end()
        self.undo()
        try:
            results = self._reaper.close()
        except UndoError as error:
            results = [UndoResult("all", {}, False, str(error))]
        for result in results:
            self._journal.emit(Kind.HEALED, asdict(result))
        return all(result.verified for result in results)


def _world_size(part: NodePart) -> int | None:
    return next((rank.world_size for rank in part.ranks().values()), None)


_LOOK_S = 0.1
_LAST_S = 10.0  # seconds to wait at the end until the controller has received everything


class Agent:
    """Serves one controller at a time: the one that connected last. `faults`: None if the node's reaper could not be
    started; then `trouble` says why. `folder`: the run directory. `missing`: the capabilities that the plan needs and
    this machine lacks. `signal`: sends a signal to the node's command. Raises OSError if the socket can't be made."""

    def __init__(
        self, path: Path, node: int, journal: Journal, faults: NodeFaults | None, signal: Callable[[int], None], *,
        folder: Path, missing: Sequence[str] = (), trouble: str = "", lease_s: float = LEASE_S,
    ) -> None:  # fmt: skip
        self._folder = folder
        self._node, self._journal, self._faults, self._signal = node, journal, faults, signal
        self._missing, self._trouble, self._lease_s = list(missing), trouble, lease_s
        self._heard_s: float | None = None  # when the last message of the controller came; None: no message has come
        self._lapsed = ""
        self._leaving, self._over, self._met = threading.Event(), threading.Event(), threading.Event()
        self._news = threading.Condition()
        self._sent = 0  # events that were sent over the present connection
        self._talk: Connection | None = None
        self._sees_nothing = False  # the controller does not see the run directory of this node
        journal.listen(lambda event: self._tell_news())
        self._server = Server(path, self._converse)
        self._thread = threading.Thread(target=self._keep_lease, name="lease", daemon=True)
        self._thread.start()

    @property
    def lapsed(self) -> str:
        """Why everything was undone before the command ended. Empty if it was not."""
        return self._lapsed

    def undo_soon(self) -> None:
        """Makes the agent undo everything soon. May be called from a signal handler."""
        self._leaving.set()

    def await_controller(self, wait_s: float) -> None:
        """Waits until a controller has connected, but at most `wait_s` seconds, and not if everything must be
        undone."""
        end = time.monotonic() + wait_s
        while not self._met.wait(_LOOK_S) and not self._leaving.is_set() and time.monotonic() < end:
            pass

    def settle(self) -> bool:
        """Must be called after the command has ended. Undoes everything, and returns whether nothing is left to
        undo."""
        return self._faults is None or self._faults.close()

    def close(self) -> None:
        """Sends the controller the rest of the events and, if it asked for them, the files. Then closes the socket."""
        self._over.set()
        self._thread.join()
        end = time.monotonic() + _LAST_S
        with self._news:
            while time.monotonic() < end and self._talk and self._talk.open and self._sent < self._journal.count:
                self._news.wait(_LOOK_S)
        if self._talk is not None:
            if self._sees_nothing:
                for name, piece in files_to_send(self._folder):
                    self._talk.say(file=name, bytes=base64.b64encode(piece).decode())
            self._talk.say(bye={})
        self._server.close()

    def _keep_lease(self) -> None:
        while not self._over.wait(_LOOK_S):
            if self._leaving.is_set():
                self._lapse("the scheduler ends the job")
                return
            if self._journal.failed:
                self._lapse(self._journal.failed)
                return
            heard = self._heard_s
            if heard is not None and time.monotonic() - heard > self._lease_s:
                self._lapse(f"the controller said nothing for {self._lease_s:g} s")
                return

    def _lapse(self, why: str) -> None:
        if self._faults is not None:
            self._faults.end()
            self._faults.undo()
        self._journal.emit(Kind.NOTE, {"text": f"node {self._node}: {why}: everything was undone on this node"})
        self._lapsed = why
        if self._talk is not None:
            self._talk.say(lapsed=why)

    def _converse(self, talk: Connection) -> None:
        words = talk.words()
        hello = next(words, {})
        if hello.get("do") != "hello" or hello.get("version") != VERSION:
            talk.say(error=f"this agent speaks version {VERSION}; use the same version of torchaos on all nodes")
            return
        self._talk, self._heard_s, self._sees_nothing = talk, time.monotonic(), bool(hello.get("collect"))
        talk.say(hello=self._about())
        self._met.set()
        for said in words:
            self._heard_s = time.monotonic()
            with suppress(KeyError, TypeError, ValueError, StopIteration):
                self._obey(talk, said)

    def _about(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "node": self._node,
            "host": processes.host(),
            "boot": processes.boot_id(),
            "pid": os.getpid(),
            "missing": self._missing,
            "trouble": self._trouble,
            "lapsed": self._lapsed,
            "mono_s": time.monotonic(),
        }

    def _obey(self, talk: Connection, said: Mapping[str, Any]) -> None:
        do, faults = said["do"], self._faults
        if do == "beat":
            talk.say(beat=said["sent_s"], mono_s=time.monotonic())
        elif do == "clock":
            data = {"node": self._node, "offset_s": float(said["offset_s"]), "error_s": float(said["error_s"])}
            self._journal.emit(Kind.CLOCK, data)
        elif do == "follow":
            threading.Thread(target=self._forward, args=(talk, int(said["since"])), name="events", daemon=True).start()
        elif do == "signal":
            self._signal(int(said["number"]))
        elif do == "leave":
            self.undo_soon()
        elif do == "start" and faults and not self._missing:  # the controller ends the run
            faults.start(said["fault"], said["ranks"])
        elif do == "page" and faults:
            faults.write(said["fault"], int(said["rank"]), int(said["word"]), int(said["value"]))
        elif do in ("end", "heal"):  # may take some seconds
            threading.Thread(target=self._answer, args=(talk, said), name=do, daemon=True).start()

    def _answer(self, talk: Connection, said: Mapping[str, Any]) -> None:
        left: list[str] = []
        if self._faults is not None:
            if said["do"] == "end":
                left = self._faults.end()
            else:
                self._faults.undo(said["fault"])
        talk.say(re=said["id"], ok=left)

    def _forward(self, talk: Connection, since: int) -> None:
        """Sends the events from number `since` on, until the connection ends."""
        while talk.open and talk is self._talk:
            for event in self._journal.since(since):
                talk.say(event=event.to_line().decode(), n=since)
                since += 1
            with self._news:
                self._sent = since
                self._news.notify_all()
                if since >= self._journal.count:
                    self._news.wait(_LOOK_S)

    def _tell_news(self) -> None:
        with self._news:
            self._news.notify_all()
