"""Writes the event of each step (`StepEvents`).

With large batches, the digest and index of each sample are most of the journal. So the bytes that a rank writes about
samples are limited (`SampleBudget`). When it has written as many as its plan allows, it writes only the sums of a
step's samples, except in steps near a fault, a load or a save."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...protocol.check_sums import Sums, sums_of
from ...protocol.packed_lines import payload
from ...protocol.wire import Kind
from ..agent import Agent
from .loss import Losses, arrived
from .step_counter import Segment

NEAR, AFTER_SAVE = 64, 8  # steps: around a fault, and after a start or a load; after a save
_INDEX = 4  # bytes
_REST = 100  # bytes of a step's line without samples
_TEXT = (
    "the samples take more than the {} KiB that are kept for each rank: from step {} of attempt {} on, only one sum "
    "for each rank and step is kept, except near faults, loads and saves"
)


class StepEvents:
    """`with_state`: the segments have the state of training."""

    def __init__(self, agent: Agent, losses: Losses) -> None:
        self._agent, self._losses = agent, losses
        self._allowance = SampleBudget(agent)
        self.with_state = False

    def emit(self, with_last: bool) -> None:
        """Writes the event of the iteration that has ended. `with_last`: see `Tally.take`. Runs in every step."""
        agent = self._agent
        segment = agent.tally.take(with_last)
        agent.steps_over += 1
        agent.unseen.discard("steps")
        samples: bytes | None = None
        indices: tuple[int, ...] | None = None
        sums: Sums | None = None
        if segment.batches:
            samples = _joined([batch.samples for batch in segment.batches])
            indices = _joined([batch.indices for batch in segment.batches])
            if samples is not None:
                agent.unseen.discard("samples")
                sums = self._allowance.sums(samples, indices)
                if sums is not None:
                    samples = indices = None
        late = bool(segment.pending) and not arrived(segment)
        given = (
            segment.losses, segment.lr, segment.opt_step, segment.sched_step, segment.skipped, samples, indices,
            agent.phases.take(), sums,
        )  # fmt: skip
        dropped = {"dropped": segment.dropped} if segment.dropped else {}
        if not (self.with_state or dropped):
            agent.emit_step(agent.steps_over, *given)
        else:
            of_state = _of_state(segment) if self.with_state else {}
            agent.emit(Kind.STEP, {**payload(*given), **of_state, **dropped}, agent.steps_over)
        if late:
            self._losses.step_over(agent.steps_over, segment)


def _of_state(segment: Segment) -> dict[str, Any]:
    found: dict[str, Any] = {"norm": segment.norm}
    if segment.after is not None:
        found.update(vars(segment.after))
    if (before := segment.before) is not None:
        found.update(restored=before.parameters, restored_moments=before.moments, restored_sketch=before.sketch)
    return found


def _joined(parts: list[Any]) -> Any:
    """All parts (tuples, or bytes) joined in order. None if one of them is None."""
    if len(parts) == 1:
        return parts[0]
    return None if None in parts else functools.reduce(operator.add, parts)


class SampleBudget:
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
