"""From what the ranks say of their collectives to the ones that hold the others up. Pure."""

from __future__ import annotations

from collections import Counter

from torchaos.harness.diagnosis.calls import Call, Calls, is_mutual, ranges
from torchaos.harness.diagnosis.doubts import FEW, FRESH_S, weigh
from torchaos.harness.diagnosis.slow import remarks
from torchaos.harness.diagnosis.verdict import HIGH, MEDIUM, Diagnosis
from torchaos.harness.diagnosis.waits import Late, Node, Op, Waits, groups_of, waits

_MOST_SENTENCES = 3


def diagnose(calls: Calls) -> Diagnosis:
    """Names nobody where a healthy job may look the same."""
    found = Diagnosis(problems=[*calls.problems, *remarks(calls)])
    graph = waits(calls)
    if not graph.ops and not graph.late:
        _given_up(calls, found)
        return found
    ends = graph.ends()
    for end in ends:
        _read_end(end, graph, calls, found)
    _weigh_unknown(calls, graph, found)
    proven = any(_mismatch(op, Diagnosis()) for end in ends for op in map(graph.ops.get, end) if op)
    weigh(calls, graph, ends, proven, found)
    return found


def _read_end(end: set[Node], graph: Waits, calls: Calls, found: Diagnosis) -> None:
    ranks = sorted(node for node in end if isinstance(node, int))
    ops = [graph.ops[node] for node in end if node in graph.ops]
    if any(_mismatch(op, found) for op in ops):
        return
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
    """Others wait for it, and nothing under way holds it up."""
    if rank not in calls.ranks:
        found.suspect([rank], *_waited_for(rank, graph), "nothing was recorded of it: it is gone, or was not asked")
    elif rank in graph.stale:
        found.suspect([rank], "its record is older than the others': they are done with what it had not entered then")
    else:
        last = max(calls.ranks[rank].calls, key=lambda call: call.order, default=None)
        words = "it has nothing under way itself"
        if last:
            words += f"; the last it called was {_named(last)}" + (f", {last.where}" if last.where else "")
        found.blame([rank], HIGH, *_waited_for(rank, graph), words)


def _read_late(rank: int, op: Op, stale: bool, found: Diagnosis) -> None:
    words = f"it is still in {op.name}, which {ranges(sorted(op.done))} {_have(len(op.done))} finished"
    if stale:
        found.suspect([rank], f"{words}, but its record is older than the others': they have gone further since")
    else:
        found.blame([rank], HIGH, words + ": on its own side nothing comes to an end any more")


def _read_op(op: Op, graph: Waits, found: Diagnosis) -> None:
    """Everybody is in it, and nothing before it is under way."""
    started = [rank for rank, call in op.pending.items() if call.started]
    waiting = sorted(op.pending.keys() - set(started))
    if started and waiting and len(waiting) <= len(started):
        found.blame(
            waiting, HIGH, f"its device never started {op.name}; that of {ranges(sorted(started))} did, and waits"
        )
        return
    behind_hosts = _not_gone_on(op, graph)
    if behind_hosts:
        found.blame(
            sorted(behind_hosts), MEDIUM,
            f"it is in {op.name} like all of its group, but the others have called more after it, and it has not",
        )  # fmt: skip
    found.suspect(
        sorted(op.pending), f"it is in {op.name} with everybody else: it is in flight, or what carries it is broken"
    )


def _not_gone_on(op: Op, graph: Waits) -> set[int]:
    """Of those in it, the few that have not entered the later ones that the others have."""
    later = [one for one in graph.ops.values() if one.key[0] == op.key[0] and one.seq > op.seq and len(one.key) == 2]
    absent = {rank for one in later for rank in one.missing & op.pending.keys()}
    return absent if 2 * len(absent) < len(op.pending) else set()


def _read_circle(end: set[Node], ranks: list[int], ops: list[Op], graph: Waits, calls: Calls, found: Diagnosis) -> None:
    """They wait for each other. A send that nobody takes does not hold up its rank, as a rule: without those it may
    open. Else the one that most wait for is in the wrong place."""
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
        inside = [one for one in opened.ends() if one <= end and one & senders]
        for one in inside:
            for node in one:
                if isinstance(node, int):
                    _read_absent(node, graph, calls, found)
        if inside:
            return
    votes = Counter({op.key: len(op.pending) for op in ops if op.missing})
    best = votes.most_common(1)[0][1] if votes else 0
    named = {frozenset(graph.ops[key].missing) for key, many in votes.items() if many == best}
    words = f"{ranges(ranks)} wait for each other: they called their collectives in different orders"
    if len(named) == 1 and (wrong := next(iter(named))) and len(wrong) < best:
        for rank in wrong:
            found.blame([rank], MEDIUM, words, *_waited_for(rank, graph), *_is_in(rank, graph))
    else:
        for rank in ranks:
            found.suspect([rank], words, *_is_in(rank, graph))


def _mismatch(op: Op, found: Diagnosis) -> bool:
    """At the same number, some call another operation than the others, or with other sizes or types."""
    if len(op.key) != 2:
        return False
    calls = {rank: call for rank, call in (*op.pending.items(), *op.done.items()) if call is not None}
    about = next((call.about for call in calls.values()), "")
    called: dict[int, object] = {rank: call.op for rank, call in calls.items()}
    given: dict[int, object] = {rank: call.shape for rank, call in calls.items() if call.shape}
    for what, kinds in (("calls", called), ("gives", given)):
        (usual, many), *others = Counter(kinds.values()).most_common() or [(None, 0)]
        if not others:
            continue
        odd = [rank for rank, kind in kinds.items() if kind != usual]
        for rank in sorted(odd if many > len(odd) else kinds):
            rest = sorted(other for other in kinds if kinds[other] != kinds[rank])
            words = f"as number {op.seq} of {about} it {what} {kinds[rank]}, and not {kinds[rest[0]]} as {ranges(rest)}"
            if many > len(odd):
                found.blame([rank], HIGH, words)
            else:
                found.suspect([rank], words)
        return True
    return False


def _weigh_unknown(calls: Calls, graph: Waits, found: Diagnosis) -> None:
    """A rank of which nothing was recorded is blamed only where others wait for it and nobody else explains that."""
    unknown = {rank for rank in found.suspects if rank not in calls.ranks}
    if unknown and not found.culprits and found.suspects == unknown:
        found.blame(sorted(_alone_waited_for(unknown, graph)), MEDIUM)
    readable = {rank for rank in unknown if any(f"{rank}" in text for text in calls.problems)}
    for rank in readable - found.culprits:
        found.say(rank, "see the notes on its record")


def _alone_waited_for(unknown: set[int], graph: Waits) -> set[int]:
    """Those without a record that some op waits for, and for nothing that is known. Whoever lives leaves a record; but
    where more than a few did not, the records were not collected."""
    if len(unknown) > FEW:
        return set()
    reasons = [graph.edges[key] for key, op in graph.ops.items() if op.pending and graph.edges[key] <= unknown]
    return {rank for ranks in reasons for rank in ranks if isinstance(rank, int)}


def _given_up(calls: Calls, found: Diagnosis) -> None:
    """Nothing is under way. Where all but a few are done with one op, their last, that these never entered, it was
    given up: it can't have come to its end. Unless these were only recorded a moment before the others: they are named
    where the times of the files bear out the time-out."""
    for group in groups_of(calls).values():
        top = max(group.last.values(), default=-1)
        done = [rank for rank, by_number in group.calls.items() if top in by_number]
        behind = [rank for rank, last in group.last.items() if last == top - 1]
        call = group.calls[done[0]][top] if done else None
        if not call or not is_mutual(call.op) or not behind or len(behind) > len(done):
            continue
        if set(done) | set(behind) == set(group.members):
            words = f"{ranges(sorted(done))} {_have(len(done))} ended {_named(call)}, which it never entered"
            if _timed_out(calls, call):
                found.blame(behind, MEDIUM, f"{words}: they gave it up")
            else:
                found.suspect(behind, f"{words}: they gave it up, or it was recorded before them")


def _timed_out(calls: Calls, call: Call) -> bool:
    written = [one.written_s for one in calls.ranks.values() if one.written_s]
    if not written or not call.created_s or not call.timeout_s:
        return False
    return call.timeout_s <= min(written) - call.created_s < call.timeout_s + FRESH_S


def _waited_for(rank: int, graph: Waits) -> list[str]:
    ops = [op for op in graph.ops.values() if rank in op.missing | op.unknown and op.pending]
    ops.sort(key=lambda op: (min(call.created_s or 0.0 for call in op.pending.values()), op.seq))
    more = len(ops) - _MOST_SENTENCES
    found = [
        f"{ranges(sorted(op.pending))} {'waits' if len(op.pending) == 1 else 'wait'} in {op.name}, "
        + ("which it never entered" if rank in op.missing else "and nothing shows that it entered it")
        for op in ops[:_MOST_SENTENCES]
    ]
    return [*found, f"and so in {more} more"] if more > 0 else found


def _is_in(rank: int, graph: Waits) -> list[str]:
    ops = [op for op in graph.ops.values() if rank in op.pending]
    return [f"it is in {op.name}" for op in ops[:_MOST_SENTENCES]]


def _named(call: Call) -> str:
    return f"{call.op} {call.seq} of {call.about or call.group}"


def _have(many: int) -> str:
    return "has" if many == 1 else "have"
