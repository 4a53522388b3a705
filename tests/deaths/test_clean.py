"""What the campaign of deaths calls left behind."""

from __future__ import annotations

from pathlib import Path

from dying import clean

from torchaos.harness.protocol.packed_lines import Packer
from torchaos.harness.protocol.wire import EventFile, Kind


def test_lines_of_a_journal(tmp_path: Path) -> None:
    """Steps are binary, and can be read. A torn last line is no damage; a changed line in the middle is."""
    events = tmp_path / "events"
    events.mkdir()
    own = EventFile(events / "rank0.jsonl", "rank0", 0, 0)
    own.emit(Kind.NOTE, {"text": "a note"})
    own.close()
    packer = Packer("rank0", 0, 0)
    steps = [
        packer.line(number, 1.8e9, 10.0 + number, number, [0.5], [1e-3], number, number, False, None, None, {})
        for number in (1, 2, 3)
    ]
    with open(events / "rank0.jsonl", "ab") as file:
        file.write(b"".join(steps) + steps[0][:20])
    assert clean.journals(tmp_path) == []
    whole = (events / "rank0.jsonl").read_bytes()
    at = whole.index(steps[1]) + len(steps[1]) // 2
    (events / "rank0.jsonl").write_bytes(whole[:at] + bytes([whole[at] ^ 2]) + whole[at + 1 :])
    assert clean.journals(tmp_path) == ["rank0.jsonl:3: not an event"]
