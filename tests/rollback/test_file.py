"""The File handle: it restores the file byte for byte, and touches no other file."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from torchaos.harness.rollback.file_handles import File
from torchaos.harness.rollback.handles import to_json
from torchaos.harness.rollback.reaper import UndoExecutor
from torchaos.harness.rollback.undo_log import UndoRecord


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "job" / "checkpoint.pt"
    path.parent.mkdir()
    path.write_bytes(b"weights" * 1000)
    path.chmod(0o640)
    os.utime(path, ns=(10**18, 10**18))
    return path


def _guard(file: Path, made: bytes | None = None) -> File:
    digest = None if made is None else hashlib.sha256(made).hexdigest()
    return File.of(file, file.parent, file.parent.parent, digest)


def test_damage_in_place(file: Path) -> None:
    """Flipped bytes, another mode and another time of change are all taken back."""
    handle = _guard(file)
    with open(file, "r+b") as damaged:
        damaged.write(b"W")
    file.chmod(0o600)
    handle.undo()
    found = file.stat()
    assert (file.read_bytes(), found.st_mode & 0o7777, found.st_mtime_ns) == (b"weights" * 1000, 0o640, 10**18)
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_removed(file: Path) -> None:
    """A file that the fault removed comes back."""
    handle = _guard(file)
    file.unlink()
    assert not handle.is_undone()
    handle.undo()
    assert handle.is_undone()


def test_put_in_its_place_by_the_fault(file: Path) -> None:
    """A file that the fault put in its place gives way."""
    handle = _guard(file, made=b"stale")
    other = file.with_name("other")
    other.write_bytes(b"stale")
    os.replace(other, file)
    handle.undo()
    assert file.read_bytes() == b"weights" * 1000


def test_spares_a_file_that_the_job_wrote_since(file: Path) -> None:
    """A newer file of the job's at the same path stays, also where it got the old one's inode number; it is said."""
    handle = _guard(file, made=b"stale")
    file.unlink()
    file.write_bytes(b"the next checkpoint")
    with pytest.raises(ValueError, match="there is another file now"):
        handle.undo()
    assert file.read_bytes() == b"the next checkpoint"
    assert not handle.is_undone()


def test_new_file_is_removed_only_if_ours(tmp_path: Path) -> None:
    """What was not there before goes when it is what the fault made, and stays when it is not."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    handles = [File.of(path, tmp_path, tmp_path, hashlib.sha256(b"fault").hexdigest()) for path in (ours, theirs)]
    ours.write_bytes(b"fault")
    theirs.write_bytes(b"somebody's")
    handles[0].undo()
    with pytest.raises(ValueError, match="another file"):
        handles[1].undo()
    assert not ours.exists()
    assert theirs.read_bytes() == b"somebody's"


def _yielding(file: Path) -> File:
    """A guarded checkpoint, damaged in place, with the fault's note."""
    handle = File.of(file, file.parents[1], file.parents[1], yields=True)
    with open(file, "r+b") as damaged:
        damaged.write(b"W")
    handle.note()
    assert not handle.is_undone()
    return handle


def test_a_folder_that_the_job_rotated_away(file: Path) -> None:
    """A checkpoint that went with its folder leaves nothing to put back."""
    handle = _yielding(file)
    file.unlink()
    file.parent.rmdir()
    handle.undo()
    assert handle.is_undone()
    assert not file.parent.exists()


@pytest.mark.parametrize("what", ["file", "folder"])
def test_a_file_that_the_job_moved(file: Path, what: str) -> None:
    """Damage that the job has moved along, by renaming the file or its folder, is put right where it is now."""
    handle = _yielding(file)
    if what == "file":
        now = file.rename(file.with_name("previous.pt"))
    else:
        now = file.parent.rename(file.parent.with_name("step-10")) / file.name
    assert not handle.is_undone()
    handle.undo()
    assert handle.is_undone()
    assert now.read_bytes() == b"weights" * 1000
    assert not file.exists()


@pytest.mark.parametrize("in_place", [True, False])
def test_a_checkpoint_that_the_job_wrote_anew_stays(file: Path, in_place: bool) -> None:
    """A newer checkpoint at the same path is the job's, whether it was renamed there or written into the old file."""
    handle = _yielding(file)
    if in_place:
        file.write_bytes(b"the next checkpoint")
    else:
        file.with_name("new").write_bytes(b"the next checkpoint")
        file.with_name("new").replace(file)
    handle.undo()
    assert handle.is_undone()
    assert file.read_bytes() == b"the next checkpoint"


@pytest.mark.parametrize("first", ["earlier", "later", "all"])
def test_two_faults_on_one_file(file: Path, first: str) -> None:
    """Whichever is asked to be taken back first, in the end the file is what it was, byte for byte."""
    before, executor = file.stat(), UndoExecutor(None)
    for name, damage in (("earlier", b"W"), ("later", b"XX")):
        handle = File.of(file, file.parent, file.parent.parent, yields=name == "earlier")
        executor.record_undo(UndoRecord(name, name, (to_json(handle),)))
        with open(file, "r+b") as damaged:
            damaged.write(damage)
        handle.note()
    orders: dict[str, list[str | None]] = {
        "earlier": ["earlier", "later"],
        "later": ["later", "earlier"],
        "all": [None],
    }
    for asked in orders[first]:
        assert all(each.verified for each in executor.undo(asked, "test"))
    after = file.stat()
    assert file.read_bytes() == b"weights" * 1000
    assert (after.st_mode, after.st_mtime_ns) == (before.st_mode, before.st_mtime_ns)
    assert executor.is_done


def test_refuses_links_and_the_outside(file: Path, tmp_path: Path) -> None:
    """Links, hard links, folders and paths outside the root are refused when guarding, each in a sentence."""
    link, hard = file.with_name("link"), file.with_name("hard")
    link.symlink_to(file)
    with pytest.raises(ValueError, match="symbolic link"):
        _guard(link)
    with pytest.raises(ValueError, match="outside"):
        File.of(file, tmp_path / "elsewhere", tmp_path)
    with pytest.raises(ValueError, match="not a regular file"):
        File.of(file.parent, tmp_path, tmp_path)
    with pytest.raises(ValueError, match="lacks the digest"):
        _guard(file.with_name("missing"))
    os.link(file, hard)
    with pytest.raises(ValueError, match="hard links"):
        _guard(file)


def test_does_not_follow_a_link_made_since(file: Path, tmp_path: Path) -> None:
    """A link that took the file's place, or its folder's, is not followed when undoing."""
    handle = _guard(file)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / file.name).write_bytes(b"precious")
    file.unlink()
    file.symlink_to(outside / file.name)
    with pytest.raises(ValueError, match="symbolic link"):
        handle.undo()
    file.unlink()
    file.parent.rmdir()
    file.parent.symlink_to(outside)
    with pytest.raises(ValueError, match="symbolic link"):
        handle.undo()
    assert (outside / file.name).read_bytes() == b"precious"


def test_a_damaged_copy_is_not_put_back(file: Path) -> None:
    """What can't be put back as it was is not put back at all, and that is said."""
    handle = _guard(file)
    file.write_bytes(b"damaged")
    assert handle.copy is not None
    Path(handle.copy).write_bytes(b"rotten")
    with pytest.raises(ValueError, match="has changed since it was saved"):
        handle.undo()
    assert file.read_bytes() == b"damaged"
