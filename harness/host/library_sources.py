"""Shows from which sources a compiled C library was made: a digest of the sources is stored at the end of its file.
Times of change can't show this, because pip writes the files of a wheel in any order. setup.py runs this file alone, so
it imports only the standard library."""

from __future__ import annotations

import hashlib
from pathlib import Path


def sources_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.[chi]*"))


def digest_of(folder: Path) -> str:
    """A digest of the sources in a folder, as 16 hexadecimal digits."""
    state = hashlib.blake2b(digest_size=8)
    for path in sources_in(folder):
        state.update(path.name.encode() + path.read_bytes())
    return state.hexdigest()


def sign(library: Path, folder: Path) -> None:
    """Adds the digest of the sources in `folder` to the end of the library file. A loader ignores bytes after the
    sections."""
    if not is_made_of(library, folder):
        with open(library, "ab") as file:
            file.write(digest_of(folder).encode())


def is_made_of(library: Path, folder: Path) -> bool:
    return library.is_file() and library.read_bytes().endswith(digest_of(folder).encode())
