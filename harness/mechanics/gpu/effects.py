"""Evidence from effects that the harness itself has read."""

from __future__ import annotations

from torchaos.harness.agent.wire import Kind
from torchaos.harness.contracts import Evidence
from torchaos.harness.record.record import Record


def first_effect(record: Record, fault: str, words: str) -> Evidence | None:
    """Evidence from the first effect of this fault that the harness recorded and whose text contains `words`."""
    seen = [e for e in record.of_fault(fault, Kind.EFFECT) if words in str(e.data["effect"]) and e.source == "harness"]
    return Evidence.of(str(seen[0].data["effect"]), seen[0]) if seen else None
