"""Steps in columns: events, history and verdicts are the same as with one line at a time."""

from __future__ import annotations

import io
import math
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from mutating.mutate import damaged
from packing import pack

from torchaos.harness.analysis.caught_up import pace_of
from torchaos.harness.analysis.comparison.sample_counts import FirstUses, came_earlier
from torchaos.harness.analysis.verdict import judge
from torchaos.harness.protocol.check_sums import Sums, sums_of
from torchaos.harness.protocol.wire import Event, EventFile, Kind, Phase
from torchaos.harness.record.events import merged
from torchaos.harness.record.events.journal import read, read_events, read_journal
from torchaos.harness.record.events.merged import Arrived, Growing, Merged, Snapshot
from torchaos.harness.record.history import Executions, History
from torchaos.harness.record.record import Record
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.record.steps import executions
from torchaos.harness.record.steps.columns import Columns
from torchaos.harness.record.steps.executions import UNPLACED, StepTable
from torchaos.harness.record.steps.packed_blocks import blocks_of

RUNS = sorted((Path(__file__).parents[1] / "data" / "runs").iterdir())
USUAL: dict[str, Any] = {
    "losses": [0.1 + 0.2], "lr": [1e-3], "opt_step": 7, "sched_step": 6, "skipped": False, "samples": bytes(range(12)),
    "indices": (3, 4), "phases": {Phase.DATA: 0.25, Phase.FORWARD: 1.25e-5, Phase.BACKWARD: 0.5},
}  # fmt: skip
OTHERS: list[dict[str, Any]] = [
    {}, {"losses": []}, {"losses": [None, 1.5]}, {"lr": [None, 0.5]}, {"opt_step": None, "sched_step": None},
    {"skipped": None}, {"samples": None, "indices": None}, {"indices": (-5, 2**62)}, {"phases": {}},
    {"phases": {Phase.FORWARD: 1e6}}, {"losses": [float("inf"), -0.0]}, {"opt_step": 2**70},
    {"samples": None, "indices": None, "sums": Sums(700, 2**64 - 1, 700, 5)},
]  # fmt: skip


def test_sums_are_those_of_all_samples(tmp_path: Path) -> None:
    """A step that keeps only the sums of its samples, and one that keeps each sample, have the same sums in columns."""
    file = EventFile(tmp_path / "rank1.jsonl", "rank1-a2-p3", 1, 2)
    for indices in ((3, 4), (2**62, -1), None):
        file.emit_step(1, **{**USUAL, "indices": indices})
        sums = sums_of(USUAL["samples"], indices)
        file.emit_step(2, **{**USUAL, "samples": None, "indices": None, "sums": sums})
    file.close()
    for found in _columns_both_ways(tmp_path / "rank1.jsonl"):
        for name in ("samples_sum", "indices_sum", "in_samples", "in_indices"):
            full, summed = (found[name][found["local_step"] == step] for step in (1, 2))
            assert sorted(full.tolist()) == sorted(summed.tolist()), name
        assert found["in_seen"][found["summed"]].tolist() == [0, 0, 0]


def _columns_both_ways(path: Path) -> list[Columns]:
    """The steps of a file as blocks, and as objects."""
    lines = io.BytesIO(path.read_bytes()).readlines()
    blocks, left = blocks_of(lines, path)
    assert not left
    return [Columns.of([], blocks), Columns.of([read(line) for line in lines])]


def test_counted_columns_need_no_memory(tmp_path: Path) -> None:
    """Counters that go up with the steps are kept as one number for all steps, and are read as they were written."""
    file = EventFile(tmp_path / "rank1.jsonl", "rank1-a2-p3", 1, 2)
    for step in range(9):
        file.emit_step(step, **{**USUAL, "opt_step": step + 2**24, "sched_step": None if step > 7 else step})
    file.close()
    lines = io.BytesIO((tmp_path / "rank1.jsonl").read_bytes()).readlines()
    [block], left = blocks_of(lines, tmp_path / "rank1.jsonl")
    assert (block.own["opt_step"].strides, block.own["seq"].strides, left) == ((0,), (0,), [])
    assert block.whole("opt_step").tolist() == [step + 2**24 for step in range(9)]
    columns = Columns([block])
    assert columns["sched_step"][:8].tolist() == list(range(8))
    assert math.isnan(columns["sched_step"][8])
    assert list(block.lines) == lines
    assert [block.lines[row] for row in range(9)] == lines


def _lines(folder: Path) -> list[bytes]:
    """Steps of all kinds in one file, each twice, with another event among them."""
    file = EventFile(folder / "rank1.jsonl", "rank1-a2-p3", 1, 2)
    for step, other in enumerate([*OTHERS, *OTHERS]):
        file.emit_step(step, **{**USUAL, **other})
        if step == 3:
            file.emit(Kind.NOTE, {"text": "among them"})
    file.close()
    return io.BytesIO((folder / "rank1.jsonl").read_bytes()).readlines()


def _in_blocks(lines: list[bytes]) -> Iterator[Event]:
    return (block.event(row) for block in blocks_of(lines)[0] for row in range(len(block)))


def test_rows_are_the_events_of_the_lines(tmp_path: Path) -> None:
    """Each line is either left, or its event is a row with the same values, and nearly all are rows."""
    lines = _lines(tmp_path)
    _blocks, left = blocks_of(lines)
    there = sorted([*_in_blocks(lines), *(read(lines[place]) for place in left)], key=lambda event: event.seq)
    assert there == [read(line) for line in lines]
    assert len(left) < len(lines) / 2


def test_damaged_lines_are_in_no_block(tmp_path: Path) -> None:
    """Of 1,000 damaged lines, five at a time among whole lines, none is another event, and most of the whole lines are
    still rows."""
    lines, draw, found = _lines(tmp_path), Random(0), 0
    true = [read(line) for line in lines]
    for _ in range(200):
        hurt = [damaged(draw.choice(lines), draw).replace(b"\n", b"") + b"\n" for _ in range(5)]
        events = list(_in_blocks([*lines, *hurt]))
        assert all(event in true for event in events)
        found += len(events)
    assert found > 200 * len(lines) / 3


def test_events_come_in_order_of_time(tmp_path: Path) -> None:
    """The whole of a journal is a sequence, of which the ends are known without a look at the rest."""
    for rank in (0, 1):
        file = EventFile(tmp_path / f"rank{rank}.jsonl", f"rank{rank}", rank, 0)
        for step in range(1, 5):
            file.emit_step(step, **USUAL)
            file.emit(Kind.NOTE, {"text": str(step)})
        file.close()
    whole = read_journal(tmp_path)
    events = list(whole)
    assert events == sorted(events, key=lambda event: event.mono_s) == read_events(tmp_path)
    assert (len(whole), whole[0], whole[-1], whole[3]) == (16, events[0], events[-1], events[3])


def test_steps_have_places_beyond_32_bits(tmp_path: Path) -> None:
    """A base may be any number, also a large one in the name of a checkpoint."""
    file = EventFile(tmp_path / "rank0.jsonl", "rank0", 0, 0)
    for step in (1, 2):
        file.emit_step(step, **USUAL)
    file.close()
    steps = read_journal(tmp_path).steps_made.once_each()
    for base in (2**31 - 2, 2**40):
        steps.place(base, 0)
        assert [one.global_step for one in steps] == [base + 1, base + 2]


def test_late_losses_are_in_their_rows(tmp_path: Path) -> None:
    """A loss that was copied after its step replaces the None there, and the event stays as it was written."""
    file = EventFile(tmp_path / "rank0.jsonl", "rank0", 0, 0)
    for step in (1, 2):
        file.emit_step(step, **{**USUAL, "losses": [0.5, None]})
    file.emit(Kind.LOSS, {"losses": [None, 0.25]}, step=2)
    file.close()
    whole = read_journal(tmp_path)
    steps = whole.steps_made.once_each()
    assert [one.losses for one in steps] == [(0.5, None), (0.5, 0.25)]
    assert steps.loss_seen.tolist() == [False, True]
    assert [event.data["losses"] for event in whole if event.kind is Kind.STEP] == [[0.5, None]] * 2


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_same_verdict_from_packed_lines(run: Path, tmp_path: Path) -> None:
    """A recorded run has the same history and result, word for word, if its steps are packed lines."""
    copy = tmp_path / run.name
    shutil.copytree(run, copy)
    packed_ = sum(pack(path) for path in copy.glob("**/events/*.jsonl"))
    before, after = Record.load(RunDir(run)).history, Record.load(RunDir(copy)).history
    assert packed_ >= len(after.executions) or run.name == "no-such-script"
    assert list(after.executions) == list(before.executions)
    assert dict(after.counting()) == dict(before.counting())
    assert after.redone() == before.redone()
    assert replace(after, executions=before.executions) == before
    assert replace(judge(RunDir(copy)), run_dir="") == replace(judge(RunDir(run)), run_dir="")


def test_columns_of_objects_and_of_blocks_are_equal(tmp_path: Path) -> None:
    """Nothing tells from which kind of line a column was made."""
    lines = _lines(tmp_path)
    blocks, left = blocks_of(lines)
    mixed = Columns.of([read(lines[place]) for place in left], blocks)
    plain = Columns.of([read(line) for line in lines])
    names = ("rank", "attempt", "local_step", "mono_s", "opt_step", "sched_step", "losses", "lr", "samples",
             "samples_sum", "indices", "indices_sum", "in_samples", "in_seen", "in_indices", "took_s", "saving_s",
             "in_phases")  # fmt: skip
    for name in names:
        one, other = Executions.all_of(mixed).column(name), Executions.all_of(plain).column(name)
        assert one.tobytes() == other.tobytes(), name


def test_rows_of_a_file_are_read_again_while_it_grows(tmp_path: Path) -> None:
    """The lines of a journal's blocks are not kept: they come from the file, in which there may be more by now."""
    lines = _lines(tmp_path)
    (block, *_) = read_journal(tmp_path).blocks
    with open(tmp_path / "rank1.jsonl", "ab") as file:
        file.write(lines[0])
    assert [block.event(row) for row in range(len(block))] == [read(line) for line in block.lines]
    assert set(block.lines) <= set(lines)
    assert block.lines[1:] == list(block.lines)[1:]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_looks_at_a_growing_run(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at a run in progress has the history that all its events have, and puts each step into one block."""
    monkeypatch.setattr(merged, "_ENOUGH", 2)
    copy = tmp_path / run.name
    shutil.copytree(run, copy)
    for path in copy.glob("events/*.jsonl"):
        pack(path)
    events, arrived = read_events(RunDir(copy).events), Arrived()
    live = Growing(arrived)
    for end in sorted({len(events) * part // 4 for part in range(5)}):
        for event in events[len(arrived) : end]:
            arrived.add(event)
        seen = Snapshot(arrived, live)
        found, plain = History.of(seen), History.of(events[:end])
        assert list(found.executions) == list(plain.executions)
        assert replace(found, executions=plain.executions) == plain
        assert sorted(map(repr, Merged.of(seen))) == sorted(map(repr, events[:end]))
    assert len(Merged.of(seen).others) < len(events) or not any(event.kind is Kind.STEP for event in events)


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_some_ranks_at_a_time(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In parts of one rank each, a run has the same repeated steps, pace and last steps as in one part."""
    history = Record.load(RunDir(run)).history
    whole = (
        history.redone(),
        pace_of(history, math.inf),
        pace_of(history, history.executions.last_s() or 0.0, [history]),
    )
    monkeypatch.setattr(executions, "_TOGETHER", 1)
    assert len(list(history.executions.by_ranks())) == len(history.executions.ranks)
    assert sum(map(len, history.executions.by_ranks())) == len(history.executions)
    parts = (
        history.redone(),
        pace_of(history, math.inf),
        pace_of(history, history.executions.last_s() or 0.0, [history]),
    )
    assert parts == whole
    last = {(step.global_step, step.rank): step for step in history.executions}
    found = history.executions.last_of("global_step", "rank")
    keys = sorted(last, key=lambda key: (UNPLACED if key[0] is None else key[0], key[1]))
    assert list(found) == [last[key] for key in keys]


@pytest.mark.parametrize("draws", range(20))
def test_first_uses_of_samples(draws: int, tmp_path: Path) -> None:
    """In which step each sample came first is found from packed and from other lines, as plain dicts find it."""
    draw = Random(draws)
    drawn = {(rank, step): [draw.randrange(-3, 40) for _ in range(draw.randrange(4))]
             for rank in (0, 1) for step in range(1, 9)}  # fmt: skip
    for rank in (0, 1):
        file = EventFile(tmp_path / f"rank{rank}.jsonl", f"rank{rank}", rank, 0)
        for step in range(1, 9):
            rows = drawn[rank, step]
            file.emit_step(step, **{**USUAL, "indices": rows, "opt_step": draw.choice((2**70, step))})
        file.close()
    made = read_journal(tmp_path).steps_made.once_each()
    made.place(0, 0)
    steps = StepTable(made.last_of("global_step", "rank"))
    whole = {step: [*drawn[0, step], *drawn[1, step]] for step in range(1, 9)}
    first = {index: step for step in reversed(whole) for index in whole[step]}
    found = FirstUses(steps)
    assert {index: found.of(index) for index in first} == first
    assert found.repeated() == {at for at, own in whole.items() if own and all(first[one] < at for one in own)}
    assert [found.after(at) for at in whole] == [sum(one > at for one in first.values()) for at in whole]
    assert {at for at, own in whole.items() if came_earlier(steps, at)} == {
        at for at, own in whole.items() if own and first[own[0]] < at
    }


def test_table_of_steps() -> None:
    """A table of steps is the mapping that it stands for, also of a part of the steps."""
    (run,) = (run for run in RUNS if run.name == "kill")
    steps = Record.load(RunDir(run)).history.by_step()
    plain = {step: dict(by_rank) for step, by_rank in steps.items()}
    last = max(plain)
    assert list(plain) == list(range(1, last + 1))
    assert dict(StepTable.of(plain)) == plain
    assert dict(steps.up_to(7).without({2})) == {step: plain[step] for step in (1, 3, 4, 5, 6, 7)}
    assert last + 1 not in steps
    assert steps.get(last + 1) is None
