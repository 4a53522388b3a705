"""Starts a node's container, prints its output, and ends with its exit code.

    python -m ... CONFIG.json COMMAND...

In the harness's process tree, this process represents the node's command. Its environment is the job's, and is copied
into the container. SIGTERM is passed on to the container."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from torchaos.harness.host.cluster_tools import NODE, RUN, EngineError, engine, of_run

_SIGNALLED = 128  # a larger exit code means a signal: 128 + its number


def main(config: dict[str, Any], command: list[str]) -> int:
    where = config["engine"]
    with engine(where, timeout_s=60.0) as client:
        _forget(client, config["create"]["labels"])
        created = _create(client, config, command)
        refused: list[int] = []  # signals that came when the container did not run

        def hand_on(number: int, _frame: object) -> None:
            try:
                with engine(where) as other:
                    other.kill(created, signal=signal.Signals(number).name)
            except EngineError:
                refused.append(number)

        # Attach before the start, so that no output is missed.
        output = client.attach(created, stdout=True, stderr=True, stream=True)
        signal.signal(signal.SIGTERM, hand_on)
        client.start(created)
        for number in tuple(refused):
            hand_on(number, None)
        for chunk in output:
            os.write(1, chunk)
        return int(client.wait(created, timeout=None)["StatusCode"])


def _forget(client: Any, labels: dict[str, str]) -> None:
    """Removes the earlier container of this node. A container of another run that has the same name stays."""
    from docker.errors import NotFound

    for container in client.containers(all=True, filters=of_run(labels[RUN], int(labels[NODE]))):
        with suppress(NotFound):
            client.remove_container(container["Id"], force=True, v=True)


def _create(client: Any, config: dict[str, Any], command: list[str]) -> str:
    from docker.types import Mount

    names = config["env"]
    environment = {name: value for name, value in os.environ.items() if names is None or name in names}
    mounts = [Mount(target, source, type="bind", read_only=read_only) for source, target, read_only in config["mounts"]]
    host = client.create_host_config(mounts=mounts, network_mode=config["network"], init=True, **config["host"])
    at = client.create_endpoint_config(ipv4_address=config["address"])
    found = client.create_container(
        command=command, environment={**environment, **config["set"]}, host_config=host,
        networking_config=client.create_networking_config({config["network"]: at}), **config["create"],
    )  # fmt: skip
    return str(found["Id"])


def end_like(code: int) -> None:
    """Ends this process in the same way as the container ended: with the same exit code, or by the same signal, so that
    a waiting parent sees the same status."""
    if code > _SIGNALLED:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        try:
            signal.signal(code - _SIGNALLED, signal.SIG_DFL)
        except (OSError, ValueError):  # SIGKILL has no handler, and the code may be the job's own and mean no signal
            pass
        try:
            os.kill(os.getpid(), code - _SIGNALLED)
        except (OSError, ValueError):
            pass
    sys.exit(code)


if __name__ == "__main__":
    try:
        ended = main(json.loads(Path(sys.argv[1]).read_text()), sys.argv[2:])
    except EngineError as error:
        print(f"torchaos: {error}", flush=True)
        sys.exit(125)
    end_like(ended)
