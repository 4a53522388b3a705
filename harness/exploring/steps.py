"""Finds in which step and phase of its rank each operation was. On one machine, the agent and the recorder read the
same clock, CLOCK_MONOTONIC; times of other nodes are corrected by the journal. An operation belongs to the step after
the last step that its rank had finished."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import replace

from torchaos.harness.agent.wire import Event, Kind, Phase
from torchaos.harness.exploring.operations import Operation


def with_steps(operations: Sequence[Operation], events: Iterable[Event]) -> tuple[Operation, ...]:
    """The operations with their steps, counted from 1 in each attempt. Operations during a save of their rank get the
    phase `checkpoint_write`. An operation of a rank without events is returned unchanged."""
    steps: dict[int, list[tuple[float, int]]] = {}
    saves: dict[int, list[tuple[float, int]]] = {}
    for event in events:
        if event.rank is None:
            continue
        if event.kind is Kind.AGENT_STARTED:
            steps.setdefault(event.rank, []).append((event.mono_s, 0))
        elif event.kind is Kind.STEP and event.step is not None:
            steps.setdefault(event.rank, []).append((event.mono_s, event.step))
        elif event.kind in (Kind.SAVE_BEGIN, Kind.SAVE_END):
            saves.setdefault(event.rank, []).append((event.mono_s, 1 if event.kind is Kind.SAVE_BEGIN else -1))
    for timed in (*steps.values(), *saves.values()):
        timed.sort()

    def placed(operation: Operation) -> Operation:
        done = steps.get(operation.rank, []) if operation.rank is not None else []
        at = bisect_right(done, (operation.begun_s, 1 << 62))
        if not at:
            return operation
        begun = [change for when, change in saves.get(operation.rank or 0, ()) if when <= operation.begun_s]
        phase = Phase.CHECKPOINT_WRITE.value if sum(begun) > 0 else None
        return replace(operation, step=done[at - 1][1] + 1, phase=phase)

    return tuple(placed(operation) for operation in operations)
