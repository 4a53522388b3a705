"""Removes finished run directories by age and size, when it is told to. One that may have something to take back, or is
still at work, stays whatever its age."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torchaos.harness.running.upkeep import commands
from torchaos.harness.undo import log
from torchaos.harness.undo.recovery import find


@dataclass(frozen=True)
class Finished:
    folder: Path
    age_s: float  # since something last changed in it, by the wall clock
    size: int  # bytes on disk


def finished(out: Path) -> list[Finished]:
    """The run directories under `out` that nothing is left of, the oldest first. While a run is at work, only those
    that were judged: it may be in the middle of its twin, and have nothing guarded yet. Raises OSError where `out`
    can't be read."""
    busy = {Path(run.run_dir) for run in find(())[0]}
    at_work = bool(commands.living())
    found = [
        _measure(folder)
        for folder in out.resolve().iterdir()
        if folder not in busy and _is_finished(folder) and not (at_work and not (folder / "result.json").exists())
    ]
    return sorted(found, key=lambda one: -one.age_s)


def to_remove(runs: list[Finished], older_s: float | None, beyond: int | None) -> Iterator[Finished]:
    """Those older than `older_s` seconds; and of the rest the oldest, until at most `beyond` bytes are left. Pure."""
    left = sum(one.size for one in runs)
    for one in runs:
        if (older_s is not None and one.age_s > older_s) or (beyond is not None and left > beyond):
            left -= one.size
            yield one


def remove(one: Finished) -> None:
    """Raises OSError. The plan goes first: half a run directory is none."""
    (one.folder / "plan.json").unlink(missing_ok=True)
    shutil.rmtree(one.folder)


def _is_finished(folder: Path) -> bool:
    """A folder of ours, judged or given up, whose undo log says that all is taken back."""
    if folder.is_symlink() or not (folder / "plan.json").is_file() or folder.stat().st_uid != os.geteuid():
        return False
    if not log.path_of(folder).exists():  # nothing was ever guarded
        return (folder / "undo").is_dir()
    try:
        records, damaged = log.read(folder)
    except OSError:
        return False
    return not damaged and not any(record.open for record in records)


def _measure(folder: Path) -> Finished:
    newest, size = 0.0, 0
    for path in (folder, *folder.rglob("*")):
        try:
            found = path.lstat()
        except OSError:
            continue
        newest = max(newest, found.st_mtime) if path.parent == folder or path == folder else newest
        size += found.st_blocks * 512
    return Finished(folder, max(0.0, time.time() - newest), size)
