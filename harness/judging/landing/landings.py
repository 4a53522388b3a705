"""The time, the attempt and the ranks of each hit of a fault."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torchaos.harness.agent.wire import Event, Kind
from torchaos.harness.record.history import History


class RunSoFar(Protocol):
    """The events of a run in order of time, and their history: a finished record, or a live run up to now."""

    @property
    def events(self) -> Sequence[Event]: ...

    @property
    def history(self) -> History: ...

    def of_kind(self, *kinds: Kind) -> Iterator[Event]: ...


@dataclass(frozen=True)
class Landing:
    """One hit of a fault in one attempt, with all its targets."""

    fault: str
    at_s: float  # the first hit, CLOCK_MONOTONIC
    attempt: int
    ranks: frozenset[int]  # empty: it hit a node or the job itself
    pids: frozenset[int]


def landings(run: RunSoFar) -> list[Landing]:
    """The landings in order of time. A fault that hit in several attempts has a landing in each of them."""
    hits: dict[tuple[str, int], list[Event]] = {}
    seen = list(run.of_kind(Kind.APPLYING, Kind.APPLIED))
    applying = {event.data["fault"] for event in seen if event.kind is Kind.APPLYING}
    for event in seen:
        if event.kind is Kind.APPLIED and event.data["fault"] in applying:
            continue
        alive = run.history.attempt_at(event.mono_s)
        attempt = event.attempt if event.attempt is not None else alive.number if alive else 0
        hits.setdefault((event.data["fault"], attempt), []).append(event)
    found = [_landing(fault, attempt, events) for (fault, attempt), events in hits.items()]
    return sorted(found, key=lambda landing: landing.at_s)


def _landing(fault: str, attempt: int, events: Sequence[Event]) -> Landing:
    ranks = frozenset(event.rank for event in events if event.rank is not None)
    pids = frozenset(event.data["pid"] for event in events if event.data.get("pid"))
    return Landing(fault, min(event.mono_s for event in events), attempt, ranks, pids)
