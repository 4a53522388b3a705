"""Whether the record lacks what its other parts say must be there: it was cut, and nobody knows what it said. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from torchaos.harness.agent.wire import Kind
from torchaos.harness.record.record import Record


def missing_in_words(run: Record, twins: Sequence[Record]) -> str:
    """In the journal of the run or of a twin; empty where nothing is known to be missing."""
    records = (run, *twins)
    seen, ended = set[int](), set[int]()
    for record in records:
        seen |= {rank for rank, _ in _who(record, Kind.AGENT_STARTED)}
        ended |= {rank for rank, _ in set(_ended_well(record)) & set(_who(record, Kind.AGENT_ENDED))}
    for whose, record in (("the journal", run), *(("the journal of a twin", twin) for twin in twins)):
        if why := next(chain(record.gaps, _cut(record, seen, ended)), None):
            return f"{whose} is damaged: {why}"
    return ""


def _cut(record: Record, seen: set[int], ended: set[int]) -> Iterator[str]:
    """Ranks that ended well in a job that did, without the last event of their agent though the same rank has it where
    it `ended` well in another record, or without any event though the agent was in this rank in other attempts. (A job
    may leave by os._exit, which no agent survives: then it does so whenever it ends well.)"""
    has, whole = set(_who(record, Kind.AGENT_STARTED, Kind.STEP)), set(_who(record, Kind.AGENT_ENDED))
    excused = set(_who(record, Kind.AGENT_FAILED, Kind.APPLYING))
    for rank, attempt in sorted(set(_ended_well(record)) - whole - excused):
        if (rank, attempt) in has:
            if rank in ended:
                yield f"rank {rank} ended well in attempt {attempt}, and its last events are missing"
        elif rank in seen:
            yield f"rank {rank} ended well in attempt {attempt}, and all of its events are missing"


def _ended_well(record: Record) -> list[tuple[int, int]]:
    """Ranks, and the last attempt of each."""
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
