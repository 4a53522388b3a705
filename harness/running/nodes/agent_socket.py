"""The folder of a node's agent (control pages, the agent's plan, the undo log), its socket in that folder for processes
of the same user, and `join`, which connects the socket with standard input and output.

The folder is never on a shared file system, because such file systems promise no coherence for a memory-mapped file.
The process of `join` keeps no state, so it may be killed and started again. This module imports no large library,
because that process is started often."""

from __future__ import annotations

import json
import os
import shutil
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torchaos.harness.interfaces import UsageError
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.rollback.undo_log import private

JOB = "slurm-job"  # the file with the number of the Slurm job in which the agent runs


def place_of(mark: str) -> RunDir:
    return RunDir(Path(tempfile.gettempdir()) / f"torchaos-{os.geteuid()}" / mark.lstrip("."))


def socket_of(mark: str) -> Path:
    return place_of(mark).root / "socket"


@contextmanager
def address_of(path: Path) -> Iterator[str]:
    """A context manager with a short address of a socket. It is needed because the path of a socket may have at most
    107 bytes (unix(7)), and a temporary folder may be deep. Raises OSError if the folder does not exist."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def remove_place(mark: str) -> None:
    """Removes the folder of an agent, and its parent folder if no other run uses that."""
    root = place_of(mark).root
    shutil.rmtree(root, ignore_errors=True)
    with suppress(OSError):
        root.parent.rmdir()


def make_place(mark: str) -> RunDir:
    """Makes the folder of an agent with mode 0700. Raises UsageError if it can't be made, or if others can write to
    it."""
    place = place_of(mark)
    try:
        for folder in (place.root.parent, place.root, place.agent_plan.parent, place.pages, place.undo):
            private(folder)
        if job := os.environ.get("SLURM_JOB_ID"):
            (place.root / JOB).write_text(job)
    except OSError as error:
        raise UsageError(f"{place.root}: the folder of this node can't be made: {error}") from error
    return place


WAIT_S = 30.0  # seconds to wait for the agent's socket


def join(path: Path, wait_s: float = WAIT_S) -> bool:
    """Copies standard input to the agent's socket, and the socket to standard output, until the agent closes the
    connection. Returns False if no agent appeared within `wait_s` seconds, or if no process listens on its socket."""
    sock = _connected(path, wait_s)
    if sock is None:
        return False
    threading.Thread(target=_copy_in, args=(sock,), daemon=True).start()
    while chunk := _received(sock):
        sys.stdout.buffer.write(chunk)
        sys.stdout.buffer.flush()
    return True


def _copy_in(sock: socket.socket) -> None:
    with suppress(OSError):
        while chunk := os.read(0, 1 << 16):
            sock.sendall(chunk)
        sock.shutdown(socket.SHUT_RDWR)


def _received(sock: socket.socket) -> bytes:
    try:
        return sock.recv(1 << 16)
    except ConnectionResetError:
        return b""


def _connected(path: Path, wait_s: float) -> socket.socket | None:
    end = time.monotonic() + wait_s
    while True:
        sock = socket.socket(socket.AF_UNIX)
        try:
            with address_of(path) as address:
                sock.connect(address)
            return sock
        except ConnectionRefusedError:  # the agent of the socket is dead
            return None
        except FileNotFoundError:
            if time.monotonic() > end:
                return None
        time.sleep(0.05)


_SEND_S = 10.0  # seconds after which a connection that takes no data is closed
_LONGEST = 1 << 20  # bytes of a line


class Connection:
    """A connection to a controller. `say` may be called from any thread, and does nothing if the other end has
    closed."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._lock = sock, threading.Lock()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(_SEND_S), 0))
        self.open = True

    def say(self, **words: Any) -> None:
        try:
            with self._lock:
                self._sock.sendall(json.dumps(words, separators=(",", ":")).encode() + b"\n")
        except OSError:
            self.close()

    def words(self) -> Iterator[Mapping[str, Any]]:
        """Yields the messages from the other end, until it closes the connection or sends something other than a JSON
        object."""
        with suppress(OSError, ValueError), self._sock.makefile("rb") as lines:
            while line := lines.readline(_LONGEST):
                said = json.loads(line)
                if not isinstance(said, dict):
                    return
                yield said

    def close(self) -> None:
        self.open = False
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)


class Server:
    """Calls `converse` with each connection, in its own thread. A new connection closes the earlier one. Raises OSError
    if the socket can't be made."""

    def __init__(self, path: Path, converse: Callable[[Connection], None]) -> None:
        self._path, self._converse = path, converse
        self._talk: Connection | None = None
        self._sock = socket.socket(socket.AF_UNIX)
        with suppress(FileNotFoundError):
            path.unlink()  # left by an agent that was killed
        with address_of(path) as address:
            self._sock.bind(address)
        os.chmod(path, 0o700)
        self._sock.listen(4)
        threading.Thread(target=self._accept, name="server", daemon=True).start()

    def close(self) -> None:
        with suppress(OSError):
            self._path.unlink()
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        if self._talk is not None:
            self._talk.close()

    def _accept(self) -> None:
        with suppress(OSError):  # it was closed already
            while True:
                sock, _ = self._sock.accept()
                if _user_of(sock) not in (os.geteuid(), 0):
                    sock.close()
                    continue
                if self._talk is not None:
                    self._talk.close()
                self._talk = Connection(sock)
                threading.Thread(target=self._serve, args=(sock, self._talk), name="talk", daemon=True).start()

    def _serve(self, sock: socket.socket, talk: Connection) -> None:
        with sock:
            self._converse(talk)
            talk.close()


def _user_of(sock: socket.socket) -> int:
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])
