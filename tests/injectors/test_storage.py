"""storage.*: a real file system over the checkpoint folder, in which chosen operations of chosen ranks fail."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from torchaos.harness.fault_drivers.storage_faults import Rules
from torchaos.harness.interfaces import ChaosError, Target
from torchaos.harness.record.record import Record
from torchaos.harness.rollback.file_handles import Mount, mounts

from .conftest import Operation

pytestmark = pytest.mark.needs("fuse")
PATIENCE_S = 200.0

# Writes, syncs and reads a file as a rank; prints what became of each: 0, or the number of the error.
RANK = """
import json, os, sys, time
folder, data = sys.argv[1], b"x" * int(sys.argv[2])
def attempt(work):
    began = time.monotonic()
    try:
        work()
        return 0, time.monotonic() - began
    except OSError as error:
        return error.errno, time.monotonic() - began
def write():
    with open(f"{folder}/new{os.environ.get('RANK', '')}", "wb", buffering=0) as file:
        for start in range(0, len(data), 4096):
            file.write(data[start:start + 4096])
def sync():
    with open(f"{folder}/old", "r+b") as file:
        os.fsync(file.fileno())
def read():
    with open(f"{folder}/old", "rb") as file:
        assert file.read() == b"as it was"
print(json.dumps({work.__name__: attempt(work) for work in (write, sync, read)}))
"""


def rank(folder: Path, number: int | None, size: int = 8192) -> subprocess.Popen[str]:
    """A process that is that rank, or (None) nobody's."""
    identity = {} if number is None else {"RANK": str(number), "TORCHELASTIC_RUN_ID": "x"}
    argv = [sys.executable, "-S", "-c", RANK, str(folder), str(size)]
    return subprocess.Popen(argv, env={**os.environ, **identity}, stdout=subprocess.PIPE, text=True)


def said(process: subprocess.Popen[str]) -> dict[str, tuple[int, float]]:
    output, _ = process.communicate(timeout=PATIENCE_S)
    return {name: tuple(value) for name, value in json.loads(output).items()}


def errors(folder: Path, number: int | None, size: int = 8192) -> dict[str, int]:
    return {name: code for name, (code, _took) in said(rank(folder, number, size)).items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoints"
    path.mkdir()
    (path / "old").write_bytes(b"as it was")
    return path


@pytest.fixture
def fault(folder: Path) -> Iterator[Callable[..., Operation]]:
    """Faults at rank 1, all taken back in the end."""
    made: list[Operation] = []

    def apply(name: str, **params: Any) -> Operation:
        made.append(Operation(name, folder, target=Target((1,)), **params))
        return made[-1].apply()

    yield apply
    for one in made:
        assert one.take_back()
    assert not [one for one in mounts() if one.target == str(folder)]


FINE = {"write": 0, "sync": 0, "read": 0}


@pytest.mark.parametrize(
    ("name", "params", "wrong"),
    [
        ("storage.error", {"error": "EIO"}, {"write": errno.EIO, "sync": errno.EIO}),
        ("storage.error", {"error": "ESTALE", "on": "reads"}, {"read": errno.ESTALE}),
        ("storage.fsync_error", {}, {"sync": errno.EIO}),
        ("storage.read_only", {}, {"write": errno.EROFS, "sync": errno.EROFS}),
        ("storage.full", {}, {"write": errno.ENOSPC}),
    ],
)
def test_it_fails_for_that_rank_alone(
    folder: Path, fault: Callable[..., Operation], name: str, params: Any, wrong: dict[str, int]
) -> None:
    """Rank 1 is refused what the fault names, rank 0 and strangers are not, and afterwards nobody is; the file system's
    own log is the evidence."""
    one = fault(name, **params)
    assert errors(folder, 1) == {**FINE, **wrong}
    assert errors(folder, 0) == FINE
    assert errors(folder, None) == FINE
    (probe,) = one.injector.probes(one.site)
    probe.sample(one.site.emit)
    events = [data for _kind, data in one.events if data.get("what") == "spoilt"]
    assert {data["rank"] for data in events} == {1}
    assert one.take_back()
    assert errors(folder, 1) == FINE


def test_full_after_so_many_bytes(folder: Path, fault: Callable[..., Operation]) -> None:
    """What fits is written, the rest is not, and the file system says that it has no room."""
    fault("storage.full", left=3 * 4096)
    assert errors(folder, 1, size=3 * 4096)["write"] == 0
    assert errors(folder, 1, size=4096)["write"] == errno.ENOSPC
    assert os.statvfs(folder).f_bavail == 0


def test_full_is_as_a_file_system_that_is_really_full(folder: Path, fault: Callable[..., Operation]) -> None:
    """Beside a tmpfs of eight pages, of which one is taken: the same calls fail with the same errors, as much is left
    of the file that did not fit, and as much room is said to be there."""
    look = "import os, sys; at = os.statvfs(sys.argv[1]); print(os.path.getsize(sys.argv[1] + '/new1'), at.f_bavail)"
    real = (
        'mount -t tmpfs -o size=32k,noswap full "$1" 2>/dev/null || mount -t tmpfs -o size=32k full "$1" && '
        'printf "as it was" > "$1/old" && "$0" -S -c "$2" "$1" 65536 && "$0" -S -c "$3" "$1"'
    )
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    argv = ["unshare", "--mount", *user, "sh", "-c", real, sys.executable, str(folder), RANK, look]
    environment = {**os.environ, "RANK": "1", "TORCHELASTIC_RUN_ID": "x"}
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    if done.returncode != 0:
        pytest.skip(f"needs a mount namespace (root or user namespaces): {done.stderr.strip()}")
    codes, room = done.stdout.splitlines()
    fault("storage.full", left=7 * 4096)
    assert errors(folder, 1, size=65536) == {name: code for name, (code, _took) in json.loads(codes).items()}
    listed = subprocess.run([sys.executable, "-S", "-c", look, str(folder)], capture_output=True, text=True)
    assert listed.stdout.split() == room.split() == [str(7 * 4096), "0"]


def test_what_is_written_meanwhile_is_there_afterwards(folder: Path, fault: Callable[..., Operation]) -> None:
    """The folder below is the very one: renames, links and modes of a healthy rank are there when it is uncovered."""
    one = fault("storage.error")
    (folder / "step-10.partial").mkdir()
    (folder / "step-10.partial" / "weights").write_bytes(b"w" * 300_000)
    (folder / "step-10.partial").rename(folder / "step-10")
    (folder / "step-10" / "weights").chmod(0o600)
    (folder / "latest").symlink_to("step-10")
    seen = sorted(path.name for path in folder.iterdir())
    assert one.take_back()
    assert sorted(path.name for path in folder.iterdir()) == seen == ["latest", "old", "step-10"]
    assert (folder / "latest" / "weights").read_bytes() == b"w" * 300_000
    assert (folder / "step-10" / "weights").stat().st_mode & 0o777 == 0o600


def test_inodes_are_those_of_the_files(folder: Path, fault: Callable[..., Operation]) -> None:
    """Below the fault, a file has the inode that it has afterwards, for a stat and in a listing of its folder: the
    manifest of a save knows a renamed file by its inode."""
    own = folder / "saved.pt"
    own.write_bytes(b"x")
    real = own.stat()
    fault("storage.error")
    assert own.stat().st_dev != real.st_dev, "the folder is not covered"
    assert own.stat().st_ino == real.st_ino
    assert {entry.name: entry.inode() for entry in os.scandir(folder)}["saved.pt"] == real.st_ino


def test_slow(folder: Path, fault: Callable[..., Operation]) -> None:
    """Each of two writes takes the delay longer, for that rank; a rank that is not hit takes none of it."""
    fault("storage.slow", delay=1.0)
    took = {number: said(rank(folder, number))["write"][1] for number in (0, 1)}
    assert took[1] > 2 * 1.0
    assert took[0] < took[1] - 1.0


def test_a_stall_lasts_until_it_is_taken_back(folder: Path, fault: Callable[..., Operation]) -> None:
    """The rank hangs in the kernel, where not even SIGKILL ends it; the undo lets it go on, with nothing lost."""
    for number in (0, 1):
        (folder / f"new{number}").touch()  # a file that hangs while it is made would block the folder for all
    one = fault("storage.stall", on="writes")
    process = rank(folder, 1)
    log = one.site.undo_copies / "damage.log"
    end = time.monotonic() + PATIENCE_S
    while not (log.exists() and log.read_bytes()):
        assert time.monotonic() < end, f"nothing hung; {process.poll()=}"
        time.sleep(0.01)
    assert errors(folder, 0) == FINE
    assert process.poll() is None
    assert one.take_back()
    assert {name: code for name, (code, _took) in said(process).items()} == FINE
    assert (folder / "new1").stat().st_size == 8192


def test_the_server_ends_with_the_mount(folder: Path, fault: Callable[..., Operation]) -> None:
    """No process of ours is left once it is unmounted."""
    one = fault("storage.error")
    tag = next(mount.source for mount in mounts() if mount.target == str(folder)).encode()
    assert one.take_back()
    end = time.monotonic() + PATIENCE_S
    while left := [path for path in Path("/proc").glob("[0-9]*/cmdline") if _holds(path, tag)]:
        assert time.monotonic() < end, f"{left} is left"
        time.sleep(0.05)


def test_taken_back_before_it_is_mounted(folder: Path, tmp_path: Path) -> None:
    """The harness dies while the server starts, and the reaper finds no mount yet: the server leaves by itself."""
    rules = Rules(("write",), (1,), error="EIO").to_json()
    server = subprocess.Popen(
        [sys.executable, "-m", "torchaos.harness.fault_drivers.storage_fs", str(folder), "torchaos-late",
         str(tmp_path / "gone"), str(tmp_path / "log")], stdin=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        server.communicate(rules, timeout=PATIENCE_S)
        assert not [one for one in mounts() if one.target == str(folder)]
    finally:
        server.kill()
        Mount(str(folder), "torchaos-late").undo()


def test_no_folder_yet(tmp_path: Path) -> None:
    """Nothing is mounted over a folder that is not there: a sentence says so."""
    with pytest.raises(ChaosError, match="no such folder yet"):
        Operation("storage.error", tmp_path / "none", target=Target((1,))).apply()


def test_what_the_agent_reads_proves_nothing(folder: Path, fault: Callable[..., Operation]) -> None:
    """The agent's own threads, which read what was saved for its manifest, are not refused, and are no evidence."""
    one = fault("storage.error", on="reads")
    script = """
import sys
from pathlib import Path
from torchaos.harness.agent.saving.digesting_writers import Helper
found = []
helper = Helper()
helper.do(lambda: found.append(Path(sys.argv[1]).read_bytes()))
helper.finish()
assert found == [b"as it was"], found
"""
    environment = {**os.environ, "RANK": "1", "TORCHELASTIC_RUN_ID": "x"}
    argv = [sys.executable, "-c", script, str(folder / "old")]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    (probe,) = one.injector.probes(one.site)
    probe.sample(one.site.emit)
    assert not [data for _kind, data in one.events if data.get("what") == "spoilt"]


def test_felt_needs_a_rank_that_was_hit(folder: Path, fault: Callable[..., Operation]) -> None:
    """A file system that nobody used proves nothing."""
    one = fault("storage.error")
    record = Record.__new__(Record)
    object.__setattr__(record, "events", ())
    assert one.injector.felt(record, "damage") is None


def _holds(path: Path, word: bytes) -> bool:
    try:
        return word in path.read_bytes()
    except OSError:
        return False
