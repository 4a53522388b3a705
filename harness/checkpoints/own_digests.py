"""Digests that a checkpoint keeps of its own files, checked: a job may write the SHA-256 of each file beside it.

Two checkpoints of equal contents may differ in them: a pickle's bytes also say which of its strings are one object in
memory, and a resume makes those anew. So a digest that is right is told as such, and one that is not stays as it is.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping

from .files import Files
from .layout import Checkpoint

_DIGEST = re.compile(r"'(?:\w+:)?(?P<digits>[0-9a-fA-F]{32,128})'")
_ALGORITHMS: Mapping[int, tuple[str, ...]] = {
    32: ("md5",), 40: ("sha1",), 64: ("sha256", "blake2s"), 96: ("sha384",), 128: ("sha512", "blake2b"),
}  # fmt: skip
_BLOCK = 1 << 20


def checked(files: Files, found: Checkpoint, go_on: Callable[[], None]) -> dict[str, str]:
    """The values of a checkpoint, with words in place of each right digest of a file of it. The name of such a value
    ends with that of the file, or holds it. Raises OSError."""
    told = {name: match["digits"].lower() for name, text in found.values.items() if (match := _DIGEST.fullmatch(text))}
    paths = {one.path[len(found.path) + 1 :]: one.path for one in found.files if told and one.path != found.path}
    made: dict[tuple[str, int], list[str]] = {}
    values = dict(found.values)
    for name, digits in told.items():
        file = max((one for one in paths if _names(name, one)), key=len, default=None)
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
    states = [hashlib.new(one, usedforsecurity=False) for one in algorithms]
    buffer = memoryview(bytearray(_BLOCK))
    for at in range(0, size, _BLOCK):
        go_on()
        part = buffer[: files.read_into(path, at, buffer[: min(_BLOCK, size - at)])]
        for state in states:
            state.update(part)
    return [state.hexdigest() for state in states]
