"""Steps that a fault broke off on some ranks only, before the whole job went back to an earlier state in the process.
The agent of such a rank counts one step less from there on than the agents of the other ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf

from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.record.steps import Executions

_HITS = (Kind.APPLYING, Kind.APPLIED)


def counted(events: Sequence[Event], seen: Executions) -> tuple[Sequence[Event], Executions]:
    """The same events and steps, with a count that goes on in step on all ranks: the step that was broken off counts on
    each rank, also where it has no event. `events`: in order of time."""
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
    """The states with which ranks of an attempt went back and count one step less than other ranks since then."""
    (attempt,) = own.attempts
    mine = [event for event in events if event.attempt == attempt]
    back = {rank: [*_states_gone_back_to(mine, own.at(own.rank == rank), rank)] for rank in own.ranks}
    if len({len(states) for states in back.values()}) != 1:
        return
    lead = dict.fromkeys(back, 0)  # by how much each rank's count was raised
    for states in zip(*back.values(), strict=True):
        counts = {state.rank or 0: (state.step or 0) + lead[state.rank or 0] for state in states}
        lacking = {rank for rank, count in counts.items() if count == max(counts.values()) - 1}
        begun_s = max(state.mono_s for state in states)
        hits = [hit for hit in mine if hit.kind in _HITS and (hit.rank in lacking or hit.rank is None)]
        if set(counts.values()) - {max(counts.values())} and len({*counts.values()}) == 2 and lacking:
            last_s = min(_last_s(own, rank, begun_s) for rank in lacking)
            if any(last_s < hit.mono_s < begun_s for hit in hits):
                yield from (state for state in states if state.rank in lacking)
                lead.update({rank: lead[rank] + 1 for rank in lacking})


def _states_gone_back_to(events: Sequence[Event], own: Executions, rank: int) -> Iterator[Event]:
    """The states with which a rank went on after it had put an earlier one back, and not after a save."""
    for state in events:
        if state.kind is Kind.BEGUN and state.rank == rank and state.step:
            last_s = _last_s(own, rank, state.mono_s)
            saved = any(
                event.kind is Kind.SAVE_BEGIN and event.rank == rank and last_s < event.mono_s < state.mono_s
                for event in events
            )
            if not saved:
                yield state


def _last_s(own: Executions, rank: int, before_s: float) -> float:
    """When the rank had finished its last step before that time."""
    done = own.mono_s[(own.rank == rank) & (own.mono_s < before_s)]
    return float(done.max(initial=-inf))
