"""Finds the ranks that hold up the others, from the recorded collectives of all ranks."""

from __future__ import annotations

from torchaos.harness.watching.diagnosis import misplaced
from torchaos.harness.watching.diagnosis.calls import Call, Calls, is_mutual, ranges
from torchaos.harness.watching.diagnosis.doubts import FEW, FRESH_S, weigh
from torchaos.harness.watching.diagnosis.slow import remarks
from torchaos.harness.watching.diagnosis.verdict import HIGH, MEDIUM, Diagnosis
from torchaos.harness.watching.diagnosis.waits import Late, Node, Op, Waits, groups_of, waits
from torchaos.harness.watching.diagnosis.words import have, named, waited_for

_OF_ALL = 3  # if more than one rank in three left no record, the records were not collected completely


def diagnose(calls: Calls) -> Diagnosis:
    """The diagnosis of the recorded calls. It names no culprit if a healthy job could look the same."""
    found = Diagnosis(problems=[*calls.problems, *remarks(calls)])
    graph = waits(calls)
    if not graph.ops and not graph.late:
        _given_up(calls, found)
        return found
    ends = graph.ends()
    wrong = misplaced.read_mismatches(graph, found)
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
    """Judges a rank for which others wait, and which itself waits for nothing."""
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
    not the minority."""
    later = [each for each in graph.ops.values() if each.key[0] == op.key[0] and each.seq > op.seq]
    absent = {rank for each in later if len(each.key) == 2 for rank in each.missing & op.pending.keys()}
    return absent if 2 * len(absent) < len(op.pending) else set()


def _read_circle(end: set[Node], ranks: list[int], ops: list[Op], graph: Waits, calls: Calls, found: Diagnosis) -> None:
    """Judges ranks that wait for each other. A send usually does not block its rank. So if all waits of some ranks are
    sends, and the circle opens without them, they are treated as not waiting."""
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
    misplaced.read_circle(ranks, ops, graph, found)


def _weigh_unknown(calls: Calls, graph: Waits, found: Diagnosis) -> None:
    """Weighs the ranks without a usable record. A rank without a record is blamed only if others wait for it and no
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
    """The ranks without a record for which an op waits, if that op waits for no rank with a record. A live rank leaves
    a record. If more than FEW ranks left none, the records were not collected completely, and the result is empty."""
    if len(unknown) > FEW:
        return set()
    reasons = [graph.edges[key] for key, op in graph.ops.items() if op.pending and graph.edges[key] <= unknown]
    return {rank for ranks in reasons for rank in ranks if isinstance(rank, int)}


def _given_up(calls: Calls, found: Diagnosis) -> None:
    """Judges records in which no call is under way. If most ranks ended an op that the others never entered, and it was
    their last op, they gave it up, because it can't have succeeded. Another explanation is that the others were
    recorded a moment earlier. So the others are culprits only if the files were written when the op's time-out was
    due."""
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
    """Whether the records were written soon after the call's time-out."""
    written = [record.written_s for record in calls.ranks.values() if record.written_s]
    if not written or not call.created_s or not call.timeout_s:
        return False
    return call.timeout_s <= min(written) - call.created_s < call.timeout_s + FRESH_S
