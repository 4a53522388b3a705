"""The run directories that a user names, and the newest one: `latest`.

The folders into which the runs of a working directory went by `--out` are remembered, so that `latest` finds them. The
file STATE/outs/DIGEST of a working directory has a folder in each line."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem

from torchaos.harness.host.disk import write_atomically
from torchaos.harness.interfaces import UsageError
from torchaos.harness.rollback import undo_log

if TYPE_CHECKING:
    _PathType = click.ParamType[Path]
else:
    _PathType = click.ParamType  # older versions of click have no type argument

LATEST = "latest"
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
    return undo_log.private(undo_log.state_home() / "outs") / digest


class RunFolder(_PathType):
    """A run directory; `latest`: the newest run of all folders into which runs of this working directory went;
    `OUT/latest`: the newest run in OUT."""

    name = "run directory"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = Path(str(value))
        if path.name != LATEST or path.exists():
            return path
        found = latest(outs_of(Path.cwd()) if str(path) == LATEST else (path.parent,))
        click.echo(f"{path}: {_described(found)}", err=True)
        return found

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        named = [CompletionItem(LATEST)] if LATEST.startswith(incomplete) else []
        return [*named, CompletionItem(incomplete, type="dir")]


def _described(run: Path) -> str:
    """The run directory, with the scenario and the folder of its job, if these can be read: runs of several jobs may
    have the same scenario's name."""
    try:
        plan = json.loads((run / "plan.json").read_bytes())
        return f"{run.absolute()} ({plan['scenario']}, job in {plan['job']['cwd']})"
    except (OSError, ValueError, KeyError, TypeError):
        return str(run.absolute())


def latest(outs: Sequence[Path] = (RUNS,)) -> Path:
    """The newest run directory in these folders. Raises UsageError if there is none."""
    plans = (path for out in outs for path in out.glob("*/plan.json"))
    runs = [path for path in plans if (path.parent / "events").is_dir()]  # an exploration has none
    if not runs:
        raise UsageError(f"{LATEST}: there is no run in {outs[0].absolute()}; name a run directory, or OUT/{LATEST}")
    return max(runs, key=lambda path: path.stat().st_mtime_ns).parent
