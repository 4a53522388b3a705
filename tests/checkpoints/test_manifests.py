"""Finds the save of a file whose path is not the path of any manifest."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest
import torch

from torchaos.harness.agent.saving.manifest_writer import Manifest
from torchaos.harness.checkpoints.files import Local
from torchaos.harness.checkpoints.verify import verify
from torchaos.harness.checkpoints.verify.manifests import Manifests
from torchaos.harness.host.disk import born_ns


def test_an_inode_that_is_used_again_is_no_rename(tmp_path: Path) -> None:
    """A renamed file is known by its inode. A file that was made after the manifest is another one, though it has the
    inode and the size of a file that is gone: file systems give an inode's number to the next file."""
    file = tmp_path / "step-1" / "rank-1.pt"
    file.parent.mkdir()
    file.write_bytes(b"x" * 10)
    if not born_ns(file):
        pytest.skip("this file system does not say when a file was made (statx, STATX_BTIME)")
    made = Manifest(tmp_path, "one.json", str(file), 0)
    with open(file, "rb") as opened:
        made.add(str(file), opened.fileno(), [(0, 10, "0" * 16)], "", raced=False)
    made.write()
    renamed = file.rename(tmp_path / "other.pt")
    found = Manifests.of([tmp_path / "one.json"])
    assert found.of_files({str(renamed): 10}) == {str(renamed): found.saved[0]}
    early = {**json.loads((tmp_path / "one.json").read_text()), "wall_s": time.time() - 3600}
    (tmp_path / "one.json").write_text(json.dumps(early))
    assert Manifests.of([tmp_path / "one.json"]).of_files({str(renamed): 10}) == {}


@pytest.mark.parametrize("name", ["last.pt.tmp", "last.tmp"])
def test_a_save_that_was_not_renamed_is_of_no_other_file(tmp_path: Path, name: str) -> None:
    """A job was killed between its second save and the rename: the file with the final name is of the first save,
    whether the suffix is added for the save, or put in place of the last one."""
    writing, final = tmp_path / name, tmp_path / "last.pt"
    for number in (1, 2):
        writing.write_bytes(bytes(10))
        made = Manifest(tmp_path, f"{number}.json", str(writing), 0)
        with open(writing, "rb") as opened:
            made.add(str(writing), opened.fileno(), [(0, 10, str(number) * 16)], "", raced=False)
        made.write()
        if number == 1:
            writing.rename(final)
    found = Manifests.of([tmp_path / "1.json", tmp_path / "2.json"])
    assert found.of_files({str(final): 10}) == {str(final): found.saved[0]}
    for manifest in (tmp_path / "1.json", tmp_path / "2.json"):
        raw = json.loads(manifest.read_text())
        manifest.write_text(json.dumps({**raw, "files": [{**one, "dev": 12345} for one in raw["files"]]}))
    found = Manifests.of([tmp_path / "1.json", tmp_path / "2.json"])
    assert found.of_files({str(final): 10}) == {str(final): found.saved[0]}, "a FUSE file system was another device"


@pytest.mark.parametrize("name", ["last.pt.tmp", "last.tmp"])
@pytest.mark.parametrize("copied", [False, True])
def test_a_save_that_still_has_its_unfinished_name_is_of_no_older_file(tmp_path: Path, name: str, copied: bool) -> None:
    """The file with the final name was put there before the second save began, and is no file of this run: a backup, or
    the state of an exploration. So it is of the first save. If the job copies its save, the file is newer than the
    save, and of the second."""
    writing, final = tmp_path / name, tmp_path / "last.pt"
    for number in (1, 2):
        if number == 2 and not copied:
            final.write_bytes(bytes(10))
            wait_for_the_next_tick(final)
        writing.write_bytes(bytes(10))
        made = Manifest(tmp_path, f"{number}.json", str(writing), 0)
        with open(writing, "rb") as opened:
            made.add(str(writing), opened.fileno(), [(0, 10, str(number) * 16)], "", raced=False)
        made.write()
        if number == 1:
            writing.unlink()
    if not born_ns(writing):
        pytest.skip("this file system does not say when a file was made (statx, STATX_BTIME)")
    if copied:
        shutil.copyfile(writing, final)
    found = Manifests.of([tmp_path / "1.json", tmp_path / "2.json"])
    assert found.of_files({str(final): 10}) == {str(final): found.saved[copied]}


def test_a_save_without_digests_is_not_compared_with_an_earlier_save(tmp_path: Path) -> None:
    """The process was killed after its second save, before it had written the digests: the file is not called damaged
    because it differs from the first save, and no manifest covers it. A torn file is still found, by its size."""
    final = tmp_path / "last.pt"
    for number in (1, 2):
        torch.save({"w": torch.full((64,), float(number))}, final)
        made = Manifest(tmp_path, f"rank0-attempt0-{number}-1.json", str(final), 0)
        made.announce(str(final), final.stat())
        if number == 1:
            made.add_whole(str(final), final.stat(), [(0, final.stat().st_size, "0" * 16)])
            made.write()
    found = verify(Local(), str(final), Manifests.load(tmp_path))
    assert (found.problems, found.unseen, found.manifest) == ([], [], False)
    os.truncate(final, final.stat().st_size - 1)
    assert verify(Local(), str(final), Manifests.load(tmp_path)).problems
    (tmp_path / "rank0-attempt0-2-1.json").unlink()
    torch.save({"w": torch.full((64,), 2.0)}, final)
    assert verify(Local(), str(final), Manifests.load(tmp_path)).problems, "with the manifest of another save"


def wait_for_the_next_tick(file: Path) -> None:
    """Waits until a new file is younger than this file: the times of files come from a clock that ticks each 4 ms."""
    other = file.with_name("tick")
    other.touch()
    while other.stat().st_mtime_ns <= file.stat().st_mtime_ns:
        other.touch()
    other.unlink()
