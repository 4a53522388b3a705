"""The folder that only one node uses."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from torchaos.harness.running.nodes.place import address_of


def test_a_socket_in_a_deep_folder(tmp_path: Path) -> None:
    """A socket can be made and reached below a path that is longer than the 107 bytes of a socket's address."""
    path = tmp_path / ("deep" * 30) / "socket"
    path.parent.mkdir()
    with pytest.raises(OSError, match="too long"):
        socket.socket(socket.AF_UNIX).bind(str(path))
    server, client = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    with server, client:
        with address_of(path) as address:
            server.bind(address)
        server.listen()
        with address_of(path) as address:
            client.connect(address)
        server.accept()[0].sendall(b"here")
        assert client.recv(4) == b"here"
