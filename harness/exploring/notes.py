"""The files into which a recording is written while a job runs: `operations` (a line for each operation), the bytes in
`blobs/`, `collectives` and `plans` (writers.py), and `doubts`. recorder.py reads them afterwards."""

from __future__ import annotations

import json
import os
from pathlib import Path

from torchaos.harness.exploring.blobs import Blobs
from torchaos.harness.exploring.operations import Kind
from torchaos.harness.exploring.writers import Writers


class Notes:
    """The files of one recording, in the folder `home`. The methods must not be called by two threads at once."""

    DOUBTS = "doubts"  # sentences about what could not be recorded
    NAMES = ("operations", "collectives", "plans")  # without the folder of blobs

    def __init__(self, home: Path) -> None:
        self.blobs, self._writers = Blobs(home / "blobs"), Writers(home / "collectives", home / "plans")
        self._lines = os.open(home / "operations", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self.next = 0  # the number of the next operation
        self._doubts, self._doubted = home / self.DOUBTS, set[str]()

    def add(self, kind: Kind, path: str, began_s: float, ended_s: float, tid: int, by: int, **more: object) -> None:
        """Adds an operation of the thread `by`. `tid`: the thread that made the call; 0: unknown. `more`: fields of
        Operation; None: the default."""
        writer = self._writers.of(by)
        fields = {
            "number": self.next, "kind": kind.value, "path": path, "rank": writer.rank, "pid": writer.pid, "tid": tid,
            "begun_s": began_s, "ended_s": ended_s, **more,
        }  # fmt: skip
        self.next += 1
        line = {name: value for name, value in fields.items() if value is not None}
        os.write(self._lines, json.dumps(line).encode() + b"\n")

    def doubt(self, sentence: str) -> None:
        """Notes once what could not be recorded."""
        if sentence not in self._doubted:
            self._doubted.add(sentence)
            with open(self._doubts, "a") as file:
                file.write(json.dumps(sentence) + "\n")

    def close(self) -> None:
        """Copies the last collectives."""
        self._writers.close()
