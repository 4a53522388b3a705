"""The part of the job that is on this node, as a fault sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from torchaos.harness.agent.wire import ENV_NODE
from torchaos.harness.contracts import ChaosError
from torchaos.harness.machine import proc
from torchaos.harness.running.launchers.local import LocalNode
from torchaos.harness.running.launchers.node_run import LiveNode
from torchaos.harness.running.launchers.running_job import RunningJob
from torchaos.harness.watching.probes.ranks import RankWatch


class NodePart(RunningJob):
    """This node's part of a job. `mark`: the mark that all its processes carry. The wrapper starts and ends the
    command, not this class."""

    def __init__(self, watch: RankWatch, node: int, mark: str) -> None:
        super().__init__(watch)
        self._node, self._mark = node, mark

    def start(self) -> None:
        raise NotImplementedError

    def nodes(self) -> list[LiveNode]:
        here = LocalNode(self._node, {ENV_NODE: str(self._node)})
        return [LiveNode(here, self._mark, self.members, self._no_return, self._no_return)]

    def members(self) -> dict[int, int]:
        living = {pid: ticks for pid, ticks in self._watch.members().items() if proc.is_alive(pid, ticks)}
        return {**living, **proc.family(self._mark)}

    def stop(self, grace_s: float = 0.0, hurried: Callable[[], bool] = lambda: False) -> list[int]:
        raise NotImplementedError

    def _no_return(self, index: int) -> NoReturn:
        raise ChaosError(f"node {index} is a machine of its own, and its command can't be started again from here")

    def _live(self) -> None:
        raise NotImplementedError
