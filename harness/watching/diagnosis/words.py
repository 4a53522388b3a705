"""Clauses that say which ranks wait for which."""

from __future__ import annotations

from torchaos.harness.watching.diagnosis.calls import Call, ranges
from torchaos.harness.watching.diagnosis.waits import Waits

_MOST = 3


def waited_for(rank: int, graph: Waits) -> list[str]:
    """Clauses about the ranks that wait for this rank: at most _MOST clauses, and a count of the rest."""
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
