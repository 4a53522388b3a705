"""Several nodes on one machine: a network namespace each, with a link to a switch that is in one too.

Nothing is made in the host's own namespaces, and nothing outlives the processes that keep the run's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from torchaos.harness.agent.wire import ENV_RUN_ID
from torchaos.harness.contracts import ChaosError, Handle, JobSpec
from torchaos.harness.launchers.elastic_env import elastic_env
from torchaos.harness.network import holder
from torchaos.harness.network.link import Link
from torchaos.harness.undo.handles import JobProcesses
from torchaos.harness.undo.space import Space


@dataclass(frozen=True)
class NetnsNode:
    index: int
    link: Link
    cwd: Path
    env: Mapping[str, str]

    def argv(self, command: Sequence[str]) -> list[str]:
        return self.link.space.enter(command, self.cwd)

    def host_pid(self, pid: int) -> int | None:
        return pid


class Netns:
    """Each node runs the command as it was written. Torchrun takes what it does not say from the environment: how many
    nodes there are, and where they meet. What the scenario or the command says itself, stays."""

    name: ClassVar[str] = "netns"
    needs: ClassVar[frozenset[str]] = frozenset({"links"})

    def __init__(self) -> None:
        self._links: list[Link] = []

    def resources(self, spec: JobSpec) -> Sequence[Handle]:
        return (JobProcesses(keepers(spec.env[ENV_RUN_ID])),)

    def create(self, spec: JobSpec) -> Sequence[NetnsNode]:
        """The namespaces stay the same over all submissions: a link that is cut stays cut. Raises ChaosError."""
        if len(self._links) != spec.nodes or not all(link.space.alive() for link in self._links):
            self._links = make_links(spec.log.parent.parent / "net", spec.nodes, spec.env[ENV_RUN_ID])
        return [
            NetnsNode(index, link, spec.cwd, elastic_env(index, spec, self._links[0].name, link.name, holder.DEVICE))
            for index, link in enumerate(self._links)
        ]


def keepers(run_id: str) -> str:
    """The mark of the processes that keep the namespaces: not that of the job, which is ended before them."""
    return f"{run_id}.net"


def make_links(folder: Path, nodes: int, run_id: str) -> list[Link]:
    """Raises ChaosError where namespaces can't be made."""
    user = "same-user" if os.geteuid() == 0 else "own-user"
    argv = [sys.executable, "-S", "-E", holder.__file__, str(folder), str(nodes), user]
    environ = {**os.environ, ENV_RUN_ID: keepers(run_id)}
    process = subprocess.Popen(
        argv, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True, cwd="/"
    )
    assert process.stdout is not None
    with process.stdout as output:
        said = json.loads(output.readline() or b'{"error": "their keeper ended"}')
    if "error" in said:
        process.wait()
        raise ChaosError(f"the nodes' network namespaces can't be made: {said['error']}; see torchaos doctor")
    switch = Space.of(said["switch"])
    return [
        Link(
            Space.of(pid), switch, holder.DEVICE, holder.port(node), holder.address(node), holder.name(node),
            str(folder / holder.name(node) / "hosts"), run_id,
        )
        for node, pid in enumerate(said["nodes"])
    ]  # fmt: skip
