"""Two groups of ranks that write the same checkpoints are found, and nothing else is taken for that."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from torchaos.harness.analysis.explanations import split_brain
from torchaos.harness.analysis.verdict import verdict_of
from torchaos.harness.protocol.wire import FIELDS, Event, Kind
from torchaos.harness.record.plan import Named, Plan, PlannedJob
from torchaos.harness.record.record import Record
from torchaos.harness.record.result import Verdict

JOB = PlannedJob(("torchrun", "train.py"), "/job", {}, 2, 2, 60.0, "/job/checkpoints")
PLAN = Plan("made-up", "", 7, JOB, (), (Named("completed", {}),))
OLD, NEW = "node000:4001", "node001:4002"


class Made:
    """A journal in which ranks, each with its group's store, write checkpoints at given times."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._seq = itertools.count()

    def add(self, kind: Kind, source: str, at: float, attempt: int, **data: Any) -> None:
        data = {**dict.fromkeys(FIELDS[kind]), **data}
        self.events.append(Event(kind, source, next(self._seq), 0.0, at, 0, attempt, 1, data))

    def rank(self, source: str, group: str | None, attempt: int = 0) -> None:
        self.add(Kind.AGENT_STARTED, source, 1.0, attempt, hooks=[], **({"group": group} if group else {}))

    def save(self, source: str, path: str, begin: float, end: float | None = None, attempt: int = 0) -> None:
        self.add(Kind.SAVE_BEGIN, source, begin, attempt, path=path, format="dcp")
        if end is not None:
            self.add(Kind.SAVE_END, source, end, attempt, path=path, format="dcp", ok=True, blocked_s=0.0)

    def record(self) -> Record:
        return Record(PLAN, tuple(sorted(self.events, key=lambda event: event.mono_s)), {})


def two(first: str | None = OLD, second: str | None = NEW) -> Made:
    made = Made()
    made.rank("a", first)
    made.rank("b", second)
    return made


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("/c/step-20", "/c/step-20"), ("/c/step-20.partial", "/c/step-10"), ("/c/model.pt", "/c/model.pt"),
        ("/c/step-10/rank0.pt", "/c/step-20/rank0.pt"),
    ],
)  # fmt: skip
def test_interleaved_writes_of_two_groups(one: str, other: str) -> None:
    """A group that still writes when another has begun to is told of, whichever steps they write."""
    made = two()
    made.save("a", one, 10.0, 11.0)
    made.save("b", other, 12.0, 13.0)
    assert split_brain(made.record()) is None
    made.save("a", one, 14.0, 15.0)
    assert (found := split_brain(made.record()))
    assert "wrote checkpoints to /c at the same time" in found
    assert "until 3.0 s after" in found


def test_a_save_that_spans_the_other_one() -> None:
    """It needs no second write: the end of one that was begun before counts."""
    made = two()
    made.save("a", "/c/step-20", 10.0, 14.0)
    made.save("b", "/c/step-10", 12.0)
    assert split_brain(made.record())


@pytest.mark.parametrize(("first", "second"), [(OLD, OLD), (None, NEW), (None, None)])
def test_one_group_or_nobody_knows(first: str | None, second: str | None) -> None:
    """Ranks of one group write together; journals that say nothing about groups claim nothing."""
    made = two(first, second)
    made.save("a", "/c/step-20", 10.0, 14.0)
    made.save("b", "/c/step-20", 12.0, 15.0)
    assert split_brain(made.record()) is None


def test_folders_of_their_own() -> None:
    """Two groups that write to different places do not meet."""
    made = two()
    made.save("a", "/one/step-20", 10.0, 14.0)
    made.save("b", "/other/step-20", 12.0, 15.0)
    assert split_brain(made.record()) is None


def test_one_takes_over_from_the_other() -> None:
    """After a restart the same port may come again in another attempt: one after the other is as it should be; an
    attempt that still writes when the next one has begun to is another group."""
    made = Made()
    made.rank("a", OLD, attempt=0)
    made.rank("b", OLD, attempt=1)
    made.save("a", "/c/step-20", 10.0, 11.0, attempt=0)
    made.save("b", "/c/step-20", 12.0, 13.0, attempt=1)
    assert split_brain(made.record()) is None
    made.save("a", "/c/step-25", 14.0, 15.0, attempt=0)
    assert split_brain(made.record())


def test_the_verdict_is_failed() -> None:
    """Whatever was asserted, and whether or not it holds, such a run has failed, and the reason says why."""
    made = two()
    made.save("a", "/c/step-20", 10.0, 14.0)
    made.save("b", "/c/step-20", 12.0, 15.0)
    made.add(Kind.STAGE, "harness", 20.0, 0, stage="end")
    result = verdict_of(made.record(), [], "/run")
    assert result.verdict is Verdict.FAILED
    assert result.reason.startswith("split_brain: two groups of ranks")
    calm = [event for event in made.events if event.source != "b"]
    assert "split_brain" not in verdict_of(replace(made.record(), events=tuple(calm)), [], "/run").reason
