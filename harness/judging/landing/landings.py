"""Where and when each fault hit. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torchaos.harness.agent.wire import Event, Kind
from torchaos.harness.record.history import History


class Told(Protocol):
    """Events in order of time, and the history that they make: a record, or what a run has told so far."""

    @property
    def events(self) -> Sequence[Event]: ...

    @property
    def history(self) -> History: ...


@dataclass(frozen=True)
class Landing:
    """One fault as it hit: all its targets at once."""

    fault: str
    at_s: float  # CLOCK_MONOTONIC
    attempt: int
    ranks: frozenset[int]  # empty: not a rank but a node, or the job itself
    pids: frozenset[int]


def landings(told: Told) -> list[Landing]:
    """In order of time; a fault that landed in several attempts is one landing in each."""
    hits: dict[tuple[str, int], list[Event]] = {}
    seen = [event for event in told.events if event.kind in (Kind.APPLYING, Kind.APPLIED)]
    applying = {event.data["fault"] for event in seen if event.kind is Kind.APPLYING}
    for event in seen:
        if event.kind is Kind.APPLIED and event.data["fault"] in applying:
            continue
        alive = told.history.attempt_at(event.mono_s)
        attempt = event.attempt if event.attempt is not None else alive.number if alive else 0
        hits.setdefault((event.data["fault"], attempt), []).append(event)
    found = [_landing(fault, attempt, events) for (fault, attempt), events in hits.items()]
    return sorted(found, key=lambda landing: landing.at_s)


def _landing(fault: str, attempt: int, events: Sequence[Event]) -> Landing:
    ranks = frozenset(event.rank for event in events if event.rank is not None)
    pids = frozenset(event.data["pid"] for event in events if event.data.get("pid"))
    return Landing(fault, min(event.mono_s for event in events), attempt, ranks, pids)
