"""Collectives called in the wrong place: another one than the others at the same number, or in another order. Pure.

A mismatch is proof, however short it lasts. An order is told by the calls that were made, and where these leave it
open, by how many wait for whom.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations

from torchaos.harness.watching.diagnosis.calls import ranges
from torchaos.harness.watching.diagnosis.verdict import HIGH, MEDIUM, Diagnosis
from torchaos.harness.watching.diagnosis.waits import Group, Node, Op, Waits
from torchaos.harness.watching.diagnosis.words import is_in, waited_for


def read_mismatches(graph: Waits, found: Diagnosis) -> set[Node]:
    """The ops at whose number some call another operation than the others, or give other sizes or types. Of each group
    the first one is told of; what comes after it is shifted."""
    wrong: dict[object, Op] = {}
    bad: set[Node] = set()
    for op in (one for one in graph.ops.values() if len(one.key) == 2):
        if _kinds(op):
            bad.add(op.key)
            first = wrong.setdefault(op.key[0], op)
            wrong[op.key[0]] = min(first, op, key=lambda one: one.seq)
    for op in wrong.values():
        _tell(op, graph.groups, found)
    return bad


def _kinds(op: Op) -> tuple[str, dict[int, object]] | None:
    """What each rank calls, or gives, where they differ. Of several in one (coalesced) not all have the same name."""
    calls = {rank: call for rank, call in (*op.pending.items(), *op.done.items()) if call and call.op != "coalesced"}
    called: dict[int, object] = {rank: call.op for rank, call in calls.items()}
    given: dict[int, object] = {rank: call.shape for rank, call in calls.items() if call.shape}
    return next(
        ((what, kinds) for what, kinds in (("calls", called), ("gives", given)) if len({*kinds.values()}) > 1), None
    )


def _tell(op: Op, groups: Mapping[str, Group], found: Diagnosis) -> None:
    what, kinds = _kinds(op) or ("", {})
    (usual, many), *_ = Counter(kinds.values()).most_common()
    sure, confidence = 2 * many > len(kinds), HIGH
    if not sure:
        elsewhere = _elsewhere(op, what, groups)
        sure, usual, confidence = elsewhere in kinds.values(), elsewhere, MEDIUM
    odd = [rank for rank, kind in kinds.items() if kind != usual] if sure else list(kinds)
    about = next(iter(op.pending.values())).about
    for rank in sorted(odd):
        rest = sorted(other for other in kinds if kinds[other] != kinds[rank])
        words = f"as number {op.seq} of {about} it {what} {kinds[rank]}, and not {kinds[rest[0]]} as {ranges(rest)}"
        if sure:
            found.blame([rank], confidence, words)
        else:
            found.suspect([rank], words)


def _elsewhere(op: Op, what: str, groups: Mapping[str, Group]) -> object:
    """What other groups of the same description and size call, or give, at this number; None where they disagree."""
    mine = groups[str(op.key[0])]
    alike = [
        one for one in groups.values()
        if one is not mine and mine.description and one.description == mine.description
        and len(one.members) == len(mine.members)
    ]  # fmt: skip
    calls = [call for one in alike for by_number in one.calls.values() if (call := by_number.get(op.seq))]
    kinds = Counter(call.op if what == "calls" else call.shape for call in calls)
    usual, many = next(iter(kinds.most_common(1)), (None, 0))
    return usual if 2 * many > len(calls) else None


def read_circle(ranks: Sequence[int], ops: Sequence[Op], graph: Waits, found: Diagnosis) -> None:
    """Ranks that wait for each other: the few that called in another order than the others."""
    swapped = _swapped(ops)
    if swapped:
        for rank, words in swapped.items():
            found.blame([rank], HIGH, words, *is_in(rank, graph))
        return
    wrong = _in_the_wrong_place(ranks, ops, graph)
    words = f"{ranges(ranks)} wait for each other: they called their collectives in different orders"
    for rank in wrong:
        found.blame([rank], MEDIUM, words, *waited_for(rank, graph), *is_in(rank, graph))
    for rank in ranks if not wrong else ():
        found.suspect([rank], words, *is_in(rank, graph))


def _swapped(ops: Iterable[Op]) -> dict[int, str]:
    """Those that are in two ops which they called the other way round than most, and what they did."""
    found: dict[int, str] = {}
    for one, other in combinations([op for op in ops if len(op.key) == 2], 2):
        both = one.pending.keys() & other.pending.keys()
        first = {rank for rank in both if one.pending[rank].order < other.pending[rank].order}
        few = min(first, both - first, key=len)
        if few and 2 * len(few) < len(both):
            early, late = (one, other) if few == first else (other, one)
            found |= dict.fromkeys(few, f"it called {early.name} before {late.name}, the others the other way round")
    return found


def _in_the_wrong_place(ranks: Sequence[int], ops: Sequence[Op], graph: Waits) -> frozenset[int]:
    """The one that all wait for; within one group, the few that most wait for; of several groups see _out_of_turn."""
    votes = Counter({op.key: len(op.pending) for op in ops if op.missing})
    best = max(votes.values(), default=0)
    waited = {frozenset(graph.ops[key].missing) for key, many in votes.items() if many == best}
    if {*ranks} in waited and len(ranks) == 1:
        return frozenset(ranks)
    if len({frozenset(op.members) for op in ops}) > 1:
        waited = {_out_of_turn(ops)}
    few = next(iter(waited), frozenset[int]())
    return few if len(waited) == 1 and len(few) < best else frozenset()


def _out_of_turn(ops: Iterable[Op]) -> frozenset[int]:
    """Ranks that run the same program have made the same number of calls when they come to an op; the few that have
    not are out of turn."""
    odd: set[int] = set()
    for turn in [{rank: call.order for rank, call in op.pending.items()} for op in ops if len(op.pending) > 2]:
        usual, many = Counter(turn.values()).most_common(1)[0]
        odd |= {rank for rank, order in turn.items() if order != usual} if 2 * many > len(turn) else set()
    return frozenset(odd)
