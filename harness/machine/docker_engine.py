"""The Docker engine: its address, and requests to it. Everything that a run makes in the engine has the run's id as a
label.

The engine must be on this machine, with a Unix socket, because the harness also reads the nodes' processes, files and
network from this machine."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torchaos.harness.contracts import UsageError

RUN, NODE = "torchaos.run", "torchaos.node"  # names of labels
USUAL = "unix:///var/run/docker.sock"
ANSWER_S = 20.0  # seconds for one request; removing a container from a busy disk takes several


class EngineError(OSError):
    """The engine does not answer, or refuses a request."""


def address() -> str:
    """The address of the user's engine. Raises UsageError if it is not a socket of this machine."""
    given = os.environ.get("DOCKER_HOST") or USUAL
    if not given.startswith("unix://"):
        raise UsageError(f"DOCKER_HOST is {given}; nodes can only be containers of this machine: give unix://SOCKET")
    return given


@contextmanager
def engine(where: str, timeout_s: float = ANSWER_S) -> Iterator[Any]:
    """A context manager with a docker.APIClient. Inside the `with` block, the client's errors become EngineErrors with
    the message of the engine."""
    _check_socket(where)
    try:
        import docker
        from docker.errors import DockerException
        from requests.exceptions import RequestException
    except ImportError as error:
        raise EngineError(f"no connection to Docker: {error}; pip install 'torchaos[docker]'") from error
    client = None
    try:
        client = docker.APIClient(base_url=where, version="auto", timeout=timeout_s)
        yield client
    except (DockerException, RequestException) as error:
        words = getattr(error, "explanation", None) or error
        raise EngineError(f"the Docker engine at {where}: {words}") from error
    finally:
        if client is not None:
            client.close()


def _check_socket(where: str) -> None:
    """Raises EngineError if there is no socket at the address. An undo log may be damaged and name any file."""
    try:
        found = stat.S_ISSOCK(os.stat(where.removeprefix("unix://")).st_mode)
    except (OSError, ValueError) as error:
        raise EngineError(f"the Docker engine at {where} does not answer: {error}; start it") from error
    if not found:
        raise EngineError(f"the Docker engine at {where} does not answer: this is not a socket")


def version(where: str, timeout_s: float = 5.0) -> str:
    """The engine's version. Raises EngineError if it does not answer within `timeout_s` seconds."""
    with engine(where, timeout_s) as client:
        return str(client.version()["Version"])


def of_run(run_id: str, node: int | None = None) -> dict[str, Any]:
    """The filter for all objects of a run or, with `node`, of one node of the run."""
    return {"label": [f"{RUN}={run_id}", *([] if node is None else [f"{NODE}={node}"])]}


def container_of(client: Any, run_id: str, node: int) -> Any:
    """The engine's current description of the node's container. Raises EngineError if there is none."""
    found = client.containers(all=True, filters=of_run(run_id, node))
    if not found:
        raise EngineError(f"node {node} has no container now")
    return client.inspect_container(found[0]["Id"])


def events(client: Any, container: str, since_s: float) -> list[Any]:
    """The engine's events about a container, from `since_s` (seconds since the epoch) until now."""
    # With `until` in the past, the engine sends the events that it remembers (256) and closes the stream.
    stream = client.events(since=f"{since_s:.6f}", until=f"{time.time():.6f}", decode=True)
    actors = [(event, event["Actor"]) for event in stream]
    return [event for event, actor in actors if container in (actor["ID"], actor["Attributes"].get("container"))]
