"""Notes about gradients whose norm is odd."""

from __future__ import annotations

import math
from typing import Any

import pytest

from torchaos.harness.analysis.verdict import verdict_of
from torchaos.harness.protocol.wire import Kind
from torchaos.harness.reporting.event_timeline import happened


@pytest.mark.parametrize(
    ("norm", "words"),
    [
        (math.inf, "the norm of the gradient is inf in step 1 on rank 0, and 19 more such notes came later"),
        (
            1e9,
            "the norm of the gradient is 1e+09 in step 1 on rank 0, far from the steps before, and 19 more such notes",
        ),
    ],
)
def test_notes_of_one_kind_are_told_once(trainer: Any, norm: float, words: str) -> None:
    """A loss scaler may make one in each step. Only a finite norm was compared with the steps before."""

    class Odd(trainer):  # type: ignore[misc]
        def _step(self, attempt: int, world: int, state: Any, step: int, local: int) -> None:
            if step <= 10:
                for rank in range(world):
                    data = {"text": f"the norm of the gradient is {norm:.6g}", "norm": norm}
                    self.emit(Kind.NOTE, data, rank, attempt, local - 1)
            super()._step(attempt, world, state, step, local)

    run = Odd().record()
    assert any(words in note for note in verdict_of(run, [], "/run").notes)
    lines = [moment.text for moment in happened(run) if "norm" in moment.text]
    assert len(lines) == 1, lines
    assert "rank 0" in lines[0]
    assert "; 19 more such notes, the last at " in lines[0]
