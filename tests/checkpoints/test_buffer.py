"""Memory into which the kernel copies parts of files fast."""

from __future__ import annotations

import random

import numpy as np

from torchaos.harness.checkpoints.files import ALIGNED, Buffer

PAGE = 4096


def test_no_part_begins_a_little_behind_its_place_in_a_page() -> None:
    """Wherever a part begins in its file, the memory for it holds the whole part, aligns the numbers, and does not
    begin 1 to 31 bytes behind the place in a page at which the part begins."""
    draw, buffer = random.Random(1), Buffer(PAGE * 3)
    for _ in range(2000):
        offset, length = draw.randrange(PAGE * 5), draw.randrange(1, buffer.size + 1)
        number = draw.randrange(PAGE * 5)
        part = np.frombuffer(buffer.part(offset, length, number), np.uint8)
        assert len(part) == length
        assert (part.ctypes.data - offset + number) % ALIGNED == 0
        assert not 0 < (part.ctypes.data - offset) % PAGE < 32
