"""Finds the ranks that hold up the others, from the recorded collectives of all ranks. `diagnose` names the culprits;
`weigh` turns culprits into mere suspects if a healthy job could look the same.

A hang, and a job that goes on a moment later, leave the same records. What tells them apart is how long the ranks have
waited, and only the modification times of the files show that. If these may be the times of copies, the ops
(collectives, sends and recvs) that were under way decide instead."""

from __future__ import annotations

from itertools import pairwise

from torchaos.harness.monitoring.diagnosis import diagnosis
from torchaos.harness.monitoring.diagnosis.diagnosis import (
    HIGH,
    LOW,
    MEDIUM,
    Diagnosis,
    have,
    named,
    remarks,
    waited_for,
)
from torchaos.harness.monitoring.diagnosis.wait_graph import (
    Call,
    Calls,
    Late,
    Node,
    Op,
    Waits,
    groups_of,
    is_mutual,
    ranges,
    waits,
)

# A wait proves a hang only if it is longer than each of these limits that applies.
_EARLY_S = 1.0
_DUMPED_S = 2.5  # for dumps: no tool dumps a hang earlier, and a checkpoint takes as long
_UNKNOWN_S = 10.0  # used if the dumps have no older calls, which would show the usual gaps
_USUAL = 3.0  # times the usual gap between two calls of a rank, but at most _LONGEST_S
_LONGEST_S = 60.0
FRESH_S = 600.0  # a record that was written within this time after the time-out is no late copy
_GAPS = 20  # the fewest gaps from which a usual gap is computed
FEW = 2  # up to this number, ranks count as few


def weigh(calls: Calls, graph: Waits, ends: list[set[Node]], proven: bool, found: Diagnosis) -> None:
    """Changes `found`: turns a culprit into a suspect if a healthy job could look the same. `ends`: the parts of the
    graph that wait for nothing outside themselves. `proven`: the collectives of the ranks do not match, which proves
    the blame even if no rank has waited for long."""
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
    job would look the same."""
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
    """The usual gap in seconds between two calls of a rank: a host may run ahead of its device by that time. Of each
    rank, the third longest gap counts, because the two longest may be the first step and a checkpoint; of all ranks,
    the largest. 0 if no rank has enough calls."""
    worst = 0.0
    for record in calls.ranks.values():
        times = sorted(call.created_s for call in record.calls if call.created_s)
        gaps = sorted(after - before for before, after in pairwise(times))
        if len(gaps) >= _GAPS:
            worst = max(worst, gaps[-3])
    return worst


def _too_many(graph: Waits, found: Diagnosis) -> None:
    """Turns the culprits into suspects if more ranks are missing than wait. Then the ranks that wait are usually just a
    little ahead."""
    waiting = {rank for op in graph.ops.values() for rank in op.pending}
    absent = found.culprits - waiting
    if len(absent) > len(waiting):
        begun = f"only {ranges(sorted(waiting))} {have(len(waiting))} begun to wait, the others may be on their way"
        _acquit(found, begun if waiting else "no other rank waits")


def _lasted(calls: Calls, graph: Waits) -> bool:
    """Whether the times of the files can be trusted: they were written at most FRESH_S seconds after a time-out was due
    (later files may be copies), or no file was read."""
    begun = [call.created_s for op in graph.ops.values() for call in op.pending.values() if call.created_s]
    written = [record.written_s for record in calls.ranks.values() if record.written_s and record.copied]
    limits = [call.timeout_s for op in graph.ops.values() for call in op.pending.values() if call.timeout_s]
    return not written or not begun or min(written) - min(begun) < max(limits, default=0.0) + FRESH_S


def _in_motion(ends: list[set[Node]], graph: Waits, found: Diagnosis) -> None:
    """Turns the culprits into suspects if some collective is under way on all of its ranks. A job that hangs has no
    such collective, so this job was recorded while it was going on."""
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
    """Turns the culprits into suspects if there are many of them: the ranks of a whole pipeline stage may be computing
    while the others wait for their data."""
    if len(found.culprits) > max(FEW, len(calls.world) // 8):
        _acquit(
            found,
            f"this many ranks ({len(found.culprits)} of {len(calls.world)}) may just be at work, and the times of the "
            "files don't show how long the others have waited",
        )


def _others_at_work(calls: Calls, graph: Waits, found: Diagnosis) -> None:
    """Examines the ranks that share a group with a culprit and wait for nothing. In a job that hangs, such a rank is
    itself stuck, although nobody waits for it yet: it becomes a suspect. More such ranks than culprits mean that the
    job was computing: then the culprits become suspects."""
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


_OF_ALL = 3  # if more than one rank in three has no record, the records were not collected completely


def diagnose(calls: Calls) -> Diagnosis:
    """The diagnosis of the recorded calls. It names no culprit if a healthy job could look the same."""
    found = Diagnosis(problems=[*calls.problems, *remarks(calls)])
    graph = waits(calls)
    if not graph.ops and not graph.late:
        _given_up(calls, found)
        return found
    ends = graph.ends()
    wrong = diagnosis.read_mismatches(graph, found)
    for end in ends:
        if not end & wrong:
            _read_end(end, graph, calls, found)
    _weigh_unknown(calls, graph, found)
    weigh(calls, graph, ends, bool(wrong), found)
    return found


def _read_end(end: set[Node], graph: Waits, calls: Calls, found: Diagnosis) -> None:
    ranks = sorted(node for node in end if isinstance(node, int))
    ops = [graph.ops[node] for node in end if node in graph.ops]
    late = next((node.rank for node in end if isinstance(node, Late)), None)
    if late is not None:
        _read_late(late, graph.late[late], late in graph.stale, found)
    elif len(end) > 1:
        _read_circle(end, ranks, ops, graph, calls, found)
    elif ranks:
        _read_absent(ranks[0], graph, calls, found)
    elif ops:
        _read_op(ops[0], graph, found)


def _read_absent(rank: int, graph: Waits, calls: Calls, found: Diagnosis) -> None:
    """Judges a rank for which other ranks wait and which itself waits for nothing."""
    if rank not in calls.ranks:
        found.suspect([rank], *waited_for(rank, graph), "it has no record: it is gone, or its record was not collected")
    elif rank in graph.stale:
        found.suspect(
            [rank], "its record is older than the others': they have finished calls that it had not entered then"
        )
    elif calls.ranks[rank].torn:
        found.suspect([rank], *waited_for(rank, graph), "its record is torn: what it did last is not known")
    else:
        last = max(calls.ranks[rank].calls, key=lambda call: call.order, default=None)
        words = "it has no call under way itself"
        if last:
            words += f"; the last it called was {named(last)}" + (f", {last.where}" if last.where else "")
        found.blame([rank], HIGH, *waited_for(rank, graph), words)


def _read_late(rank: int, op: Op, stale: bool, found: Diagnosis) -> None:
    words = f"it is still in {op.name}, which {ranges(sorted(op.done))} {have(len(op.done))} finished"
    if stale:
        found.suspect([rank], f"{words}, but its record is older than the others': they have gone further since")
    else:
        found.blame([rank], HIGH, words + ": no call ends on this rank any more")


def _read_op(op: Op, graph: Waits, found: Diagnosis) -> None:
    """Judges an op that all its ranks have entered, and that waits for no other op."""
    started = [rank for rank, call in op.pending.items() if call.started]
    waiting = sorted(op.pending.keys() - set(started))
    if started and waiting and len(waiting) <= len(started):
        found.blame(
            waiting, HIGH, f"its device never started {op.name}; that of {ranges(sorted(started))} did, and waits"
        )
        return
    inside = sorted(rank for rank, call in op.pending.items() if call.inside)
    returned = sorted(op.pending.keys() - set(inside))
    if inside and len(inside) <= len(returned):
        found.blame(
            inside, MEDIUM,
            f"it is still inside its call of {op.name}, from which {ranges(returned)} {have(len(returned))} returned: "
            "it has not handed it over yet",
        )  # fmt: skip
        return
    behind_hosts = _not_gone_on(op, graph)
    if behind_hosts:
        found.blame(
            sorted(behind_hosts), MEDIUM,
            f"it is in {op.name} like all of its group, but the others have made later calls, and it has not",
        )  # fmt: skip
    found.suspect(
        sorted(op.pending), f"it is in {op.name} with all others: the data is on its way, or the network is broken"
    )


def _not_gone_on(op: Op, graph: Waits) -> set[int]:
    """The ranks in the op that have not entered later ops of its group, although other ranks have. Empty if they are
    not a minority."""
    later = [each for each in graph.ops.values() if each.key[0] == op.key[0] and each.seq > op.seq]
    absent = {rank for each in later if len(each.key) == 2 for rank in each.missing & op.pending.keys()}
    return absent if 2 * len(absent) < len(op.pending) else set()


def _read_circle(end: set[Node], ranks: list[int], ops: list[Op], graph: Waits, calls: Calls, found: Diagnosis) -> None:
    """Judges ranks that wait for each other in a circle. A send usually does not block its rank. So ranks that wait
    only in sends count as not waiting, if this opens the circle."""
    senders = {
        rank for rank in ranks
        if all(rank == op.key[1] for op in ops if rank in op.pending and len(op.key) == 4)
        and not any(rank in op.pending and len(op.key) == 2 for op in ops)
    }  # fmt: skip
    if senders:
        cut = {key: set(others) for key, others in graph.edges.items()}
        for rank in senders:
            cut[rank] = set()
        opened = Waits(graph.ops, cut, graph.stale, graph.late)
        inside = [part for part in opened.ends() if part <= end and part & senders]
        for part in inside:
            for node in part:
                if isinstance(node, int):
                    _read_absent(node, graph, calls, found)
        if inside:
            return
    diagnosis.read_circle(ranks, ops, graph, found)


def _weigh_unknown(calls: Calls, graph: Waits, found: Diagnosis) -> None:
    """Judges the ranks without a usable record. A rank without a record is blamed only if others wait for it and no
    other rank explains the wait. A rank with an empty or torn record was alive when it wrote the record, so it stays a
    suspect."""
    unknown = {rank for rank in found.suspects if rank not in calls.ranks or calls.ranks[rank].torn}
    gone = unknown - calls.ranks.keys() - calls.unreadable
    few = len(gone) == 1 or len(gone) * _OF_ALL <= len(calls.world)
    if gone and few and not found.culprits and found.suspects == gone:
        found.blame(sorted(_alone_waited_for(gone, graph)), MEDIUM)
    for rank in (unknown & (calls.ranks.keys() | calls.unreadable)) - found.culprits:
        found.say(rank, "see the notes on its record")


def _alone_waited_for(unknown: set[int], graph: Waits) -> set[int]:
    """The ranks of `unknown` (ranks without a record) that alone hold up an op: the op waits for no rank with a record.
    Empty if more than FEW ranks have no record, because a live rank leaves one: the records were not collected
    completely."""
    if len(unknown) > FEW:
        return set()
    reasons = [graph.edges[key] for key, op in graph.ops.items() if op.pending and graph.edges[key] <= unknown]
    return {rank for ranks in reasons for rank in ranks if isinstance(rank, int)}


def _given_up(calls: Calls, found: Diagnosis) -> None:
    """Judges records in which no call is under way. If most ranks have ended an op that the others never entered, and
    it was their last op, they gave up: the op can't have succeeded. But perhaps the others were only recorded a moment
    earlier. So they are culprits only if the files were written when the time-out of the op was due."""
    for group in groups_of(calls).values():
        top = max(group.last.values(), default=-1)
        done = [rank for rank, by_number in group.calls.items() if top in by_number]
        behind = [rank for rank, last in group.last.items() if last == top - 1]
        call = group.calls[done[0]][top] if done else None
        if not call or not is_mutual(call.op) or not behind or len(behind) > len(done):
            continue
        if set(done) | set(behind) == set(group.members):
            words = f"{ranges(sorted(done))} {have(len(done))} ended {named(call)}, which it never entered"
            if _timed_out(calls, call):
                found.blame(behind, MEDIUM, f"{words}: they gave it up")
            else:
                found.suspect(behind, f"{words}: they gave it up, or its record is older than theirs")


def _timed_out(calls: Calls, call: Call) -> bool:
    """Whether the records were written soon after the time-out of the call."""
    written = [record.written_s for record in calls.ranks.values() if record.written_s]
    if not written or not call.created_s or not call.timeout_s:
        return False
    return call.timeout_s <= min(written) - call.created_s < call.timeout_s + FRESH_S
