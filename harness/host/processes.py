"""The processes of this machine. A process is always identified by its pid and start time, never by its name. Also
helpers for this process itself: its memory, and the end of its child processes."""

from __future__ import annotations

import ctypes
import gc
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple

from torchaos.harness.protocol.wire import ENV_RUN_ID, start_ticks

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_libc = ctypes.CDLL(None)


def end_with(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Must be called by a child process: the kernel then sends it this signal when its parent (a pid) dies. If the
    parent is dead already, the child exits with code 1 at once."""
    _libc.prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)


_LOOK_MS = 500  # milliseconds


def wait_for(process: subprocess.Popen[Any]) -> int:
    """Waits for the process and returns its exit code; if negative, the number of a signal.

    Used instead of Popen.wait, which sleeps in a single system call. Python runs signal handlers only between bytecodes
    of the main thread. So the handler of a signal that comes just before that call, or in another thread, would run
    only when the process has ended."""
    if process.returncode is not None:
        return process.returncode
    try:
        pidfd = os.pidfd_open(process.pid)
    except ProcessLookupError:  # another thread has waited for the process
        return process.wait()
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        while not poll.poll(_LOOK_MS):
            pass
    finally:
        os.close(pidfd)
    return process.wait()


@contextmanager
def uncollected() -> Iterator[None]:
    """Switches garbage collection off during the block, or during the function that it decorates. A long record has a
    million objects that stay alive, and each collection would visit all of them."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def give_back() -> None:
    """Returns freed memory to the kernel. glibc would keep memory that lies between blocks in use."""
    with suppress(OSError, AttributeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)


_FIRST_PID_NAMESPACE = 0xEFFFFFFC  # PROC_PID_INIT_INO, include/linux/proc_ns.h
END_S = 30.0  # seconds; a rank that returns pinned or GPU memory dies slowly
_AT_ONCE = 256  # pidfds open at the same time; by default a process may have 1,024 open files


class Stat(NamedTuple):
    """The fields of /proc/PID/stat that we use; see proc(5)."""

    state: str  # T: stopped by a signal, Z: zombie
    parent: int
    ticks: int  # start time in clock ticks since boot
    cpu_ticks: int  # CPU time in user mode and in the kernel, in clock ticks
    status: int  # how the process ended, as in waitpid(2); only meaningful for a zombie


def stat(pid: int) -> Stat | None:
    """The state of a process, from /proc. None if there is no such process."""
    try:
        file = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)  # takes half as long as open()
        try:
            fields = os.read(file, 4096).rpartition(b")")[2].split()
        finally:
            os.close(file)
        used = int(fields[11]) + int(fields[12])
        return Stat(fields[0].decode(), int(fields[1]), int(fields[19]), used, int(fields[49]))
    except (FileNotFoundError, ProcessLookupError, IndexError):
        return None


def inner_pid(pid: int) -> int:
    """The pid of a process in its own pid namespace. 0 if that is the namespace of this process, or if there is no such
    process."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            line = next((line for line in file if line.startswith(b"NSpid:")), b"")
        own = int(line.split()[-1])
    except (OSError, IndexError, ValueError):
        return 0
    return 0 if own == pid else own


def in_namespace_of(first: int, own: int) -> int | None:
    """Translates a pid: `own` is the pid in the namespace of the process `first`. Returns the pid in the namespace of
    this process. None if there is no such process."""
    with suppress(OSError):
        space = os.stat(f"/proc/{first}/ns/pid").st_ino
        for pid in _pids():
            with suppress(OSError):
                if (inner_pid(pid) or pid) == own and os.stat(f"/proc/{pid}/ns/pid").st_ino == space:
                    return pid
    return None


def boot_id() -> str:
    """The id of this boot of the machine, or empty if the kernel has none."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


def host() -> str:
    """A name for the set of pids to which this process's pid belongs; the same after a reboot. It includes the
    machine's name and id, because several machines may share a home directory. In a container, it includes the pid
    namespace, because several containers may share a machine, with its name and boot id."""
    try:
        with open("/etc/machine-id") as file:
            machine = file.read().strip()
    except OSError:
        machine = ""
    return "/".join((os.uname().nodename, machine, *_pid_namespace()))


def _pid_namespace() -> tuple[str, ...]:
    """The number of this process's pid namespace. Empty in the first namespace of the machine."""
    with suppress(OSError):
        number = os.stat("/proc/self/ns/pid").st_ino
        return () if number == _FIRST_PID_NAMESPACE else (str(number),)
    return ()


def ticks_of(pid: int) -> int:
    """The start time in clock ticks since boot. 0 if there is no such process."""
    return start_ticks(pid) or 0


def is_alive(pid: int, ticks: int) -> bool:
    """Whether the process that started at `ticks` exists and is not a zombie."""
    found = stat(pid)
    return found is not None and found.ticks == ticks and found.state not in "ZX"


@contextmanager
def hold(pid: int, ticks: int) -> Iterator[int | None]:
    """A context manager with a pidfd of the process that started at `ticks`. None if that process is gone or a zombie,
    or if the pid belongs to another process now.

    Raises OSError if /proc can't be read, because then every process would seem to be gone."""
    if start_ticks(os.getpid()) is None:
        raise OSError("/proc can't be read, so it is unknown which processes exist")
    if start_ticks(pid) != ticks:
        yield None
        return
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        yield None
        return
    try:
        # From now on the pidfd means one process only, so check that it is the right one.
        yield fd if start_ticks(pid) == ticks and not _ended([fd], time.monotonic()) else None
    finally:
        os.close(fd)


def kill(processes: Mapping[int, int], deadline: float) -> list[int]:
    """Sends SIGKILL, which also ends stopped processes, to each pid that still has the given start time. Waits until
    they are gone, or until CLOCK_MONOTONIC reaches `deadline` (seconds). Returns the pids that are left."""
    left = []
    items = list(processes.items())
    for some in (items[start : start + _AT_ONCE] for start in range(0, len(items), _AT_ONCE)):
        with ExitStack() as stack:
            held = {pid: stack.enter_context(hold(pid, ticks)) for pid, ticks in some}
            living = {fd: pid for pid, fd in held.items() if fd is not None}
            sent = [fd for fd in living if _sigkill(fd)]
            gone = _ended(sent, deadline)
            left += [pid for fd, pid in living.items() if fd not in gone]
    return left


def end(find: Callable[[], Mapping[int, int]], timeout_s: float = END_S) -> list[int]:
    """Sends SIGKILL to all processes that `find` returns (start times by pid), and repeats this until it returns none.
    Returns the pids that are left after `timeout_s` seconds, for example because they are stuck in the kernel."""
    deadline = time.monotonic() + timeout_s
    while members := find():  # again and again, because new processes may have been started
        left = kill(members, deadline)
        if left or time.monotonic() > deadline:
            return sorted(left or members)
    return []


def send(processes: Mapping[int, int], number: int) -> None:
    """Sends a signal to each pid that still has the given start time. Raises OSError if that is not permitted."""
    for pid, ticks in processes.items():
        with suppress(ProcessLookupError), hold(pid, ticks) as fd:
            if fd is not None:
                signal.pidfd_send_signal(fd, number)


def _sigkill(pidfd: int) -> bool:
    """Sends SIGKILL. Returns False if that is not permitted; then the caller must not wait for the process."""
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return True


def _ended(fds: list[int], deadline: float) -> set[int]:
    """The pidfds whose processes have ended with all their threads, whether reaped or not. Waits for them until
    `deadline` (CLOCK_MONOTONIC)."""
    poll, gone = select.poll(), set[int]()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    while len(gone) < len(fds):
        ended = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
        if not ended:
            break
        for fd, _events in ended:
            poll.unregister(fd)
            gone.add(fd)
    return gone


def family(run_id: str, variable: str = ENV_RUN_ID) -> dict[int, int]:
    """The start times, by pid, of all living processes of a job: those with its mark in their environment (`variable`),
    and all their descendants, because a rank that sets its process title may have overwritten its environment. Never
    includes this process or its ancestors."""
    table = {pid: found for pid in _pids() if (found := stat(pid)) and found.state not in "ZX"}
    spared = _lineage()
    children: dict[int, list[int]] = {}
    for pid, found in table.items():
        children.setdefault(found.parent, []).append(pid)
    open_, members = [pid for pid in table if _marked(pid, variable, run_id)], set[int]()
    while open_:
        pid = open_.pop()
        if pid not in spared and pid not in members:
            members.add(pid)
            open_.extend(children.get(pid, ()))
    return {pid: table[pid].ticks for pid in members}


def marks_of(run_id: str) -> set[str]:
    """The marks of a run's processes: its id, and the marks of its helper processes, which begin with the id and a
    dot."""
    helpers, marks = f"{ENV_RUN_ID}={run_id}.".encode(), {run_id}
    for pid in _pids():
        _line, environ = image(pid) or (b"", b"")
        marks |= {os.fsdecode(entry.partition(b"=")[2]) for entry in environ.split(b"\0") if entry.startswith(helpers)}
    return marks


def maps_deleted(path: str) -> list[int]:
    """The pids of this user's processes that still have the deleted file `path` mapped."""
    line = f" {path} (deleted)\n".encode()
    pids = []
    for pid in _pids():
        with suppress(OSError), open(f"/proc/{pid}/maps", "rb") as file:
            if line in file.read():
                pids.append(pid)
    return pids


def have_open(mount: int) -> list[int]:
    """The pids of the processes that have a file or folder of the mount open. `mount`: its id in /proc/self/mountinfo.
    Processes of other users are left out, unless this process is root."""
    line = f"mnt_id:\t{mount}\n"
    return [pid for pid in _pids() if any(line in info for info in _open_files(pid))]


def _open_files(pid: int) -> Iterator[str]:
    """The text of /proc/PID/fdinfo for each open file; see proc_pid_fdinfo(5)."""
    folder = f"/proc/{pid}/fdinfo"
    with suppress(OSError):
        for name in os.listdir(folder):
            with suppress(OSError), open(f"{folder}/{name}") as file:
                yield file.read()


def is_own(pid: int) -> bool:
    return pid in _lineage()


def _lineage() -> set[int]:
    pid, found = os.getpid(), set[int]()
    while pid and pid not in found:
        found.add(pid)
        above = stat(pid)
        pid = above.parent if above else 0
    return found


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _marked(pid: int, variable: str, value: str) -> bool:
    try:
        return f"{variable}={value}".encode() in _image(pid)[1].split(b"\0")
    except OSError:  # the process is gone, or is of another user, so it is not of this job
        return False


def image(pid: int) -> tuple[bytes, bytes] | None:
    """The command line and the environment of a process, as its last exec set them. A forked process has those of its
    parent. None if they can't be read."""
    try:
        return _image(pid)
    except OSError:
        return None


def wait_for_forks(parent: tuple[bytes, bytes], timeout_s: float) -> None:
    """Waits at most `timeout_s` seconds until no process has the command line and environment of `parent`, a process
    that is dead. A child that `parent` forked just before its death still has both, and gets its own mark only when it
    calls exec."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and any(image(pid) == parent for pid in _pids() if pid != os.getpid()):
        time.sleep(0.001)


def _image(pid: int) -> tuple[bytes, bytes]:
    for _attempt in range(100):
        with open(f"/proc/{pid}/cmdline", "rb") as line, open(f"/proc/{pid}/environ", "rb") as environ:
            found = line.read(), environ.read()
        if any(found) or not os.path.exists(f"/proc/{pid}/exe"):
            break
        time.sleep(0.001)  # in the middle of an exec, a process has a program but no command line
    return found
