"""The agent of a node, without a controller."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from pathlib import Path

import pytest
from waiting import wait_until

from torchaos.harness.protocol.wire import EventFile, Kind
from torchaos.harness.record.events.journal import Journal
from torchaos.harness.running.launchers.node_channel import VERSION
from torchaos.harness.running.nodes.agent_socket import address_of
from torchaos.harness.running.nodes.node_agent import Agent


def test_a_damaged_record_ends_the_nodes_part(tmp_path: Path) -> None:
    """If a rank's events can no longer be read, the agent takes everything back and says why: the controller would
    otherwise judge a run of which it has not seen everything."""
    events = tmp_path / "events"
    events.mkdir()
    journal = Journal(events, "node1", node=1)
    file = EventFile(events / "rank0.jsonl", "rank0", 0, 0)
    agent = Agent(tmp_path / "socket", 1, journal, None, lambda number: None, folder=tmp_path)
    file.emit(Kind.AGENT_STARTED, {"pid": 1, "start_ticks": 1, "local_rank": 0, "world_size": 2, "python": "3.11",
                                   "torch": None, "hooks": [], "node": 1})  # fmt: skip
    wait_until(lambda: journal.count)
    os.truncate(events / "rank0.jsonl", 0)
    notes = wait_until(lambda: [event for event in journal.snapshot() if event.kind is Kind.NOTE])
    assert [event.data["text"] for event in notes] == [
        "node 1: the journal can't be read: rank0.jsonl: it became shorter: everything was undone on this node"
    ]
    agent.close()
    journal.close()
    file.close()


class _Faults:
    """Notes which faults the agent starts."""

    def __init__(self) -> None:
        self.started: list[str] = []

    def start(self, fault: str, ranks: Sequence[int]) -> None:
        self.started.append(fault)


@pytest.mark.parametrize("missing", [["own_network"], []])
def test_a_node_that_lacks_something_begins_no_fault(tmp_path: Path, missing: list[str]) -> None:
    """The controller hears what is missing and ends the run; until then the agent begins nothing that it could perhaps
    not undo."""
    (tmp_path / "events").mkdir()
    journal, faults = Journal(tmp_path / "events", "node1", node=1), _Faults()
    agent = Agent(tmp_path / "socket", 1, journal, faults, lambda number: None, folder=tmp_path, missing=missing)  # type: ignore[arg-type]
    start = {"do": "start", "fault": "f", "ranks": []}
    said = [{"do": "hello", "version": VERSION}, start, {"do": "beat", "sent_s": 1}]
    with socket.socket(socket.AF_UNIX) as controller, address_of(tmp_path / "socket") as address:
        controller.connect(address)
        controller.settimeout(60)
        controller.sendall(b"".join(json.dumps(each).encode() + b"\n" for each in said))
        with controller.makefile("rb") as lines:
            assert json.loads(lines.readline())["hello"]["missing"] == missing
            assert json.loads(lines.readline())["beat"] == 1  # the start was read before it
    assert faults.started == ([] if missing else ["f"])
    agent.close()
    journal.close()
