"""The manifest of a save: digests of everything that the save wrote, chunk by chunk.

Digests are made from the bytes in memory, because the file may already be damaged when it is read. A manifest is a JSON
file in the run directory, one for each save and rank.

`spans` has entries (offset, length, digests), with one digest in hexadecimal for each CHUNK bytes:

- 16 digits: xxh3 of the memory.
- 24 digits: xxh3 and then CRC-32, for formats that keep no CRC. From the CRC-32, a flipped bit can be located. It takes
  several times as long as xxh3, so it is computed later, in the background, from the file. It is added only if every
  xxh3 of the file is still that of the memory.
- 8 digits: CRC-32 of the memory, if the job's Python has no xxhash package.

A file without spans was saved, but its process ended before the digests were written.

agent/saving/manifest_writer.py decides when manifests are made."""

from __future__ import annotations

from collections.abc import Iterator

VERSION, FOLDER = 1, "manifests"
CHUNK = 1 << 20


def gaps(size: int, spans: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yields (begin, end) of each part of a file of `size` bytes that no span covers. `spans`: (offset, length in
    bytes)."""
    at = 0
    for offset, length in sorted(spans):
        if offset > at:
            yield at, offset
        at = max(at, offset + length)
    if at < size:
        yield at, size
