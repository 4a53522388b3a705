"""The agent's stamps in the shape that blame works on."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from torchaos.harness.agent.stamps import Stamp, read_folder
from torchaos.harness.watching.diagnosis.calls import Call, Calls, RankCalls


def read_stamps(folder: Path, now_s: float | None = None) -> Calls:
    """Of each rank its latest process. `now_s`: CLOCK_MONOTONIC; None: when it was recorded is not known."""
    newest: dict[int, list[Stamp]] = {}
    for stamps in read_folder(folder):
        if stamps and _when(stamps) > _when(newest.get(stamps[0].rank, [])):
            newest[stamps[0].rank] = stamps
    return of_stamps(newest.values(), now_s)


def of_stamps(by_rank: Iterable[list[Stamp]], now_s: float | None = None) -> Calls:
    """Sends and recvs are left out: a stamp does not say with whom."""
    ranks, world = {}, set()
    for stamps in by_rank:
        rank = stamps[0].rank
        calls = [
            Call(
                one.number, one.group, one.op, one.seq, None, not one.open, False, one.start_mono_s, about=_about(one)
            )
            for one in stamps if one.op not in ("send", "recv")
        ]  # fmt: skip
        groups = {one.group: one.ranks for one in stamps if one.ranks}
        ranks[rank] = RankCalls(rank, calls, groups, {}, {}, now_s, stamps[0].number > 1)
        world |= {rank, *(member for members in groups.values() for member in members)}
    return Calls(ranks, (), tuple(sorted(world)))


def _about(one: Stamp) -> str:
    return f"group {one.group}" if one.ranks is None else f"group {one.group} of {len(one.ranks)}"


def _when(stamps: list[Stamp]) -> float:
    return stamps[-1].start_mono_s if stamps else -1.0
