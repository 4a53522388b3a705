"""The folder on the node that only this node uses, and what dead agents left on the node."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from torchaos.harness.agent.wire import Kind
from torchaos.harness.interfaces import UsageError
from torchaos.harness.record.events.journal import Journal
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.rollback import recovery
from torchaos.harness.rollback.open_runs import private

# The folder on the node that only this node uses: control pages, the agent's plan, the undo log, and the socket.
#
# It is never on a shared file system, because such file systems promise no coherence for a memory-mapped file.

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


# What dead agents left on this node.

_RECOVER_S = 120.0


def of_job(job: str) -> Iterator[Path]:
    """The folders of agents that ran in this job of Slurm, of all users that the caller may read."""
    for folder in Path(tempfile.gettempdir()).glob("torchaos-*/*"):
        with suppress(OSError):
            owner = folder.lstat().st_uid
            theirs = folder.parent.name == f"torchaos-{owner}" and folder.parent.lstat().st_uid == owner
            if theirs and (folder / JOB).read_text() == job:
                yield folder


def undo_for_the_dead(journal: Journal) -> str:
    """Undoes what this user's agents left here that died together with their reapers, as when a node goes down. Returns
    why that failed, or an empty text."""
    wrong = []
    for folder in (Path(tempfile.gettempdir()) / f"torchaos-{os.geteuid()}").glob("*"):
        if recovery.left_over(recovery.find([folder])[0]):
            failed = recover(folder)
            said = f"what {folder.name} left on this node is {f'not undone: {failed}' if failed else 'undone'}"
            journal.emit(Kind.NOTE, {"text": said})
            wrong += [said] if failed else []
    return "; ".join(wrong)


def recover(folder: Path) -> str:
    """Undoes what is left of an agent. Returns why that failed, or an empty text. If the caller is root, everything is
    done with the rights of the folder's owner, because the owner could have written the undo log."""
    owner = folder.stat()
    whose = {"user": owner.st_uid, "group": owner.st_gid, "extra_groups": []} if os.geteuid() == 0 else {}
    argv = [sys.executable, "-m", "torchaos.harness", "node", "--recover", folder.name]
    try:
        done = subprocess.run(
            argv, cwd="/", stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_RECOVER_S, check=False,
            **whose,  # type: ignore[call-overload]
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return "" if done.returncode == 0 else (done.stdout + done.stderr).strip()[-300:] or "it failed"
