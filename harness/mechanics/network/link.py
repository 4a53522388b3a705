"""The link between a node and the other nodes, for network faults."""

from __future__ import annotations

from dataclasses import dataclass

from torchaos.harness.contracts import ChaosError, LiveNode
from torchaos.harness.machine.netspace import Space


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
