"""Checks the bytes of a file that are outside the spans of its manifest: headers, directories, padding. One digest
covers all of them."""

from __future__ import annotations

import posixpath

from xxhash import xxh3_64

from torchaos.harness.agent.spans import gaps

from ..crc import crc32
from ..files import Files
from ..layout import Problem, Trouble
from .manifests import Saved

_BLOCK = 1 << 20


def rest_differs(files: Files, path: str, saved: Saved) -> Problem | None:
    """A problem if these bytes differ from the saved bytes. None if they are equal, or if they have no digest."""
    if saved.rest is None:
        return None
    digester, crc = xxh3_64(), 0
    try:
        for begin, end in gaps(saved.size, [(span.offset, span.length) for span in saved.spans]):
            for at in range(begin, end, _BLOCK):
                part = files.read(path, at, min(_BLOCK, end - at))
                crc = crc32(part, crc)
                digester.update(part)
    except OSError as error:
        return Problem(Trouble.UNREADABLE, f"{posixpath.basename(path)}: {error.strerror or error}", path)
    now = f"{crc:08x}"
    if f"{digester.hexdigest()}{now}" == saved.rest or (len(saved.rest) == 8 and now == saved.rest):
        return None
    text = f"{posixpath.basename(path)}: its headers are not those that were written"
    return Problem(Trouble.DIGEST, text, path)
