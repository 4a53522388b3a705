"""The recorded collectives of all ranks of a job. Dumps and the agent's stamps are both converted to this form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torchaos.harness.agent.collective_stamps import Stamp, read_folder

# The recorded collectives of all ranks of a job. Dumps and the agent's stamps are both converted to this form.

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


# Converts the agent's stamps of collectives into the form that the diagnosis reads.


def read_stamps(folder: Path, now_s: float | None = None) -> Calls:
    """The stamps in a folder; for each rank, those of its latest process. `now_s`: the present time of CLOCK_MONOTONIC;
    None: the time of the recording is not known."""
    newest: dict[int, list[Stamp]] = {}
    for stamps in read_folder(folder):
        if stamps and _when(stamps) > _when(newest.get(stamps[0].rank, [])):
            newest[stamps[0].rank] = stamps
    return of_stamps(newest.values(), now_s)


def of_stamps(by_rank: Iterable[list[Stamp]], now_s: float | None = None) -> Calls:
    """Converts lists of stamps, one list for each rank. Sends and recvs are left out, because a stamp does not name the
    other rank."""
    ranks, world = {}, set()
    for stamps in by_rank:
        rank = stamps[0].rank
        calls = [_call(stamp) for stamp in stamps if stamp.op not in ("send", "recv")]
        groups = {stamp.group: stamp.ranks for stamp in stamps if stamp.ranks}
        ranks[rank] = RankCalls(rank, calls, groups, {}, {}, now_s, stamps[0].number > 1)
        world |= {rank, *(member for members in groups.values() for member in members)}
    return Calls(ranks, (), tuple(sorted(world)))


def _call(stamp: Stamp) -> Call:
    about = f"group {stamp.group}" if stamp.ranks is None else f"group {stamp.group} of {len(stamp.ranks)}"
    return Call(
        stamp.number, stamp.group, stamp.op, stamp.seq, done=not stamp.open, inside=stamp.returned_mono_s is None,
        created_s=stamp.start_mono_s, about=about,
    )  # fmt: skip


def _when(stamps: list[Stamp]) -> float:
    return stamps[-1].start_mono_s if stamps else -1.0
