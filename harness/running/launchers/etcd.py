"""Runs an etcd server for a job whose nodes use etcd for their rendezvous. The server runs in the namespace of the
switch between the nodes, so it outlives every node. Before it is started, the mark of its process is written to the
undo log. Torch needs etcd's v2 API."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchaos.harness.host import processes
from torchaos.harness.host.network_namespace import NetworkNamespace
from torchaos.harness.interfaces import ChaosError
from torchaos.harness.protocol.wire import ENV_RUN_ID
from torchaos.harness.running.launchers import holder

PROGRAM = "etcd"
ADDRESS = f"{holder.SUBNET}.1"
ENDPOINT = f"{ADDRESS}:2379"
START_S = 30.0
_BACKENDS = ("etcd-v2", "etcd")
_ENDPOINT_ENV = "PET_RDZV_ENDPOINT"
_PEERS = "http://127.0.0.1:2380"
# The server's data is in a tmpfs that disappears with its namespaces. Its log files alone would take 128 MB of the run
# directory.
_IN_MEMORY = 'mount -t tmpfs -o mode=700 none "$0" && exec "$@"'
_ASK = (
    "import http.client, sys; one = http.client.HTTPConnection(sys.argv[1], timeout=3); "
    "one.request('GET', '/v2/keys/?quorum=true'); sys.exit(one.getresponse().status != 200)"
)


@dataclass(frozen=True)
class Etcd:
    pid: int
    start_ticks: int

    def alive(self) -> bool:
        return processes.is_alive(self.pid, self.start_ticks)


def is_wanted(command: Sequence[str], env: Mapping[str, str]) -> bool:
    """Whether torchrun is set to use etcd, and no endpoint is given. The command has priority over the environment."""
    following = zip((word.partition("=") for word in command), [*command[1:], ""], strict=True)
    options = {name.replace("_", "-"): value if equals else after for (name, equals, value), after in following}
    backend = options.get("--rdzv-backend", env.get("PET_RDZV_BACKEND"))
    elsewhere = _ENDPOINT_ENV in env or options.keys() & {"--rdzv-endpoint", "--standalone"}
    return backend in _BACKENDS and not elsewhere


def mark_of(run_id: str) -> str:
    """The mark of the server's process. It differs from the job's mark, because the job is ended before the server."""
    return f"{run_id}.etcd"


def environment() -> dict[str, str]:
    """The variables that give a node's torchrun the address of the rendezvous."""
    return {_ENDPOINT_ENV: ENDPOINT}


def start(switch: NetworkNamespace, run_id: str, folder: Path) -> Etcd:
    """Starts a server that answers all nodes at ENDPOINT. `switch`: the network namespace of the switch. Raises
    ChaosError if the server does not start."""
    data, log = folder / "data", folder / "server.log"
    data.mkdir(parents=True, exist_ok=True)
    url = f"http://{ENDPOINT}"
    command = ["sh", "-c", _IN_MEMORY, str(data), shutil.which(PROGRAM) or PROGRAM, "--enable-v2"]
    command += ["--data-dir", str(data), "--listen-client-urls", url, "--advertise-client-urls", url]
    command += ["--listen-peer-urls", _PEERS, "--initial-advertise-peer-urls", _PEERS]
    command += ["--initial-cluster", f"default={_PEERS}"]
    # etcd would take variables ETCD_* as options.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("ETCD_")}
    try:
        switch.run(["ip", "address", "replace", f"{ADDRESS}/24", "dev", "switch"])
        with open(log, "ab") as output:
            process = subprocess.Popen(
                switch.enter(command, folder), start_new_session=True, env={**environ, ENV_RUN_ID: mark_of(run_id)},
                stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        raise ChaosError(f"the job's etcd can't be started: {error}") from error
    _await(switch, process, log)
    return Etcd(process.pid, processes.ticks_of(process.pid))


def _await(switch: NetworkNamespace, process: subprocess.Popen[bytes], log: Path) -> None:
    """Waits until the server answers a request that needs a leader. Raises ChaosError, with the last problem, if it
    does not."""
    end, seen = time.monotonic() + START_S, "nothing"
    while time.monotonic() < end:
        if process.poll() is not None:
            seen = f"it ended with exit code {process.returncode}"
            break
        try:
            switch.run([sys.executable, "-I", "-S", "-c", _ASK, ENDPOINT])
            return
        except (OSError, subprocess.SubprocessError) as error:
            seen = str(error)
        time.sleep(0.05)
    raise ChaosError(f"the job's etcd did not start: {seen}; see {log}")
