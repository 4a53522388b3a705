"""The agent of a node: carries out the controller's messages, and undoes everything if none comes any more."""

from __future__ import annotations

import base64
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torchaos.harness.agent.wire import Kind
from torchaos.harness.host import processes
from torchaos.harness.record.events.journal import Journal
from torchaos.harness.running.launchers.node_channel import LEASE_S, VERSION
from torchaos.harness.running.launchers.node_run_dir import files_to_send
from torchaos.harness.running.nodes.agent_socket import Server, Talk
from torchaos.harness.running.nodes.node_faults import NodeFaults

_LOOK_S = 0.1
_LAST_S = 10.0  # seconds to wait at the end until the controller has received everything


class Agent:
    """Serves one controller at a time, the latest that connected. `faults`: None if the node's reaper could not be
    started; `trouble` says why. `folder`: the run directory. `missing`: the capabilities that the plan needs and this
    machine lacks. `signal`: sends a signal to the node's command. Raises OSError if the socket can't be made."""

    def __init__(
        self, path: Path, node: int, journal: Journal, faults: NodeFaults | None, signal: Callable[[int], None], *,
        folder: Path, missing: Sequence[str] = (), trouble: str = "", lease_s: float = LEASE_S,
    ) -> None:  # fmt: skip
        self._folder = folder
        self._node, self._journal, self._faults, self._signal = node, journal, faults, signal
        self._missing, self._trouble, self._lease_s = list(missing), trouble, lease_s
        self._heard_s: float | None = None  # when the last message of the controller came; None: none has come
        self._lapsed = ""
        self._leaving, self._over, self._met = threading.Event(), threading.Event(), threading.Event()
        self._news = threading.Condition()
        self._sent = 0  # events that were sent over the present connection
        self._talk: Talk | None = None
        self._sees_nothing = False  # whether the controller does not see the run directory of this node
        journal.listen(lambda event: self._tell_news())
        self._server = Server(path, self._converse)
        self._thread = threading.Thread(target=self._keep_lease, name="lease", daemon=True)
        self._thread.start()

    @property
    def lapsed(self) -> str:
        """Why everything was undone before the command ended; empty if it was not."""
        return self._lapsed

    def take_back(self) -> None:
        """Makes the agent undo everything soon. May be called from a signal handler."""
        self._leaving.set()

    def await_controller(self, wait_s: float) -> None:
        """Returns when a controller has connected, after `wait_s` seconds, or when everything must be undone."""
        end = time.monotonic() + wait_s
        while not self._met.wait(_LOOK_S) and not self._leaving.is_set() and time.monotonic() < end:
            pass

    def settle(self) -> bool:
        """Undoes everything, after the command has ended. Returns whether nothing is left to undo."""
        return self._faults is None or self._faults.close()

    def close(self) -> None:
        """Sends the controller everything that it has not received yet."""
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
            self._faults.heal()
        self._journal.emit(Kind.NOTE, {"text": f"node {self._node}: {why}: everything was undone on this node"})
        self._lapsed = why
        if self._talk is not None:
            self._talk.say(lapsed=why)

    def _converse(self, talk: Talk) -> None:
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

    def _obey(self, talk: Talk, said: Mapping[str, Any]) -> None:
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
            self.take_back()
        elif do == "start" and faults and not self._missing:  # the controller ends the run
            faults.start(said["fault"], said["ranks"])
        elif do == "page" and faults:
            faults.write(said["fault"], int(said["rank"]), int(said["word"]), int(said["value"]))
        elif do in ("end", "heal"):  # may take some seconds
            threading.Thread(target=self._answer, args=(talk, said), name=do, daemon=True).start()

    def _answer(self, talk: Talk, said: Mapping[str, Any]) -> None:
        left: list[str] = []
        if self._faults is not None:
            if said["do"] == "end":
                left = self._faults.end()
            else:
                self._faults.heal(said["fault"])
        talk.say(re=said["id"], ok=left)

    def _forward(self, talk: Talk, since: int) -> None:
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
