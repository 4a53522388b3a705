"""Starts a Toxiproxy server with a proxy in front of each endpoint. The mark of its process is in the undo log before
it starts."""

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
START_S = 20.0  # seconds


@dataclass(frozen=True)
class Endpoint:
    """An address that the job uses. The real server is at `upstream`; the job gets the proxy's address `listen` instead
    (both host:port)."""

    name: str
    upstream: str
    listen: str
    api: Api


def mark_of_server(run_id: str) -> str:
    """The mark of the server's process. It differs from the job's mark, because the job is ended before the server."""
    return f"{run_id}.proxy"


def start(upstreams: Mapping[str, str], run_id: str, folder: Path, link: Link | None) -> dict[str, Endpoint]:
    """Starts the server in the network of a node or, if `link` is None, on this machine's loopback. Raises
    ChaosError."""
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
    """Waits until the server reports that all proxies are up. Raises ChaosError with its last answer otherwise."""
    end, state = time.monotonic() + START_S, "nothing"
    while time.monotonic() < end:
        if process.poll() is not None:
            state = f"it ended with exit code {process.returncode}"
            break
        try:
            if link is None or os.path.samefile(f"/proc/{process.pid}/ns/net", f"/proc/{link.space.pid}/ns/net"):
                proxies = api.ask()
                if names <= {name for name, proxy in proxies.items() if proxy["enabled"]}:
                    return
                state = f"its proxies are {dict(proxies)}"
        except OSError as error:
            state = str(error)
        time.sleep(0.02)
    raise ChaosError(f"the proxies could not be put in front of the job's endpoints: {state}; see {log}")


def _ports(count: int) -> list[int]:
    """Free ports. If a port is taken before the server starts, the server fails, and the run is not started."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    numbers = [int(listener.getsockname()[1]) for listener in held]
    for listener in held:
        listener.close()
    return numbers
