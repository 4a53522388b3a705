"""The folder on the node that only this node uses: control pages, the agent's plan, the undo log, and the socket.

It is never on a shared file system, because such file systems promise no coherence for a memory-mapped file."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from torchaos.harness.interfaces import UsageError
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.rollback.open_runs import private

JOB = "slurm-job"  # the file with the number of the job of Slurm in which the agent runs


def place_of(mark: str) -> RunDir:
    return RunDir(Path(tempfile.gettempdir()) / f"torchaos-{os.geteuid()}" / mark.lstrip("."))


def socket_of(mark: str) -> Path:
    return place_of(mark).root / "socket"


@contextmanager
def address_of(path: Path) -> Iterator[str]:
    """A context manager with a short address of a socket: a socket's path has at most 107 bytes (unix(7)), and a
    temporary folder may be deep. Raises OSError if the folder does not exist."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def remove_place(mark: str) -> None:
    """Removes the folder, and the one above it if no other run uses that."""
    root = place_of(mark).root
    shutil.rmtree(root, ignore_errors=True)
    with suppress(OSError):
        root.parent.rmdir()


def make_place(mark: str) -> RunDir:
    """Makes the folder with mode 0700. Raises UsageError if it can't be made, or if others can write to it."""
    place = place_of(mark)
    try:
        for folder in (place.root.parent, place.root, place.agent_plan.parent, place.pages, place.undo):
            private(folder)
        if job := os.environ.get("SLURM_JOB_ID"):
            (place.root / JOB).write_text(job)
    except OSError as error:
        raise UsageError(f"{place.root}: the folder of this node can't be made: {error}") from error
    return place
