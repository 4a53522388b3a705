"""The Mount handle: it unmounts torchaos's mounts at once, even if they are in use, and no other mounts."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchaos.harness.rollback.file_handles import Mount, mounts

pytestmark = pytest.mark.needs("root")
TAG = f"torchaos-test-{os.getpid()}"


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "a b"  # escaped in mountinfo
    path.mkdir()
    (path / "below").write_text("still here")
    yield path
    while any(one.target == str(path) for one in mounts()):
        subprocess.run(["umount", "-l", path], check=True)


def mount(*words: object) -> None:
    subprocess.run(["mount", *map(str, words)], check=True)


def test_unmounts_even_while_in_use(target: Path) -> None:
    """A tmpfs of ours, mounted twice and with a file open in it: gone, and what lies below shows again."""
    handle = Mount.of(target, TAG)
    mount("-t", "tmpfs", TAG, target)
    mount("-t", "tmpfs", TAG, target)
    with open(target / "busy", "w"):
        assert not handle.is_undone()
        handle.undo()
    assert handle.is_undone()
    assert (target / "below").read_text() == "still here"


def test_bind_mount_is_known_by_its_folder(target: Path, tmp_path: Path) -> None:
    """A bind mount shows another source; the name of the folder that is bound must be the tag."""
    (tmp_path / TAG).mkdir()
    handle = Mount.of(target, TAG)
    mount("--bind", tmp_path / TAG, target)
    assert not handle.is_undone()
    handle.undo()
    assert handle.is_undone()


def test_spares_what_others_mounted(target: Path) -> None:
    """Another's mount at the same place stays; one on top of ours is not taken off, and that is said."""
    handle = Mount.of(target, TAG)
    mount("-t", "tmpfs", "others", target)
    handle.undo()
    assert handle.is_undone()
    assert [one.source for one in mounts() if one.target == str(target)] == ["others"]
    mount("-t", "tmpfs", TAG, target)
    mount("-t", "tmpfs", "others", target)
    with pytest.raises(ValueError, match="mounted on top of it"):
        handle.undo()
    assert not handle.is_undone()
    assert len([one for one in mounts() if one.target == str(target)]) == 3


def test_refuses_what_is_not_ours(target: Path) -> None:
    """Without our prefix, with a path for a tag, or where the tag is taken already, there is no handle."""
    for tag in ("tmpfs", "torchaos-a/b"):
        with pytest.raises(ValueError, match="no mount of torchaos"):
            Mount(str(target), tag)
    mount("-t", "tmpfs", TAG, target)
    with pytest.raises(ValueError, match="of that name already"):
        Mount.of(target, TAG)
