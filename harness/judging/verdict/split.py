"""Two groups of ranks that write one set of checkpoints at the same time: split brain. Pure.

A group is the ranks of one rendezvous: they share the store that torchelastic names to them. After a restart another
group takes over, so that one which still writes when the next has begun to is not under anybody's control.
"""

from __future__ import annotations

import posixpath
from collections import defaultdict

from torchaos.harness.agent.wire import Event, Kind
from torchaos.harness.record.history.checkpoints import final_path, number_in_name
from torchaos.harness.record.record import Record

Group = tuple[str, int]  # the store's address, and the attempt


def split_brain(run: Record) -> str | None:
    """A sentence about the first two groups that wrote at the same time. None if there are none, or where nothing
    shows who wrote: no agent, or no watch on checkpoints."""
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
                        f"two groups of ranks wrote checkpoints to {folder} at the same time: that of the store "
                        f"{old[0]} until {events[-1].mono_s - others[0].mono_s:.1f} s after that of the store {new[0]} "
                        "had begun to"
                    )
    return None


def _folder(path: str) -> str:
    """That the checkpoints of all steps are in."""
    parts = final_path(posixpath.normpath(path)).split("/")
    for number in range(len(parts) - 1, 0, -1):
        if number_in_name(parts[number]) is not None:
            return "/".join(parts[:number]) or "/"
    return posixpath.dirname("/".join(parts)) or "/"
