"""Finds the ranks that hold up a running job, given by the pid of its torchrun, from process states, the agent's
stamps, and stacks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torchaos.harness.host import processes
from torchaos.harness.interfaces import RankProcess, UsageError
from torchaos.harness.monitoring.diagnosis import blame, stacks
from torchaos.harness.monitoring.diagnosis.diagnosis import HIGH, LOW, MEDIUM, Diagnosis
from torchaos.harness.monitoring.diagnosis.recorded_calls import Calls, ranges, read_stamps
from torchaos.harness.monitoring.probes.census import Census, check_agent, find_ranks, rank_process
from torchaos.harness.monitoring.probes.sockets import Sockets

# Finds the ranks that hold up a running job, from process states, the agent's stamps, and stacks.

_STUCK = {
    "T": "it is stopped (by a signal)",
    "t": "it is stopped (by a debugger)",
    "Z": "it is dead",
    "X": "it is dead",
}
_ASLEEP_S, _LOOKS = 0.2, 5
# Seconds between looks at the stacks: irregular, so that they do not keep pace with the job's steps.
_MOMENTS_S = (0.0, 0.31, 0.53, 0.17, 0.71, 0.23, 0.43, 0.13, 0.37, 0.61)


def diagnose(
    ranks: Mapping[int, RankProcess], world: int = 0, stamps: Path | None = None, hangs: bool = False,
    py_spy: Callable[[], str | None] = stacks.find_py_spy, seen: Mapping[int, stacks.Stack] | None = None,
) -> Diagnosis:  # fmt: skip
    """The diagnosis of a live job.

    `world`: the number of ranks that should exist. `stamps`: the folder of the agent's stamps. `hangs`: the job is
    known to hang, so one look at the stacks is enough; otherwise several looks take some seconds. `py_spy`: finds the
    program that reads stacks; `seen`: the stacks of a job that hangs, by rank, if they were read already. A stopped or
    missing process explains a hang by itself. So does a network that loses what a rank sends: then no rank is to blame
    for a wait. Next in weight are the stamps, because they show which rank is in which collective, and then the
    stacks."""
    states = _states(ranks)
    found = Diagnosis()
    gone = set(range(world)) - set(ranks)
    for rank in gone:
        found.blame([rank], HIGH, "it has no process")
    for rank, state in states.items():
        if state in _STUCK:
            found.blame([rank], HIGH, _STUCK[state])
    calls = read_stamps(stamps, None if hangs else time.monotonic()) if stamps and stamps.is_dir() else Calls({})
    said = blame.diagnose(calls)
    found.problems += said.problems
    groups = {members for record in calls.ranks.values() for members in record.groups.values()}
    looks = 1 if hangs or found.culprits else len(_MOMENTS_S)
    in_groups = sorted(groups, key=len)
    odd = stacks.outliers(seen, in_groups) if seen is not None else _by_stacks(ranks, in_groups, found, looks, py_spy())
    for rank, state in states.items():
        if state == "D" and (hangs or rank in odd or rank in said.culprits):  # otherwise it may be writing a checkpoint
            found.blame([rank], MEDIUM, "it is in an uninterruptible sleep in the kernel")
    if found.culprits:
        for rank in found.culprits:
            found.say(rank, *said.evidence.get(rank, []))
    elif (said.culprits or odd) and _is_cut(ranks):
        for rank in sorted(said.culprits | odd.keys()):
            found.suspect([rank], *said.evidence.get(rank, []), odd.get(rank, ""))
        found.suspect(ranks)
        found.problems.append(
            "data that a rank sends does not arrive, and the kernel sends it again and again: the network explains who "
            "waits for whom"
        )
    elif said.culprits:
        for rank in sorted(said.culprits):
            found.blame([rank], said.confidence, *said.evidence[rank], odd.get(rank, ""))
    elif odd:
        for rank, words in odd.items():
            found.blame([rank], MEDIUM, words)
        if 2 * len(odd) > len(ranks):
            found.confidence = LOW
    found.suspect(said.suspects - found.culprits if not found.culprits else ())
    return found


def _states(ranks: Mapping[int, RankProcess]) -> dict[int, str]:
    """The state letter of each rank, such as T, D or Z, if it was the same in all looks; else an empty string."""
    seen: dict[int, set[str]] = {rank: set() for rank in ranks}
    for number in range(_LOOKS):
        time.sleep(_ASLEEP_S / _LOOKS if number else 0)
        for rank, process in ranks.items():
            now = processes.stat(process.pid)
            seen[rank].add(now.state if now and now.ticks == process.start_ticks else "Z")
    return {rank: next(iter(states)) if len(states) == 1 else "" for rank, states in seen.items()}


def _is_cut(ranks: Mapping[int, RankProcess]) -> bool:
    sockets = Sockets()
    sockets.look(list(ranks.values()))
    return sockets.losing


def _by_stacks(
    ranks: Mapping[int, RankProcess], groups: Sequence[Sequence[int]], found: Diagnosis, looks: int,
    py_spy: str | None,
) -> dict[int, str]:  # fmt: skip
    """The ranks whose stack differs from the others' in each of several looks, with a sentence each.

    In a healthy job, too, some rank waits for another at any moment. So no rank is returned if the stacks of the other
    ranks change between the looks. The stack of a stopped rank can be read too."""
    if py_spy is None:
        found.problems.append("py-spy is not installed, so no stacks were looked at; pip install 'torchaos[stacks]'")
        return {}
    odd, before = dict[int, str](), dict[int, stacks.Stack]()
    for number, seconds in enumerate(_MOMENTS_S[:looks]):
        time.sleep(seconds)
        by_pid = stacks.sample([process.pid for process in ranks.values()], py_spy)
        now = {rank: by_pid[process.pid] for rank, process in ranks.items() if process.pid in by_pid}
        seen = stacks.outliers(now, groups)
        odd = {rank: words for rank, words in seen.items() if not number or rank in odd}
        if any(now[rank] != before.get(rank, now[rank]) for rank in now.keys() - odd.keys()):
            found.problems.append("the stacks of ranks that seem to wait change, so these ranks are working")
            return {}
        if not odd:
            return {}
        before = now
    if unread := sorted(set(ranks) - set(before)):
        found.problems.append(
            f"the stack of {ranges(unread)} could not be read (is py-spy allowed to? it needs ptrace)"
        )
    return odd


# Diagnoses the live job of a torchrun, given by its pid.


def of_job(pid: int, stamps: Path | None = None) -> Diagnosis:
    """Finds the ranks of a torchrun and diagnoses them. `stamps`: the folder of the agent's stamps, if the job has the
    agent. Raises UsageError if `pid` is no torchrun of this user, or has no ranks."""
    check_agent(pid)
    ranks = ranks_of(pid)
    if not ranks:
        raise UsageError(f"pid {pid}: no ranks below it; is it still starting, or between two attempts?")
    return diagnose(ranks, 0, stamps)


def ranks_of(pid: int) -> dict[int, RankProcess]:
    """The ranks below this torchrun on this machine, by number. If there are several attempts, those of the latest."""
    census = Census(None)
    census.add_root(pid)
    census.scan()
    found = find_ranks(census.members, (), time.monotonic())
    in_order = sorted(found.ranks.items())
    return {rank: rank_process(member, member.identity) for (_, rank), member in in_order if member.identity}
