"""The part of a job that is on this node, as a fault sees it."""

from __future__ import annotations

from typing import NoReturn

from torchaos.harness.agent.wire import ENV_NODE
from torchaos.harness.contracts import ChaosError
from torchaos.harness.machine import proc
from torchaos.harness.running.launchers.job_view import JobView
from torchaos.harness.running.launchers.local import LocalNode
from torchaos.harness.running.launchers.node_run import LiveNode
from torchaos.harness.watching.probes.ranks import RankWatch


class NodePart(JobView):
    """This node's part of a job. `mark`: the mark that all its processes carry."""

    def __init__(self, watch: RankWatch, node: int, mark: str) -> None:
        super().__init__(watch)
        self._node, self._mark = node, mark

    def nodes(self) -> list[LiveNode]:
        here = LocalNode(self._node, {ENV_NODE: str(self._node)})
        return [LiveNode(here, self._mark, self.members, self._no_return, self._no_return)]

    def members(self) -> dict[int, int]:
        living = {pid: ticks for pid, ticks in self._watch.members().items() if proc.is_alive(pid, ticks)}
        return {**living, **proc.family(self._mark)}

    def _no_return(self, index: int) -> NoReturn:
        raise ChaosError(f"node {index} is a machine of its own, and its command can't be started again from here")
