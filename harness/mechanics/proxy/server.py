"""Starts a Toxiproxy server with a proxy before each endpoint. It is guarded before it is started, by its mark."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torchaos.harness.agent.wire import ENV_RUN_ID
from torchaos.harness.contracts import ChaosError
from torchaos.harness.machine import proc
from torchaos.harness.machine.toxiproxy.api import Api
from torchaos.harness.mechanics.network.link import Link

PROGRAM = "toxiproxy-server"
START_S = 20.0


@dataclass(frozen=True)
class Endpoint:
    """What the job reaches at `upstream`, and is told to reach at `listen` (both host:port)."""

    name: str
    upstream: str
    listen: str
    api: Api


def mark_of_server(run_id: str) -> str:
    """Of the server's process: not that of the job, which is ended before it."""
    return f"{run_id}.proxy"


def start(upstreams: Mapping[str, str], run_id: str, folder: Path, link: Link | None) -> dict[str, Endpoint]:
    """In the network of a node, or (None) in this machine's own, on its loopback. Raises ChaosError."""
    folder.mkdir(parents=True, exist_ok=True)
    host = link.address if link else "127.0.0.1"
    port, *ports = _ports(1 + len(upstreams)) if link is None else range(18474, 18475 + len(upstreams))
    listens = {name: f"{host}:{number}" for name, number in zip(upstreams, ports, strict=True)}
    config = [{"name": n, "upstream": upstreams[n], "listen": listens[n], "enabled": True} for n in upstreams]
    (folder / "proxies.json").write_text(json.dumps(config, indent=1))
    command = [shutil.which(PROGRAM) or PROGRAM, "-port", str(port), "-host", "127.0.0.1"]
    command += ["-config", str(folder / "proxies.json")]
    log = folder / "server.log"
    with open(log, "ab") as output:
        process = subprocess.Popen(
            link.space.enter(command, folder) if link else command, cwd=folder, start_new_session=True,
            env={**os.environ, ENV_RUN_ID: mark_of_server(run_id)}, stdin=subprocess.DEVNULL, stdout=output,
            stderr=output,
        )  # fmt: skip
    api = Api(process.pid, proc.ticks_of(process.pid), port)
    _await(api, process, set(upstreams), link, log)
    return {name: Endpoint(name, upstreams[name], listens[name], api) for name in upstreams}


def _await(api: Api, process: subprocess.Popen[bytes], names: set[str], link: Link | None, log: Path) -> None:
    """Until the server says that all proxies are up. Raises ChaosError with what it said last."""
    end, said = time.monotonic() + START_S, "nothing"
    while time.monotonic() < end:
        if process.poll() is not None:
            said = f"it ended with exit code {process.returncode}"
            break
        try:
            if link is None or os.path.samefile(f"/proc/{process.pid}/ns/net", f"/proc/{link.space.pid}/ns/net"):
                found = api.ask()
                if names <= {name for name, one in found.items() if one["enabled"]}:
                    return
                said = f"its proxies are {dict(found)}"
        except OSError as error:
            said = str(error)
        time.sleep(0.02)
    raise ChaosError(f"the proxies could not be put before the job's endpoints: {said}; see {log}")


def _ports(count: int) -> list[int]:
    """That nobody listens on now; where one is taken meanwhile, the server says so, and the run is not started."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    found = [int(one.getsockname()[1]) for one in held]
    for one in held:
        one.close()
    return found
