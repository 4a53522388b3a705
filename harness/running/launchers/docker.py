"""Several nodes on one machine, each a container, on a network that only this run uses.

Everything that is made has the run's id as a label, and is removed with the run. A container lives as long as the
node's command. A node that is started again is a new container with the same name and address."""

from __future__ import annotations

import json
import os
import sys
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from torchaos.harness.agent.wire import ENV_ATTEMPT_BASE, ENV_NODE, ENV_RUN_ID
from torchaos.harness.contracts import ChaosError, Handle, JobSpec, Launcher, UsageError
from torchaos.harness.machine import proc
from torchaos.harness.machine.docker_engine import NODE, RUN, EngineError, address, container_of, engine
from torchaos.harness.machine.netspace import Space
from torchaos.harness.mechanics.network.link import Link
from torchaos.harness.running.launchers import etcd, holder
from torchaos.harness.running.launchers.docker_image import HOST, covering, host_mounts, make_host_image, own_mounts
from torchaos.harness.running.launchers.elastic_env import elastic_env
from torchaos.harness.undo.containers import Containers, DockerImage, DockerNetwork
from torchaos.harness.undo.handles import JobProcesses

_SUBNETS = 64  # tried one after the other: another run, or the machine itself, may use some of them
_MEMORY = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # bytes
# The limits are set explicitly, so that a fault's limit can be undone by setting these values again.
_LIMITS = {"cpu_period": 100_000, "cpu_quota": -1, "mem_limit": _MEMORY, "memswap_limit": _MEMORY}
_STARTED_S = 20.0


@dataclass
class DockerNode:
    """A node that is a container. `folder`: the inputs of the container, and the file with the names of the other
    nodes."""

    index: int
    engine: str
    run_id: str
    folder: Path
    address: str
    env: Mapping[str, str]
    _link: Link | None = None
    _pids: dict[tuple[int, int], int] = field(default_factory=dict)  # by first process and inner pid

    def argv(self, command: Sequence[str]) -> list[str]:
        # The attendant is a process of the run, but not of the node.
        python = [sys.executable, "-I", "-m", "torchaos.harness.running.launchers.docker_attendant"]
        return ["env", "-u", ENV_NODE, *python, str(self.folder / "container.json"), *command]

    @property
    def link(self) -> Link:
        """The node's link. Raises ChaosError if the node has no running container."""
        if self._link is None or not self._link.space.alive():
            space = Space.of(self._first_pid())
            name = holder.name(self.index)
            # The device may be another one after the engine has disconnected and reconnected the container.
            shown = json.loads(space.run(["ip", "-j", "-4", "addr", "show", "to", self.address]))
            device = next((entry["ifname"] for entry in shown if entry.get("ifname")), holder.DEVICE)
            names = str(self.folder / "hosts")
            self._link = Link(space, space, device, "", self.address, name, names, self.run_id)
        return self._link

    def host_pid(self, pid: int) -> int | None:
        try:
            first = self._first_pid()
        except ChaosError:
            first = self._link.space.pid if self._link else 0
        key = first, pid
        if key not in self._pids and (found := proc.in_namespace_of(first, pid)):
            self._pids[key] = found
        return self._pids.get(key)

    def _first_pid(self) -> int:
        if self._link and self._link.space.alive():
            return self._link.space.pid
        end = time.monotonic() + _STARTED_S
        try:
            with engine(self.engine) as client:
                while not (pid := container_of(client, self.run_id, self.index)["State"]["Pid"]):
                    if time.monotonic() > end:
                        break
                    time.sleep(0.05)
        except EngineError as error:
            raise ChaosError(str(error)) from error
        if not pid:
            raise ChaosError(f"the container of node {self.index} does not run")
        return int(pid)


class Docker(Launcher):
    """Each node is a container that runs the command unchanged. torchrun takes missing settings from the environment,
    as with other launchers."""

    name: ClassVar[str] = "docker"
    needs: ClassVar[frozenset[str]] = frozenset({"links", "docker"})
    sets_rendezvous: ClassVar[bool] = True
    cannot: ClassVar[Mapping[str, str]] = {
        "network.link_down": "the other end of a container's link is the engine's; write container.disconnect",
        "endpoints": "a container does not reach a proxy of the harness's; write launcher: local or netns",
    }  # by injector, or by the kind of thing that it hits: what to write instead

    @staticmethod
    def needs_of(command: Sequence[str], env: Mapping[str, str]) -> frozenset[str]:
        if etcd.is_wanted(command, env):
            raise UsageError(
                "the job's rendezvous is in etcd, and launcher: docker starts no etcd; name a server that the "
                "containers reach (--rdzv-endpoint HOST:PORT), or write launcher: netns, which starts etcd"
            )
        return frozenset()

    def __init__(self) -> None:
        self._engine = address()
        self._made: tuple[str, str] | None = None  # image and subnet, once they are made

    def resources(self, spec: JobSpec) -> Sequence[Handle]:
        """The handles of everything that `create` makes, in order of creation: image and network, the containers, and
        the processes that make containers. They are undone in reverse order."""
        run_id = spec.env[ENV_RUN_ID]
        made = (kind(self._engine, run_id) for kind in (DockerImage, DockerNetwork))
        return (*made, Containers(self._engine, run_id, spec.nodes), JobProcesses(run_id))

    def create(self, spec: JobSpec) -> Sequence[DockerNode]:
        """The nodes. Network and image are the same for all submissions. Raises ChaosError, or UsageError if the user's
        image does not exist."""
        try:
            with engine(self._engine) as client:
                self._made = self._made or self._make(client, spec)
        except EngineError as error:
            raise ChaosError(f"the nodes can't be made: {error}; see torchaos doctor") from error
        image, subnet = self._made
        return [self._node(index, spec, image, subnet) for index in range(spec.nodes)]

    def _make(self, client: Any, spec: JobSpec) -> tuple[str, str]:
        run_id, name = spec.env[ENV_RUN_ID], name_of(spec.env[ENV_RUN_ID])
        wanted = str(spec.container.get("image", HOST))
        if wanted != HOST and not client.images(name=wanted):
            raise UsageError(f"the engine has no image {wanted}; docker pull it first, or leave container.image out")
        image = make_host_image(client, run_id, name) if wanted == HOST else wanted
        return image, _make_network(client, run_id, name)

    def _node(self, index: int, spec: JobSpec, image: str, subnet: str) -> DockerNode:
        run_id, run_dir = spec.env[ENV_RUN_ID], spec.log.parent.parent
        folder = run_dir / "net" / holder.name(index)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        (folder / "hosts").write_text(_hosts(spec.nodes, subnet))
        env = elastic_env(index, spec, holder.name(0), holder.name(index))
        from_host = spec.container.get("image", HOST) == HOST
        read_only = covering([*own_mounts(), *(host_mounts(spec.argv) if from_host else ())])
        writable = covering([run_dir, spec.cwd, *([spec.checkpoints] if spec.checkpoints else [])])
        for path in writable:
            path.mkdir(parents=True, exist_ok=True)  # the engine mounts only folders that exist
        mounts = [
            *((str(path), str(path), True) for path in read_only if path not in writable),
            *((str(path), str(path), False) for path in writable),
            *(_mount(mount) for mount in spec.container.get("mounts", ())),
            (str(folder / "hosts"), "/etc/hosts", True),
        ]
        config = {
            "engine": self._engine, "network": name_of(run_id), "address": _address(subnet, index), "mounts": mounts,
            "env": None if from_host else sorted({*spec.own_env, *env, ENV_ATTEMPT_BASE}),
            "set": {ENV_NODE: str(index)}, "host": {"shm_size": 1 << 30, **_LIMITS},
            "create": {
                "image": image, "name": f"{name_of(run_id)}-{holder.name(index)}", "hostname": holder.name(index),
                "labels": {RUN: run_id, NODE: str(index)}, "working_dir": str(spec.cwd),
                "user": f"{os.geteuid()}:{os.getegid()}",
            },
        }  # fmt: skip
        (folder / "container.json").write_text(json.dumps(config, indent=1))
        return DockerNode(index, self._engine, run_id, folder, _address(subnet, index), env)


def name_of(run_id: str) -> str:
    """The name of an object of this run, in letters that the engine accepts. Its label, not its name, shows to which
    run it belongs."""
    return f"torchaos-{zlib.crc32(run_id.encode()):08x}-{run_id[-8:].strip('-._').lower()}"


def _make_network(client: Any, run_id: str, name: str) -> str:
    from docker.errors import APIError
    from docker.types import IPAMConfig, IPAMPool

    first = zlib.crc32(run_id.encode())
    for number in range(_SUBNETS):
        subnet = f"10.77.{(first + number) % 256}"
        pool = IPAMConfig(pool_configs=[IPAMPool(subnet=f"{subnet}.0/24")])
        try:
            client.create_network(name, driver="bridge", ipam=pool, labels={RUN: run_id}, check_duplicate=True)
            return subnet
        except APIError as error:
            if "overlaps" not in str(error) or number == _SUBNETS - 1:
                raise
    raise AssertionError


def _address(subnet: str, node: int) -> str:
    return f"{subnet}.{11 + node}"


def _hosts(nodes: int, subnet: str) -> str:
    named = "".join(f"{_address(subnet, node)} {holder.name(node)}\n" for node in range(nodes))
    return f"127.0.0.1 localhost\n{named}"


def _mount(text: str) -> tuple[str, str, bool]:
    """A mount in the form of `docker run -v`: SOURCE:TARGET[:ro]."""
    source, target, *mode = text.split(":")
    return os.path.abspath(source), target, mode == ["ro"]
