"""What an event reports of an earlier step, after the event of that step."""

from __future__ import annotations

from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.record.steps.columns import Columns

STEP: dict[str, object] = {
    "losses": [None, 2.0], "samples": None, "indices": None, "lr": [], "opt_step": None, "sched_step": None,
    "phases": {}, "skipped": False, "norm": 3.0,
}  # fmt: skip
LATE: dict[str, object] = {"losses": [], "parameters": "ab", "moments": "cd", "sketch": [1.0, 2.0]}


def _event(kind: Kind, seq: int, step: int, data: dict[str, object]) -> Event:
    return Event(kind, "rank0-a0-p1", seq, 0.0, float(seq), 0, 0, step, data)


def test_a_late_state_is_that_of_its_step() -> None:
    """It leaves the losses as they are, and a late loss leaves the state as it is."""
    steps = [_event(Kind.STEP, 0, 1, STEP), _event(Kind.STEP, 2, 2, STEP)]
    late = [_event(Kind.LOSS, 1, 1, LATE), _event(Kind.LOSS, 3, 1, {"losses": [1.0, None]})]
    columns = Columns.of([*steps, *late])
    first, second = sorted(map(columns.execution, range(len(columns))), key=lambda one: one.local_step)
    assert (first.parameters, first.moments, first.sketch, first.norm) == ("ab", "cd", (1.0, 2.0), 3.0)
    assert first.losses == (1.0, 2.0)
    assert (second.parameters, second.losses) == (None, (None, 2.0))
