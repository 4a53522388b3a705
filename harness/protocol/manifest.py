"""The manifest of a save: digests of everything that the save wrote, chunk by chunk.

Digests are made from the bytes in memory, because a digest of the file could already include damage. A manifest is a
JSON file in the run directory, one for each save and rank.

`spans` holds (offset, length, digests) entries, with one digest in hex for each CHUNK bytes:

- 16 digits: xxh3 of the memory.
- 24 digits: xxh3 and then CRC-32, for formats that keep no CRC. A flipped bit can be located from the CRC-32, but it
  takes several times as long as xxh3. So it is computed later, in the background, from the file, and added only if
  every xxh3 of the file is still that of the memory.
- 8 digits: CRC-32 of the memory, if the job's Python has no xxhash package.

A file without spans was saved, but its process ended before the digests were written.

agent/manifest_writer.py decides when manifests are made.
"""

from __future__ import annotations

from collections.abc import Iterator

VERSION, FOLDER = 1, "manifests"
CHUNK = 1 << 20


def gaps(size: int, spans: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The (begin, end) of each part of a file of `size` bytes that no span (offset, bytes) covers."""
    at = 0
    for offset, length in sorted(spans):
        if offset > at:
            yield at, offset
        at = max(at, offset + length)
    if at < size:
        yield at, size
