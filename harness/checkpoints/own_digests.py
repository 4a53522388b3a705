"""Checks digests of files that a checkpoint itself contains, for example the SHA-256 of each file. Two checkpoints with
equal contents may have different digests: the bytes of a pickle also depend on which strings are the same object in
memory, and a resume changes that. So a correct digest is replaced by a fixed text, and a wrong digest stays."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping

from .buffer import Buffer
from .files import Files
from .layout import Checkpoint

_DIGEST = re.compile(r"'(?:\w+:)?(?P<digits>[0-9a-fA-F]{32,128})'")
_ALGORITHMS: Mapping[int, tuple[str, ...]] = {
    32: ("md5",), 40: ("sha1",), 64: ("sha256", "blake2s"), 96: ("sha384",), 128: ("sha512", "blake2b"),
}  # fmt: skip
_BLOCK = 1 << 20


def checked(files: Files, found: Checkpoint, go_on: Callable[[], None]) -> dict[str, str]:
    """The values of a checkpoint, without digests of its own files, so that they can be compared with the values of
    another checkpoint. A fixed text replaces a value that is the correct digest of a file whose name the value's name
    contains. `go_on` is called before each block of a file is read, and may raise. Raises OSError."""
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
