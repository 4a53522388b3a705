"""Three nodes that are network namespaces of this machine, and sockets in them."""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from needs import need

from torchaos.harness.fault_drivers.network.links import Link
from torchaos.harness.host.network_namespace import NetworkNamespace
from torchaos.harness.rollback.handles import JobProcesses
from torchaos.harness.running.launchers.local import keepers, make_links

RUN = f"network-tests-{os.getpid()}"
_NEWNET = 0x40000000


@pytest.fixture(scope="session")
def links(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Link]]:
    need("links", "root")
    yield make_links(tmp_path_factory.mktemp("net"), 3, RUN)
    handle = JobProcesses(keepers(RUN))
    handle.undo()
    assert handle.is_undone()


class Wire:
    """Datagrams with the time at which they were sent, from one node to another, within this process."""

    def __init__(self, sender: Link, receiver: Link) -> None:
        self.sender = socket_in(sender.namespace, lambda: _bound(sender, socket.SOCK_DGRAM))
        self.receiver = socket_in(receiver.namespace, lambda: _bound(receiver, socket.SOCK_DGRAM))
        self.receiver.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 21)

    def send(self, count: int, gap_s: float = 0.0, wait_s: float = 0.3) -> list[tuple[int, float]]:
        """Number and delay (in ms) of each that came, in the order in which they came."""
        came: list[tuple[int, float]] = []
        ended = threading.Event()
        self.receiver.settimeout(wait_s)

        def receive() -> None:
            while not (ended.is_set() and len(came) >= count):
                try:
                    number, sent_s = struct.unpack("=id", self.receiver.recv(64))
                except TimeoutError:
                    if ended.is_set():
                        return
                    continue
                came.append((number, (time.monotonic() - sent_s) * 1e3))

        thread = threading.Thread(target=receive)
        thread.start()
        for number in range(count):
            self.sender.sendto(struct.pack("=id", number, time.monotonic()), self.receiver.getsockname())
            time.sleep(gap_s)
        ended.set()
        thread.join()
        return came

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()


def socket_in(namespace: NetworkNamespace, make: Callable[[], socket.socket]) -> socket.socket:
    """A socket stays in the network namespace in which it was made, and a thread may go there on its own."""
    made: list[Any] = []

    def run() -> None:
        try:
            fd = os.open(f"/proc/{namespace.pid}/ns/net", os.O_RDONLY)
            assert ctypes.CDLL(None).setns(fd, _NEWNET) == 0
            os.close(fd)
            made.append(make())
        except BaseException as error:
            made.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(made[0], BaseException):
        raise made[0]
    return made[0]  # type: ignore[no-any-return]


def _bound(link: Link, kind: int) -> socket.socket:
    one = socket.socket(socket.AF_INET, kind)
    one.bind((link.address, 0))
    return one


@pytest.fixture
def wire(links: list[Link]) -> Iterator[Wire]:
    """From node 0 to node 1."""
    one = Wire(links[0], links[1])
    yield one
    one.close()


@pytest.fixture
def connection(links: list[Link]) -> Iterator[tuple[socket.socket, socket.socket]]:
    """An established TCP connection: node 0's end, and node 1's."""
    listener = socket_in(links[1].namespace, lambda: _bound(links[1], socket.SOCK_STREAM))
    listener.listen()
    ours = socket_in(links[0].namespace, lambda: _bound(links[0], socket.SOCK_STREAM))
    ours.connect(listener.getsockname())
    theirs, _ = listener.accept()
    yield ours, theirs
    for one in (ours, theirs, listener):
        one.close()


@pytest.fixture
def fresh_run() -> Iterator[str]:
    """A run id of its own; whatever keeps its namespaces is ended with the test."""
    run = f"{RUN}-{time.monotonic_ns()}"
    yield run
    JobProcesses(keepers(run)).undo()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "net"
