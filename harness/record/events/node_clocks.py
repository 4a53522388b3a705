"""The clocks and the process ids of several nodes.

Each node that `torchaos exec` records has its own pids, so two nodes may have equal pids, even with equal start times.
When events are read, each pid is made unique in the whole job: the number of the node is put above the 22 bits that
Linux uses for a pid (PID_MAX_LIMIT, include/linux/threads.h). The pids of node 0 do not change.

CLOCK_MONOTONIC counts from each machine's own boot. So the offset of each node's clock is measured through the shared
run directory, recorded in the journal, and subtracted when the nodes' events are merged. The exchange is that of NTP
(RFC 5905, section 8): a node writes a file, node 0 sees it and answers in another file. The offset is computed from the
times of both. Of many exchanges, the fastest is used. The error is at most half its round trip."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

from torchaos.harness.interfaces import Emit
from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.record.steps.packed_blocks import Block

_BITS = 22
_OF_NODE = re.compile(r"node(\d+)(?=[-.]|$)")
WRAPPER = re.compile(r"node\d+(\.\d+)?")  # the name of a wrapper's source; a second launch on a node adds a number
_PIDS = ("pid", "inner_pid", "pids")


class NodePid(int):
    """The pid of a process on a node other than the first. Its text shows the pid and the node."""

    @classmethod
    def of(cls, node: int, pid: int) -> NodePid:
        return cls(node << _BITS | pid)

    def __str__(self) -> str:
        return f"{self & (1 << _BITS) - 1} (node {self >> _BITS})"


def nodes_of(events: Sequence[Event]) -> dict[str, int]:
    """The node of each event source: from its name, if the wrapper of a node wrote the events, otherwise from an event
    that names a node. Sources without a node are left out. Pure."""
    found: dict[str, int] = {}
    for event in events:
        node = event.data.get("node")
        if (wrapper := node_in_name(event.source)) is not None:
            found[event.source] = wrapper
        elif node is not None and event.kind in (Kind.CLOCK, Kind.AGENT_STARTED):
            found[event.source] = node
    return found


def node_in_name(source: str) -> int | None:
    """The node in a source's name, if the wrapper of a node gave the name."""
    found = _OF_NODE.match(source)
    return None if found is None else int(found[1])


def with_unique_pids(events: Sequence[Event]) -> list[Event]:
    """The events of nodes that have their own wrappers, with pids that are unique in the job. In a run with a single
    harness the pids are unique already. Pure."""
    if not any(event.kind is Kind.NODE_STARTED and WRAPPER.fullmatch(event.source) for event in events):
        return list(events)
    nodes = nodes_of(events)
    return [on_node(event, nodes.get(event.source, 0)) for event in events]


def on_node(event: Event, node: int) -> Event:
    """A copy of the event in which each pid also holds the number `node`, so that pids are unique in the job. Pure."""
    pids = {key: _unique(node, event.data[key]) for key in _PIDS if node and key in event.data}
    return replace(event, data={**event.data, **pids}) if pids else event


def _unique(node: int, given: object) -> object:
    if isinstance(given, list):
        return [_unique(node, pid) for pid in given]
    return NodePid.of(node, given) if isinstance(given, int) else given


class OuterPids:
    """Replaces the pid that a rank in a container reports by the pid that the harness sees. Learns the pairs from
    `rank.up` events; reads no file."""

    def __init__(self) -> None:
        self._known: dict[tuple[int | None, int | None, int], int] = {}  # by rank, attempt and inner pid

    def note(self, event: Event) -> None:
        if event.kind is Kind.RANK_UP and "inner_pid" in event.data:
            self._known[event.rank, event.attempt, event.data["inner_pid"]] = event.data["pid"]

    def outside(self, event: Event) -> Event:
        """The event with the pid in the harness's namespace."""
        pid = event.data.get("pid") if self._known and event.source.startswith("rank") else None
        if not isinstance(pid, int) or (known := self._known.get((event.rank, event.attempt, pid))) is None:
            return event
        return replace(event, data={**event.data, "pid": known})


POLL_S, IDLE_S = 0.001, 0.02  # seconds between two looks for a file: while a request is open, and at other times
ANSWER_S = 10.0  # a network file system may cache the list of a folder's files for some seconds
EXCHANGES = 16
EVERY_S = 60.0  # clocks drift by some ms in that time


class Clock:
    """Answers requests on node 0, and sends requests on every other node. Runs in its own thread, from `start` to
    `stop`."""

    def __init__(self, folder: Path, node: int, emit: Emit, now: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._node, self._emit, self._now = folder, node, emit, now
        self._ended = threading.Event()
        self._asked = 0
        work = self._answer if node == 0 else self._ask
        self._thread = threading.Thread(target=work, name="clock", daemon=True)

    def start(self) -> None:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()

    def _answer(self) -> None:
        known: dict[str, int] = {}
        wait_s = IDLE_S
        while not self._ended.wait(wait_s):
            wait_s = min(IDLE_S, wait_s * 1.02)
            with suppress(OSError, ValueError, KeyError):
                for name in os.listdir(self._folder):
                    if name.startswith("ask-") and name.removeprefix("ask-").isdigit():
                        seen_s, asked = self._now(), int((self._folder / name).read_text())
                        if known.get(name) != asked:
                            known[name], wait_s = asked, POLL_S
                            answer = {"asked": asked, "seen_s": seen_s, "said_s": self._now()}
                            _write(self._folder / name.replace("ask", "answer"), json.dumps(answer))

    def _ask(self) -> None:
        while True:
            found = [exchange for _ in range(EXCHANGES) if (exchange := self._exchange()) is not None]
            if found:
                error_s, offset_s = min(found)
                self._emit(Kind.CLOCK, {"node": self._node, "offset_s": offset_s, "error_s": error_s})
            if self._ended.wait(EVERY_S):
                return

    def _exchange(self) -> tuple[float, float] | None:
        """One exchange with node 0: the bound of the error, and the offset in seconds; None if no answer came."""
        self._asked += 1
        answer = self._folder / f"answer-{self._node}"
        with suppress(OSError):
            asked_s = self._now()
            _write(self._folder / f"ask-{self._node}", str(self._asked))
            end = time.monotonic() + ANSWER_S
            while time.monotonic() < end and not self._ended.is_set():
                with suppress(OSError, ValueError, KeyError):
                    said = json.loads(answer.read_text())
                    heard_s = self._now()
                    if said["asked"] == self._asked:
                        offset_s = ((said["seen_s"] - asked_s) + (said["said_s"] - heard_s)) / 2
                        return ((heard_s - asked_s) - (said["said_s"] - said["seen_s"])) / 2, offset_s
                time.sleep(POLL_S)
        return None


class Clocks:
    """The offsets in the events of a run, by which times are converted to the clock of node 0. Pure."""

    def __init__(self, events: Sequence[Event]) -> None:
        self._offsets: dict[int, list[tuple[float, float]]] = {}
        boots: dict[str, float] = {}  # by source: the time of the wall clock at which CLOCK_MONOTONIC was 0
        for event in events:
            boots.setdefault(event.source, event.wall_s - event.mono_s)
            if event.kind is Kind.CLOCK:
                self._offsets.setdefault(event.data["node"], []).append((event.mono_s, event.data["offset_s"]))
        for measured in self._offsets.values():
            measured.sort()
        for node, offset_s in _by_wall_clock(boots):
            self._offsets.setdefault(node, [(0.0, offset_s)])
        self._node_of = nodes_of(events) if self._offsets else {}

    def aligned(self, event: Event) -> Event:
        """The event, shifted by the last offset that was measured before it, or else by the first offset."""
        offsets = self._of(event.source)
        if not offsets:
            return event
        last = max(0, bisect_right(offsets, (event.mono_s, float("inf"))) - 1)
        return replace(event, mono_s=event.mono_s + offsets[last][1])

    def aligned_block(self, block: Block) -> Block:
        """The block with all its steps shifted in the same way."""
        offsets = self._of(block.source)
        if not offsets:
            return block
        measured, by_s = np.array(offsets).T
        last = np.searchsorted(measured, block.own["mono_s"], side="right") - 1
        return block.shifted(by_s[np.maximum(last, 0)])

    def _of(self, source: str) -> Sequence[tuple[float, float]]:
        node = self._node_of.get(source)
        node = node_in_name(source) if node is None else node
        return self._offsets.get(-1 if node is None else node, ())


def _by_wall_clock(boots: Mapping[str, float]) -> Iterator[tuple[int, float]]:
    """The offsets of nodes by their wall clocks, which are less exact than a measurement. They are needed if a node
    died before its clock was measured. Offsets of less than a second are left out, because machines do not boot at the
    same time."""
    first = boots.get("harness", boots.get("node0"))
    for source, boot in boots.items():
        if first is not None and WRAPPER.fullmatch(source) and abs(boot - first) > 1.0:
            yield node_in_name(source) or 0, boot - first


def _write(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}")
    partial.write_text(text)
    os.replace(partial, path)
