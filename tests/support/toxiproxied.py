"""A toxic on a proxy of its own server, for the contract test of all handles."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from torchaos.harness.contracts import Handle
from torchaos.harness.mechanics.proxy.server import mark_of_server, start
from torchaos.harness.running import capabilities
from torchaos.harness.undo.handles import JobProcesses
from torchaos.harness.undo.network import mark_of
from torchaos.harness.undo.proxy import Toxic


def on_a_proxy(folder: Path) -> Iterator[tuple[Handle, Callable[[], object]]]:
    """The handle, and the change that it undoes. Skips if this machine has no toxiproxy-server."""
    found = capabilities.check("toxiproxy")
    if not found.present:
        pytest.skip(f"no toxiproxy-server with its client ({found.detail}); {found.remedy}")
    run, mark = f"toxic-{os.getpid()}-{time.monotonic_ns()}", mark_of("a-fault")
    api = start({"store": "127.0.0.1:9"}, run, folder / "proxy", None)["store"].api
    toxic = {"type": "latency", "name": f"{mark}_upstream", "stream": "upstream", "attributes": {"latency": 5}}
    handle = Toxic(api.pid, api.start_ticks, api.port, "store", mark)
    yield handle, lambda: api.ask(proxy="store", add=[toxic])
    JobProcesses(mark_of_server(run)).restore()
