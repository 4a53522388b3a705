"""The Docker engine: where it is, and talking to it. Everything of a run bears its id as a label.

The engine must be on this machine, and reached by its socket: a node's processes, files and network are looked at from
here, too.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torchaos.harness.contracts import UsageError

RUN, NODE = "torchaos.run", "torchaos.node"  # labels
USUAL = "unix:///var/run/docker.sock"
ANSWER_S = 20.0  # of one request; an engine that removes a container on a busy disk takes seconds


class EngineError(OSError):
    """The engine does not answer, or says no."""


def address() -> str:
    """Of the engine that this user means. Raises UsageError where it is not one of this machine."""
    said = os.environ.get("DOCKER_HOST") or USUAL
    if not said.startswith("unix://"):
        raise UsageError(f"DOCKER_HOST is {said}; nodes can only be containers of this machine: give unix://SOCKET")
    return said


@contextmanager
def engine(where: str, timeout_s: float = ANSWER_S) -> Iterator[Any]:
    """A docker.APIClient. What it raises in there comes out as EngineError, with the engine's own words."""
    _check_socket(where)
    try:
        import docker
        from docker.errors import DockerException
        from requests.exceptions import RequestException
    except ImportError as error:
        raise EngineError(f"Docker can't be talked to: {error}; pip install 'torchaos[docker]'") from error
    client = None
    try:
        client = docker.APIClient(base_url=where, version="auto", timeout=timeout_s)
        yield client
    except (DockerException, RequestException) as error:
        said = getattr(error, "explanation", None) or error
        raise EngineError(f"the Docker engine at {where}: {said}") from error
    finally:
        if client is not None:
            client.close()


def _check_socket(where: str) -> None:
    """A damaged undo log may name anything; what is no socket is not even looked at."""
    try:
        found = stat.S_ISSOCK(os.stat(where.removeprefix("unix://")).st_mode)
    except (OSError, ValueError) as error:
        raise EngineError(f"the Docker engine at {where} does not answer: {error}; start it") from error
    if not found:
        raise EngineError(f"the Docker engine at {where} does not answer: that is no socket")


def version(where: str, timeout_s: float = 5.0) -> str:
    """Raises EngineError where it does not answer."""
    with engine(where, timeout_s) as client:
        return str(client.version()["Version"])


def of_run(run_id: str, node: int | None = None) -> dict[str, Any]:
    """The filter that finds what a run has made, or what it has made for one node."""
    return {"label": [f"{RUN}={run_id}", *([] if node is None else [f"{NODE}={node}"])]}


def container_of(client: Any, run_id: str, node: int) -> Any:
    """What the engine knows of the node's container, as it is now. Raises EngineError where the node has none."""
    found = client.containers(all=True, filters=of_run(run_id, node))
    if not found:
        raise EngineError(f"node {node} has no container now")
    return client.inspect_container(found[0]["Id"])


def events(client: Any, container: str, since_s: float) -> list[Any]:
    """What the engine has told of a container from this time (seconds since the epoch) until now."""
    # With `until` in the past the engine gives what it remembers (256 events) and closes.
    stream = client.events(since=f"{since_s:.6f}", until=f"{time.time():.6f}", decode=True)
    found = list(stream)
    return [one for one in found if container in (one["Actor"]["ID"], one["Actor"]["Attributes"].get("container"))]
