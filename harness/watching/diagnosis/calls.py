"""What the ranks of a job say of their collectives, whatever it was read from: dumps or the agent's stamps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

_MUTUAL = ("all_reduce", "allreduce", "all_gather", "allgather", "reduce_scatter", "all_to_all", "alltoall", "barrier")


@dataclass(frozen=True)
class Call:
    """One collective, or one side of a send and its recv, of one rank."""

    order: int  # counts the calls of the rank
    group: str
    op: str  # all_reduce, all_gather, ..., send, recv
    seq: int  # the same on every rank of the group; of a send or a recv it means nothing to others
    pair: tuple[int, int] | None = None  # a send's or recv's source and destination, global ranks
    done: bool = False
    started: bool = False  # on the device; where nothing is measured nothing is started
    created_s: float | None = None  # seconds since the epoch, or CLOCK_MONOTONIC: of one rank's host
    shape: tuple[object, ...] = ()  # what must agree between ranks; empty: unknown or free
    where: str = ""  # the user's line of code
    about: str = ""  # the group in words
    timeout_s: float | None = None  # of the process group


@dataclass(frozen=True)
class RankCalls:
    """All that is known of one rank. `entered` and `completed`: the highest number by group, of groups that the
    calls don't tell all of."""

    rank: int
    calls: Sequence[Call]
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # members, where they are known
    entered: Mapping[str, int] = field(default_factory=dict)
    completed: Mapping[str, int] = field(default_factory=dict)
    written_s: float | None = None  # not later than this was it recorded, on the clock of `created_s`
    clipped: bool = False  # older calls are missing
    torn: bool = False  # newer calls may be missing
    moving: bool = False  # something of it had come to its end a moment before it was recorded
    copied: bool = False  # `written_s` may be the time of a copy, and much too late

    @property
    def says_nothing(self) -> bool:
        return not self.calls and not self.entered


@dataclass(frozen=True)
class Calls:
    ranks: Mapping[int, RankCalls]
    problems: tuple[str, ...] = ()
    world: tuple[int, ...] = ()  # every rank of the job, as far as anything tells
    unreadable: frozenset[int] = frozenset()  # ranks that left a record of which nothing can be read


def is_mutual(op: str) -> bool:
    """Nobody is done with it before everybody has entered it; with a broadcast or a send, its source may be."""
    return op.startswith(_MUTUAL)


def ranges(ranks: Sequence[int]) -> str:
    """Ranks in words: `rank 3`, `ranks 0-2, 7`."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and rank == parts[-1][1] + 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    text = ", ".join(
        f"{low}-{high}" if high > low + 1 else f"{low}, {high}" if high > low else f"{low}" for low, high in parts
    )
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"
