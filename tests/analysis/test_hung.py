"""How a hang is told in which the run had to end the job, from journals made by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from torchaos.harness.analysis.explanations import because
from torchaos.harness.analysis.hangs import hang_at_end
from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.record.record import Record

BARRIER = {"rank": 0, "waits": True, "verb": "waits", "where": "in barrier 1 of group 1 (newest at train.py:48)"}
BROADCAST = {"rank": 1, "waits": True, "verb": "waits", "where": "in broadcast 4 of group 0 (train.py:61)"}
LOOP = {"rank": 1, "waits": False, "verb": "is busy", "where": "in spin at train.py:9"}
ALL = tuple(Kind)


def _ended(run: Record, attempt: int, after_s: float, *ranks: dict[str, Any], kinds: tuple[Kind, ...] = ALL,
           culprits: tuple[int, ...] = ()) -> Record:  # fmt: skip
    """The run, without what came after `kinds` of this attempt, and ended by its time-out so many seconds later."""
    kept = [
        event for event in run.events
        if event.attempt is None or event.attempt < attempt or (event.attempt == attempt and event.kind in kinds)
    ]  # fmt: skip
    kept = [e for e in kept if e.kind is not Kind.JOB_EXITED and (e.kind, e.attempt) != (Kind.RANK_EXITED, attempt)]
    end_s = max(event.mono_s for event in kept) + after_s
    said = {"ranks": list(ranks), "culprits": list(culprits), "problems": []}
    stopped = {"reason": "the job took longer than its time-out", "interrupted": False, "enough": False}
    more = [
        Event(kind, "harness", 90_000 + number, 0.0, end_s, data=data)
        for number, (kind, data) in enumerate(((Kind.STOPPED, stopped), (Kind.HANG_AT_END, said)))
    ]
    return replace(run, events=(*kept, *more))


def _words(run: Record) -> str:
    hang = hang_at_end(run)
    return hang.words if hang else ""


def test_a_recovery_that_hangs_is_told(trainer: Any) -> None:
    """Which attempt, how far it had come, and where each rank waits; the verdict's reason says it, too."""
    run = trainer(kills=[(18, 1)]).record()
    hung = _ended(run, 1, 60.0, BARRIER, BROADCAST, kinds=(Kind.RANK_UP, Kind.AGENT_STARTED))
    words = (
        "attempt 1 hung before its first step; rank 0 waits in barrier 1 of group 1 (newest at train.py:48), rank 1 in "
        "broadcast 4 of group 0 (train.py:61)"
    )
    assert _words(hung) == words
    assert because(hung) == f"; {words}"


def test_after_a_step_with_a_culprit(trainer: Any) -> None:
    """As far as the job got, and who held up the others."""
    hung = _ended(trainer(steps=9).record(), 0, 60.0, BARRIER, LOOP, culprits=(1,))
    assert _words(hung) == (
        "attempt 0 hung after step 9; rank 0 waits in barrier 1 of group 1 (newest at train.py:48), rank 1 is busy in "
        "spin at train.py:9; rank 1 held up the other"
    )


def test_in_a_save(trainer: Any) -> None:
    """A save that was begun and never ended."""
    run = trainer(steps=9).record()
    begun = next(run.of_kind(Kind.SAVE_BEGIN))
    cut = replace(run, events=tuple(e for e in run.events if e.mono_s <= begun.mono_s))
    assert ", in a save; " in _words(_ended(cut, 0, 60.0, BARRIER))


def test_ranks_that_are_gone(trainer: Any) -> None:
    """They are told beside those that wait for them."""
    run = trainer(steps=9).record()
    gone = next(run.of_kind(Kind.RANK_EXITED))
    hung = _ended(run, 0, 60.0, BARRIER if gone.rank else BROADCAST)
    hung = replace(hung, events=(*hung.events[:-2], gone, *hung.events[-2:]))
    assert f", rank {gone.rank} is gone (exit code 0)" in _words(hung)


@pytest.mark.parametrize(("after_s", "rank"), [(0.5, BARRIER), (60.0, None)])
def test_a_slow_job_did_not_hang(trainer: Any, after_s: float, rank: dict[str, Any] | None) -> None:
    """A time-out soon after a step says nothing about a hang; nor does a job of which no rank was seen."""
    assert hang_at_end(_ended(trainer(steps=9).record(), 0, after_s, *([rank] if rank else []))) is None


def test_ranks_that_are_all_busy_may_be_slow(trainer: Any) -> None:
    """They made no step for a minute: that is what is claimed."""
    words = _words(_ended(trainer(steps=9).record(), 0, 60.0, {**LOOP, "rank": 0}, LOOP))
    assert words == "attempt 0 did not go on for its last 60 s, after step 9; ranks 0, 1 are busy in spin at train.py:9"
