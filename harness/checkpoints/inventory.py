"""The inventory: a list of all checkpoints after a run, tensor by tensor, for assertions. No code from checkpoints is
run."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torchaos.harness.contracts import UsageError

from . import formats, own_digests, values
from .files import Files, Local
from .formats.folders import problem_of
from .layout import Problem, Trouble
from .verify import Manifests, Verified, verify


class _GivenUp(Exception):
    pass


def take(
    root: Path, manifests: Path | None = None, timeout_s: float = 300.0, given_up: Callable[[], bool] = lambda: False,
    seen: Iterable[str] = (),
) -> dict[str, Any]:  # fmt: skip
    """The inventory of all checkpoints under `root`: {"root", "checkpoints", "unread": types of other files that may
    hold tensors, "problem": why it is incomplete, or None}.

    `manifests`: the run directory with the manifests of the saves. `seen`: paths that the job saved or loaded: they are
    checkpoints whatever their names are. Raises nothing. It stops after `timeout_s` seconds, or when `given_up()` is
    true."""
    found: list[dict[str, Any]] = []
    unread: list[str] = []
    problem, files, end = None, Local(), time.monotonic() + timeout_s
    saved = _manifests(manifests)

    def go_on() -> None:
        if time.monotonic() > end or given_up():
            raise _GivenUp(f"not read within {timeout_s:g} s")

    try:
        unread = formats.unread(files, os.path.abspath(root), seen := set(map(os.path.normpath, seen)))
        for path in formats.find(files, os.path.abspath(root), seen):
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
    """One checkpoint as JSON for assertions. `tensors`: digests of the values, equal in any layout. `sketches`: show by
    how much values differ (sketch.py). `kinds`: types and shapes."""
    found = verify(files, path, manifests)
    layout, digests, sketches = found.layout, {}, {}
    unread: list[Problem] = []
    for name, summary in values.summaries(files, layout.tensors, go_on):
        if isinstance(summary, Exception):
            unread.append(problem_of(summary, name, path))
        else:
            digests[name], sketches[name] = summary.digest, summary.sketch
    problems = [*found.problems, *unread]
    # The job may have saved NaN as it is, and assertions judge that.
    damage = [problem for problem in problems if problem.kind is not Trouble.NAN and not problem.is_blind]
    hostile = [os.path.basename(problem.file or path) for problem in problems if problem.kind is Trouble.HOSTILE]
    return {
        "path": os.path.relpath(path, root if path != root else os.path.dirname(root)),
        "format": layout.format,
        "step": layout.step,
        "complete": not any(problem.kind in (Trouble.TORN, Trouble.UNFINISHED) for problem in problems),
        "loadable": all(problem.loads for problem in problems),
        "problem": damage[0].text if damage else None,
        "problems": [_as_json(problem, root) for problem in problems],
        "missing": layout.missing,
        "unopened": hostile,  # files that must not be unpickled
        "unread": layout.unread,  # types of files that are not read
        "opaque": layout.opaque,
        "verified": _how(found),
        "tensors": digests,
        "sketches": sketches,
        "kinds": {name: values.kind_of(tensor) for name, tensor in layout.tensors.items()},
        "values": own_digests.checked(files, layout, go_on),
        "bytes": layout.size,
    }


def _manifests(folder: Path | None) -> Manifests | None:
    try:
        return Manifests.load(folder) if folder else None
    except UsageError:
        return None  # no rank with an agent saved anything


def _how(found: Verified) -> str | None:
    """The source with which the contents were compared: manifest, crc, or None."""
    return "manifest" if found.manifest else None if found.bare else "crc"


def _as_json(problem: Problem, root: str) -> dict[str, Any]:
    fields = {
        "kind": problem.kind.value, "text": problem.text, "tensor": problem.tensor, "element": problem.element,
        "bits": problem.bits, "file": os.path.relpath(problem.file, root) if problem.file else None,
        "offset": problem.offset,
    }  # fmt: skip
    return {name: value for name, value in fields.items() if value is not None}
