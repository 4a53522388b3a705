"""What a resume asks of its folder: noted by a real FUSE server, and compared between trees."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from torchaos.harness.crash_explorer.folder_contents import Content, Extent, Tree
from torchaos.harness.crash_explorer.fuse_mount import ReadSet, ReadTracer, ReadTracers, TracedResume
from torchaos.harness.crash_explorer.recording_log import Query
from torchaos.harness.rollback.file_handles import mounts

# A job that takes the newest folder, and reads one of its files. Argument: the folder.
JOB = """
import os, sys
newest = os.path.join(sys.argv[1], max(os.listdir(sys.argv[1])))
if os.path.exists(newest + "/ready") and os.path.islink(sys.argv[1] + "/link"):
    print(open(newest + "/weights").read())
"""


@pytest.mark.needs("fuse")
def test_questions_of_a_job_are_noted(tmp_path: Path) -> None:
    """Names, files that are there and files that are not, and the file that was read through a link, until a given
    time. The other checkpoint, and a file that nobody looked at, are not among them."""
    folder = tmp_path / "checkpoints"
    for name in ("1/weights", "1/ready", "2/weights", "2/ready", "2/moments"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    (folder / "0link").symlink_to("2")
    tracer = ReadTracer(folder, tmp_path / "home")
    with tracer:
        subprocess.run([sys.executable, "-S", "-c", JOB, str(folder)], check=True)
        (folder / "0link").rename(folder / "link")
        said = subprocess.run([sys.executable, "-S", "-c", JOB, str(folder)], check=True, capture_output=True)
        ended_s = time.monotonic()
        assert (folder / "2/moments").read_text() == "2/moments"
    assert said.stdout == b"2/weights\n"
    assert tracer.left == []
    found = tracer.until(ended_s)
    assert found
    asked = {
        (Query.NAMES, ""),
        (Query.IS, "2"),
        (Query.IS, "2/ready"),
        (Query.KIND, "0link"),
        (Query.BYTES, "2/weights"),
    }
    assert asked <= found.asked
    assert not {path for _ask, path in found.asked} & {"1/weights", "1/ready", "2/moments"}
    assert tracer.until(0.0) is None
    after = tracer.until(time.monotonic())
    assert after
    assert (Query.BYTES, "2/moments") in after.asked - found.asked
    assert ReadSet.from_json(found.to_json()) == found  # type: ignore[arg-type]
    assert not any(mount.target == str(folder) for mount in mounts())


# A job that saves anew over what a death left, moves a folder, and reads what it wrote. Argument: the folder.
SAVER = """
import os, sys
os.chdir(sys.argv[1])
open("torn.tmp", "w").write("whole")
os.replace("torn.tmp", "last")
os.mkdir("new.tmp")
open("new.tmp/part", "w").write("part")
os.rename("new.tmp", "new")
print(open("last").read(), open("new/part").read())
os.rename("old", "older")
os.unlink("gone")
os.stat("sized")
open("sized", "w")
open("grown", "a").write("more")
"""


@pytest.mark.needs("fuse")
def test_what_a_job_writes_itself_is_not_asked(tmp_path: Path) -> None:
    """A torn file that is written anew may have any bytes and any size. A file that was looked at before may not; of a
    file that grows, the bytes count, and of a folder that is moved, all that is in it."""
    folder = tmp_path / "checkpoints"
    (folder / "old").mkdir(parents=True)
    for name in ("torn.tmp", "last", "gone", "sized", "grown", "old/file"):
        (folder / name).write_text("before")
    tracer = ReadTracer(folder, tmp_path / "home")
    with tracer:
        subprocess.run([sys.executable, "-S", "-c", SAVER, str(folder)], check=True)
    found = tracer.until(time.monotonic())
    assert found
    asks = {path: {ask for ask, of in found.asked if of == path} for _ask, path in found.asked}
    assert asks["torn.tmp"] == asks["last"] == asks["gone"] == {Query.KIND}
    assert asks["new.tmp"] == {Query.KIND}
    assert "new/part" not in asks
    assert Query.ALL in asks["old"]
    assert Query.IS in asks["sized"]
    assert Query.BYTES in asks["grown"]


# A job that first looks at a folder in some way, and then removes it. Arguments: the folder, and the way.
REMOVER = """
import os, shutil, sys
os.chdir(sys.argv[1])
for folder in ("1.partial", "2.partial"):
    how = sys.argv[2] if folder == "1.partial" else ""
    if how == "lists":
        os.listdir(folder)
    elif how == "reads":
        open(folder + "/sub/b").read()
    elif how == "picks":
        for name in os.listdir(folder):
            os.path.getsize(folder + "/" + name)
    elif how == "keeps":
        shutil.copytree(folder, "copy")
    shutil.rmtree(folder)
"""


@pytest.mark.needs("fuse")
@pytest.mark.parametrize("how", ["", "lists", "reads", "picks", "keeps"])
def test_a_folder_that_is_removed_at_once_may_have_more_files(tmp_path: Path, how: str) -> None:
    """Of a folder that a job lists and removes with all that is in it, only the kinds of names count. If the job looks
    at it before in any other way, it counts what it looked at."""
    folder = tmp_path / "checkpoints"
    for name in ("1.partial/a", "1.partial/sub/b", "2.partial/a", "2.partial/sub/b"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("before")
    tracer = ReadTracer(folder, tmp_path / "home")
    with tracer:
        subprocess.run([sys.executable, "-S", "-c", REMOVER, str(folder), how], check=True)
    found = tracer.until(time.monotonic())
    assert found
    asks = {path: {ask for ask, of in found.asked if of == path} for _ask, path in found.asked}
    assert asks["2.partial"] - {Query.IS} == {Query.CLEARED}
    assert not [path for path in asks if path.startswith("2.partial/")]
    looked = {"": set(), "lists": {Query.NAMES}, "reads": set(), "picks": {Query.NAMES}, "keeps": {Query.NAMES}}[how]
    assert asks["1.partial"] - {Query.IS} == looked | {Query.CLEARED}
    assert (Query.BYTES in asks.get("1.partial/sub/b", set())) is (how in ("reads", "keeps"))
    assert (Query.IS in asks.get("1.partial/a", set())) is (how in ("picks", "keeps"))
    assert list(folder.iterdir()) == ([folder / "copy"] if how == "keeps" else [])


@pytest.mark.needs("fuse")
def test_a_folder_that_is_not_removed_was_listed(tmp_path: Path) -> None:
    """A job that lists a folder, and removes some of its files: the names count, and what the removed files were."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    for name in ("a.tmp", "b"):
        (folder / name).write_text("before")
    job = "import os, sys; os.chdir(sys.argv[1]); [os.unlink(x) for x in os.listdir('.') if x.endswith('.tmp')]"
    tracer = ReadTracer(folder, tmp_path / "home")
    with tracer:
        subprocess.run([sys.executable, "-S", "-c", job, str(folder)], check=True)
    found = tracer.until(time.monotonic())
    assert found
    assert {(Query.NAMES, ""), (Query.KIND, "a.tmp")} <= found.asked
    assert not any(ask is Query.CLEARED for ask, _path in found.asked)


@pytest.mark.needs("fuse")
def test_a_server_that_died_knows_nothing(tmp_path: Path) -> None:
    """If the server is killed, not all questions are known, so there are none to compare by."""
    tracer = ReadTracer(tmp_path / "checkpoints", tmp_path / "home")
    with tracer:
        assert tracer._server is not None
        tracer._server.kill()
    assert tracer.until(time.monotonic()) is None


@pytest.mark.needs("fuse")
@pytest.mark.parametrize("killed", ["nothing", "the next server", "the reaper"])
def test_many_resumes_are_noted_one_after_the_other(tmp_path: Path, killed: str) -> None:
    """The server of the next resume starts ahead, and nothing is mounted before that resume. If this server or the
    shared reaper is killed, others take their place. In the end, nothing is left."""
    folder, tracers = tmp_path / "checkpoints", ReadTracers(tmp_path / "home")
    for name in ("first", "second", "third"):
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(name)
        traced = TracedResume(folder, tracers)
        with traced:
            assert (folder / name).read_text() == name
        assert not any(mount.target == str(folder) for mount in mounts())
        tracer, ahead, reaper = traced._tracer, tracers._next, tracers._reaper
        assert tracer
        found = tracer.until(time.monotonic())
        assert found
        assert {path for ask, path in found.asked if ask is Query.BYTES} == {name}
        assert (traced.left, traced.failed) == ([], "")
        assert ahead
        assert ahead.is_ready
        assert reaper
        dies = {"the next server": ahead._server, "the reaper": reaper._process}.get(killed)
        if dies:
            dies.kill()
            dies.wait()
            while killed == "the reaper" and not reaper._lost:  # the client notices it in a thread
                time.sleep(0.01)
    tracers.close()
    assert not (tmp_path / "home").exists()
    assert not ahead or not ahead.is_ready


@pytest.mark.parametrize("kind", ["looks", "recording"])
def test_without_a_permit_nothing_is_covered(tmp_path: Path, kind: str) -> None:
    """If the harness dies before it has guarded the undo, the end of the input is no permit."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    argv = [kind, folder, "a-source", tmp_path / "switch", tmp_path]
    done = subprocess.run(
        [sys.executable, "-m", "torchaos.harness.crash_explorer.fuse_servers", *map(str, argv)],
        stdin=subprocess.DEVNULL, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 1
    assert not any(mount.target == str(folder) for mount in mounts())


def _tree(weights: str = "w", size: int = 8, more: str = "") -> Tree:
    files = {"2/weights": Content(size, (Extent(0, size, weights),)), **({more: Content()} if more else {})}
    return Tree(files, frozenset({"1", "2"}), {"link": "2"})


@pytest.mark.parametrize(("ask", "path", "other", "same"), [
    (Query.BYTES, "2/weights", _tree("v"), False),
    (Query.BYTES, "2/moments", _tree("v"), True),
    (Query.IS, "2/weights", _tree("v"), True),
    (Query.IS, "2/weights", _tree(size=7), False),
    (Query.IS, "2", _tree(size=7), True),
    (Query.IS, "2/ready", _tree(more="2/ready"), False),
    (Query.IS, "2/ready", _tree(more="3"), True),
    (Query.NAMES, "2", _tree(more="2/ready"), False),
    (Query.NAMES, "", _tree(more="2/ready"), True),
    (Query.NAMES, "", _tree(more="3"), False),
    (Query.NAMES, "", Tree(_tree().files, frozenset({"2"}), {"link": "2", "1": "2"}), False),
    (Query.KIND, "2/weights", _tree(size=7), True),
    (Query.KIND, "2/ready", _tree(more="2/ready"), False),
    (Query.CLEARED, "2", _tree("v", size=7), True),
    (Query.CLEARED, "2", _tree(more="2/weights1"), False),
    (Query.CLEARED, "", _tree(more="4/weights"), True),
    (Query.CLEARED, "", _tree(more="4"), False),
    (Query.CLEARED, "3", _tree(more="3/weights"), False),
    (Query.ALL, "2", _tree(size=7), False),
    (Query.ALL, "2", _tree(more="3"), True),
    (Query.IS, "link", Tree(_tree().files, _tree().folders, {"link": "1"}), False),
    (Query.IS, "1", Tree({**_tree().files, "1": Content()}, frozenset({"2"}), {"link": "2"}), False),
])  # fmt: skip
def test_trees_that_answer_alike(ask: Query, path: str, other: Tree, same: bool) -> None:
    """Only what was asked counts: a file's bytes only if they were read, its size if it was looked at, a folder's names
    if they were listed."""
    assert ReadSet(frozenset({(ask, path)})).same(_tree(), other) is same


def test_the_server_starts_without_large_libraries() -> None:
    """Each resume starts a server. numpy and pydantic, which the harness uses, take longer to import than all else."""
    module = "torchaos.harness.crash_explorer.fuse_servers"
    code = f"import {module}, sys; print(sorted({{'numpy', 'pydantic'}} & sys.modules.keys()))"
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert said.stdout == "[]\n"
