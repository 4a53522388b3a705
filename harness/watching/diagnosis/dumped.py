"""The stacks of ranks that their agents write at a signal (`agent/dumps.py`), for ranks that py-spy can't read. It is
used only when the job is about to be ended."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from torchaos.harness.agent.dumps import SIGNAL
from torchaos.harness.contracts import RankProcess
from torchaos.harness.machine import proc
from torchaos.harness.watching.diagnosis.stacks import Frame, Stack

_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_WAIT_S, _LOOK_S = 3.0, 0.05  # seconds; a write is over when the file did not grow between two looks


def ask(ranks: Mapping[int, RankProcess], folder: Path) -> dict[int, Stack]:
    """The stacks of these ranks, by rank; without the ranks that don't answer."""
    asked = {}
    for rank, process in ranks.items():
        files = [path for path in folder.glob(f"rank{rank}-a{process.attempt}-p*.txt") if path.is_file()]
        if files and _handles_it(process.pid):
            path = max(files, key=lambda file: file.stat().st_mtime)
            before = path.stat().st_size
            with suppress(OSError), proc.hold(process.pid, process.start_ticks) as fd:
                if fd is not None:
                    signal.pidfd_send_signal(fd, SIGNAL)
                    asked[rank] = path, before
    end = time.monotonic() + _WAIT_S
    found: dict[int, Stack] = {}
    sizes: dict[int, int] = {}
    while asked.keys() - found.keys() and time.monotonic() < end:
        time.sleep(_LOOK_S)
        for rank, (path, before) in asked.items():
            size = path.stat().st_size
            if size > before and sizes.get(rank) == size:
                found[rank] = Stack(ranks[rank].pid, parse(path.read_bytes()[before:].decode(errors="replace")))
            sizes[rank] = size
    return found


def parse(text: str) -> tuple[Frame, ...]:
    """The frames of a stack as faulthandler writes it (Python/traceback.c), the innermost first."""
    return tuple(Frame(function, file, int(line)) for file, line, function in _FRAME.findall(text))


def _handles_it(pid: int) -> bool:
    """Whether the process has a handler for the signal; see SigCgt in proc_pid_status(5). Otherwise it would die."""
    with suppress(OSError, ValueError), open(f"/proc/{pid}/status", "rb") as file:
        for line in file:
            if line.startswith(b"SigCgt:"):
                return bool(int(line.split()[1], 16) >> (SIGNAL - 1) & 1)
    return False
