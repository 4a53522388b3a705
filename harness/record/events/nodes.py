"""The node of each source of events, and pids that are unique in the whole job.

Each node that `torchaos exec` records has its own pids, so two nodes may have equal pids, even with equal start times.
When events are read, each pid is made unique: the number of the node is put above the 22 bits that Linux uses for a pid
(PID_MAX_LIMIT, include/linux/threads.h). The pids of node 0 do not change."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from torchaos.harness.agent.wire import Event, Kind

_BITS = 22
_OF_NODE = re.compile(r"node(\d+)(?=[-.]|$)")
WRAPPER = re.compile(r"node\d+(\.\d+)?")  # the name of a wrapper's source; a second launch on a node adds a number
_PIDS = ("pid", "inner_pid", "pids")


class NodePid(int):
    """The pid of a process on any node but the first. Its text shows the pid and the node."""

    @classmethod
    def of(cls, node: int, pid: int) -> NodePid:
        return cls(node << _BITS | pid)

    def __str__(self) -> str:
        return f"{self & (1 << _BITS) - 1} (node {self >> _BITS})"


def nodes_of(events: Sequence[Event]) -> dict[str, int]:
    """The node of each event source: from its name if the wrapper of a node wrote the events, otherwise from a node in
    its events. Sources without a node are left out. Pure."""
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
