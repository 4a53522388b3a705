"""Watches the harness itself during a run: free space on the disk, its own memory, and its run directory."""

from __future__ import annotations

import os
import resource
import shutil
import time
from pathlib import Path

from torchaos.harness.contracts import UsageError
from torchaos.harness.scenario.sizes import size_in_words

DISK_AT_START = 256 << 20  # bytes that must be free where the run directory is
DISK_LEAST = 64 << 20  # bytes; with less the run is ended, while there is still space to record it
MEMORY_MOST = 8 << 30  # bytes; or a quarter of the machine's memory, if that is less
EVERY_S = 1.0


def check_disk(run_dir: Path) -> None:
    """Raises UsageError if there is too little free space to record a run."""
    place = next(path for path in (run_dir, *run_dir.parents) if path.exists())
    free = shutil.disk_usage(place).free
    if free < DISK_AT_START:
        raise UsageError(
            f"{run_dir}: {size_in_words(free)} are free there, and a run needs {size_in_words(DISK_AT_START)}; "
            "make room (`torchaos prune` removes old runs), or choose another --out"
        )


class Guards:
    """Checks for problems of the harness itself, at most once in EVERY_S seconds."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir, self._looked = run_dir, 0.0
        pages = os.sysconf("SC_PHYS_PAGES") * resource.getpagesize()
        self._memory = min(MEMORY_MOST, pages // 4)

    def trouble(self) -> str | None:
        """Why the run can't go on, as a sentence. None if nothing is wrong, or if it is too early to check again."""
        now = time.monotonic()
        if now - self._looked < EVERY_S:
            return None
        self._looked = now
        try:
            if not self._run_dir.is_dir():
                return f"the run directory {self._run_dir} was removed"
            free = shutil.disk_usage(self._run_dir).free
        except OSError as error:
            return f"the run directory {self._run_dir} can't be read: {error.strerror}"
        if free < DISK_LEAST:
            return f"only {size_in_words(free)} are free on the disk of the run directory"
        if (used := _resident()) > self._memory:
            return (
                f"torchaos itself uses {size_in_words(used)} of memory, and {size_in_words(self._memory)} is its limit"
            )
        return None


def _resident() -> int:
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
