"""Converts the agent's stamps of collectives into the form that the diagnosis reads."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from torchaos.harness.agent.stamps import Stamp, read_folder
from torchaos.harness.watching.diagnosis.calls import Call, Calls, RankCalls


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
