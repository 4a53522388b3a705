"""The part of a job that is on this node, as a fault sees it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

from torchaos.harness.agent.wire import ENV_NODE
from torchaos.harness.contracts import ChaosError
from torchaos.harness.machine import proc
from torchaos.harness.running.launchers.job_view import JobView
from torchaos.harness.running.launchers.local import LocalNode
from torchaos.harness.running.launchers.node_run import LiveNode
from torchaos.harness.watching.probes.ranks import RankWatch


class NodePart(JobView):
    """This node's part of a job. `mark`: the mark that all its processes carry. `env`: the part of their environment
    that says where they are; by default the number of the node."""

    def __init__(self, watch: RankWatch, node: int, mark: str, env: Mapping[str, str] | None = None) -> None:
        super().__init__(watch)
        self._node, self._mark = node, mark
        self._env = {ENV_NODE: str(node)} if env is None else env

    def stop(self) -> None:
        """Stops watching."""
        self._watch.stop()

    def nodes(self) -> list[LiveNode]:
        here = LocalNode(self._node, self._env)
        return [LiveNode(here, self._mark, self._whole, self._no_return, self._no_return)]

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
