"""A Docker engine for tests, in its own namespaces: the machine's network, mounts and engine stay unchanged."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torchaos.harness.host.cluster_tools import NODE, RUN, EngineError, engine, version
from torchaos.harness.interfaces import Handle
from torchaos.harness.rollback.container_handles import Container, Containers, DockerImage, DockerNetwork
from torchaos.harness.running.launchers.docker import covering, host_mounts, make_host_image

with suppress(ImportError):
    from docker.types import IPAMConfig, IPAMPool, Mount

_UP_S = 60.0
# Not `ip netns exec`, which mounts /sys again, without the cgroups that the engine needs.
_START = 'ip link set lo up && exec setpriv --pdeathsig TERM dockerd "$@"'


def missing() -> str:
    """What this machine lacks for it, or an empty text."""
    from torchaos.harness.running import capabilities

    if not capabilities.check("root").present:
        return "root"
    lacks = [name for name in ("dockerd", "containerd", "docker-init", "iptables", "unshare", "setpriv", "nsenter")
             if shutil.which(name) is None]  # fmt: skip
    with suppress(ImportError):
        import docker  # noqa: F401

        return f"{', '.join(lacks)} (Debian: docker.io)" if lacks else ""
    return "the package docker (pip install 'torchaos[docker]')"


@contextmanager
def private_engine(folder: Path) -> Iterator[str]:
    """The engine's address. The engine ends, with all its containers, at the end of the block, or when its parent dies.
    The folder's path must be short, because it contains sockets."""
    folder.mkdir(parents=True, exist_ok=True)
    where = f"unix://{folder / 'docker.sock'}"
    options = ["--data-root", folder / "data", "--exec-root", folder / "exec", "--pidfile", folder / "pid", "-H", where,
               "--bridge", "none"]  # fmt: skip
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(
            ["unshare", "--net", "--mount", "sh", "-c", _START, "sh", *map(str, options)],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    try:
        _await(where, process, folder / "log")
        yield where
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _await(where: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end, answer = time.monotonic() + _UP_S, ""
    while time.monotonic() < end and process.poll() is None:
        try:
            version(where)
            return
        except EngineError as error:
            answer = str(error)
            time.sleep(0.05)
    raise AssertionError(f"the engine did not come up: {answer}; its log: {log.read_text()[-2000:]}")


def network_of(client: Any, run_id: str) -> str:
    """The id of a network with the run's label."""
    pool = IPAMConfig(pool_configs=[IPAMPool(subnet="10.78.0.0/24")])
    return str(client.create_network(f"test-{run_id}", ipam=pool, labels={RUN: run_id})["Id"])


def sleeper(client: Any, run_id: str, network: str | None = None, owner: str = "", limits: Any = None) -> str:
    """The id of a container that sleeps, in an image of the run. `owner`: the run id of its label, if another one."""
    image = make_host_image(client, run_id, f"test-{run_id}")
    mounts = [
        Mount(str(path), str(path), type="bind", read_only=True) for path in covering(host_mounts(["/bin/sleep"]))
    ]
    made = client.create_container(
        image, ["sleep", "600"], labels={RUN: owner or run_id, NODE: "0"},
        host_config=client.create_host_config(
            mounts=mounts, network_mode=network or "none", init=True, **(limits or {})
        ),
    )  # fmt: skip
    client.start(made)
    return str(made["Id"])


def in_engine(kind: str, where: str) -> Iterator[tuple[Handle, Callable[[], object]]]:
    """A handle of that kind, and the change that it undoes. Nothing is left afterwards."""
    run_id = f"handle-{os.getpid()}-{time.monotonic_ns()}"
    try:
        with engine(where) as client:
            if kind == "container":
                container = sleeper(client, run_id)
                yield Container(where, run_id, container, "running"), lambda: client.pause(container)
            else:
                makes: dict[str, tuple[Handle, Callable[[], object]]] = {
                    "containers": (Containers(where, run_id), lambda: sleeper(client, run_id)),
                    "docker_network": (DockerNetwork(where, run_id), lambda: network_of(client, run_id)),
                    "docker_image": (
                        DockerImage(where, run_id), lambda: make_host_image(client, run_id, f"test-{run_id}")
                    ),
                }  # fmt: skip
                yield makes[kind]
    finally:
        for handle in (Containers(where, run_id), DockerNetwork(where, run_id), DockerImage(where, run_id)):
            handle.undo()


KINDS = ("container", "containers", "docker_image", "docker_network")

if __name__ == "__main__":
    with private_engine(Path(sys.argv[1])) as address:
        print(address, flush=True)
        signal.sigwait({signal.SIGINT, signal.SIGTERM})
