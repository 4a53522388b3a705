"""Remembers into which folders the runs of a working directory went by `--out`, so that `latest` finds them. The file
STATE/outs/DIGEST of a working directory has a folder in each line."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path

from torchaos.harness.machine.disk import write_atomically
from torchaos.harness.undo import open_runs

RUNS = Path("torchaos-runs")  # where run directories go, unless --out names another folder
_MOST = 20  # folders of a working directory


def remember(out: Path) -> None:
    """Notes the folder of a run that begins in the current working directory. Without a note, only `latest` suffers."""
    with suppress(OSError):
        path, known = _file(Path.cwd()), [str(one) for one in outs_of(Path.cwd())[1:]]
        text = str(out.absolute())
        if out.absolute() != RUNS.absolute() and text not in known[:1]:
            others = [one for one in known if one != text]
            write_atomically(path, "\n".join([text, *others][:_MOST]) + "\n", private=True)


def outs_of(cwd: Path) -> list[Path]:
    """The folders into which the runs of this working directory went: the usual one, then the others that are there,
    newest first."""
    lines: list[str] = []
    with suppress(OSError):
        lines = _file(cwd).read_text(errors="surrogateescape").splitlines()
    return [RUNS, *(Path(line) for line in lines if os.path.isdir(line))]


def _file(cwd: Path) -> Path:
    digest = hashlib.blake2b(os.fsencode(cwd), digest_size=12).hexdigest()
    return open_runs.private(open_runs.state_home() / "outs") / digest
