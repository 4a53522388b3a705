"""A pipeline whose stages are divided anew: one rank goes on with the layers of two."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from torchaos.assertions.loss_continuity import LossContinuity
from torchaos.assertions.sample_accounting import SampleAccounting
from torchaos.harness.interfaces import Outcome
from torchaos.harness.protocol.wire import Kind
from torchaos.harness.record.record import Record

RESUMED = 10


def pipeline(trainer: Any, kills: Any = (), ahead: int = 0, off: float = 0.0, unseen: Sequence[None] = ()) -> Record:
    """A job whose ranks all read the whole batch, and whose last rank alone has the loss. Its second attempt is on one
    rank, `ahead` batches further than it should be, and its losses are off by so much. `unseen`: the losses of the
    other ranks."""

    class Stages(trainer):  # type: ignore[misc]
        def emit(self, kind: Any, data: Any, *where: Any, **how: Any) -> None:
            if kind is Kind.STEP:
                rank, attempt, local = where
                step = local + RESUMED * attempt
                batch = list(range(8 * (step + ahead * attempt), 8 * (step + ahead * attempt) + 8))
                loss = (3.0 - 0.01 * step) * (1 + off * attempt)
                samples = {"samples": [f"d{index}" for index in batch], "indices": batch}
                data = {**data, **samples, "losses": [loss] if rank or attempt else list(unseen)}
            super().emit(kind, data, *where, **how)

    record: Record = Stages(kills=kills, worlds={1: 1}, state_seen=True, global_batch=True).record()
    return record


@pytest.mark.parametrize("unseen", [[], [None]])  # no backward of a loss; the backward of what is no number
@pytest.mark.parametrize(("ahead", "off", "losses", "samples"), [
    (0, 0.0, Outcome.PASSED, Outcome.PASSED), (1, 0.0, Outcome.PASSED, Outcome.FAILED),
    (0, 0.1, Outcome.FAILED, Outcome.PASSED),
])  # fmt: skip
def test_stages_that_are_divided_anew(
    trainer: Any, ahead: int, off: float, losses: Outcome, samples: Outcome, unseen: list[None]
) -> None:
    """A batch that each stage reads counts once, and a stage that has no loss in one run may have one in the other."""
    run, twin = pipeline(trainer, ((13, 1),), ahead, off, unseen), pipeline(trainer, unseen=unseen)
    found = LossContinuity().judge(run, [twin])
    assert found.outcome is losses, found.reason
    assert "other samples" not in found.reason  # of a batch that two stages read once each
    found = SampleAccounting().judge(run, [twin])
    assert found.outcome is samples, found.reason
