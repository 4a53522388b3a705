"""The result of a diagnosis, in the same form for every source of evidence; clauses about which rank waits for which;
and the mismatches, which are a proof even if no rank has waited for long.

A mismatch is a rank that called a collective in the wrong place: another operation than the other ranks at the same
number, or another order. A wrong order is found from the recorded calls or, if these do not decide, from the number of
ranks that wait for each other. A rank that always enters its collectives last is slow, but does not hang. This is only
a remark: the clocks of the hosts may differ, and some rank is always last."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from statistics import median
from typing import Any

from torchaos.harness.monitoring.diagnosis.wait_graph import Call, Calls, Group, Node, Op, Waits, is_mutual, ranges

_MOST = 3  # clauses of one kind


def waited_for(rank: int, graph: Waits) -> list[str]:
    """Clauses about the ranks that wait for this rank: at most _MOST clauses, and then the number of the remaining
    ranks."""
    ops = [op for op in graph.ops.values() if rank in op.missing | op.unknown and op.pending]
    ops.sort(key=lambda op: (min(call.created_s or 0.0 for call in op.pending.values()), op.seq))
    more = len(ops) - _MOST
    found = [
        f"{ranges(sorted(op.pending))} {'waits' if len(op.pending) == 1 else 'wait'} in {op.name}, "
        + ("which it never entered" if rank in op.missing else "and nothing shows that it entered it")
        for op in ops[:_MOST]
    ]
    return [*found, f"and so in {more} more"] if more > 0 else found


def is_in(rank: int, graph: Waits) -> list[str]:
    ops = [op for op in graph.ops.values() if rank in op.pending]
    return [f"it is in {op.name}" for op in ops[:_MOST]]


def named(call: Call) -> str:
    return f"{call.op} {call.seq} of {call.about or call.group}"


def have(many: int) -> str:
    return "has" if many == 1 else "have"


HIGH, MEDIUM, LOW, NONE = "high", "medium", "low", "none"


@dataclass
class Diagnosis:
    """The ranks that caused a hang.

    `culprits`: ranks that certainly held up the others. `suspects`: the smallest known set of ranks that contains all
    culprits, if there is a hang. `confidence`: how sure the culprits are; "none" if there are none."""

    culprits: set[int] = field(default_factory=set)
    suspects: set[int] = field(default_factory=set)
    confidence: str = NONE
    evidence: dict[int, list[str]] = field(default_factory=lambda: defaultdict(list))
    problems: list[str] = field(default_factory=list)  # what could not be read or decided
    summary: str = ""

    def blame(self, ranks: Iterable[int], confidence: str, *sentences: str) -> None:
        """Adds culprits, with sentences of evidence. The confidence is the lowest of all culprits."""
        order = (NONE, HIGH, MEDIUM, LOW)
        self.confidence = max(self.confidence, confidence, key=order.index)
        for rank in ranks:
            self.culprits.add(rank)
            self.suspects.add(rank)
            self.say(rank, *sentences)

    def suspect(self, ranks: Iterable[int], *sentences: str) -> None:
        for rank in ranks:
            self.suspects.add(rank)
            self.say(rank, *sentences)

    def say(self, rank: int, *sentences: str) -> None:
        self.evidence[rank] = list(dict.fromkeys([*self.evidence[rank], *filter(None, sentences)]))

    def to_json(self) -> dict[str, Any]:
        evidence = {str(rank): self.evidence[rank] for rank in sorted(self.evidence)}
        return {
            "culprits": sorted(self.culprits), "suspects": sorted(self.suspects), "confidence": self.confidence,
            "summary": self.summary or self._in_short(), "evidence": evidence, "problems": self.problems,
        }  # fmt: skip

    def lines(self) -> Sequence[str]:
        found = [self.summary or self._in_short()]
        for rank in sorted(self.culprits):
            found += [f"  rank {rank}", *(f"    {text}" for text in self.evidence.get(rank, []))]
        for rank in sorted(self.suspects - self.culprits):
            found += [f"  rank {rank}, a suspect", *(f"    {text}" for text in self.evidence.get(rank, []))]
        return [*found, *(f"note: {text}" for text in self.problems)]

    def _in_short(self) -> str:
        if self.culprits:
            others = self.suspects - self.culprits
            more = f"; {ranges(sorted(others))} can't be ruled out" if others else ""
            return f"{ranges(sorted(self.culprits))} held up the other ranks (confidence: {self.confidence}){more}"
        if self.suspects:
            return f"nobody can be named; if it hangs, the culprit is among {ranges(sorted(self.suspects))}"
        return "nobody is to blame: no rank waits for another one"


_NEEDED = 20  # with fewer collectives of a group, none of its ranks is called slow
_MOSTLY = 0.8  # a slow rank enters at least this share of them last
_SHARE = 0.2  # and later than the rank before it by at least this share of the time between two collectives


def remarks(calls: Calls) -> Iterator[str]:
    """Yields a sentence for each group in which one rank is slow (see _MOSTLY and _SHARE)."""
    entered: dict[tuple[str, int], dict[int, float]] = defaultdict(dict)
    for rank, record in calls.ranks.items():
        for call in record.calls:
            if call.done and call.created_s and is_mutual(call.op):
                entered[call.group, call.seq][rank] = call.created_s
    by_group: dict[str, list[dict[int, float]]] = defaultdict(list)
    for (group, _), times in sorted(entered.items()):
        by_group[group].append(times)
    for group, all_times in sorted(by_group.items()):
        members = max(len(times) for times in all_times)
        whole = [times for times in all_times if len(times) == members]
        if members < 3 or len(whole) < _NEEDED:
            continue
        (last, often), *_ = Counter(max(times, key=lambda rank: times[rank]) for times in whole).most_common()
        late = [
            sorted(times.values())[-1] - sorted(times.values())[-2]
            for times in whole
            if max(times, key=times.__getitem__) == last
        ]
        starts = sorted(min(times.values()) for times in whole)
        between = median(after - before for before, after in pairwise(starts))
        if often >= _MOSTLY * len(whole) and median(late) > _SHARE * between:
            yield (
                f"rank {last} is slow: it entered {often} of {len(whole)} collectives of group {group} last, "
                f"by {median(late) * 1e3:.0f} ms (if the clocks of the hosts agree)"
            )


def read_mismatches(graph: Waits, found: Diagnosis) -> set[Node]:
    """Finds the ops in which ranks called different operations, or gave different sizes or types. Returns all such ops.
    Blames ranks only for the first such op of each group, because later ops differ as a consequence."""
    wrong: dict[object, Op] = {}
    bad: set[Node] = set()
    for op in (each for each in graph.ops.values() if len(each.key) == 2):
        if _kinds(op):
            bad.add(op.key)
            first = wrong.setdefault(op.key[0], op)
            wrong[op.key[0]] = min(first, op, key=lambda each: each.seq)
    for op in wrong.values():
        _tell(op, graph.groups, found)
    return bad


def _kinds(op: Op) -> tuple[str, dict[int, object]] | None:
    """If the ranks differ in this op: ("calls", operation by rank) or ("gives", sizes and types by rank). Otherwise
    None. Coalesced calls are left out, because their parts may have different names."""
    calls = {rank: call for rank, call in (*op.pending.items(), *op.done.items()) if call and call.op != "coalesced"}
    called: dict[int, object] = {rank: call.op for rank, call in calls.items()}
    given: dict[int, object] = {rank: call.shape for rank, call in calls.items() if call.shape}
    return next(
        ((verb, kinds) for verb, kinds in (("calls", called), ("gives", given)) if len({*kinds.values()}) > 1), None
    )


def _tell(op: Op, groups: Mapping[str, Group], found: Diagnosis) -> None:
    verb, kinds = _kinds(op) or ("", {})
    (usual, many), *_ = Counter(kinds.values()).most_common()
    sure, confidence = 2 * many > len(kinds), HIGH
    if not sure:
        elsewhere = _elsewhere(op, verb, groups)
        sure, usual, confidence = elsewhere in kinds.values(), elsewhere, MEDIUM
    deviant = [rank for rank, kind in kinds.items() if kind != usual] if sure else list(kinds)
    about = next(iter(op.pending.values())).about
    for rank in sorted(deviant):
        rest = sorted(other for other in kinds if kinds[other] != kinds[rank])
        words = f"as number {op.seq} of {about} it {verb} {kinds[rank]}, and not {kinds[rest[0]]} as {ranges(rest)}"
        if sure:
            found.blame([rank], confidence, words)
        else:
            found.suspect([rank], words)


def _elsewhere(op: Op, verb: str, groups: Mapping[str, Group]) -> object:
    """The operation or size that most ranks called or gave at this number, in other groups with the same description
    and size. None if there is no majority."""
    mine = groups[str(op.key[0])]
    alike = [
        group for group in groups.values()
        if group is not mine and mine.description and group.description == mine.description
        and len(group.members) == len(mine.members)
    ]  # fmt: skip
    calls = [call for group in alike for by_number in group.calls.values() if (call := by_number.get(op.seq))]
    kinds = Counter(call.op if verb == "calls" else call.shape for call in calls)
    usual, many = next(iter(kinds.most_common(1)), (None, 0))
    return usual if 2 * many > len(calls) else None


def read_circle(ranks: Sequence[int], ops: Sequence[Op], graph: Waits, found: Diagnosis) -> None:
    """Judges ranks that wait for each other. Blames the few ranks that called in another order. If these can't be
    found, all ranks become suspects."""
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
    """The few ranks that called two ops in the reverse order, each with a sentence about it."""
    found: dict[int, str] = {}
    for a, b in combinations([op for op in ops if len(op.key) == 2], 2):
        both = a.pending.keys() & b.pending.keys()
        first = {rank for rank in both if a.pending[rank].order < b.pending[rank].order}
        few = min(first, both - first, key=len)
        if few and 2 * len(few) < len(both):
            early, late = (a, b) if few == first else (b, a)
            found |= dict.fromkeys(few, f"it called {early.name} before {late.name}, the others the other way round")
    return found


def _in_the_wrong_place(ranks: Sequence[int], ops: Sequence[Op], graph: Waits) -> frozenset[int]:
    """The ranks that called in the wrong order. If all others wait for one rank, it is that rank. Within a single
    group, it is the few ranks for which most ranks wait; in several groups, the ranks out of turn (see `_out_of_turn`).
    Empty if this is not clear."""
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
    """The ranks that had made another number of calls before an op than most ranks. Ranks that run the same program
    make the same number of calls before it."""
    odd: set[int] = set()
    for turn in [{rank: call.order for rank, call in op.pending.items()} for op in ops if len(op.pending) > 2]:
        usual, many = Counter(turn.values()).most_common(1)[0]
        odd |= {rank for rank, order in turn.items() if order != usual} if 2 * many > len(turn) else set()
    return frozenset(odd)
