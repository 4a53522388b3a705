"""Limits how many bytes a rank writes about samples: with large batches, the digest and index of each sample are most
of the journal. When a rank has written as many bytes as its plan allows, it writes only the sums of a step's samples,
except in steps near a fault, a load or a save."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..protocol.sample_sums import Sums, sums_of
from ..protocol.wire import Kind

if TYPE_CHECKING:
    from .agent import Agent

NEAR, AFTER_SAVE = 64, 8  # steps: around a fault, and after a start or a load; after a save
_INDEX = 4  # bytes
_REST = 100  # bytes of a step's line without samples
_TEXT = (
    "the samples take more than the {} KiB that are kept for each rank: from step {} of attempt {} on, only one sum "
    "for each rank and step is kept, except near faults, loads and saves"
)


class Allowance:
    """Counts the bytes that the rank may still write about samples."""

    def __init__(self, agent: Agent) -> None:
        self._agent, self._until = agent, NEAR
        self._handled = agent.loads, agent.saves
        self._said = False
        allowed = agent.plan.sample_bytes
        self._left: float = float("inf") if allowed is None else allowed - _spent(agent)

    def sums(self, samples: bytes, indices: Sequence[int] | None) -> Sums | None:
        """What to write instead of these samples. None: they are kept in full. Must be called once for each step."""
        self._left -= len(samples) + _INDEX * len(indices or ())
        if self._left >= 0 or self._is_near():
            return None
        agent = self._agent
        if not self._said and agent.who.rank == 0:
            allowed = (agent.plan.sample_bytes or 0) // 1024
            agent.emit(Kind.NOTE, {"text": _TEXT.format(allowed, agent.steps_over, agent.who.attempt)})
        self._said = True
        return sums_of(samples, indices)

    def _is_near(self) -> bool:
        agent, (loads, saves) = self._agent, self._handled
        step = agent.steps_over
        if agent.loads != loads:
            self._until = step + NEAR - 1
        elif agent.saves != saves:
            self._until = max(self._until, step + AFTER_SAVE - 1)
        self._handled = agent.loads, agent.saves
        if step <= self._until:
            return True
        moments = [trigger.when.step for trigger in agent.plan.triggers if trigger.when.step is not None]
        base = agent.triggers.base
        return base is not None and any(abs(base + step - moment) <= NEAR for moment in moments)


def _spent(agent: Agent) -> int:
    """About how many bytes earlier attempts of this rank wrote about samples on this node. For small batches it is too
    low."""
    spent = 0
    if agent.who.attempt:
        for path in Path(agent.plan.events).glob(f"rank{agent.who.rank}-a*.jsonl"):
            text = path.read_bytes()
            spent += max(0, len(text) - _REST * text.count(b"\n"))
    return spent
