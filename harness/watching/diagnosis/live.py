"""Who holds up a job that runs: its processes' states, the agent's stamps, and the stacks, put together."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from torchaos.harness.contracts import RankProcess
from torchaos.harness.machine import proc
from torchaos.harness.watching.diagnosis import blame, stacks
from torchaos.harness.watching.diagnosis.calls import Calls, ranges
from torchaos.harness.watching.diagnosis.stamped import read_stamps
from torchaos.harness.watching.diagnosis.verdict import HIGH, LOW, MEDIUM, Diagnosis

_STUCK = {
    "T": "it is stopped (by a signal)",
    "t": "it is stopped (by a debugger)",
    "Z": "it is dead",
    "X": "it is dead",
}
_ASLEEP_S, _LOOKS = 0.2, 5
# Seconds between looks at the stacks: in no step's beat.
_MOMENTS_S = (0.0, 0.31, 0.53, 0.17, 0.71, 0.23, 0.43, 0.13, 0.37, 0.61)


def diagnose(
    ranks: Mapping[int, RankProcess], world: int = 0, stamps: Path | None = None, hangs: bool = False
) -> Diagnosis:
    """`world`: how many ranks there should be. `hangs`: that it does is known, however short it waits by now, and one
    look at the stacks will do; else it takes some seconds. What is stopped or gone explains a hang by itself; after
    that the stamps count most, since they tell who is in which collective; then the stacks."""
    states = _states(ranks)
    found = Diagnosis()
    gone = set(range(world)) - set(ranks)
    for rank in gone:
        found.blame([rank], HIGH, "it has no process")
    for rank, state in states.items():
        if state in _STUCK:
            found.blame([rank], HIGH, _STUCK[state])
    calls = read_stamps(stamps, None if hangs else time.monotonic()) if stamps and stamps.is_dir() else Calls({})
    seen = blame.diagnose(calls)
    found.problems += seen.problems
    groups = {members for one in calls.ranks.values() for members in one.groups.values()}
    apart = _apart(ranks, sorted(groups, key=len), found, 1 if hangs or found.culprits else len(_MOMENTS_S))
    for rank, state in states.items():
        if state == "D" and (hangs or rank in apart or rank in seen.culprits):  # else it may just write a checkpoint
            found.blame([rank], MEDIUM, "it is in an uninterruptible sleep in the kernel")
    if found.culprits:
        for rank in found.culprits:
            found.say(rank, *seen.evidence.get(rank, []))
    elif seen.culprits:
        for rank in sorted(seen.culprits):
            found.blame([rank], seen.confidence, *seen.evidence[rank], apart.get(rank, ""))
    elif apart:
        for rank, words in apart.items():
            found.blame([rank], MEDIUM, words)
        if 2 * len(apart) > len(ranks):
            found.confidence = LOW
    found.suspect(seen.suspects - found.culprits if not found.culprits else ())
    return found


def _states(ranks: Mapping[int, RankProcess]) -> dict[int, str]:
    """By rank: T, D or Z where it was that each time, else a blank."""
    seen: dict[int, set[str]] = {rank: set() for rank in ranks}
    for number in range(_LOOKS):
        time.sleep(_ASLEEP_S / _LOOKS if number else 0)
        for rank, one in ranks.items():
            now = proc.stat(one.pid)
            seen[rank].add(now.state if now and now.ticks == one.start_ticks else "Z")
    return {rank: next(iter(states)) if len(states) == 1 else "" for rank, states in seen.items()}


def _apart(
    ranks: Mapping[int, RankProcess], groups: Sequence[Sequence[int]], found: Diagnosis, looks: int
) -> dict[int, str]:
    """By their stacks; a rank that is stopped can be read too. At any one moment some rank of a healthy job waits for
    another: of several looks, those that are apart in each, while nothing changes in the stacks of the others."""
    py_spy = stacks.find_py_spy()
    if py_spy is None:
        found.problems.append("py-spy is not installed, so no stacks were looked at; pip install 'torchaos[stacks]'")
        return {}
    apart, before = dict[int, str](), dict[int, stacks.Stack]()
    for number, seconds in enumerate(_MOMENTS_S[:looks]):
        time.sleep(seconds)
        by_pid = stacks.sample([one.pid for one in ranks.values()], py_spy)
        now = {rank: by_pid[one.pid] for rank, one in ranks.items() if one.pid in by_pid}
        seen = stacks.outliers(now, groups)
        apart = {rank: words for rank, words in seen.items() if not number or rank in apart}
        if any(now[rank] != before.get(rank, now[rank]) for rank in now.keys() - apart.keys()):
            found.problems.append("the stacks of ranks that may wait change from look to look, so they go on")
            return {}
        if not apart:
            return {}
        before = now
    if unread := sorted(set(ranks) - set(before)):
        found.problems.append(
            f"the stack of {ranges(unread)} could not be read (is py-spy allowed to? it needs ptrace)"
        )
    return apart
