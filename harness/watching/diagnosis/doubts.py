"""Where a healthy job may look the same, nobody is named: culprits become suspects. Pure.

What counts is for how long they have waited, and only the times of the files tell that: within the records nothing
differs between a job that hangs and one that goes on a moment later. A copied file has lost its time; then the shape of
what was under way has to do.
"""

from __future__ import annotations

from itertools import pairwise

from torchaos.harness.watching.diagnosis.calls import Calls, ranges
from torchaos.harness.watching.diagnosis.verdict import LOW, Diagnosis
from torchaos.harness.watching.diagnosis.waits import Node, Waits

_EARLY_S = 1.0  # a wait that was seen for less than this says nothing by itself
_DUMPED_S = 2.5  # for dumps, which nobody makes as soon as that of a hang: a rank's checkpoint takes as long
_UNKNOWN_S = 10.0  # nor less than this where no older calls were kept to learn from
_USUAL = 3.0  # nor does one below so many times a usual one
_LONGEST_S = 60.0  # and after this it does, whatever is usual
FRESH_S = 600.0  # after a time-out a record is written soon, where its file's time is still that of the writing
_GAPS = 20  # fewer than these teach nothing of what is usual
FEW = 2


def weigh(calls: Calls, graph: Waits, ends: list[set[Node]], proven: bool, found: Diagnosis) -> None:
    """`proven`: by what was called, whatever the time; mismatched collectives are."""
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
                "the times of the files don't tell for how long anybody has waited; if the job was going on when they "
                "were written, nobody is to blame"
            )


def _too_early(calls: Calls, graph: Waits, found: Diagnosis) -> None:
    """The records were written so soon after the waits began that a healthy job looks the same."""
    begun = [call.created_s for op in graph.ops.values() for call in op.pending.values() if call.created_s]
    written = [one.written_s for one in calls.ranks.values() if one.written_s]
    if not begun or not written:
        return
    usual, live = _usual_gap_s(calls), not any(one.copied for one in calls.ranks.values())
    only_active = not usual and all(one.clipped for one in calls.ranks.values())
    least = _EARLY_S if live else _UNKNOWN_S if only_active else _DUMPED_S
    bound = max(least, min(_LONGEST_S, _USUAL * usual))
    age = min(written) - min(begun)
    if -1.0 < age < bound:
        _acquit(
            found,
            f"it was recorded {max(age, 0.0):.1f} s after the first wait began, which is too early to tell a hang",
        )


def _still_moving(calls: Calls, graph: Waits, found: Diagnosis) -> None:
    """Somebody who waits was done with something else a moment before."""
    waiting = {rank for op in graph.ops.values() for rank in op.pending} - found.culprits
    moving = sorted(rank for rank in waiting if rank in calls.ranks and calls.ranks[rank].moving)
    if moving and found.culprits:
        _acquit(found, f"{ranges(moving)} {_have(len(moving))} ended a collective a moment before it was recorded")


def _usual_gap_s(calls: Calls) -> float:
    """The longest of the usual times between two calls of one rank: the third longest, since the first steps and a
    checkpoint are none. A host may run ahead of its device by as much as the time between two steps."""
    worst = 0.0
    for one in calls.ranks.values():
        times = sorted(call.created_s for call in one.calls if call.created_s)
        gaps = sorted(after - before for before, after in pairwise(times))
        if len(gaps) >= _GAPS:
            worst = max(worst, gaps[-3])
    return worst


def _too_many(graph: Waits, found: Diagnosis) -> None:
    """Where more are missing than wait, the few that wait are only a little ahead, as a rule."""
    waiting = {rank for op in graph.ops.values() for rank in op.pending}
    absent = found.culprits - waiting
    if len(absent) > len(waiting):
        _acquit(
            found, f"only {ranges(sorted(waiting))} {_have(len(waiting))} begun to wait, the others may be on their way"
        )


def _lasted(calls: Calls, graph: Waits) -> bool:
    """The times of the files bear out that it waited for long: they were written about when a time-out was due, or
    nothing was read from files. A copy has lost its time."""
    begun = [call.created_s for op in graph.ops.values() for call in op.pending.values() if call.created_s]
    written = [one.written_s for one in calls.ranks.values() if one.written_s and one.copied]
    limits = [call.timeout_s for op in graph.ops.values() for call in op.pending.values() if call.timeout_s]
    return not written or not begun or min(written) - min(begun) < max(limits, default=0.0) + FRESH_S


def _in_motion(ends: list[set[Node]], graph: Waits, found: Diagnosis) -> None:
    """Nothing tells for how long it waited, and a collective that nobody holds up is under way: once a job has come to
    rest there is none, so that it was recorded while it went on."""
    flying = [graph.ops[next(iter(end))] for end in ends if len(end) == 1 and next(iter(end)) in graph.ops]
    whole = [op for op in flying if len(op.key) == 2 and len(op.pending) == len(op.members) > 1]
    whole = [op for op in whole if not any(call.started for call in op.pending.values())]
    if whole and found.culprits:
        _acquit(
            found,
            f"{whole[0].name} is in flight on all of its ranks, so the job may well go on, and the times of the files "
            "don't tell how long anybody has waited",
        )


def _a_good_part(calls: Calls, found: Diagnosis) -> None:
    """As when the ranks of a whole pipeline stage are at work, and the others wait for what they will send."""
    if len(found.culprits) > max(FEW, len(calls.world) // 8):
        _acquit(
            found,
            f"so many ranks ({len(found.culprits)} of {len(calls.world)}) may just be at work, and the times of the "
            "files don't tell how long the others have waited",
        )


def _others_at_work(calls: Calls, graph: Waits, found: Diagnosis) -> None:
    """Once a job has come to rest, whoever waits for nothing is stuck by itself. One or two may be, and nobody has come
    to wait for them yet: suspects. Where there are more of them than culprits, the job was at work."""
    waiting = {rank for op in graph.ops.values() for rank in op.pending} | set(graph.late)
    groups = {members for one in calls.ranks.values() for members in one.groups.values()}
    near = {rank for members in groups if found.culprits & {*members} for rank in members}
    free = {rank for rank in near & calls.ranks.keys() if not calls.ranks[rank].torn}
    free -= waiting | found.suspects | found.culprits
    if len(free) > len(found.culprits):
        _acquit(found, f"{ranges(sorted(free))} have nothing under way either, and nobody waits for that")
    elif free:
        found.suspect(sorted(free), "it has nothing under way, and nobody waits for it: at work, or stuck by itself")


def _have(many: int) -> str:
    return "has" if many == 1 else "have"


def _acquit(found: Diagnosis, why: str) -> None:
    found.culprits.clear()
    found.confidence = LOW if found.suspects else found.confidence
    found.problems.append(why)
