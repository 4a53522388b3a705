"""Ranks in a container report pids of its pid namespace; all other events have pids of the harness's namespace."""

from __future__ import annotations

from dataclasses import replace

from torchaos.harness.agent.wire import Event, Kind


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
