"""The events of a run in progress: steps stay in their files, and everybody sees them as if they were objects."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

from torchaos.harness.interfaces import ChaosError
from torchaos.harness.protocol.control_pages import ControlPage
from torchaos.harness.protocol.wire import Event, EventFile, Kind
from torchaos.harness.record.events import merged as arrivals
from torchaos.harness.record.events.journal import Journal, read_events
from torchaos.harness.record.events.merged import Merged, beside_steps
from torchaos.harness.running.conditions.progress import Attempts, LossBelow, NoProgress, Steps
from torchaos.harness.running.engine import stages as run_module
from torchaos.harness.running.engine.stages import BaseWriter

STEPS = 10
USUAL: dict[str, Any] = {"lr": [1e-3], "opt_step": 7, "sched_step": 6, "skipped": False, "samples": bytes(range(12)),
                         "indices": (3, 4), "phases": {}}  # fmt: skip


def _write(folder: Path, rank: int, steps: range) -> None:
    file = EventFile(folder / f"rank{rank}.jsonl", f"rank{rank}", rank, 0)
    for step in steps:
        file.emit_step(step, losses=[1.0 / step], **USUAL)
    file.emit(Kind.NOTE, {"text": f"rank {rank}"})
    file.close()


def _live(folder: Path, number: int) -> Journal:
    journal = Journal(folder)
    wait_until(lambda: journal.count, lambda count: count == number)
    return journal


def test_a_snapshot_is_the_list_of_all_events(tmp_path: Path) -> None:
    """It has length, places, parts and both directions, and stays as it is when events arrive."""
    for rank in (0, 1):
        _write(tmp_path, rank, range(1, STEPS + 1))
    journal = _live(tmp_path, 2 * STEPS + 2)
    heard: list[Event] = []
    journal.listen(heard.append)
    seen, plain = journal.snapshot(), read_events(tmp_path)
    late = journal.emit(Kind.NOTE, {"text": "later"})
    events = list(seen)
    assert sorted(map(repr, events)) == sorted(map(repr, plain))
    assert len(seen) == len(events) == 2 * STEPS + 2
    assert [seen[place] for place in range(-len(seen), len(seen))] == [*events, *events]
    assert (seen[3:7], seen[::-2], list(reversed(seen))) == (events[3:7], events[::-2], events[::-1])
    assert [event.data["text"] for event in seen.beside_steps] == [e.data["text"] for e in events if e.step is None]
    assert journal.since(len(seen)) == heard == [late]
    with pytest.raises(IndexError):
        _ = seen[len(seen)]
    journal.close()


def test_no_step_is_kept_as_an_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a look, each step is a row of columns, and its line is read again when somebody asks."""
    monkeypatch.setattr(arrivals, "_ENOUGH", 4)
    _write(tmp_path, 0, range(1, 9))
    journal = _live(tmp_path, 9)
    whole = journal.snapshot().merged
    assert [event.kind for event in whole.others] == [Kind.NOTE]
    assert [len(block) for block in whole.blocks] == [8]
    assert list(whole) == read_events(tmp_path)
    assert journal._arrived.objects(9) == list(whole.others)
    journal.close()


def test_a_file_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was read into columns stays known; events that would have to be read again are left out."""
    monkeypatch.setattr(arrivals, "_ENOUGH", 4)
    _write(tmp_path, 0, range(1, 9))
    _write(tmp_path, 1, range(1, 9))
    journal = _live(tmp_path, 18)
    whole = journal.snapshot().merged
    shutil.move(tmp_path / "rank0.jsonl", tmp_path / "away")
    seen = journal.snapshot()
    assert [event.rank for event in seen if event.kind is Kind.STEP] == [1] * 8
    assert len(beside_steps(seen)) == 2
    for merged in (whole, seen.merged):
        assert merged.steps["local_step"].tolist() == [*range(1, 9), *range(1, 9)]
    assert Steps(8).holds(seen, 0.0) is None  # nobody said how many ranks there are
    journal.close()


@pytest.mark.parametrize("how", ["removed", "cut off", "cut within a line", "emptied and written again"])
@pytest.mark.parametrize("looked", [True, False])
def test_a_damaged_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, looked: bool) -> None:
    """The journal says that a file was removed or became shorter. No look at the run crashes. Steps that are in no
    column yet are left out everywhere, and a value that must be read again is refused with the file's name."""
    monkeypatch.setattr(arrivals, "_ENOUGH", 4)
    _write(tmp_path, 0, range(1, 9))
    _write(tmp_path, 1, range(1, 3))  # too few for columns
    journal = _live(tmp_path, 12)
    if looked:
        assert len(journal.snapshot().merged.blocks) == 1
    for rank in (0, 1):
        path = tmp_path / f"rank{rank}.jsonl"
        start = journal.snapshot()._arrived._starts[1]
        if how == "removed":
            path.unlink()
        else:
            os.truncate(path, {"cut off": start, "cut within a line": start + 7}.get(how, 0))
        if how == "emptied and written again":
            path.write_bytes(b'{"kind": "note"}\n' * 3)
    wait_until(lambda: journal.failed)
    assert re.fullmatch("the journal can't be read: rank[01].jsonl: (No such file.*|it became shorter)", journal.failed)
    seen = journal.snapshot()
    there = {(event.rank, event.step) for event in seen if event.kind is Kind.STEP}
    assert there <= {(0, 1), (1, 1)}
    columns = seen.merged.steps
    steps = set(zip(columns["rank"].tolist(), columns["local_step"].tolist(), strict=True))
    assert steps == there | ({(0, step) for step in range(1, 9)} if looked else set())
    assert Steps(8).holds(seen, 0.0) is None
    assert len(beside_steps(seen)) == 2
    assert len(journal.since(0)) == len(there) + 2
    if looked:
        with pytest.raises(ChaosError, match=r"rank0.jsonl: it (was cut off or changed after|can't be read again)"):
            list(seen.merged)
    journal.close()


def test_a_file_that_grows_again(tmp_path: Path) -> None:
    """After a file became shorter, what is written to it later is not taken for the lines that were there."""
    _write(tmp_path, 0, range(1, 9))
    journal = _live(tmp_path, 9)
    os.truncate(tmp_path / "rank0.jsonl", 0)
    wait_until(lambda: journal.failed)
    _write(tmp_path, 0, range(101, 131))
    journal.catch_up()
    assert {event.step for event in journal.snapshot() if event.kind is Kind.STEP} <= {*range(101, 131)}
    assert journal.count == 9
    journal.close()


def test_conditions_judge_columns_and_objects_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A condition has the same answer for a snapshot, for events in order of time, and for a plain list."""
    monkeypatch.setattr(arrivals, "_ENOUGH", 4)
    file = EventFile(tmp_path / "rank1.jsonl", "rank1", 1, 2)
    file.emit(Kind.AGENT_STARTED, {"pid": 1, "start_ticks": 1, "local_rank": 0, "world_size": 2, "python": "3.11",
                                   "torch": None, "hooks": []})  # fmt: skip
    file.emit_step(1, losses=[0.9, None], **USUAL)
    file.emit(Kind.LOSS, {"losses": [None, 0.1]}, step=1)
    file.emit_step(2, losses=[None], **USUAL)
    file.close()
    _write(tmp_path, 0, range(1, STEPS + 1))
    journal = _live(tmp_path, STEPS + 5)
    seen = journal.snapshot()
    last_s = max(event.mono_s for event in seen)
    for events in (seen, seen.merged, list(seen)):
        answers = [condition.holds(events, last_s + 5) for condition in (
            LossBelow(0.101), LossBelow(0.1), Attempts(2), Attempts(3), NoProgress(4.0), NoProgress(60.0), Steps(1),
        )]  # fmt: skip
        assert answers == [True, False, True, False, True, False, False]
    assert Merged.of(seen).beside_steps
    journal.close()


def test_a_base_is_written_once_it_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control page of the rank gets the base of its newest attempt, and only first steps cost a look."""
    looks: list[int] = []

    def base_of(_events: object, attempt: int) -> tuple[int | None, list[object]]:
        looks.append(attempt)
        return (None if len(looks) == 1 else 40 + attempt), []

    monkeypatch.setattr(run_module, "base_of", base_of)
    page = ControlPage(tmp_path / "page", create=True)
    writer = BaseWriter([{0: page}])
    events = [Event(Kind.STEP, "rank", number, 0.0, 1.0, rank, attempt, step) for number, (rank, attempt, step) in
              enumerate([(0, 1, 1), (1, 2, 1), (0, 1, 2), (0, 0, 1)])]  # fmt: skip
    for event in events:
        writer.note(event)
    writer.update(events)
    assert page.read(ControlPage.BASE_ATTEMPT) == -1
    writer.update(events)
    assert (page.read(ControlPage.BASE_ATTEMPT), page.read(ControlPage.BASE)) == (1, 41)
    writer.update(events)
    assert looks == [1, 1]
    writer.note(Event(Kind.STEP, "rank", 9, 0.0, 1.0, 0, 2, 1))
    writer.update([*events, Event(Kind.NOTE, "harness", 0, 0.0, 2.0 + run_module.PATIENCE_S)])
    assert looks == [1, 1]  # no rank waits so long
    page.close()
