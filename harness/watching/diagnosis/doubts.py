"""Turns culprits into suspects if a healthy job could look the same.

The records alone can't distinguish a hang from a job that goes on a moment later. The time that the ranks have waited
decides, and only the modification times of the files show it. If these may be the times of copies, the ops that were
under way decide instead."""

from __future__ import annotations

from itertools import pairwise

from torchaos.harness.watching.diagnosis.calls import Calls, ranges
from torchaos.harness.watching.diagnosis.verdict import LOW, Diagnosis
from torchaos.harness.watching.diagnosis.waits import Node, Waits
from torchaos.harness.watching.diagnosis.words import have

# A wait proves a hang only if it is longer than each of these limits that applies.
_EARLY_S = 1.0
_DUMPED_S = 2.5  # for dumps: no tool dumps a hang earlier, and a checkpoint takes as long
_UNKNOWN_S = 10.0  # if the dumps hold no older calls that show the usual gaps
_USUAL = 3.0  # times the usual gap between two calls of a rank, but at most _LONGEST_S
_LONGEST_S = 60.0
FRESH_S = 600.0  # a record that was written within this time after the time-out is no late copy
_GAPS = 20  # the least number of gaps that shows a usual gap
FEW = 2


def weigh(calls: Calls, graph: Waits, ends: list[set[Node]], proven: bool, found: Diagnosis) -> None:
    """Changes `found`: a culprit becomes a suspect if a healthy job could look the same. `proven`: the collectives of
    the ranks do not match, which proves the blame even if no rank has waited for long."""
    _too_early(calls, graph, found)
    _too_many(graph, found)
    if not proven:
        _still_moving(calls, graph, found)
    if not proven and not _lasted(calls, graph):
        _in_motion(ends, graph, found)
        _a_good_part(calls, found)
        _others_at_work(calls, graph, found)
        if found.culprits:
            found.problems.append(
                "the times of the files don't show how long any rank has waited; if the job was going on when they "
                "were written, nobody is to blame"
            )


def _too_early(calls: Calls, graph: Waits, found: Diagnosis) -> None:
    """Turns the culprits into suspects if the records were written so soon after the first wait began that a healthy
    job looks the same."""
    begun = [call.created_s for op in graph.ops.values() for call in op.pending.values() if call.created_s]
    written = [record.written_s for record in calls.ranks.values() if record.written_s]
    if not begun or not written:
        return
    usual, live = _usual_gap_s(calls), not any(record.copied for record in calls.ranks.values())
    only_active = not usual and all(record.clipped for record in calls.ranks.values())
    least = _EARLY_S if live else _UNKNOWN_S if only_active else _DUMPED_S
    bound = max(least, min(_LONGEST_S, _USUAL * usual))
    age = min(written) - min(begun)
    if -1.0 < age < bound:
        _acquit(
            found,
            f"it was recorded {max(age, 0.0):.1f} s after the first wait began, which is too early to tell a hang",
        )


def _still_moving(calls: Calls, graph: Waits, found: Diagnosis) -> None:
    """Turns the culprits into suspects if a waiting rank had ended another call a moment before."""
    waiting = {rank for op in graph.ops.values() for rank in op.pending} - found.culprits
    moving = sorted(rank for rank in waiting if rank in calls.ranks and calls.ranks[rank].moving)
    if moving and found.culprits:
        _acquit(found, f"{ranges(moving)} {have(len(moving))} ended a collective a moment before it was recorded")


def _usual_gap_s(calls: Calls) -> float:
    """The usual gap in seconds between two calls of a rank. For each rank it is the third longest gap, because the two
    longest may be the first step and a checkpoint. The largest value of all ranks counts. A host may run ahead of its
    device by such a gap."""
    worst = 0.0
    for record in calls.ranks.values():
        times = sorted(call.created_s for call in record.calls if call.created_s)
        gaps = sorted(after - before for before, after in pairwise(times))
        if len(gaps) >= _GAPS:
            worst = max(worst, gaps[-3])
    return worst


def _too_many(graph: Waits, found: Diagnosis) -> None:
    """Turns the culprits into suspects if more ranks are missing than wait. Then the waiting ranks are usually just a
    little ahead."""
    waiting = {rank for op in graph.ops.values() for rank in op.pending}
    absent = found.culprits - waiting
    if len(absent) > len(waiting):
        begun = f"only {ranges(sorted(waiting))} {have(len(waiting))} begun to wait, the others may be on their way"
        _acquit(found, begun if waiting else "no other rank waits")


def _lasted(calls: Calls, graph: Waits) -> bool:
    """Whether the times of the files can be trusted. True if they were written at most FRESH_S seconds after a time-out
    was due, or if no file was read. Later files may be copies."""
    begun = [call.created_s for op in graph.ops.values() for call in op.pending.values() if call.created_s]
    written = [record.written_s for record in calls.ranks.values() if record.written_s and record.copied]
    limits = [call.timeout_s for op in graph.ops.values() for call in op.pending.values() if call.timeout_s]
    return not written or not begun or min(written) - min(begun) < max(limits, default=0.0) + FRESH_S


def _in_motion(ends: list[set[Node]], graph: Waits, found: Diagnosis) -> None:
    """Turns the culprits into suspects if a collective is under way on all of its ranks. A hanging job has no such
    collective, so this job was recorded while it was going on."""
    flying = [graph.ops[next(iter(end))] for end in ends if len(end) == 1 and next(iter(end)) in graph.ops]
    whole = [op for op in flying if len(op.key) == 2 and len(op.pending) == len(op.members) > 1]
    whole = [op for op in whole if not any(call.started for call in op.pending.values())]
    if whole and found.culprits:
        _acquit(
            found,
            f"{whole[0].name} is under way on all of its ranks, so the job may be going on, and the times of the files "
            "don't show how long any rank has waited",
        )


def _a_good_part(calls: Calls, found: Diagnosis) -> None:
    """Turns the culprits into suspects if there are many of them. The ranks of a whole pipeline stage may be computing
    while the others wait for their data."""
    if len(found.culprits) > max(FEW, len(calls.world) // 8):
        _acquit(
            found,
            f"this many ranks ({len(found.culprits)} of {len(calls.world)}) may just be at work, and the times of the "
            "files don't show how long the others have waited",
        )


def _others_at_work(calls: Calls, graph: Waits, found: Diagnosis) -> None:
    """Examines ranks that share a group with a culprit and wait for nothing. In a job that hangs, such a rank is stuck
    by itself, and no rank waits for it yet. It becomes a suspect. If there are more such ranks than culprits, the job
    was computing, and the culprits become suspects."""
    waiting = {rank for op in graph.ops.values() for rank in op.pending} | set(graph.late)
    groups = {members for record in calls.ranks.values() for members in record.groups.values()}
    near = {rank for members in groups if found.culprits & {*members} for rank in members}
    free = {rank for rank in near & calls.ranks.keys() if not calls.ranks[rank].torn}
    free -= waiting | found.suspects | found.culprits
    if len(free) > len(found.culprits):
        _acquit(found, f"{ranges(sorted(free))} have no call under way either, and no rank waits for them")
    elif free:
        found.suspect(sorted(free), "it has no call under way, and nobody waits for it: at work, or stuck by itself")


def _acquit(found: Diagnosis, why: str) -> None:
    """Turns all culprits into suspects, and notes the reason."""
    found.culprits.clear()
    found.confidence = LOW if found.suspects else found.confidence
    found.problems.append(why)
