"""Removes finished run directories by age and size, when the user asks for it. A run that is still in progress, or may
have changes to undo, is kept at any age."""

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
    age_s: float  # seconds since something in it last changed, by the wall clock
    size: int  # bytes on disk


def finished(out: Path) -> list[Finished]:
    """The finished run directories in the folder `out`, the oldest first. While another command runs, directories
    without a verdict are left out: they may belong to a run that has just begun and has nothing in its undo log yet.
    Raises OSError if `out` can't be read."""
    busy = {Path(run.run_dir) for run in find(())[0]}
    at_work = bool(commands.living())
    found = [
        _measure(folder)
        for folder in out.resolve().iterdir()
        if folder not in busy and _is_finished(folder) and not (at_work and not (folder / "result.json").exists())
    ]
    return sorted(found, key=lambda run: -run.age_s)


def to_remove(runs: list[Finished], older_s: float | None, beyond: int | None) -> Iterator[Finished]:
    """Yields the runs to remove: first all runs older than `older_s` seconds, then the oldest of the rest, until at
    most `beyond` bytes are left. `runs` must have the oldest first."""
    left = sum(run.size for run in runs)
    for run in runs:
        if (older_s is not None and run.age_s > older_s) or (beyond is not None and left > beyond):
            left -= run.size
            yield run


def remove(run: Finished) -> None:
    """Removes a run directory. Its plan is removed first, so that a half-removed folder no longer counts as a run
    directory. Raises OSError."""
    (run.folder / "plan.json").unlink(missing_ok=True)
    shutil.rmtree(run.folder)


def _is_finished(folder: Path) -> bool:
    """Whether the folder is a run directory of this user whose undo log shows that everything was undone."""
    if folder.is_symlink() or not (folder / "plan.json").is_file() or folder.stat().st_uid != os.geteuid():
        return False
    if not log.path_of(folder).exists():  # no change was ever written to the undo log
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
