"""network.delay, .duplicate, .reorder, .corrupt: what a node sends comes late, twice, in another order, damaged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torchaos.harness.agent.fault import Fault
from torchaos.harness.agent.wire import Seconds

if TYPE_CHECKING:
    from torchaos.harness.contracts import Evidence, Handle, Hits, Probe, Site, Where
    from torchaos.harness.network.shaper import Shaper
    from torchaos.harness.record import Record


class _Shaped(Fault):
    """Hits what the nodes send, all of it; for both directions, name all nodes."""

    where: ClassVar[tuple[Where, ...]] = ("node",)
    needs: ClassVar[frozenset[str]] = frozenset({"links", "shaper", "tc", "ss"})
    hits: ClassVar[Hits] = "nodes"
    proof: ClassVar[tuple[str, str]]  # a counter of the receiving kernels, and what it says

    def shape(self) -> dict[str, float]:
        raise NotImplementedError

    def changes(self, site: Site) -> Sequence[Handle]:
        return [handle for shaper in self._shapers(site) for handle in shaper.handles()]

    def apply(self, site: Site) -> None:
        for shaper in self._shapers(site):
            shaper.apply()

    def probes(self, site: Site) -> Sequence[Probe]:
        from torchaos.harness.network.probes import came

        return came(site, *self.proof)

    def felt(self, record: Record, fault: str) -> Evidence | None:
        from torchaos.harness.network.evidence import counted

        return counted(record, fault, self.proof[0])

    def _shapers(self, site: Site) -> list[Shaper]:
        from torchaos.harness.network.link import link_of
        from torchaos.harness.network.shaper import Shape, Shaper

        return [Shaper(site.fault, link_of(live), Shape(**self.shape())) for live in site.nodes]


@dataclass(frozen=True)
class Delay(_Shaped):
    """Each packet comes so much later, give or take the jitter, in the order in which it was sent."""

    delay: Seconds = 0.05
    jitter: Seconds = 0.0

    name: ClassVar[str] = "network.delay"

    def shape(self) -> dict[str, float]:
        return {"delay": 1e3 * self.delay, "jitter": 1e3 * self.jitter}

    def probes(self, site: Site) -> Sequence[Probe]:
        from torchaos.harness.network.probes import slower

        return slower(site, self._least_ms)

    def felt(self, record: Record, fault: str) -> Evidence | None:
        from torchaos.harness.network.evidence import counted

        return counted(record, fault, "rtt_ms", least=self._least_ms)

    @property
    def _least_ms(self) -> float:
        return max(1.0, 800 * (self.delay - self.jitter))


@dataclass(frozen=True)
class Duplicate(_Shaped):
    """So many of the packets come twice."""

    percent: float = 10.0

    name: ClassVar[str] = "network.duplicate"
    proof: ClassVar[tuple[str, str]] = ("duplicates", "{n} segments of the job came twice")

    def shape(self) -> dict[str, float]:
        return {"duplicate": self.percent}


@dataclass(frozen=True)
class Reorder(_Shaped):
    """So many of the packets overtake those before them, which are delayed."""

    percent: float = 25.0
    delay: Seconds = 0.01

    name: ClassVar[str] = "network.reorder"
    proof: ClassVar[tuple[str, str]] = ("out_of_order", "{n} segments of the job came out of order")

    def shape(self) -> dict[str, float]:
        return {"reorder": self.percent, "delay": 1e3 * self.delay}


@dataclass(frozen=True)
class Corrupt(_Shaped):
    """In so many of the packets one bit is another. TCP's checksum finds it, and they are sent again."""

    percent: float = 5.0

    name: ClassVar[str] = "network.corrupt"
    proof: ClassVar[tuple[str, str]] = ("bad_checksums", "{n} segments of the job came with a bad checksum")

    def shape(self) -> dict[str, float]:
        return {"corrupt": self.percent}
