"""A Toxiproxy server of one run, in front of a server that echoes its input."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from toxiproxied import server_on_path

from torchaos.harness.fault_drivers.proxy import Endpoint, mark_of_server, start_toxiproxy
from torchaos.harness.rollback.handles import JobProcesses


@pytest.fixture
def echo() -> Iterator[str]:
    """The address of a server that sends back what it gets."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                one, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(one,), daemon=True).start()

    def answer(one: socket.socket) -> None:
        with one:
            try:
                while data := one.recv(1 << 16):
                    one.sendall(data)
            except OSError:
                pass

    threading.Thread(target=serve, daemon=True).start()
    yield f"127.0.0.1:{listener.getsockname()[1]}"
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


@pytest.fixture
def endpoint(echo: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    for name, value in server_on_path(tmp_path).items():
        monkeypatch.setenv(name, value)
    run = f"proxy-tests-{os.getpid()}-{time.monotonic_ns()}"
    yield start_toxiproxy({"echo": echo}, run, tmp_path / "proxy", None)["echo"]
    handle = JobProcesses(mark_of_server(run))
    handle.undo()
    assert handle.is_undone()
