"""The recorded collectives of all ranks of a job. Dumps and the agent's stamps are both converted to this form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

_MUTUAL = ("all_reduce", "allreduce", "all_gather", "allgather", "reduce_scatter", "all_to_all", "alltoall", "barrier")


@dataclass(frozen=True)
class Call:
    """One collective that a rank called, or a send or recv."""

    order: int  # the position among the calls of the rank
    group: str
    op: str  # all_reduce, all_gather, ..., send, recv
    seq: int  # the number in the group, equal on all ranks of the group (but not for a send or recv)
    pair: tuple[int, int] | None = None  # of a send or recv: source and destination, global ranks
    done: bool = False
    started: bool = False  # seen to start on the device
    created_s: float | None = None  # seconds since the epoch or CLOCK_MONOTONIC, on the clock of the rank's host
    shape: tuple[object, ...] = ()  # sizes and types that must be equal on all ranks; empty: unknown, or may differ
    where: str = ""  # the user's line of code
    about: str = ""  # the group in words
    timeout_s: float | None = None  # of the process group
    inside: bool = False  # torch has not returned from it


@dataclass(frozen=True)
class RankCalls:
    """The record of one rank. `entered` and `completed`: the highest number by group, for groups whose calls are not
    all in `calls`."""

    rank: int
    calls: Sequence[Call]
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # the members of groups, if known
    entered: Mapping[str, int] = field(default_factory=dict)
    completed: Mapping[str, int] = field(default_factory=dict)
    written_s: float | None = None  # the latest possible time of the recording, on the clock of `created_s`
    clipped: bool = False  # older calls are missing
    torn: bool = False  # newer calls may be missing
    moving: bool = False  # a call of the rank had ended a moment before the recording
    copied: bool = False  # `written_s` may be the time of a copy, much later than the recording

    @property
    def says_nothing(self) -> bool:
        return not self.calls and not self.entered


@dataclass(frozen=True)
class Calls:
    ranks: Mapping[int, RankCalls]
    problems: tuple[str, ...] = ()
    world: tuple[int, ...] = ()  # all known ranks of the job
    unreadable: frozenset[int] = frozenset()  # ranks with a record that can't be read


def is_mutual(op: str) -> bool:
    """Whether no rank can end the op before all ranks have entered it. In a broadcast or a send, the source can end
    first."""
    return op.startswith(_MUTUAL)


def ranges(ranks: Sequence[int]) -> str:
    """Ranks in words, such as `rank 3` or `ranks 0-2, 7`."""
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
