"""The link between a node and the other nodes (`Link`), and a helper process that keeps a fault on a link up, such as
the packet queue or a flapping link (`Helper`)."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from torchaos.harness.host.network_namespace import NetworkNamespace
from torchaos.harness.interfaces import ChaosError, LiveNode
from torchaos.harness.protocol.wire import ENV_RUN_ID
from torchaos.harness.rollback.handles import JobProcesses
from torchaos.harness.rollback.network_handles import mark_of


@dataclass(frozen=True)
class Link:
    """A node's link. `namespace` is the node's own network namespace, with the end `device` of the link. `switch` is
    the namespace in which all links meet, with the other end `port`. If the run does not own a switch, `switch` is the
    same as `namespace`. For another pod, only the address is known."""

    namespace: NetworkNamespace
    switch: NetworkNamespace
    device: str
    port: str
    address: str
    name: str
    names_file: str  # the node's /etc/hosts, with the names of the other nodes
    run_id: str


def link_of(live: LiveNode) -> Link:
    """The node's link. Raises ChaosError if the node has none: it is the machine itself, or was not made by the run."""
    link: Link | None = live.node.link
    if link is None:
        raise ChaosError(f"node {live.node.index} has no link that could be changed; write launcher: netns")
    return link


@dataclass(frozen=True)
class Helper:
    """A process with a mark of its own in its environment, whose undo is on disk before it starts. The mark begins with
    the run's id and differs from the mark of the job."""

    mark: str

    @property
    def handle(self) -> JobProcesses:
        return JobProcesses(self.mark)

    def start(self, namespace: NetworkNamespace | None, command: Sequence[str]) -> str:
        """Starts the helper in this network namespace; None: in the harness's own namespace. Returns the
        helper's first line of output, which reports that it is ready. If the command is `sh`, returns an empty text
        without waiting. Raises OSError."""
        process = self.open(namespace, command)
        assert process.stdout is not None
        return process.stdout.readline().decode().strip() if command[0] != "sh" else ""

    def open(self, namespace: NetworkNamespace | None, command: Sequence[str]) -> subprocess.Popen[bytes]:
        """Starts the helper like `start`, for a caller that reads its output itself. Raises OSError."""
        return subprocess.Popen(
            namespace.enter(command) if namespace else list(command), cwd="/", start_new_session=True,
            env={**os.environ, ENV_RUN_ID: self.mark},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip


def helper_of(fault: str, link: Link) -> Helper:
    """The helper process of a fault on the link of one node."""
    return Helper(f"{link.run_id}.{mark_of(fault)}.{link.name}")


def sides(
    nodes: Sequence[LiveNode], cluster: Sequence[LiveNode], peers: Sequence[int]
) -> tuple[list[Link], list[Link]]:
    """The links of the target nodes, and the links of the nodes from which they are cut off: `peers`, or all other
    nodes if that is empty. Raises ChaosError if one of the two lists is empty."""
    inside = {live.node.index for live in nodes}
    outside = [live for live in cluster if live.node.index not in inside]
    outside = [live for live in outside if not peers or live.node.index in peers]
    if not inside or not outside:
        raise ChaosError("there is no node on the other side; name another target, or other peers")
    return [link_of(live) for live in nodes], [link_of(live) for live in outside]
