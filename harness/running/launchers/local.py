"""The launchers of this machine. `local` runs the command as it is: one node, or one torchrun for each replica. `netns`
runs several nodes. Each is in its own network namespace and has a link to a switch, which is in another namespace.

Nothing is made in the host's own namespaces, and nothing outlives the processes that keep the namespaces."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from torchaos.harness.fault_drivers.network.links import Link
from torchaos.harness.host.network_namespace import NetworkNamespace
from torchaos.harness.interfaces import ChaosError, Handle, JobSpec, Launcher, Node
from torchaos.harness.protocol.wire import ENV_REPLICA, ENV_RUN_ID
from torchaos.harness.rollback.handles import JobProcesses
from torchaos.harness.running.launchers import etcd, holder
from torchaos.harness.running.launchers.torchrun_line import elastic_env


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
    """Each node runs the command unchanged. torchrun takes missing settings from the environment: the number of nodes,
    and the address of the rendezvous (on the first node, or in an etcd that is started for the nodes). Settings in the
    scenario or the command are not changed."""

    name: ClassVar[str] = "netns"
    needs: ClassVar[frozenset[str]] = frozenset({"links"})
    makes: ClassVar[Mapping[str, str]] = {"links": "needs links between nodes (two or more)"}
    here: ClassVar[bool] = True
    sets_rendezvous: ClassVar[bool] = True
    local_disks: ClassVar[bool] = True

    def __init__(self) -> None:
        self._links: list[Link] = []
        self._etcd: etcd.Etcd | None = None

    @staticmethod
    def needs_of(command: Sequence[str], env: Mapping[str, str]) -> frozenset[str]:
        return frozenset({"etcd"} if etcd.is_wanted(command, env) else ())

    def resources(self, spec: JobSpec) -> Sequence[Handle]:
        run_id = spec.env[ENV_RUN_ID]
        servers = [JobProcesses(etcd.mark_of(run_id))] if etcd.is_wanted(spec.argv, spec.env) else []
        return (JobProcesses(keepers(run_id)), *servers)

    def create(self, spec: JobSpec) -> Sequence[NetnsNode]:
        """The nodes. The namespaces are the same for all submissions, so a link that is cut stays cut. Raises
        ChaosError if they can't be made."""
        folder, run_id = spec.log.parent.parent / "net", spec.env[ENV_RUN_ID]
        if len(self._links) != spec.nodes or not all(link.namespace.alive() for link in self._links):
            self._links, self._etcd = make_links(folder, spec.nodes, run_id, spec.local), None
        meeting: dict[str, str] = {}
        if etcd.is_wanted(spec.argv, spec.env):
            if self._etcd is None or not self._etcd.alive():
                self._etcd = etcd.start(self._links[0].switch, run_id, folder / "etcd")
            meeting = etcd.environment()
        return [
            NetnsNode(
                index, link, spec.cwd,
                {**elastic_env(index, spec, self._links[0].name, link.name, holder.DEVICE), **meeting},
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
    argv = [sys.executable, "-S", "-E", holder.__file__, str(folder), str(nodes), user]
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
            NetworkNamespace.of(pid), switch, holder.DEVICE, holder.port(node), holder.address(node), holder.name(node),
            str(folder / holder.name(node) / "hosts"), run_id,
        )
        for node, pid in enumerate(answer["nodes"])
    ]  # fmt: skip
