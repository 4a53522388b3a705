"""The packed line of a step: it is read like the JSON line of the same step, and never as another event."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest
from mutating.mutate import damaged

from torchaos.harness.protocol import packed_lines
from torchaos.harness.protocol.check_sums import Sums
from torchaos.harness.protocol.wire import Event, EventFile, Kind, Phase
from torchaos.harness.record.events.journal import Gaps, read, read_events
from torchaos.harness.record.steps.packed_blocks import blocks_of

USUAL: dict[str, Any] = {
    "losses": [0.1 + 0.2], "lr": [1e-3], "opt_step": 7, "sched_step": 6, "skipped": False, "samples": bytes(range(12)),
    "indices": (3, 4), "phases": {Phase.DATA: 0.25, Phase.FORWARD: 1e-6, Phase.BACKWARD: 0.5, Phase.OPTIMIZER: 2.0},
}  # fmt: skip


@pytest.fixture
def file(tmp_path: Path) -> EventFile:
    return EventFile(tmp_path / "rank1.jsonl", "rank1-a2-p3", 1, 2)


def lines(folder: Path) -> list[bytes]:
    return io.BytesIO((folder / "rank1.jsonl").read_bytes()).readlines()


@pytest.mark.parametrize(
    "other",
    [
        {}, {"losses": [], "lr": []}, {"losses": [None, 1.5], "lr": [None]}, {"opt_step": None, "sched_step": None},
        {"skipped": None}, {"skipped": True}, {"samples": None, "indices": None}, {"samples": b"", "indices": ()},
        {"samples": bytes(6 * 700), "indices": tuple(range(700))}, {"indices": (-5, 2**62)}, {"phases": {}},
        {"losses": [float("inf"), -0.0, 5e-324]}, {"lr": [0.1] * 64}, {"opt_step": -1},
        {"samples": None, "indices": None, "sums": Sums(700, 2**64 - 1, 0, 0)},
    ],
    ids=str,
)  # fmt: skip
def test_same_as_json(file: EventFile, tmp_path: Path, other: dict[str, Any]) -> None:
    """Every value comes back as JSON would give it, to the last bit, and the line is a packed one."""
    given = {**USUAL, **other}
    file.emit_step(41, **given)
    (line,) = lines(tmp_path)
    assert line.startswith(packed_lines.MARK)
    event = read(line)
    assert (event.kind, event.source, event.seq, event.step) == (Kind.STEP, "rank1-a2-p3", 0, 41)
    assert (event.rank, event.attempt) == (1, 2)
    assert read(event.to_line()) == event == read(line.removesuffix(b"\n"))
    assert event.data == json.loads(json.dumps(packed_lines.payload(**given)))


def test_loss_that_is_no_number(file: EventFile, tmp_path: Path) -> None:
    """A loss that is not a number is not taken for one that could not be read."""
    file.emit_step(1, **{**USUAL, "losses": [float("nan"), None]})
    first, second = read(lines(tmp_path)[0]).data["losses"]
    assert first != first
    assert second is None


@pytest.mark.parametrize("other", [{"opt_step": 2**70}, {"indices": (2**64,)}, {"lr": [None] * 65},
                                   {"losses": [0.5] * 300}])  # fmt: skip
def test_step_that_does_not_fit(file: EventFile, tmp_path: Path, other: dict[str, Any]) -> None:
    """It is a line of JSON with the number that is due, so that no event is missing before or after it."""
    file.emit_step(1, **USUAL)
    file.emit_step(2, **{**USUAL, **other})
    file.emit(Kind.NOTE, {"text": "after it"})
    events = [Event.from_line(line) for line in lines(tmp_path)]
    assert [event.seq for event in events] == [0, 1, 2]
    assert lines(tmp_path)[1].startswith(b"{")
    assert events[1].data == json.loads(json.dumps(packed_lines.payload(**{**USUAL, **other})))


def test_many_shapes(file: EventFile, tmp_path: Path) -> None:
    """Batches of very many sizes, each seen twice, are all read as they were."""
    sizes = [*range(1, 200), *range(1, 200)]
    for size in sizes:
        file.emit_step(1, **{**USUAL, "indices": tuple(range(size))})
    assert [len(read(line).data["indices"]) for line in lines(tmp_path)] == sizes


def test_torn_line(file: EventFile, tmp_path: Path) -> None:
    """Wherever the rank died within the write, the part that is there is no event."""
    file.emit_step(1, **USUAL)
    (line,) = lines(tmp_path)
    for end in range(len(line) - 1):  # all but the newline make a whole line
        with pytest.raises(ValueError, match=r"torn|padding|base64|Expecting|not a packed"):
            read(line[:end])


def test_damaged_line_is_never_another_event(file: EventFile, tmp_path: Path) -> None:
    """Each of 5,000 damaged lines is refused, or read as the event that it was."""
    file.emit_step(1, **USUAL)
    file.emit_step(2, **{**USUAL, "samples": None, "losses": [None]})
    draw, whole = Random(0), lines(tmp_path)
    true, refused = [read(line) for line in whole], 0
    for _ in range(5000):
        for part in damaged(draw.choice(whole), draw).split(b"\n"):
            try:
                event = read(part)
            except ValueError:
                refused += 1
            else:
                assert event in true
    assert refused > 3000


def test_journal_says_what_is_torn_and_what_is_damaged(file: EventFile, tmp_path: Path) -> None:
    """A line that ends in the middle is the last write of a rank that died; one with a wrong byte is damage, and the
    number of its event is missing."""
    for step in range(1, 9):
        file.emit_step(step, **USUAL)
    whole = lines(tmp_path)
    hurt = whole[2][:-2] + (b"a" if whole[2][-2:-1] != b"a" else b"b") + b"\n"
    (tmp_path / "rank1.jsonl").write_bytes(b"".join([*whole[:2], hurt, *whole[3:7], whole[7][:40]]))
    problems: list[str] = []
    gaps = Gaps()
    assert [event.step for event in read_events(tmp_path, problems, gaps)] == [1, 2, 4, 5, 6, 7]
    assert problems == ["rank1.jsonl:3"]
    assert gaps.in_words() == ["event 2 of rank1-a2-p3 is missing"]


def test_killed_writer_loses_no_step(tmp_path: Path) -> None:
    """A process that says the number of each step after it has written it is killed: all that it said are there."""
    script = f"""
import sys
from pathlib import Path
from torchaos.harness.protocol.wire import EventFile
file = EventFile(Path({str(tmp_path)!r}) / "rank1.jsonl", "rank1-a2-p3", 1, 2)
for step in range(1, 10**9):
    file.emit_step(step, [0.5], [0.1], step, None, False, None, None, {{}})
    print(step, flush=True)
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for said in process.stdout:
        if int(said) == 200:
            process.send_signal(signal.SIGKILL)
            break
    said_last = [int(line) for line in process.stdout if line.endswith("\n")]
    assert process.wait() == -signal.SIGKILL
    steps = [event.step for event in read_events(tmp_path)]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= max(said_last, default=200)


def test_lines_hold_no_newline_but_at_their_end(file: EventFile, tmp_path: Path) -> None:
    """Whatever the bytes of a step are, its line is one line: in 2,000 steps of random digests, indices and sizes."""
    draw, given = Random(0), []
    for step in range(2000):
        size = draw.choice((0, 1, 7, 39, 300))
        digests, indices = draw.randbytes(packed_lines.ROW * size), tuple(draw.randrange(2**32) for _ in range(size))
        given.append((step, packed_lines.in_hex(digests), list(indices)))
        file.emit_step(step, **{**USUAL, "samples": digests, "indices": indices, "losses": [draw.random()]})
    events = [read(line) for line in lines(tmp_path)]
    assert [(event.step, event.data["samples"], event.data["indices"]) for event in events] == given
    assert all(line.startswith(packed_lines.MARK) for line in lines(tmp_path))


@pytest.mark.parametrize("source", ["rank1-a2-p3", "rank1-a3-p3", "rank1", "node1-rank1-a2-p3", "rank01-a2-p3"])
def test_rank_and_attempt_of_any_source(source: str, tmp_path: Path) -> None:
    """They are read from the name of the source only if they are its numbers."""
    file = EventFile(tmp_path / "rank1.jsonl", source, 1, 2)
    file.emit_step(1, **USUAL)
    (line,) = lines(tmp_path)
    assert line.startswith(packed_lines.MARK)
    assert (read(line).source, read(line).rank, read(line).attempt) == (source, 1, 2)
    assert [(block.source, block.rank, block.attempt) for block in blocks_of([line])[0]] == [(source, 1, 2)]


@pytest.mark.parametrize("source", ["a b", "a=b", "a\nb"])
def test_source_that_does_not_fit(source: str, tmp_path: Path) -> None:
    """Its steps are lines of JSON."""
    EventFile(tmp_path / "rank1.jsonl", source, 1, 2).emit_step(1, **USUAL)
    assert [read(line).source for line in lines(tmp_path)] == [source]
