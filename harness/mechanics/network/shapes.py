"""The base class of `network.delay` and similar faults: the packets of the target nodes go through a shaper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from torchaos.harness.agent.fault import Fault
from torchaos.harness.contracts import Evidence, Handle, Hits, NodeSite, Probe, Where
from torchaos.harness.mechanics.network.evidence import counted
from torchaos.harness.mechanics.network.link import link_of
from torchaos.harness.mechanics.network.metering import measured, meter_handle
from torchaos.harness.mechanics.network.probes import came, slower
from torchaos.harness.mechanics.network.shaper import Shape, Shaper
from torchaos.harness.record.record import Record


class ShapedFault(Fault):
    """Affects all packets that the target nodes send. For both directions, target both ends."""

    where: ClassVar[tuple[Where, ...]] = ("node",)
    hits: ClassVar[Hits] = "nodes"
    needs: ClassVar[frozenset[str]] = frozenset({"links", "shaper", "tc", "ss"})
    on_collectives: ClassVar[bool] = True
    counter: ClassVar[str]  # counter of the receiving kernels that shows the fault; rtt_ms: the job's round trips
    words: ClassVar[str] = ""  # text of the proof for that counter

    @property
    def least(self) -> float:
        """The value that the counter must reach."""
        return 1.0

    def shape(self) -> Mapping[str, float]:
        """The fields of a Shape (see queue.py)."""
        raise NotImplementedError

    def asked(self) -> Mapping[str, float]:
        """The values that a probe connection should measure while the fault is on."""
        raise NotImplementedError

    def changes(self, site: NodeSite) -> Sequence[Handle]:
        return [*(handle for shaper in self._shapers(site) for handle in shaper.handles()), meter_handle(site)]

    def apply(self, site: NodeSite) -> None:
        for shaper in self._shapers(site):
            shaper.apply()

    def probes(self, site: NodeSite) -> Sequence[Probe]:
        seen = slower(site, self.least) if self.counter == "rtt_ms" else came(site, self.counter, self.words)
        return [*seen, *measured(site, self.asked(), jitter_ms=self.shape().get("jitter", 0.0))]

    def felt(self, record: Record, fault: str) -> Evidence | None:
        return counted(record, fault, self.counter, least=self.least)

    def _shapers(self, site: NodeSite) -> list[Shaper]:
        return [Shaper(site.fault, link_of(live), Shape(**self.shape())) for live in site.nodes]
