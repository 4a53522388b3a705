"""Finds two groups of ranks that write the same checkpoints at the same time: split brain. Pure.

A group is the set of ranks of one rendezvous, to which torchelastic gave the same store. After a restart a new group
takes over. If the old group still writes after the new group has begun, no torchrun controls it."""

from __future__ import annotations

import posixpath
from collections import defaultdict

from torchaos.harness.agent.wire import Event, Kind
from torchaos.harness.record.history.checkpoints import final_path, number_in_name
from torchaos.harness.record.record import Record

Group = tuple[str, int]  # the store's address, and the attempt


def split_brain(run: Record) -> str | None:
    """A sentence about the first two groups that wrote at the same time. None if there was only one at any time, or if
    it is not known which ranks wrote, because there was no agent or no watch on checkpoints."""
    groups = {
        event.source: (str(event.data["group"]), event.attempt or 0)
        for event in run.of_kind(Kind.AGENT_STARTED)
        if event.data.get("group")
    }
    writes: dict[str, dict[Group, list[Event]]] = defaultdict(lambda: defaultdict(list))
    for event in run.of_kind(Kind.SAVE_BEGIN, Kind.SAVE_END):
        if event.source in groups:
            writes[_folder(str(event.data["path"]))][groups[event.source]].append(event)
    for folder, by_group in sorted(writes.items()):
        ordered = sorted(by_group.items(), key=lambda item: item[1][0].mono_s)
        for number, (old, events) in enumerate(ordered):
            for new, others in ordered[number + 1 :]:
                if events[-1].mono_s > others[0].mono_s:
                    return (
                        f"two groups of ranks wrote checkpoints to {folder} at the same time: the group of the store "
                        f"{old[0]} until {events[-1].mono_s - others[0].mono_s:.1f} s after the group of the store "
                        f"{new[0]} had begun"
                    )
    return None


def _folder(path: str) -> str:
    """The folder that contains the checkpoints of all steps."""
    parts = final_path(posixpath.normpath(path)).split("/")
    for number in range(len(parts) - 1, 0, -1):
        if number_in_name(parts[number]) is not None:
            return "/".join(parts[:number]) or "/"
    return posixpath.dirname("/".join(parts)) or "/"
