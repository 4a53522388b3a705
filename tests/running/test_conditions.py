"""Conditions over events: they hold, they do not hold, or it is not known yet."""

from __future__ import annotations

import math
from itertools import count
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from torchaos.harness.base_classes import Condition
from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.running.conditions.progress import Attempts, LossBelow, NoProgress, RanksUp, Steps, Time, Wall

_seq = count()


def event(kind: Kind, at: float = 0.0, rank: int | None = None, attempt: int | None = 0, **data: Any) -> Event:
    """`step` goes into the envelope, everything else into the payload."""
    return Event(kind, "test", next(_seq), at, at, rank, attempt, data.pop("step", None), data)


def step(rank: int, number: int, at: float = 0.0, attempt: int = 0, losses: tuple[float | None, ...] = ()) -> Event:
    return event(Kind.STEP, at, rank, attempt, step=number, losses=losses)


def up(rank: int, pid: int, attempt: int = 0) -> Event:
    return event(Kind.RANK_UP, rank=rank, attempt=attempt, pid=pid, world_size=2)


def gone(rank: int, pid: int, attempt: int = 0) -> Event:
    return event(Kind.RANK_EXITED, rank=rank, attempt=attempt, pid=pid, exit_code=-9)


def logged(number: int, loss: float | None = None, at: float = 0.0) -> Event:
    return Event(Kind.LOG_STEP, "test", next(_seq), at, at, data={"step": number, "adapter": "plain", "loss": loss})


UP = (up(0, 10), up(1, 11))


@pytest.mark.parametrize("condition", [Steps(1), RanksUp(), LossBelow(1.0), NoProgress(1.0), Attempts(1), Wall(1.0)])
def test_nothing_seen_is_unknown(condition: Condition) -> None:
    """Before any event no condition says yes or no."""
    assert condition.holds((), 100.0) is None


def test_steps_asks_every_rank() -> None:
    """The slowest rank decides, and a rank that has done none counts."""
    condition = Steps(at_least=3)
    assert condition.holds(UP, 0.0) is False
    assert condition.holds((*UP, step(0, 5)), 0.0) is False
    assert condition.holds((*UP, step(0, 5), step(1, 2)), 0.0) is False
    assert condition.holds((*UP, step(0, 5), step(1, 3)), 0.0) is True


def test_steps_starts_anew_with_an_attempt() -> None:
    """After a restart the steps of the attempt before don't count."""
    before = (*UP, step(0, 5), step(1, 5))
    restarted = (*before, up(0, 20, 1), up(1, 21, 1), step(0, 1, attempt=1))
    assert Steps(3).holds(before, 0.0) is True
    assert Steps(3).holds(restarted, 0.0) is False


def test_steps_reads_the_log_where_there_is_no_agent() -> None:
    """The step that the job prints speaks for all of its ranks."""
    assert Steps(10).holds((*UP, logged(5)), 0.0) is False
    assert Steps(10).holds((*UP, logged(5), logged(10)), 0.0) is True


def test_ranks_up_follows_processes() -> None:
    """A rank that died is missing until its next process is up."""
    assert RanksUp().holds(UP[:1], 0.0) is False
    assert RanksUp().holds(UP, 0.0) is True
    assert RanksUp().holds((*UP, gone(1, 11)), 0.0) is False
    assert RanksUp().holds((*UP, gone(1, 11), up(0, 20, 1), up(1, 21, 1)), 0.0) is True


def test_ranks_up_ignores_the_exit_of_an_earlier_process() -> None:
    """An exit that is told late does not take the new process of the rank down."""
    assert RanksUp().holds((*UP, gone(1, 9)), 0.0) is True


def test_loss_below_takes_the_newest_of_each_rank() -> None:
    """One rank above the bound is enough to say no; what it said before does not count."""
    assert LossBelow(2.0).holds((step(0, 1, losses=(1.0,)), step(1, 1, losses=(3.0,))), 0.0) is False
    assert LossBelow(2.0).holds((step(0, 1, losses=(3.0,)), step(0, 2, losses=(1.0,))), 0.0) is True
    assert LossBelow(2.0).holds((step(0, 1, losses=(None,)), logged(1)), 0.0) is None


def test_loss_below_hears_late_and_logged_losses() -> None:
    """Losses that are copied later, or only printed, count as well; one that is no number is not below anything."""
    late = event(Kind.LOSS, rank=0, step=1, losses=[1.0])
    assert LossBelow(2.0).holds((step(0, 1, losses=(None,)), late), 0.0) is True
    assert LossBelow(2.0).holds((logged(1, 1.5),), 0.0) is True
    assert LossBelow(2.0).holds((step(0, 1, losses=(math.nan,)),), 0.0) is False


def test_no_progress_is_counted_from_the_newest_step_of_any_rank() -> None:
    """As long as one rank goes on there is progress; before the first step it is unknown."""
    events = (*UP, step(0, 1, at=10.0), step(1, 1, at=50.0))
    assert NoProgress(60.0).holds(UP, 500.0) is None
    assert NoProgress(60.0).holds(events, 110.0) is False
    assert NoProgress(60.0).holds(events, 110.5) is True
    assert NoProgress(60.0).holds((logged(1, at=10.0),), 80.0) is True


def test_attempts_counts_from_one() -> None:
    """Attempt 0 is the first: three attempts are seen as 0, 1 and 2."""
    assert Attempts(2).holds((up(0, 1, 0), up(0, 2, 1)), 0.0) is False
    assert Attempts(2).holds((up(0, 1, 0), up(0, 2, 1), up(0, 3, 2)), 0.0) is True


def test_wall_is_counted_from_the_first_submission() -> None:
    """A resubmission does not set the clock back."""
    events = tuple(event(Kind.JOB_STARTED, at, attempt=None, submission=n, pid=1) for n, at in enumerate((10.0, 90.0)))
    assert Wall(100.0).holds(events, 110.0) is False
    assert Wall(100.0).holds(events, 111.0) is True


@pytest.mark.parametrize("given", ["0s", "5", 60, None])
def test_a_time_is_a_duration_above_nothing(given: object) -> None:
    """The loader types parameters by these annotations: no bare number, no zero."""
    with pytest.raises(ValidationError):
        TypeAdapter(Time).validate_python(given, strict=True)
    assert TypeAdapter(Time).validate_python("1m30s", strict=True) == 90.0
