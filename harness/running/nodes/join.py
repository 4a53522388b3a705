"""The pipe between this process's standard streams and the socket of a node's agent. It keeps no state: it may be
killed and started again. Standard library only, because it is started often."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from torchaos.harness.running.nodes.place import address_of

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
        except ConnectionRefusedError:  # its agent is dead
            return None
        except FileNotFoundError:
            if time.monotonic() > end:
                return None
        time.sleep(0.05)
