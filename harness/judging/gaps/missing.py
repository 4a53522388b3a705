"""Finds out whether a journal lost events that, by other parts of the record, must have existed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from torchaos.harness.agent.wire import Kind
from torchaos.harness.record.record import Record


def missing_in_words(run: Record, twins: Sequence[Record]) -> str:
    """A clause about the first gap in the journal of the run or of a twin; empty if no gap is known."""
    records = (run, *twins)
    seen, ended = set[int](), set[int]()
    for record in records:
        seen |= {rank for rank, _ in _who(record, Kind.AGENT_STARTED)}
        ended |= {rank for rank, _ in set(_ended_well(record)) & set(_who(record, Kind.AGENT_ENDED))}
    for journal, record in (("the journal", run), *(("the journal of a twin", twin) for twin in twins)):
        if why := next(chain(record.gaps, _cut(record, seen, ended)), None):
            return f"{journal} is damaged: {why}"
    return ""


def _cut(record: Record, seen: set[int], ended: set[int]) -> Iterator[str]:
    """Yields a clause for each rank that succeeded and whose events are cut, in a job that succeeded.

    Events are cut if the agent's last event is missing although the rank wrote it in another record (`ended`), or if
    all events are missing although an agent started in this rank in another record (`seen`). The comparison with other
    records is needed because a job may always leave by os._exit, which ends the agent without a last event."""
    made = {(rank, attempt) for attempt, rank in record.sources_of_steps}
    has, whole = made | set(_who(record, Kind.AGENT_STARTED)), set(_who(record, Kind.AGENT_ENDED))
    excused = set(_who(record, Kind.AGENT_FAILED, Kind.APPLYING))
    for rank, attempt in sorted(set(_ended_well(record)) - whole - excused):
        if (rank, attempt) in has:
            if rank in ended:
                yield f"rank {rank} ended well in attempt {attempt}, and its last events are missing"
        elif rank in seen:
            yield f"rank {rank} ended well in attempt {attempt}, and all of its events are missing"


def _ended_well(record: Record) -> list[tuple[int, int]]:
    """(rank, its last attempt) of each rank that ended with exit code 0, if the job ended with exit code 0 too."""
    if record.exit_code != 0:
        return []
    codes = {(e.rank, e.attempt): e.data["exit_code"] for e in record.of_kind(Kind.RANK_EXITED)}
    last = dict(sorted(_who(record, Kind.RANK_EXITED)))
    return [who for who in last.items() if codes[who] == 0]


def _who(record: Record, *kinds: Kind) -> Iterable[tuple[int, int]]:
    return (
        (event.rank, event.attempt)
        for event in record.of_kind(*kinds)
        if event.rank is not None and event.attempt is not None
    )
