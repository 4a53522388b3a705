"""The link of a node to the others, as network faults need it."""

from __future__ import annotations

from dataclasses import dataclass

from torchaos.harness.contracts import ChaosError, LiveNode
from torchaos.harness.machine.netspace import Space


@dataclass(frozen=True)
class Link:
    """`space` is the node's own network namespace, in which its end of the link is `device`. `switch` is where all
    links come together: there the end of this one is `port`. Where that is not the run's own, it is `space` again."""

    space: Space
    switch: Space
    device: str
    port: str
    address: str
    name: str
    names_file: str  # by which the node finds the others; mounted there as /etc/hosts
    run_id: str


def link_of(live: LiveNode) -> Link:
    """Raises ChaosError where the node has none: it is the machine itself, or a stranger's."""
    if live.node.link is None:
        raise ChaosError(f"node {live.node.index} has no link that could be changed; write launcher: netns")
    return live.node.link
