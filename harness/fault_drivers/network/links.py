"""The link between a node and the other nodes, and a process that keeps a fault on, such as the packet queue or a
flapping link. It is guarded before it starts."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from torchaos.harness.agent.wire import ENV_RUN_ID
from torchaos.harness.host.netspace import Space
from torchaos.harness.interfaces import ChaosError, LiveNode
from torchaos.harness.rollback.handles import JobProcesses
from torchaos.harness.rollback.network_handles import mark_of

# The link between a node and the other nodes, for network faults.


@dataclass(frozen=True)
class Link:
    """A node's link. `space` is the node's own network namespace, with the link's end `device`. `switch` is the
    namespace in which all links meet, with the link's other end `port`. If the run does not own a switch, `switch` is
    `space`. The link of another pod has only its address."""

    space: Space
    switch: Space
    device: str
    port: str
    address: str
    name: str
    names_file: str  # the node's /etc/hosts: its names for the other nodes
    run_id: str


def link_of(live: LiveNode) -> Link:
    """The node's link. Raises ChaosError if it has none, because the node is the machine itself, or was not made by the
    run."""
    if live.node.link is None:
        raise ChaosError(f"node {live.node.index} has no link that could be changed; write launcher: netns")
    return live.node.link


# A process that keeps a fault on, such as the packet queue or a flapping link. It is guarded before it starts.


@dataclass(frozen=True)
class Helper:
    """A process with its own mark in its environment. The mark begins with the run's id and differs from the mark of
    the job."""

    mark: str

    @property
    def handle(self) -> JobProcesses:
        return JobProcesses(self.mark)

    def start(self, space: Space | None, command: Sequence[str]) -> str:
        """Starts the helper in the network namespace `space`; if that is None, in the harness's namespace. Returns the
        helper's first line, which reports that it is ready. If the command is `sh`, returns an empty text without
        waiting. Raises OSError."""
        process = self.open(space, command)
        assert process.stdout is not None
        return process.stdout.readline().decode().strip() if command[0] != "sh" else ""

    def open(self, space: Space | None, command: Sequence[str]) -> subprocess.Popen[bytes]:
        """Starts the helper like `start`, for a caller that reads its output itself. Raises OSError."""
        return subprocess.Popen(
            space.enter(command) if space else list(command), cwd="/", start_new_session=True,
            env={**os.environ, ENV_RUN_ID: self.mark},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip


def helper_of(fault: str, link: Link) -> Helper:
    """The helper for one node that the fault hits."""
    return Helper(f"{link.run_id}.{mark_of(fault)}.{link.name}")
