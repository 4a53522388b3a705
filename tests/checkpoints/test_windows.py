"""How verify cuts files into windows, and finds NaN wherever a window ends."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
from xxhash import xxh3_64_hexdigest

from torchaos.harness.checkpoints.files import Local
from torchaos.harness.checkpoints.layout import Checkpoint, Checksum, Extent, File, Shard, TensorEntry
from torchaos.harness.checkpoints.verify import stream as cutting
from torchaos.harness.checkpoints.verify.manifests import CHUNK, Digest, Span
from torchaos.harness.checkpoints.verify.stream import WIDTHS, Found, Stream, nans_in

ALL = frozenset({"crc", "digest", "nan"})
NAN = {
    "float16": b"\x01\x7c", "bfloat16": b"\x81\xff", "float8_e4m3fn": b"\xff", "float8_e5m2": b"\x7d",
    "float32": struct.pack("<f", float("nan")), "complex64": b"\x01\x00\x80\x7f",  # the second one is a signaling NaN
    "float64": struct.pack("<d", float("nan")), "complex128": struct.pack("<Q", 0xFFF0000000000001),
}  # fmt: skip
INFINITE = {
    "float16": b"\x00\x7c", "bfloat16": b"\x80\xff", "float8_e4m3fn": b"\xfe", "float8_e5m2": b"\xfc",
    "float32": struct.pack("<f", float("-inf")), "complex64": struct.pack("<f", float("inf")),
    "float64": struct.pack("<d", float("inf")), "complex128": struct.pack("<d", float("-inf")),
}  # fmt: skip


class Whole:
    """A file with sums, digests and numbers that begin and end at different places."""

    def __init__(self, path: Path, sizes: tuple[int, ...], first: int, dtype: str = "float32") -> None:
        no_nan = bytes(value & 0x3F for value in range(256))  # of any type
        data = bytearray(random.Random(1).randbytes(sum(sizes) + 2 * first).translate(no_nan))
        path.write_bytes(data)
        self.path, self.data, self.files = str(path), data, Local()
        self.layout = Checkpoint(str(path), "torch", files=[File(str(path), len(data))])
        at = first
        for number, size in enumerate(sizes):
            extent = Extent(str(path), at, size)
            self.layout.checksums.append(Checksum(extent, crc32(data[at : at + size]), f"record {number}"))
            count = size // WIDTHS[dtype]
            inner = Extent(str(path), at, count * WIDTHS[dtype])
            self.layout.tensors[f"t{number}"] = TensorEntry(
                f"t{number}", dtype, (count,), (Shard((0,), (count,), inner),)
            )
            at += size

    def span(self, first: int, last: int) -> Span:
        """What a manifest says about the bytes from `first` to `last`."""
        chunks = [self.data[at : min(at + CHUNK, last)] for at in range(first, last, CHUNK)]
        digests: tuple[Digest, ...] = tuple((xxh3_64_hexdigest(bytes(chunk)), None) for chunk in chunks)
        return Span(first, last - first, digests)

    def check(self, *spans: Span, workers: int = 2) -> Found:
        Path(self.path).write_bytes(self.data)
        return Stream(self.files, workers).run(cutting.windows(self.layout, {self.path: spans}, ALL))


@pytest.mark.parametrize("first", [0, 3, CHUNK - 1])
@pytest.mark.parametrize("covered", ["nothing", "everything", "each record", "a part"])
def test_each_byte_is_read_once(tmp_path: Path, first: int, covered: str) -> None:
    """Every byte is read once, and nothing is found in a whole file, wherever its CRCs, digests and numbers begin."""
    sizes = (5, 3 * CHUNK + 7, 4096, 40, 2 * CHUNK, 9)
    whole = Whole(tmp_path / "f.pt", sizes, first)
    places = [(each.extent.offset, each.extent.end) for each in whole.layout.checksums]
    spans = {
        "nothing": [], "everything": [(0, len(whole.data))], "each record": places,
        "a part": [(first + CHUNK // 3, first + 3 * CHUNK)],
    }[covered]  # fmt: skip
    found = whole.check(*(whole.span(*place) for place in spans))
    assert (found.chunks, found.nans, found.crcs, found.errors) == ([], [], [], {})
    assert found.bytes == (len(whole.data) if covered == "everything" else sum(sizes))


@pytest.mark.parametrize("dtype", sorted(NAN))
def test_nan_that_the_end_of_a_window_splits(tmp_path: Path, dtype: str) -> None:
    """A NaN is found at its own place, also if it begins in one window and ends in the next, and damage beside it is
    found by its digest and its CRC."""
    whole = Whole(tmp_path / "f.pt", (cutting.WINDOW + CHUNK,), 3, dtype)
    spans = whole.span(0, len(whole.data))
    for border in (CHUNK, cutting.WINDOW):
        at = 3 + (border - 3 - 1) // WIDTHS[dtype] * WIDTHS[dtype]  # the number that has the byte before the border
        kept = whole.data[at : at + WIDTHS[dtype]]
        whole.data[at : at + WIDTHS[dtype]] = NAN[dtype]
        found = whole.check(spans)
        assert [(each.offset, each.count) for each in found.nans] == [(at, 1)]
        assert found.chunks[0].offset == at // CHUNK * CHUNK
        assert [checksum.what for checksum, _ in found.crcs] == ["record 0"]
        whole.data[at : at + WIDTHS[dtype]] = INFINITE[dtype]
        assert whole.check().nans == []
        whole.data[at : at + WIDTHS[dtype]] = kept


def test_overlapping_spans(tmp_path: Path) -> None:
    """Spans that overlap are all checked, and a CRC counts its bytes once although they are read twice."""
    whole = Whole(tmp_path / "f.pt", (6 * CHUNK,), 0)
    found = whole.check(whole.span(0, 3 * CHUNK), whole.span(CHUNK // 2, 5 * CHUNK))
    assert (found.chunks, found.nans, found.crcs) == ([], [], [])
    assert found.bytes >= 6 * CHUNK


@pytest.mark.parametrize("dtype", sorted(NAN))
def test_nan_at_every_place(dtype: str) -> None:
    """One NaN is found at each place of arrays of many lengths, beside infinite numbers of both signs."""
    width = WIDTHS[dtype]
    scratch = np.empty(4096, np.uint8)
    some: Any = (bytes(width), INFINITE[dtype])
    with np.errstate(invalid="ignore"):
        for count in (1, 2, 3, 15, 16, 17, 31, 33, 63, 64, 65, 130):
            plain = b"".join(some[number % 2] for number in range(count))
            assert nans_in(memoryview(plain), dtype, scratch) is None
            for place in range(count):
                data = bytearray(plain)
                data[place * width : (place + 1) * width] = NAN[dtype]
                found = nans_in(memoryview(data), dtype, scratch)
                assert found is not None, (count, place)
                assert (found[0].tolist(), found[1]) == ([place], width)
