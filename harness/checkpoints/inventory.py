"""The inventory: a list of all checkpoints after a run, tensor by tensor, for assertions. No code from checkpoints is
run.

A checkpoint may itself contain digests of its files, for example the SHA-256 of each file. Two checkpoints with equal
contents may have different digests: the bytes of a pickle also depend on which strings are the same object in memory,
and a resume changes that. So a correct digest is replaced by a fixed text, and a wrong digest stays."""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from xxhash import xxh3_64

from torchaos.harness.interfaces import UsageError

from . import formats, tensor_values
from .files import Buffer, Files, Local
from .formats.format import problem_of
from .layout import Checkpoint, File, Problem, Trouble
from .verify import Manifests, Verified, verify

_DIGEST = re.compile(r"'(?:\w+:)?(?P<digits>[0-9a-fA-F]{32,128})'")
_ALGORITHMS: Mapping[int, tuple[str, ...]] = {
    32: ("md5",), 40: ("sha1",), 64: ("sha256", "blake2s"), 96: ("sha384",), 128: ("sha512", "blake2b"),
}  # fmt: skip
_BLOCK, _SHORT = 1 << 20, 1 << 10


def checked(files: Files, found: Checkpoint, go_on: Callable[[], None]) -> dict[str, str]:
    """The values of a checkpoint, without digests of its own files, so that they can be compared with the values of
    another checkpoint. A fixed text replaces a value that is the correct digest of a file whose name the value's name
    contains. `go_on` is called before each block of a file is read, and may raise. Raises OSError if a file can't be
    read."""
    matches = {name: _DIGEST.fullmatch(text) for name, text in found.values.items()}
    claimed = {name: match["digits"].lower() for name, match in matches.items() if match}
    files_in = [file.path for file in found.files if claimed and file.path != found.path]
    paths = {path[len(found.path) + 1 :]: path for path in files_in}
    made: dict[tuple[str, int], list[str]] = {}
    values = dict(found.values)
    for name, digits in claimed.items():
        file = max((path for path in paths if _names(name, path)), key=len, default=None)
        if file is None or len(digits) not in _ALGORITHMS:
            continue
        key = file, len(digits)
        if key not in made:
            made[key] = _digests(files, paths[file], files.size(paths[file]), _ALGORITHMS[len(digits)], go_on)
        if digits in made[key]:
            values[name] = f"the digest of {file}"
    return values


def _names(entry: str, file: str) -> bool:
    return re.search(rf"(?:^|[.:/]){re.escape(file)}(?:$|\.)", entry.rpartition(":")[2]) is not None


def _digests(files: Files, path: str, size: int, algorithms: tuple[str, ...], go_on: Callable[[], None]) -> list[str]:
    states = [hashlib.new(algorithm, usedforsecurity=False) for algorithm in algorithms]
    buffer = Buffer(_BLOCK)
    for at in range(0, size, _BLOCK):
        go_on()
        part = buffer.part(at, min(_BLOCK, size - at))
        part = part[: files.read_into(path, at, part)]
        for state in states:
            state.update(part)
    return [state.hexdigest() for state in states]


class _GivenUp(Exception):
    pass


def take(
    root: Path, manifests: Path | None = None, timeout_s: float = 300.0, given_up: Callable[[], bool] = lambda: False,
    seen: Iterable[str] = (),
) -> dict[str, Any]:  # fmt: skip
    """The inventory of all checkpoints under `root`: {"root", "checkpoints", "unread": types of other files that may
    hold tensors, each with its number, "problem": why it is incomplete, or None}.

    `manifests`: the run directory with the manifests of the saves. `seen`: paths that the job saved or loaded: they are
    checkpoints whatever their names are. Raises nothing. It stops after `timeout_s` seconds, or when `given_up()` is
    true."""
    found: list[dict[str, Any]] = []
    unread: dict[str, int] = {}
    problem, files, end = None, Local(), time.monotonic() + timeout_s
    saved, links = _manifests(manifests), dict[str, Verified]()

    def go_on() -> None:
        if time.monotonic() > end or given_up():
            raise _GivenUp(f"not read within {timeout_s:g} s")

    try:
        unread = formats.unread(files, os.path.abspath(root), seen := set(map(os.path.normpath, seen)))
        for path in formats.find(files, os.path.abspath(root), seen):
            go_on()
            found.append(entry(files, path, os.path.abspath(root), saved, go_on, links))
    except (_GivenUp, UsageError) as error:
        problem = str(error)
    except OSError as error:
        problem = f"{error.filename}: {(error.strerror or str(error)).lower()}"
    finally:
        files.close()
    return {"root": str(root), "checkpoints": found, "unread": unread, "problem": problem}


def entry(
    files: Files, path: str, root: str, manifests: Manifests | None = None, go_on: Callable[[], None] = lambda: None,
    links: dict[str, Verified] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """One checkpoint as JSON for assertions. `tensors`: digests of the values, equal in any layout. `sketches`: show by
    how much values differ (tensor_values.py). `kinds`: types and shapes. `links`: see `verify`."""
    found = verify(files, path, manifests, links=links)
    layout, digests, sketches = found.layout, {}, {}
    unread: list[Problem] = []
    for name, summary in tensor_values.summaries(files, layout.tensors, go_on):
        if isinstance(summary, Exception):
            unread.append(problem_of(summary, name, path))
        else:
            digests[name], sketches[name] = summary.digest, summary.sketch
    problems = [*found.problems, *unread]
    # The job may have saved NaN as it is, and assertions judge that.
    damage = [problem for problem in problems if problem.kind is not Trouble.NAN and not problem.is_blind]
    blind = {problem.file for problem in problems if problem.is_blind and problem.file}
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
        "builds_on": found.links,  # the names of all without which it is of no use
        "unopened": hostile,  # files that must not be unpickled
        "unread": layout.unread,  # types of files that are not read
        "unread_files": _unread_files(files, layout, blind, go_on),  # digests of their bytes, by name
        "opaque": layout.opaque,
        "verified": _how(found),
        "tensors": digests,
        "sketches": sketches,
        "kinds": {name: tensor_values.kind_of(tensor) for name, tensor in layout.tensors.items()},
        "values": checked(files, layout, go_on),
        "bytes": layout.size,
    }


def _unread_files(
    files: Files, layout: Checkpoint, blind: Collection[str], go_on: Callable[[], None]
) -> dict[str, str]:  # fmt: skip
    """The digests of the files of a folder that no format reads, whatever they are, and of those that could not be read
    (`blind`), by their paths in the folder."""
    digests = {}
    for file in layout.files:
        read = file.role != "other" or file.path in layout.by_content
        if file.path != layout.path and (not read or file.path in blind):
            digest = xxh3_64()
            with suppress(OSError):  # without permission, or gone meanwhile: it stays without a digest
                if _is_digest(files, layout, file, go_on):
                    continue
                for offset in range(0, file.size, _BLOCK):
                    go_on()
                    digest.update(files.read(file.path, offset, _BLOCK))
                digests[os.path.relpath(file.path, layout.path)] = digest.hexdigest()
    return digests


_DIGEST_FILE = re.compile(rb"\s*(?:[\w-]+:)?([0-9a-fA-F]{32,128})(?:[ *]+\S+)?\s*")


def _is_digest(files: Files, layout: Checkpoint, file: File, go_on: Callable[[], None]) -> bool:
    """Whether a file, such as `state.sha256` or `state.pt.md5`, holds nothing but the correct digest of a file beside
    it."""
    found = _DIGEST_FILE.fullmatch(files.read(file.path, 0, file.size)) if file.size <= _SHORT else None
    if found is None or len(found[1]) not in _ALGORITHMS:
        return False
    stem = os.path.splitext(file.path)[0]
    others = [each for each in layout.files if each.path != file.path]
    beside = [each for each in others if stem in (each.path, os.path.splitext(each.path)[0])]
    algorithms, digits = _ALGORITHMS[len(found[1])], found[1].decode().lower()
    return any(digits in _digests(files, each.path, each.size, algorithms, go_on) for each in beside)


def _manifests(folder: Path | None) -> Manifests | None:
    try:
        return Manifests.load(folder) if folder else None
    except UsageError:
        return None  # no rank with an agent saved anything


def _how(found: Verified) -> str | None:
    """What the contents were checked against: manifest, crc, or None."""
    return "manifest" if found.manifest else None if found.bare else "crc"


def _as_json(problem: Problem, root: str) -> dict[str, Any]:
    fields = {
        "kind": problem.kind.value, "text": problem.text, "tensor": problem.tensor, "element": problem.element,
        "bits": problem.bits, "file": os.path.relpath(problem.file, root) if problem.file else None,
        "offset": problem.offset,
    }  # fmt: skip
    return {name: value for name, value in fields.items() if value is not None}
