"""A recording, its bytes, and the trees that are made from them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from torchaos.harness.crash_explorer import folder_contents as module
from torchaos.harness.crash_explorer.folder_contents import Blobs, Content, Extent, Tree
from torchaos.harness.crash_explorer.fs_model import State
from torchaos.harness.crash_explorer.operations import Operation, OperationKind, Recording


@pytest.fixture
def blobs(tmp_path: Path) -> Blobs:
    return Blobs(tmp_path / "blobs")


def _file(blobs: Blobs, *writes: tuple[int, bytes]) -> Content:
    content = Content()
    for offset, data in writes:
        content = content.written(Extent(offset, len(data), blobs.add(data)))
    return content


@pytest.mark.parametrize(
    ("writes", "expected"),
    [
        ([(0, b"abcdef")], b"abcdef"),
        ([(0, b"abc"), (3, b"def")], b"abcdef"),
        ([(0, b"abcdef"), (2, b"XY")], b"abXYef"),
        ([(0, b"abc"), (6, b"g"), (2, b"WXYZ")], b"abWXYZg"),
        ([(3, b"def"), (0, b"ab")], b"ab\0def"),
        ([(0, b"abc"), (0, b"")], b"abc"),
        ([(4, b"e"), (0, b"ABCDEF")], b"ABCDEF"),
    ],
)
def test_writes_land_where_they_say(blobs: Blobs, writes: list[tuple[int, bytes]], expected: bytes) -> None:
    """Later writes replace earlier ones, and what nobody wrote is zero."""
    assert blobs.read(_file(blobs, *writes)) == expected


def test_a_file_is_cut_and_grows_with_zeros(blobs: Blobs) -> None:
    """Bytes beyond a truncation don't come back when the file grows again."""
    content = _file(blobs, (0, b"abcdef")).truncated(3).truncated(5)
    assert blobs.read(content) == b"abc\0\0"
    assert blobs.read(_file(blobs, (0, b"abcdef")).zeroed(1, 4)) == b"a\0\0\0ef"
    assert blobs.read(content, 1, 2) == b"bc"


def test_a_tree_is_what_it_was(blobs: Blobs, tmp_path: Path) -> None:
    """A folder that is taken and made again has the same files, folders and links."""
    folder = tmp_path / "was"
    (folder / "a" / "empty").mkdir(parents=True)
    (folder / "a" / "x").write_bytes(b"x" * 5000)
    (folder / "newest").symlink_to("a/x")
    tree = blobs.take(folder)
    blobs.make_tree(tree, tmp_path / "again")
    assert blobs.take(tmp_path / "again") == tree
    assert tree.folders == {"a", "a/empty"}
    assert tree.links == {"newest": "a/x"}
    assert (tmp_path / "again" / "newest").read_bytes() == b"x" * 5000


def test_a_sparse_file_of_20_gb_is_not_copied(blobs: Blobs, tmp_path: Path) -> None:
    """Only its data is kept, and the file that is made has the same holes."""
    folder, size = tmp_path / "was", 20 << 30
    folder.mkdir()
    with open(folder / "big", "wb") as file:
        file.truncate(size)
        file.seek(7 << 30)
        file.write(b"data")
    tree = blobs.take(folder)
    assert blobs.size() <= 1 << 20
    blobs.make_tree(tree, tmp_path / "again")
    made = (tmp_path / "again" / "big").stat()
    assert made.st_size == size
    assert made.st_blocks * 512 <= 1 << 20
    with open(tmp_path / "again" / "big", "rb") as file:
        file.seek(7 << 30)
        assert file.read(5) == b"data\0"


def test_large_files_are_links_and_heal(blobs: Blobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large file that nobody overwrites is made once. If a resumed job changes it in place, the next one gets a
    right one."""
    monkeypatch.setattr(module, "LARGE", 10)
    tree = Tree({"big": _file(blobs, (0, b"0123456789abcdef")), "small": _file(blobs, (0, b"s"))})
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    blobs.make_tree(tree, first, {"big", "small"})
    blobs.make_tree(tree, second, {"big", "small"})
    assert os.path.samefile(first / "big", second / "big")
    assert not os.path.samefile(first / "small", second / "small")
    (second / "big").write_bytes(b"changed")
    blobs.make_tree(tree, third, {"big", "small"})
    assert (third / "big").read_bytes() == b"0123456789abcdef"
    blobs.make_tree(tree, tmp_path / "copied")
    assert not os.path.samefile(tmp_path / "copied" / "big", third / "big")


def test_equal_bytes_are_kept_once(blobs: Blobs, tmp_path: Path) -> None:
    """A blob has the digest of its bytes, also for a reader that opens the store later."""
    assert blobs.add(b"same") == blobs.add(b"same")
    assert blobs.size() == 4
    content = _file(blobs, (0, b"same"))
    assert Blobs(tmp_path / "blobs").read(content) == b"same"


def test_a_recording_is_read_as_it_was_written(blobs: Blobs, tmp_path: Path) -> None:
    """Nothing is lost on the way to disk and back."""
    operations = (
        Operation(
            0, OperationKind.CREATE, "a", rank=0, pid=7, tid=8, file=1, step=3, phase="checkpoint_write", begun_s=1.5
        ),
        Operation(1, OperationKind.WRITE, "a", rank=0, file=1, offset=4, size=2, blob=blobs.add(b"xy")),
        Operation(2, OperationKind.RENAME, "a", to="b", rank=None, file=1),
        Operation(3, OperationKind.FSYNC_FOLDER, "", rank=1),
    )
    base = Tree({"old": _file(blobs, (0, b"old"))}, frozenset({"d"}), {"l": "old"})
    written = Recording(operations, frozenset({(1, 3)}), base, blobs, 1.0, 9.0, ("a sentence",))
    written.write(tmp_path / "recording")
    assert Recording.read(tmp_path / "recording") == written
    assert list(written.lines) == [0, 1, None]


def test_what_is_no_recording_is_refused(tmp_path: Path) -> None:
    """Another version, and files that are something else, are told apart from a recording."""
    (tmp_path / "recording.json").write_text('{"version": 99}')
    with pytest.raises(ValueError, match="version 99"):
        Recording.read(tmp_path)
    (tmp_path / "recording.json").write_text("{}")
    with pytest.raises(ValueError, match="not a recording"):
        Recording.read(tmp_path)


def test_a_state_makes_its_files(blobs: Blobs, tmp_path: Path) -> None:
    """A state writes the files that a resume finds, and equal files have an equal digest."""
    tree = Tree({"a/b": _file(blobs, (0, b"data"))}, frozenset({"a"}))
    state = State("one", "process death", 3, tree, None, 2, blobs)
    state.write_to(tmp_path / "state")
    assert (tmp_path / "state" / "a" / "b").read_bytes() == b"data"
    assert state.digest == State("two", "power loss", 4, blobs.take(tmp_path / "state"), None, 1, blobs).digest
