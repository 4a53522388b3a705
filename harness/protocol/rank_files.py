"""The files that a rank writes beside its events: its stacks, the list of files that it used, and manifests. Standard
library only.

The manifest of a save has digests of everything that the save wrote, chunk by chunk. They are made from the bytes in
memory, because the file may already be damaged when it is read. A manifest is a JSON file in the run directory, one for
each save and rank. agent/saving/manifest_writer.py decides when manifests are made.

`spans` has entries (offset, length, digests), with one digest in hexadecimal for each CHUNK bytes:

- 16 digits: xxh3 of the memory.
- 24 digits: xxh3 and then CRC-32, for formats that keep no CRC. From the CRC-32, a flipped bit can be located. It takes
  several times as long as xxh3, so it is computed later, in the background, from the file. It is added only if every
  xxh3 of the file is still that of the memory.
- 8 digits: CRC-32 of the memory, if the job's Python has no xxhash package.

A file without spans was saved, but its process ended before the digests were written."""

from __future__ import annotations

import signal
from collections.abc import Iterator

# When a rank gets this signal, it writes its Python stacks to `RUN_DIR/agent/stacks/rank<R>-a<attempt>-p<pid>.txt`.
# Real-time signals have no predefined meaning.
STACKS_SIGNAL = signal.SIGRTMAX - 7
STACKS = "stacks"
THREAD = "torchaos"  # name of the agent's threads in the kernel; storage faults spare them
# The letter before each path in the list of files that a rank used. FAILED: later files were not recorded.
READ, LISTED, WRITTEN, FAILED = "r", "l", "w", "!"

MANIFEST_VERSION, MANIFESTS = 1, "manifests"
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
