"""The result of a diagnosis, in the same form for every source of evidence. Also functions that make clauses about
which rank waits for which."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchaos.harness.monitoring.diagnosis.wait_graph import Call, Waits, ranges

_MOST = 3  # clauses of one kind


def waited_for(rank: int, graph: Waits) -> list[str]:
    """Clauses about the ranks that wait for this rank: at most _MOST, and the number of the rest."""
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
