"""A toxic on a proxy of its own server, for the contract test of all handles."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from torchaos.harness.fault_drivers.proxy import PROGRAM, mark_of_server, start_toxiproxy
from torchaos.harness.interfaces import Handle
from torchaos.harness.rollback.handles import JobProcesses
from torchaos.harness.rollback.network_handles import Toxic, mark_of


def server_on_path(folder: Path) -> dict[str, str]:
    """The PATH, as an environment, with a toxiproxy-server: Toxiproxy's own or, if there is none, the stand-in. Skips
    without toxiproxy-python."""
    pytest.importorskip("toxiproxy", reason="needs toxiproxy-python: pip install 'torchaos[proxy]'")
    if not shutil.which(PROGRAM):
        program = folder / "bin" / PROGRAM
        program.parent.mkdir(exist_ok=True)
        stand_in = Path(__file__).with_name("toxiproxy_stand_in.py")
        program.write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, str(stand_in)])} "$@"\n')
        program.chmod(0o755)
        return {"PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}"}
    return {"PATH": os.environ["PATH"]}


def on_a_proxy(folder: Path) -> Iterator[tuple[Handle, Callable[[], object]]]:
    """The handle, and the change that it undoes."""
    os.environ.update(server_on_path(folder))
    run, mark = f"toxic-{os.getpid()}-{time.monotonic_ns()}", mark_of("a-fault")
    api = start_toxiproxy({"store": "127.0.0.1:9"}, run, folder / "proxy", None)["store"].api
    toxic = {"type": "latency", "name": f"{mark}_upstream", "stream": "upstream", "attributes": {"latency": 5}}
    handle = Toxic(api.pid, api.start_ticks, api.port, "store", mark)
    try:
        yield handle, lambda: api.ask(proxy="store", add=[toxic])
    finally:
        JobProcesses(mark_of_server(run)).undo()
