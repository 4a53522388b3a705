"""Several nodes on one machine. Each node is a container, on a network that only this run uses.

Everything that is made has the run's id as a label, and is removed with the run. A container lives as long as the
node's command. A node that is started again is a new container with the same name and address. The image is the user's
image or, by default, an image of a few kilobytes that is made for the run: it uses the host's own Python and programs,
read-only, so nothing is downloaded or copied."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field

from torchaos.harness.fault_drivers.network.links import Link
from torchaos.harness.host import processes
from torchaos.harness.host.cluster_tools import NODE, RUN, EngineError, address, container_of, engine, version
from torchaos.harness.host.network_namespace import NetworkNamespace
from torchaos.harness.interfaces import Capability, ChaosError, Handle, JobSpec, Launcher, UsageError
from torchaos.harness.protocol.wire import ENV_ATTEMPT_BASE, ENV_NODE, ENV_RUN_ID
from torchaos.harness.record.environment import editable, job_python
from torchaos.harness.rollback.container_handles import Containers, DockerImage, DockerNetwork
from torchaos.harness.rollback.handles import JobProcesses
from torchaos.harness.running.launchers import local, namespace_holder
from torchaos.harness.running.launchers.torchrun_line import elastic_env
from torchaos.harness.scenario.field_types import Strict

HOST = "host"  # instead of the name of an image: the host's own programs
_PROGRAMS = ("bin", "lib", "lib32", "lib64", "libx32")  # links into /usr, or folders
_FOLDERS = ("dev", "etc", "proc", "run", "sbin", "sys", "tmp", "usr", "var", "var/tmp")  # sbin: for the engine's init
_COPIED = ("etc/passwd", "etc/group", "etc/ld.so.cache", "etc/localtime")
_NAMES = b"passwd: files\ngroup: files\nhosts: files\n"  # "files" only: there is no name server


def make_host_image(client: Any, run_id: str, name: str) -> str:
    """Makes the image and returns its name. Raises the errors of the client."""
    client.import_image_from_data(_root(), repository=name, tag="latest", changes=[f'LABEL {RUN}="{run_id}"'])
    return f"{name}:latest"


def _root() -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        home = os.path.expanduser("~").strip("/")
        for folder in (*_FOLDERS, *(program for program in _PROGRAMS if _is_folder(program)), home):
            _add(tar, folder, tarfile.DIRTYPE, 0o1777 if folder.endswith("tmp") else 0o755)
        for link in _PROGRAMS:
            if os.path.islink(f"/{link}"):
                _add(tar, link, tarfile.SYMTYPE, 0o777, target=os.readlink(f"/{link}"))
        for path in _COPIED:
            if os.path.isfile(f"/{path}"):
                _add(tar, path, tarfile.REGTYPE, 0o644, Path(f"/{path}").read_bytes())
        _add(tar, "etc/nsswitch.conf", tarfile.REGTYPE, 0o644, _NAMES)
    return made.getvalue()


def _add(tar: tarfile.TarFile, name: str, kind: bytes, mode: int, data: bytes = b"", target: str = "") -> None:
    member = tarfile.TarInfo(name)
    member.type, member.mode, member.size, member.linkname = kind, mode, len(data), target
    tar.addfile(member, io.BytesIO(data))


def _is_folder(name: str) -> bool:
    return os.path.isdir(f"/{name}") and not os.path.islink(f"/{name}")


def host_mounts(command: Sequence[str]) -> Iterator[Path]:
    """The folders of this machine that the command needs to run in the container as it does here. They are mounted
    read-only."""
    yield Path("/usr")
    yield from (Path(f"/{name}") for name in _PROGRAMS if _is_folder(name))
    yield from (path for path in (Path("/etc/alternatives"), Path("/etc/ssl")) if path.is_dir())
    python = job_python(command)
    yield from _prefixes(python)
    yield from editable(python)
    for word in command:
        path = Path(word.rpartition("=")[2])
        if path.is_absolute() and path.is_file():
            yield path.parent


def own_mounts() -> Iterator[Path]:
    """The folders of the agent and of the injectors that it loads. They are mounted into every container."""
    for name in ("harness", "injectors", "plugin", "scenarios"):
        yield Path(str(files(f"torchaos.{name}")))


def _prefixes(python: str) -> Iterator[Path]:
    code = "import sys; print(*{sys.prefix, sys.base_prefix, sys.exec_prefix}, sep='\\n')"
    done = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, timeout=60, check=False)
    yield from map(Path, done.stdout.splitlines())


def covering(paths: Iterable[Path]) -> list[Path]:
    """The folders, without those that are below another folder of the list. The root is left out, too, because nothing
    can be mounted over it."""
    found: list[Path] = []
    for path in sorted({path.resolve() for path in paths} | {path.absolute() for path in paths}):
        if path != Path("/") and not any(path.is_relative_to(folder) for folder in found):
            found.append(path)
    return found


_SUBNETS = 64  # the most subnets that are tried, one after the other: another run, or the machine itself, may use some
_MEMORY = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # bytes
# The limits are set explicitly, so that a fault's limit can be undone by setting these values again.
_LIMITS = {"cpu_period": 100_000, "cpu_quota": -1, "mem_limit": _MEMORY, "memswap_limit": _MEMORY}
_STARTED_S = 20.0


@dataclass
class DockerNode:
    """A node that is a container. `folder`: the folder with the container's configuration and the file with the names
    of the nodes."""

    index: int
    engine: str
    run_id: str
    folder: Path
    address: str
    env: Mapping[str, str]
    _link: Link | None = None
    _pids: dict[tuple[int, int], int] = field(default_factory=dict)  # by first process and inner pid

    def argv(self, command: Sequence[str]) -> list[str]:
        # docker_shim is a process of the run, but not of the node, so it must not have the variable of the node.
        python = [sys.executable, "-I", "-m", "torchaos.harness.running.launchers.docker_shim"]
        return ["env", "-u", ENV_NODE, *python, str(self.folder / "container.json"), *command]

    @property
    def link(self) -> Link:
        """The node's link. Raises ChaosError if the node has no running container."""
        if self._link is None or not self._link.namespace.alive():
            namespace = NetworkNamespace.of(self._first_pid())
            name = namespace_holder.name(self.index)
            # The device may be another one after the engine has disconnected and reconnected the container.
            shown = json.loads(namespace.run(["ip", "-j", "-4", "addr", "show", "to", self.address]))
            device = next((entry["ifname"] for entry in shown if entry.get("ifname")), namespace_holder.DEVICE)
            names = str(self.folder / "hosts")
            self._link = Link(namespace, namespace, device, "", self.address, name, names, self.run_id)
        return self._link

    def host_pid(self, pid: int) -> int | None:
        try:
            first = self._first_pid()
        except ChaosError:
            first = self._link.namespace.pid if self._link else 0
        key = first, pid
        if key not in self._pids and (found := processes.in_namespace_of(first, pid)):
            self._pids[key] = found
        return self._pids.get(key)

    def _first_pid(self) -> int:
        if self._link and self._link.namespace.alive():
            return self._link.namespace.pid
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


class Container(Strict):
    """The containers of the launcher docker: each node is a container."""

    image: Annotated[
        str, Field(description="An image that the engine has; host: this machine's own programs and Python, read-only.")
    ] = HOST
    mounts: Annotated[
        list[Annotated[str, Field(pattern=r"^[^:]+:/[^:]*(:ro)?$")]],
        Field(description="Folders of this machine, SOURCE:TARGET or SOURCE:TARGET:ro. The run's own folder, the "
              "working directory and the checkpoints are always mounted."),
    ] = Field(default_factory=list)  # fmt: skip


def _docker() -> str | None:
    try:
        return f"Docker {version(address())} at {address()}"
    except (EngineError, UsageError):
        return None


@dataclass
class Docker(Launcher):
    """Each node is a container that runs the command unchanged. torchrun takes missing settings from the environment,
    as with other launchers."""

    container: Annotated[Container | None, Field(description="For launcher: docker.")] = None

    name: ClassVar[str] = "docker"
    needs: ClassVar[frozenset[str]] = frozenset({"links", "docker"})
    checks: ClassVar[Mapping[str, Capability]] = {
        "docker": Capability(
            "nodes that are containers",
            _docker,
            "pip install 'torchaos[docker]', and start an engine: apt-get install docker.io; DOCKER_HOST=unix://... "
            "names another socket than the usual one",
        ),
    }
    makes: ClassVar[Mapping[str, str]] = {"docker": "hits containers"}
    sets_rendezvous: ClassVar[bool] = True
    cannot: ClassVar[Mapping[str, str]] = {
        "network.link_down": "the other end of a container's link is the engine's; write container.disconnect",
        "endpoints": "a container does not reach a proxy of the harness's; write launcher: local or netns",
    }  # keys: injectors, or kinds of targets; values: what to write instead

    @staticmethod
    def needs_of(command: Sequence[str], env: Mapping[str, str]) -> frozenset[str]:
        if local.is_wanted(command, env):
            raise UsageError(
                "the job's rendezvous is in etcd, and launcher: docker starts no etcd; name a server that the "
                "containers reach (--rdzv-endpoint HOST:PORT), or write launcher: netns, which starts etcd"
            )
        return frozenset()

    @staticmethod
    def settle(settings: dict[str, Any], absolute: Callable[[str], str]) -> None:
        if mounts := (settings.get("container") or {}).get("mounts"):
            settings["container"]["mounts"] = [absolute(mount) for mount in mounts]

    @property
    def host_programs(self) -> bool:
        return self._container.image == HOST

    @property
    def sources_elsewhere(self) -> str:
        return "" if self.host_programs else "the job runs in an image of its own"

    def __post_init__(self) -> None:
        self._container = self.container or Container()
        self._made: tuple[str, str] | None = None  # image and subnet, once they are made

    @property
    def _engine(self) -> str:
        return address()

    def resources(self, spec: JobSpec) -> Sequence[Handle]:
        """The handles of everything that `create` makes, in order of creation: image and network, the containers, and
        the processes that make containers. They are undone in reverse order."""
        run_id = spec.env[ENV_RUN_ID]
        made = (kind(self._engine, run_id) for kind in (DockerImage, DockerNetwork))
        return (*made, Containers(self._engine, run_id, spec.nodes), JobProcesses(run_id))

    def create(self, spec: JobSpec) -> Sequence[DockerNode]:
        """The nodes. All submissions use the same network and image. Raises ChaosError if a container can't be made,
        UsageError if the user's image does not exist."""
        try:
            with engine(self._engine) as client:
                self._made = self._made or self._make(client, spec)
        except EngineError as error:
            raise ChaosError(f"the nodes can't be made: {error}; see torchaos doctor") from error
        image, subnet = self._made
        return [self._node(index, spec, image, subnet) for index in range(spec.nodes)]

    def _make(self, client: Any, spec: JobSpec) -> tuple[str, str]:
        run_id, name = spec.env[ENV_RUN_ID], name_of(spec.env[ENV_RUN_ID])
        wanted = self._container.image
        if wanted != HOST and not client.images(name=wanted):
            raise UsageError(f"the engine has no image {wanted}; docker pull it first, or leave container.image out")
        image = make_host_image(client, run_id, name) if wanted == HOST else wanted
        return image, _make_network(client, run_id, name)

    def _node(self, index: int, spec: JobSpec, image: str, subnet: str) -> DockerNode:
        run_id, run_dir = spec.env[ENV_RUN_ID], spec.log.parent.parent
        folder = run_dir / "net" / namespace_holder.name(index)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        (folder / "hosts").write_text(_hosts(spec.nodes, subnet))
        env = elastic_env(index, spec, namespace_holder.name(0), namespace_holder.name(index))
        from_host = self.host_programs
        read_only = covering([*own_mounts(), *(host_mounts(spec.argv) if from_host else ())])
        writable = covering([run_dir, spec.cwd, *([spec.checkpoints] if spec.checkpoints else [])])
        for path in writable:
            path.mkdir(parents=True, exist_ok=True)  # the engine mounts only folders that exist
        mounts = [
            *((str(path), str(path), True) for path in read_only if path not in writable),
            *((str(path), str(path), False) for path in writable),
            *(_mount(mount) for mount in self._container.mounts),
            (str(folder / "hosts"), "/etc/hosts", True),
        ]
        config = {
            "engine": self._engine, "network": name_of(run_id), "address": _address(subnet, index), "mounts": mounts,
            "env": None if from_host else sorted({*spec.own_env, *env, ENV_ATTEMPT_BASE}),
            "set": {ENV_NODE: str(index)}, "host": {"shm_size": 1 << 30, **_LIMITS},
            "create": {
                "image": image, "name": f"{name_of(run_id)}-{namespace_holder.name(index)}",
                "hostname": namespace_holder.name(index),
                "labels": {RUN: run_id, NODE: str(index)}, "working_dir": str(spec.cwd),
                "user": f"{os.geteuid()}:{os.getegid()}",
            },
        }  # fmt: skip
        (folder / "container.json").write_text(json.dumps(config, indent=1))
        return DockerNode(index, self._engine, run_id, folder, _address(subnet, index), env)


def name_of(run_id: str) -> str:
    """The name of the objects of this run in the engine, in characters that the engine accepts. Not the name but the
    label of an object shows to which run it belongs."""
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
    named = "".join(f"{_address(subnet, node)} {namespace_holder.name(node)}\n" for node in range(nodes))
    return f"127.0.0.1 localhost\n{named}"


def _mount(text: str) -> tuple[str, str, bool]:
    """A mount in the form of `docker run -v`: SOURCE:TARGET[:ro]."""
    source, target, *mode = text.split(":")
    return os.path.abspath(source), target, mode == ["ro"]
