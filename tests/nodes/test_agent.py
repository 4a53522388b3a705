"""The agent of a node, without a controller."""

from __future__ import annotations

import os
from pathlib import Path

from waiting import wait_until

from torchaos.harness.agent.wire import EventFile, Kind
from torchaos.harness.record.events.journal import Journal
from torchaos.harness.running.nodes.agent import Agent


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
