"""Memory for parts of files, at addresses to which the kernel copies fast.

Linux copies a part of a file with `rep movsb`. On AMD processors since Zen 3, this takes five times as long if the
memory begins 1 to 31 bytes further into its page than the part into a page of the file, as large allocations of Python
do for a part that begins with a page (xuanwo.io/2023/04-rust-std-fs-slower-than-python)."""

from __future__ import annotations

import mmap

ALIGNED = 16  # bytes; a multiple of the width of every number
_APART = 256  # bytes between the two places, a multiple of ALIGNED and more than 31


class Buffer:
    """Memory for a part of a file, of at most `size` bytes. One part replaces the other."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._memory = memoryview(mmap.mmap(-1, size + mmap.PAGESIZE + _APART + ALIGNED))  # begins with a page

    def part(self, offset: int, length: int, number: int = 0) -> memoryview:
        """Memory for `length` bytes from this offset of a file. A number that begins at the offset `number` of the file
        is aligned in it."""
        begin = offset % mmap.PAGESIZE + _APART + -number % ALIGNED
        return self._memory[begin : begin + length]
