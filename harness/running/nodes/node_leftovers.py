"""What dead agents left on this node."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from torchaos.harness.agent.wire import Kind
from torchaos.harness.record.events.journal import Journal
from torchaos.harness.rollback import recovery
from torchaos.harness.running.nodes.node_folder import JOB

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
