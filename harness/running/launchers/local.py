"""The launchers of this machine. `local` runs the command as it is: one node, or one torchrun for each replica. `netns`
runs several nodes. Each is in its own network namespace and has a link to a switch, which is in another namespace; if
the job's rendezvous is in etcd, an etcd server runs beside the switch.

Nothing is made in the host's own namespaces, and nothing outlives the processes that keep the namespaces."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from torchaos.harness.fault_drivers.network.links import Link
from torchaos.harness.host import processes
from torchaos.harness.host.network_namespace import NetworkNamespace
from torchaos.harness.interfaces import ChaosError, Handle, JobSpec, Launcher, Node
from torchaos.harness.protocol.wire import ENV_REPLICA, ENV_RUN_ID
from torchaos.harness.rollback.handles import JobProcesses
from torchaos.harness.running.launchers import namespace_holder
from torchaos.harness.running.launchers.torchrun_line import elastic_env

# Runs an etcd server for a job whose nodes use etcd for their rendezvous. The server runs in the namespace of the
# switch between the nodes, so it outlives every node. Before it is started, the mark of its process is written to the
# undo log. Torch needs etcd's v2 API.

PROGRAM = "etcd"
ADDRESS = f"{namespace_holder.SUBNET}.1"
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


@dataclass(frozen=True)
class LocalNode:
    index: int = 0
    env: Mapping[str, str] = field(default_factory=dict)
    link: Link | None = None

    def argv(self, command: Sequence[str]) -> list[str]:
        return list(command)

    def host_pid(self, pid: int) -> int | None:
        return pid


@dataclass(frozen=True)
class Local(Launcher):
    """Starts the command on this machine, once for each replica. Nothing else is made, so nothing has to be undone."""

    name: ClassVar[str] = "local"
    here: ClassVar[bool] = True
    in_host_network: ClassVar[bool] = True
    replicas: ClassVar[bool] = True

    def resources(self, spec: JobSpec) -> Sequence[Handle]:
        return ()

    def create(self, spec: JobSpec) -> Sequence[Node]:
        if spec.replicas == 1:
            return (LocalNode(),)
        return [LocalNode(index, replica_env(index, spec)) for index in range(spec.replicas)]


def replica_env(index: int, spec: JobSpec) -> dict[str, str]:
    """The environment of a replica. REPLICA_GROUP_ID and NUM_REPLICA_GROUPS are torchft's names (its torchx.py). PET_*
    are torchrun's own names for its options; without them, all torchruns would use the same port. Settings of the user
    are not changed."""
    rendezvous = {"PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "localhost:0"}
    ours = {name: value for name, value in rendezvous.items() if name not in spec.env}
    return {
        **ours, ENV_REPLICA: str(index), "REPLICA_GROUP_ID": str(index), "NUM_REPLICA_GROUPS": str(spec.replicas),
    }  # fmt: skip


@dataclass(frozen=True)
class NetnsNode:
    index: int
    link: Link
    cwd: Path
    env: Mapping[str, str]

    def argv(self, command: Sequence[str]) -> list[str]:
        return self.link.namespace.enter(command, self.cwd)

    def host_pid(self, pid: int) -> int | None:
        return pid


class Netns(Launcher):
    """Simulates nodes as network namespaces on this machine. Each node runs the command unchanged. torchrun takes
    missing settings from the environment: the number of nodes, and the address of the rendezvous (on the first node, or
    in an etcd that is started for the nodes). Settings in the scenario or the command are not changed."""

    name: ClassVar[str] = "netns"
    needs: ClassVar[frozenset[str]] = frozenset({"links"})
    makes: ClassVar[Mapping[str, str]] = {"links": "needs links between nodes (two or more)"}
    here: ClassVar[bool] = True
    sets_rendezvous: ClassVar[bool] = True
    local_disks: ClassVar[bool] = True

    def __init__(self) -> None:
        self._links: list[Link] = []
        self._etcd: Etcd | None = None

    @staticmethod
    def needs_of(command: Sequence[str], env: Mapping[str, str]) -> frozenset[str]:
        return frozenset({"etcd"} if is_wanted(command, env) else ())

    def resources(self, spec: JobSpec) -> Sequence[Handle]:
        run_id = spec.env[ENV_RUN_ID]
        servers = [JobProcesses(mark_of(run_id))] if is_wanted(spec.argv, spec.env) else []
        return (JobProcesses(keepers(run_id)), *servers)

    def create(self, spec: JobSpec) -> Sequence[NetnsNode]:
        """The nodes. The namespaces are the same for all submissions, so a link that is cut stays cut. Raises
        ChaosError if they can't be made."""
        folder, run_id = spec.log.parent.parent / "net", spec.env[ENV_RUN_ID]
        if len(self._links) != spec.nodes or not all(link.namespace.alive() for link in self._links):
            self._links, self._etcd = make_links(folder, spec.nodes, run_id, spec.local), None
        meeting: dict[str, str] = {}
        if is_wanted(spec.argv, spec.env):
            if self._etcd is None or not self._etcd.alive():
                self._etcd = start(self._links[0].switch, run_id, folder / "etcd")
            meeting = environment()
        return [
            NetnsNode(
                index, link, spec.cwd,
                {**elastic_env(index, spec, self._links[0].name, link.name, namespace_holder.DEVICE), **meeting},
            )
            for index, link in enumerate(self._links)
        ]  # fmt: skip


def keepers(run_id: str) -> str:
    """The mark of the processes that keep the namespaces. It differs from the job's mark, because these processes are
    ended after the job."""
    return f"{run_id}.net"


def make_links(folder: Path, nodes: int, run_id: str, local: Path | None = None) -> list[Link]:
    """Makes the namespaces and the links. `local`: a path at which each node gets a folder of its own, in memory.
    Raises ChaosError if namespaces can't be made."""
    user = "same-user" if os.geteuid() == 0 else "own-user"
    argv = [sys.executable, "-S", "-E", namespace_holder.__file__, str(folder), str(nodes), user]
    argv += [str(local)] if local else []
    environ = {**os.environ, ENV_RUN_ID: keepers(run_id)}
    process = subprocess.Popen(
        argv, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True, cwd="/"
    )
    assert process.stdout is not None
    with process.stdout as output:
        answer = json.loads(output.readline() or b'{"error": "their keeper ended"}')
    if "error" in answer:
        process.wait()
        raise ChaosError(f"the nodes' network namespaces can't be made: {answer['error']}; see torchaos doctor")
    switch = NetworkNamespace.of(answer["switch"])
    return [
        Link(
            NetworkNamespace.of(pid), switch, namespace_holder.DEVICE, namespace_holder.port(node),
            namespace_holder.address(node), namespace_holder.name(node),
            str(folder / namespace_holder.name(node) / "hosts"), run_id,
        )
        for node, pid in enumerate(answer["nodes"])
    ]  # fmt: skip
