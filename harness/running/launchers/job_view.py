"""What faults know of a running job: the ranks, agents, nodes and endpoints that a fault can hit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from torchaos.harness.contracts import ChaosError, LiveNode, RankProcess
from torchaos.harness.mechanics.proxy.server import Endpoint
from torchaos.harness.mechanics.site import Victim
from torchaos.harness.watching.probes.ranks import RankWatch


class JobView(ABC):
    """The parts of a running job that a fault can hit, as they are now. It can't start or end the job."""

    def __init__(self, watch: RankWatch) -> None:
        self._watch = watch

    def ranks(self) -> dict[int, RankProcess]:
        """The live ranks, by number, without the ranks that are ambiguous or not up yet."""
        return self._watch.ranks()

    def agents(self, nodes: Sequence[int] = ()) -> list[Victim]:
        """Torchelastic's agents of these nodes, or of all nodes if `nodes` is empty. Raises ChaosError if a node has no
        agent now."""
        found = self._watch.agents()
        missing = [node for node in nodes if node not in found]
        if missing or not found:
            raise ChaosError(f"node {missing[0] if missing else 0} has no torchelastic agent now")
        return [Victim(*found[node], rank=None) for node in nodes or sorted(found)]

    def nodes(self) -> Sequence[LiveNode]:
        """The nodes, in order of their index."""
        return []

    def endpoints(self) -> Mapping[str, Endpoint]:
        """The endpoints that have a proxy, by name."""
        return {}

    @abstractmethod
    def members(self) -> dict[int, int]:
        """Every living process of the job: start times (clock ticks since boot) by pid."""
