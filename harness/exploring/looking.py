"""Serves the checkpoint folder over itself by FUSE, and notes what a resume asks of it:

    python -m torchaos.harness.exploring.looking FOLDER SOURCE SWITCH HOME

HOME gets `looks`: a line for each question that was asked for the first time, with the time. The folder was just
covered, so the kernel remembers nothing of it, and asks the server."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchaos.harness.exploring.looks import Ask
from torchaos.harness.mechanics.storage.rules import Rules
from torchaos.harness.mechanics.storage.server import Served, Spoiler, serve
from torchaos.harness.undo.mount import Mount


class Looking(Served):
    """Serves the folder and notes the questions."""

    def __init__(self, folder: str, spoil: Spoiler, mount: Mount, home: Path) -> None:
        super().__init__(folder, spoil, mount)
        self._lines = os.open(home / "looks", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._asked: set[tuple[Ask, str]] = set()

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        self._note(Ask.IS, path)
        return super().getattr(path, fh)

    def readdir(self, path: str, fh: int) -> Iterator[str]:
        self._note(Ask.NAMES, path)
        return super().readdir(path, fh)

    def open(self, path: str, flags: int) -> int:
        if not flags & os.O_TRUNC:
            self._note(Ask.BYTES, path)
        return super().open(path, flags)

    def readlink(self, path: str) -> str:
        self._note(Ask.IS, path)
        return super().readlink(path)

    def _note(self, ask: Ask, path: str) -> None:
        if (ask, path) not in self._asked:
            self._asked.add((ask, path))
            os.write(self._lines, json.dumps([time.monotonic(), ask.value, path.strip("/")]).encode() + b"\n")


def main(folder: str, source: str, switch: str, home: str) -> int:
    nothing = Spoiler(Rules((), ()), Path(switch), Path(home, "spoilt"))
    return serve(Looking(folder, nothing, Mount(folder, source), Path(home)), folder, source)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
