"""Steps that a fault broke off on some ranks only, before the whole job went back to an earlier state in the process.
The agent of such a rank counts one step less from there on than the agents of the other ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.record.steps import Executions

_HITS = (Kind.APPLYING, Kind.APPLIED)


def with_unfinished(events: Sequence[Event], seen: Executions) -> tuple[Sequence[Event], Executions]:
    """The same events and steps, but with the same count on all ranks: a step that was broken off counts on each rank,
    also on ranks that did not finish it. `events`: in order of time."""
    later = [found for attempt in sorted(seen.attempts) for found in _broken_off(events, seen.of_attempt(attempt))]
    for back in later:
        who, since_s = (back.attempt, back.rank), back.mono_s
        events = [
            replace(event, step=event.step + 1)
            if (event.attempt, event.rank) == who and event.mono_s >= since_s and event.step is not None
            else event
            for event in events
        ]
        own = (seen.attempt == back.attempt) & (seen.rank == back.rank) & (seen.mono_s >= since_s)
        seen = seen.replaced({
            int(place): replace(seen[int(place)], local_step=seen[int(place)].local_step + 1)
            for place in own.nonzero()[0]
        })  # fmt: skip
    return events, seen


def _broken_off(events: Sequence[Event], own: Executions) -> Iterator[Event]:
    """The states with which ranks of an attempt went back after a fault and count one step less than other ranks since
    then. `own`: the steps of the attempt."""
    (attempt,) = own.attempts
    mine = [
        event for event in events if event.attempt == attempt and event.kind in (*_HITS, Kind.BEGUN, Kind.SAVE_BEGIN)
    ]
    raised = dict.fromkeys(sorted(own.ranks), 0)  # by how much the count of each rank was raised
    found = list[Event]()
    for hit in (event for event in mine if event.kind in _HITS):
        states = [_went_back_to(mine, hit.mono_s, rank) for rank in raised]
        counts = {state.rank: (state.step or 0) + raised[state.rank or 0] for state in states if state}
        behind = [state for state in states if state and counts[state.rank] == max(counts.values()) - 1]
        if len(counts) < len(raised) or len({*counts.values()}) != 2 or len(behind) == len(states):
            continue
        if min(counts.values()) < max(counts.values()) - 1 or hit.rank not in (None, *(state.rank for state in behind)):
            continue
        if all(state not in found and not _made_a_step(own, hit.mono_s, state) for state in behind):
            found += behind
            raised.update({state.rank or 0: raised[state.rank or 0] + 1 for state in behind})
    yield from found


def _went_back_to(events: Sequence[Event], hit_s: float, rank: int) -> Event | None:
    """The first state with which a rank began a step after a fault. None if the rank saved before: then it is the state
    after the save."""
    later = (event for event in events if event.rank == rank and event.mono_s > hit_s and event.kind not in _HITS)
    first = next(later, None)
    return first if first and first.kind is Kind.BEGUN and first.step else None


def _made_a_step(own: Executions, hit_s: float, state: Event) -> bool:
    """Whether the rank finished a step between the fault and the state."""
    return bool(((own.rank == state.rank) & (own.mono_s > hit_s) & (own.mono_s < state.mono_s)).any())
