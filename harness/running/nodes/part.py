"""The part of a job that is on this node, as a fault sees it."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from typing import NoReturn

from torchaos.harness.agent.wire import ENV_NODE
from torchaos.harness.contracts import ChaosError
from torchaos.harness.machine import proc
from torchaos.harness.mechanics.network.link import Link
from torchaos.harness.running.launchers.job_view import JobView
from torchaos.harness.running.launchers.local import LocalNode
from torchaos.harness.running.launchers.node_run import LiveNode
from torchaos.harness.watching.probes.ranks import RankWatch


class NodePart(JobView):
    """This node's part of a job. `mark`: the mark that all its processes carry. `env`: the part of their environment
    that says where they are; by default the number of the node. `links`: the link of each node, if faults can change
    that of this node."""

    def __init__(
        self, watch: RankWatch, node: int, mark: str, env: Mapping[str, str] | None = None, links: Sequence[Link] = ()
    ) -> None:  # fmt: skip
        super().__init__(watch)
        self._node, self._mark, self.links = node, mark, links
        self._beside: Collection[int] = ()
        self._env = {ENV_NODE: str(node)} if env is None else env

    def stop(self) -> None:
        """Stops watching."""
        self._watch.stop()

    def beside(self, nodes: Collection[int]) -> NodePart:
        """The same part, for a fault that other agents apply on the nodes `nodes`: it does not cut this node off from
        them."""
        other = copy.copy(self)
        other._beside = [node for node in nodes if node != self._node]
        return other

    def nodes(self) -> list[LiveNode]:
        """This node; and the other nodes, if faults can change its link to them."""
        if not self.links:
            return [self._live(LocalNode(self._node, self._env))]
        nodes = [LocalNode(index, self._env, link) for index, link in enumerate(self.links)]
        return [self._live(node) for node in nodes if node.index not in self._beside]

    def _live(self, node: LocalNode) -> LiveNode:
        return LiveNode(node, self._mark, self._whole, self._no_return, self._no_return)

    def _whole(self) -> dict[int, int]:
        """All processes of the node. Raises ChaosError if a fault can't reach one of them."""
        found = self.members()
        if 1 in found:
            raise ChaosError(
                "torchrun is the first process of its container, which the kernel shields from signals of that "
                "container; aim at ranks, or attach from a sidecar of a pod with shareProcessNamespace"
            )
        return found

    def members(self) -> dict[int, int]:
        living = {pid: ticks for pid, ticks in self._watch.members().items() if proc.is_alive(pid, ticks)}
        return {**living, **proc.family(self._mark)}

    def _no_return(self, index: int) -> NoReturn:
        raise ChaosError(f"node {index} is a machine of its own, and its command can't be started again from here")
