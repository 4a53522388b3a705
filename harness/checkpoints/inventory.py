"""What lies in a checkpoint folder after a run, tensor by tensor, for those who judge. Nothing of it is run."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchaos.harness.contracts import UsageError

from . import formats, own_digests, values
from .files import Files, Local
from .formats.folders import problem_of
from .layout import Problem, Trouble
from .verify import Manifests, Verified, verify

# What a run may have saved in good faith, or is no damage: others judge it.
_NO_DAMAGE = (Trouble.NAN, Trouble.LIMIT)


class _GivenUp(Exception):
    pass


def take(
    root: Path, manifests: Path | None = None, timeout_s: float = 300.0, given_up: Callable[[], bool] = lambda: False
) -> dict[str, Any]:
    """The inventory of all checkpoints under `root`: {"root", "checkpoints", "unread": types of other files that
    may hold tensors, "problem": why this is not all, or None}.

    `manifests`: the run directory whose manifests tell what was saved. Raises nothing; it is cut short when it is
    `given_up`, or after `timeout_s` seconds.
    """
    found: list[dict[str, Any]] = []
    unread: list[str] = []
    problem, files, end = None, Local(), time.monotonic() + timeout_s
    saved = _manifests(manifests)

    def go_on() -> None:
        if time.monotonic() > end or given_up():
            raise _GivenUp(f"not read within {timeout_s:g} s")

    try:
        unread = formats.unread(files, os.path.abspath(root))
        for path in formats.find(files, os.path.abspath(root)):
            go_on()
            found.append(entry(files, path, os.path.abspath(root), saved, go_on))
    except (_GivenUp, UsageError) as error:
        problem = str(error)
    except OSError as error:
        problem = f"{error.filename}: {(error.strerror or str(error)).lower()}"
    finally:
        files.close()
    return {"root": str(root), "checkpoints": found, "unread": unread, "problem": problem}


def entry(
    files: Files, path: str, root: str, manifests: Manifests | None = None, go_on: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """One checkpoint, as JSON: what assertions read. `tensors` are digests of values, equal whatever the layout,
    `sketches` what tells their distance where they differ (sketch.py), and `kinds` their types and shapes."""
    found = verify(files, path, manifests)
    layout, digests, sketches = found.layout, {}, {}
    unread: list[Problem] = []
    for name, told in values.summaries(files, layout.tensors, go_on):
        if isinstance(told, Exception):
            unread.append(problem_of(told, name, path))
        else:
            digests[name], sketches[name] = told.digest, told.sketch
    problems = [*found.problems, *unread]
    damage = [one for one in problems if one.kind not in _NO_DAMAGE]
    hostile = [os.path.basename(one.file or path) for one in problems if one.kind is Trouble.HOSTILE]
    return {
        "path": os.path.relpath(path, root if path != root else os.path.dirname(root)),
        "format": layout.format,
        "step": layout.step,
        "complete": not any(one.kind in (Trouble.TORN, Trouble.UNFINISHED) for one in problems),
        "loadable": all(one.loads for one in problems),
        "problem": damage[0].text if damage else None,
        "problems": [_as_json(one, root) for one in problems],
        "missing": layout.missing,
        "unopened": hostile,  # what must not be unpickled
        "unread": layout.unread,  # types of files
        "opaque": layout.opaque,
        "verified": _how(found),
        "tensors": digests,
        "sketches": sketches,
        "kinds": {name: values.kind_of(one) for name, one in layout.tensors.items()},
        "values": own_digests.checked(files, layout, go_on),
        "bytes": layout.size,
    }


def _manifests(folder: Path | None) -> Manifests | None:
    try:
        return Manifests.load(folder) if folder else None
    except UsageError:
        return None  # nothing was saved by a rank that had the agent in it


def _how(found: Verified) -> str | None:
    """By what its contents were compared with what was written: manifest, crc, or None."""
    return "manifest" if found.manifest else None if found.unseen else "crc"


def _as_json(one: Problem, root: str) -> dict[str, Any]:
    told = {"kind": one.kind.value, "text": one.text, "tensor": one.tensor, "element": one.element, "bits": one.bits}
    file = os.path.relpath(one.file, root) if one.file else None
    return {name: value for name, value in {**told, "file": file, "offset": one.offset}.items() if value is not None}
