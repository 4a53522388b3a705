"""The recorder over a real folder: what it records, that it does not change the files, and that it is unmounted."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from saves import contents
from waiting import wait_until

from torchaos.harness.crash_explorer import state_selection
from torchaos.harness.crash_explorer.crash_points import CrashPoints
from torchaos.harness.crash_explorer.operations import Operation, OperationKind, Recording
from torchaos.harness.crash_explorer.recorded_run import Recorder
from torchaos.harness.interfaces import ChaosError
from torchaos.harness.protocol.agent_plan import AgentPlan
from torchaos.harness.rollback.file_handles import mounts
from torchaos.harness.running import capabilities

pytestmark = pytest.mark.needs("fuse")

# A rank that saves in all the ways there are; argument: the folder.
RANK = """
import mmap, os, sys
os.chdir(sys.argv[1])
me = os.environ["RANK"]
os.mkdir(me)
with open(f"{me}/tmp", "wb", buffering=0) as file:
    file.write(b"x" * 3000)
    file.write(b"y" * 3000)
    os.fsync(file.fileno())
os.rename(f"{me}/tmp", f"{me}/kept")
folder = os.open(me, os.O_RDONLY)
os.fsync(folder)
with open(f"{me}/kept", "r+b", buffering=0) as file:
    file.seek(5)
    file.write(b"again")
    os.fdatasync(file.fileno())
with open(f"{me}/kept2", "wb", buffering=0) as file:
    file.write(b"old")
with open(f"{me}/kept2", "wb", buffering=0) as file:
    file.write(b"new")
os.truncate(f"{me}/kept2", 2)
os.link(f"{me}/kept2", f"{me}/kept3")
os.symlink("kept2", f"{me}/newest")
os.unlink(f"{me}/kept2")
os.mkdir(f"{me}/gone")
os.rmdir(f"{me}/gone")
"""
EXPECTED = """
mkdir R | create R/tmp | write R/tmp 0+6000 | fsync R/tmp | close R/tmp | rename R/tmp R/kept
fsync_folder R | open R/kept | write R/kept 5+5 | fdatasync R/kept | close R/kept
create R/kept2 | write R/kept2 0+3 | close R/kept2 | open R/kept2 | truncate R/kept2 0 | write R/kept2 0+3
close R/kept2 | truncate R/kept2 2 | link R/kept2 R/kept3 | symlink R/newest kept2 | unlink R/kept2
mkdir R/gone | rmdir R/gone
"""


def _rank(program: str, folder: Path, rank: int, *before: str) -> subprocess.Popen[bytes]:
    identity = {"RANK": str(rank), "TORCHELASTIC_RUN_ID": "x"}
    return subprocess.Popen([*before, sys.executable, "-S", "-c", program, str(folder)], env={**os.environ, **identity})


def _joined(lines: Iterable[str]) -> list[str]:
    """With writes that follow each other as one: FUSE gets a write in parts that end with a page."""
    found: list[str] = []
    for line in lines:
        last = re.fullmatch(r"(write \S+) (\d+)\+(\d+)", found[-1]) if found else None
        this = re.fullmatch(r"(write \S+) (\d+)\+(\d+)", line)
        if last and this and last[1] == this[1] and int(last[2]) + int(last[3]) == int(this[2]):
            found[-1] = f"{last[1]} {last[2]}+{int(last[3]) + int(this[3])}"
        else:
            found.append(line)
    return found


def _told(operation: Operation) -> str:
    what = {OperationKind.WRITE: f" {operation.offset}+{operation.size}", OperationKind.TRUNCATE: f" {operation.size}"}
    to = f" {operation.to}" if operation.to else ""
    return f"{operation.kind.value} {operation.path}{to}{what.get(operation.kind, '')}"


def _record(tmp_path: Path, program: str = RANK, ranks: int = 2) -> tuple[Recording, Path]:
    folder = tmp_path / "checkpoints"
    with Recorder(folder, tmp_path / "home") as recorder:
        processes = [_rank(program, folder, rank) for rank in range(ranks)]
        assert [process.wait(300) for process in processes] == [0] * ranks
    assert recorder.left == []
    return recorder.recording, folder


def test_it_sees_everything_in_order(tmp_path: Path) -> None:
    """Each rank's operations are there, in their order, with their rank and bytes; the files stay after it; and the
    states of the recorded run end with what really lies there."""
    recording, folder = _record(tmp_path)
    expected = [each.strip() for line in EXPECTED.strip().splitlines() for each in line.split("|")]
    for rank in range(2):
        mine = [operation for operation in recording.operations if operation.rank == rank]
        assert _joined(map(_told, mine)) == [re.sub(r"\bR\b", str(rank), each) for each in expected]
        assert len({operation.pid for operation in mine}) == 1
    times = [(operation.begun_s, operation.ended_s) for operation in recording.operations]
    assert all(recording.began_s < begun <= ended < recording.ended_s for begun, ended in times)
    last = max(state_selection.process_death_states(CrashPoints(recording)), key=lambda state: state.moments[-1:])
    last.write_to(tmp_path / "again")
    assert contents(tmp_path / "again") == contents(folder)
    assert not any(mount.target == str(folder) for mount in mounts())


def test_without_stamps_only_the_seen_order_is_tried(tmp_path: Path) -> None:
    """If it is not known when ranks wait for each other, no moment is tried that was not seen, and it is said."""
    recording, _folder = _record(tmp_path)
    assert CrashPoints(recording).moments == len(recording.operations) + 1
    assert [sentence.split(",")[0] for sentence in recording.unsure] == ["rank 0 writes", "rank 1 writes"]


# A rank with an agent: it writes a shard, waits for the others in a collective, and rank 0 writes a marker.
WAITING_RANK = """
import os, sys
from pathlib import Path
from torchaos.harness.protocol.collective_stamps import Stamps
folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
stamps = Stamps(Path(os.environ["TORCHAOS_PLAN"]).parent / "stamps" / f"{rank}.stamps", rank, 0, os.getpid())
with open(folder / f"shard-{rank}", "wb", buffering=0) as file:
    file.write(b"x" * 100)
number = stamps.begin("barrier", stamps.group("0", [0, 1]), 4, 1)
print("waits", flush=True)
sys.stdin.readline()
stamps.returned(number)
if rank == 0:
    (folder / "marker").touch()
"""


def test_with_stamps_all_orders_are_tried_that_are_possible(tmp_path: Path) -> None:
    """The agent's stamps say that both ranks waited for each other before the marker: shards are tried in all orders,
    and the marker never without both of them."""
    folder, agent = tmp_path / "checkpoints", tmp_path / "agent"
    (agent / "stamps").mkdir(parents=True)
    AgentPlan("run", str(agent / "events"), ("stamps",)).write(agent / "plan.json")
    with Recorder(folder, tmp_path / "home") as recorder:
        ranks = []
        for rank in range(2):
            identity = {"RANK": str(rank), "TORCHELASTIC_RUN_ID": "x", "TORCHAOS_PLAN": str(agent / "plan.json")}
            ranks.append(subprocess.Popen(
                [sys.executable, "-c", WAITING_RANK, str(folder)], env={**os.environ, **identity}, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            ))  # fmt: skip
        assert [rank.stdout.readline() for rank in ranks if rank.stdout] == ["waits\n"] * 2
        assert [rank.communicate("go\n", 60) and rank.returncode for rank in ranks] == [0, 0]
    recording = recorder.recording
    assert recording.unsure == ()
    assert (
        CrashPoints(recording, symmetry=False).moments == 4 * 4 + 2
    )  # create, write, close of each; then create and close
    assert len(CrashPoints(recording, symmetry=False).classes) == 3 * 3 + 1


def test_what_was_there_before_is_the_base(tmp_path: Path) -> None:
    """Files of before the recording are in every state until somebody changes them."""
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "old").write_bytes(b"old")
    program = "import os, sys; os.rename(sys.argv[1] + '/old', sys.argv[1] + '/new')"
    recording, _folder = _record(tmp_path, program, ranks=1)
    found = [
        {path: recording.blobs.read(c) for path, c in s.tree.files.items()}
        for s in state_selection.process_death_states(CrashPoints(recording))
    ]
    assert found == [{"old": b"old"}, {"new": b"old"}]


def test_a_file_that_is_removed_while_it_is_open(tmp_path: Path) -> None:
    """It is gone at once, as on a disk, although FUSE keeps it under another name for a while."""
    program = """
import os, sys
os.chdir(sys.argv[1])
with open("gone", "wb", buffering=0) as file:
    file.write(b"1")
    os.unlink("gone")
    file.write(b"2")
open("last", "wb").close()
"""
    recording, _folder = _record(tmp_path, program, ranks=1)
    names = [sorted(state.tree.files) for state in state_selection.process_death_states(CrashPoints(recording))]
    assert names == [[], ["gone"], ["gone"], ["last"]]


def test_a_mapped_file_is_seen_when_it_is_synced(tmp_path: Path) -> None:
    """Writes to a mapped file are seen when the kernel hands them on, for the rank that opened the file."""
    program = """
import mmap, os, sys
file = open(sys.argv[1] + "/mapped", "w+b")
file.truncate(10_000)
pages = mmap.mmap(file.fileno(), 10_000)
pages[5000:5004] = b"here"
pages.flush()
"""
    recording, _folder = _record(tmp_path, program, ranks=1)
    writes = [operation for operation in recording.operations if operation.kind is OperationKind.WRITE]
    assert [(operation.path, operation.rank) for operation in writes] == [("mapped", 0)]
    last = max(state_selection.process_death_states(CrashPoints(recording)), key=lambda state: state.operations)
    assert recording.blobs.read(last.tree.files["mapped"], 4999, 6) == b"\0here\0"


def test_a_sparse_file_of_20_gb(tmp_path: Path) -> None:
    """Only what is written is kept, and the states have the same holes."""
    program = """
import os, sys
with open(sys.argv[1] + "/big", "wb", buffering=0) as file:
    file.truncate(20 << 30)
    file.seek(11 << 30)
    file.write(b"data")
"""
    recording, _folder = _record(tmp_path, program, ranks=1)
    assert recording.blobs.size() == 4
    for number, state in enumerate(state_selection.process_death_states(CrashPoints(recording))):
        state.write_to(tmp_path / f"{number}")
    made = (tmp_path / f"{number}" / "big").stat()
    assert (made.st_size, made.st_blocks * 512 < 1 << 20) == (20 << 30, True)


@pytest.mark.needs("strace")
def test_strace_sees_the_same(tmp_path: Path) -> None:
    """The kernel's own list of system calls (strace) has the same operations in the same order."""
    folder = tmp_path / "checkpoints"
    calls = "openat,write,fsync,fdatasync,rename,truncate,ftruncate,link,symlink,unlink,mkdir,rmdir,close,lseek"
    with Recorder(folder, tmp_path / "home") as recorder:
        strace = ["strace", "-y", "-o", str(tmp_path / "strace"), "-e", f"trace={calls}"]
        assert _rank(RANK, folder, 0, *strace).wait(60) == 0
    operations = recorder.recording.operations
    seen = list(_of_strace((tmp_path / "strace").read_text(), str(folder)))
    assert _joined(seen) == _joined(map(_told, operations))


def _of_strace(text: str, folder: str) -> Iterator[str]:
    """The same lines from the output of strace, for the files in the folder."""
    at: dict[str, int] = {}  # where each descriptor stands
    existing: set[str] = set()
    for line in text.splitlines():
        found = re.match(r"(\w+)\((.*)\) += (-?\d+)", line)
        if not found or int(found[3]) < 0:
            continue
        call, arguments, result = found[1], found[2], int(found[3])
        held = re.match(rf"(\d+)<{folder}/?([^>]*?)>", arguments)
        names = re.findall(r'"([^"]*)"', arguments)
        if call == "openat" and f"<{folder}>, " in arguments and "O_DIRECTORY" not in arguments:
            if "O_RDONLY" in arguments:
                continue
            yield f"{'open' if names[0] in existing else 'create'} {names[0]}"
            if names[0] in existing and "O_TRUNC" in arguments:
                yield f"truncate {names[0]} 0"
            existing.add(names[0])
            at[re.search(r"= (\d+)", line)[1]] = 0  # type: ignore[index]
        elif held and call == "write":
            yield f"write {held[2]} {at[held[1]]}+{result}"
            at[held[1]] += result
        elif held and call == "lseek":
            at[held[1]] = result
        elif held and call == "close" and held[1] in at:
            del at[held[1]]
            yield f"close {held[2]}"
        elif held and call in ("fsync", "fdatasync"):
            yield f"{call if held[1] in at else 'fsync_folder'} {held[2]}"
        elif call in ("mkdir", "rmdir", "unlink", "rename", "link"):
            if call == "rename":
                existing.add(names[1])
            yield f"{call} {' '.join(names)}"
        elif call == "symlink":
            yield f"symlink {names[1]} {names[0]}"
        elif call == "truncate":
            yield f"truncate {names[0]} {arguments.rpartition(', ')[2]}"


def test_a_killed_recorder_leaves_nothing_mounted(tmp_path: Path) -> None:
    """If the process with the recorder is killed, the folder is uncovered, its files are there, and the server ends."""
    folder, program = (
        tmp_path / "checkpoints",
        """
import sys, time
from pathlib import Path
from torchaos.harness.crash_explorer.recorded_run import Recorder
with Recorder(Path(sys.argv[1]), Path(sys.argv[2])) as recorder:
    Path(sys.argv[1], "file").write_text("x")
    print(recorder._server.pid, flush=True)
    time.sleep(600)
""",
    )
    argv = [sys.executable, "-c", program, str(folder), str(tmp_path / "home")]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as recorder:
        assert recorder.stdout is not None
        server = int(recorder.stdout.readline())
        assert any(mount.target == str(folder) for mount in mounts())
        recorder.send_signal(signal.SIGKILL)
        recorder.wait()
    wait_until(lambda: not any(mount.target == str(folder) for mount in mounts()))
    wait_until(lambda: not Path(f"/proc/{server}/exe").exists())
    assert (folder / "file").read_text() == "x"


def test_a_killed_server_is_said(tmp_path: Path) -> None:
    """If the server is killed, the folder is uncovered, and the recording is refused with a sentence."""
    folder = tmp_path / "checkpoints"
    with Recorder(folder, tmp_path / "home") as recorder:
        assert recorder._server is not None
        recorder._server.kill()
    assert not any(mount.target == str(folder) for mount in mounts())
    assert recorder.left == []
    with pytest.raises(ChaosError, match="the server ended before"):
        _ = recorder.recording


def test_a_job_that_writes_without_a_break(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that still writes when the recording ends does not keep the folder covered; the recording says that it
    is not whole."""
    monkeypatch.setattr("torchaos.harness.crash_explorer.fuse_mount._END_S", 0.5)
    folder = tmp_path / "checkpoints"
    program = """
import sys
with open(sys.argv[1] + "/log", "wb", buffering=0) as file:
    while True:
        file.write(b"x" * 100)
"""
    with Recorder(folder, tmp_path / "home") as recorder:
        writer = _rank(program, folder, 0)
        wait_until(lambda: (tmp_path / "home" / "operations").read_text().count("\n") > 20)
    try:
        assert not any(mount.target == str(folder) for mount in mounts())
        with pytest.raises(ChaosError, match="still had a file"):
            _ = recorder.recording
    finally:
        writer.kill()
        writer.wait()


def test_a_file_that_somebody_only_holds_open_is_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server does not end by itself while somebody has a file, or a copy of the mount in another namespace. It is
    asked to end, and the recording is whole."""
    monkeypatch.setattr("torchaos.harness.crash_explorer.fuse_mount._END_S", 0.5)
    folder = tmp_path / "checkpoints"
    with Recorder(folder, tmp_path / "home") as recorder:
        (folder / "file").write_text("x")
        held = os.open(folder / "file", os.O_RDONLY)
    try:
        assert not any(mount.target == str(folder) for mount in mounts())
        assert {operation.path for operation in recorder.recording.operations} == {"file"}
    finally:
        with suppress(OSError):  # nobody serves it any more
            os.close(held)


@pytest.mark.needs("root")
def test_a_mount_namespace_that_somebody_made_meanwhile_costs_no_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Another program makes a mount namespace while the folder is covered, and so keeps a copy of the mount. Nobody has
    a file open there, so the server is asked to end, long before the time is over for which a process may keep a file
    open; the recording is whole."""
    monkeypatch.setattr("torchaos.harness.crash_explorer.fuse_mount._END_S", 1e9)
    folder = tmp_path / "checkpoints"
    with Recorder(folder, tmp_path / "home") as recorder:
        (folder / "file").write_text("x")
        other = subprocess.Popen(["unshare", "--mount", "sh", "-c", "echo made; exec cat"], stdin=-1, stdout=-1)
        assert other.stdout
        other.stdout.readline()
    try:
        assert {operation.path for operation in recorder.recording.operations} == {"file"}
    finally:
        other.communicate()


def test_no_fuse_no_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without FUSE it says what to install, and leaves the folder alone."""
    missing = capabilities.Finding("fuse", False, "", "install libfuse")
    monkeypatch.setattr(capabilities, "check", lambda name: missing)
    with pytest.raises(ChaosError, match="install libfuse"), Recorder(tmp_path / "checkpoints", tmp_path / "home"):
        raise AssertionError
    assert os.listdir(tmp_path / "checkpoints") == []
