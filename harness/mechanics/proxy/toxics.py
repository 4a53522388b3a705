"""What `proxy.*` share: toxics on a proxy, or its being down, and what the kernel says of the job's connections.

Toxics are Toxiproxy's own, see "Toxics" in its README; times there are in ms, rates in KB/s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from torchaos.harness.agent.fault import Fault
from torchaos.harness.agent.wire import Kind
from torchaos.harness.contracts import ChaosError, Evidence, Handle, Hits, NodeSite, Probe, Where
from torchaos.harness.mechanics.network.evidence import counted, logged
from torchaos.harness.mechanics.network.sampling import Watch
from torchaos.harness.mechanics.proxy.server import Endpoint
from torchaos.harness.mechanics.proxy.traffic import Traffic, connections
from torchaos.harness.record.record import Record
from torchaos.harness.undo.network import mark_of
from torchaos.harness.undo.proxy import Toxic

BOTH = ("upstream", "downstream")


class ProxyFault(Fault):
    """A toxic before one of the job's endpoints, or, without a toxic, its proxy is down."""

    where: ClassVar[tuple[Where, ...]] = ("node",)
    hits: ClassVar[Hits] = "endpoints"
    needs: ClassVar[frozenset[str]] = frozenset({"toxiproxy", "ss"})
    toxic: ClassVar[str] = ""  # its type
    proofs: ClassVar[tuple[str, ...]] = ("sent_bytes", "got_bytes")  # counts of traffic.py, any of them

    endpoint: str

    if TYPE_CHECKING:  # a parameter of some, a constant of others

        @property
        def stream(self) -> str: ...  # upstream: what the job sends; downstream: what it gets; both

    def attributes(self) -> Mapping[str, Any]:
        """How much, in the units of Toxiproxy (ms, KB/s)."""
        return {}

    def changes(self, site: NodeSite) -> Sequence[Handle]:
        one = self._endpoint(site)
        mark, down = mark_of(site.fault), not self.toxic
        return [Toxic(one.api.pid, one.api.start_ticks, one.api.port, one.name, mark, down)]

    def apply(self, site: NodeSite) -> None:
        """Raises OSError where the server does not answer, ChaosError where it did not do what it was told."""
        one, mark = self._endpoint(site), mark_of(site.fault)
        streams = (BOTH if self.stream == "both" else (self.stream,)) if self.toxic else ()
        toxics = [
            {"type": self.toxic, "name": f"{mark}_{stream}", "stream": stream, "attributes": dict(self.attributes())}
            for stream in streams
        ]
        before = connections(one)
        said = one.api.ask(proxy=one.name, **({"add": toxics} if toxics else {"enabled": False})).get(one.name, {})
        if not {toxic["name"] for toxic in toxics} <= {*said.get("toxics", ())} or said.get("enabled") is not bool(
            toxics
        ):
            raise ChaosError(f"Toxiproxy did not do what it was told before {one.name}: it says {said}")
        site.emit(
            Kind.EFFECT, {"fault": site.fault, "effect": f"{one.name} is reached by {one.listen}", "at": one.listen}
        )
        if not toxics and (ended := len(before.keys() - connections(one).keys())):
            site.emit(Kind.NETWORK, {"fault": site.fault, "counts": {"ended": ended}})

    def probes(self, site: NodeSite) -> Sequence[Probe]:
        traffic = Traffic(self._endpoint(site))

        def proof(counts: Mapping[str, float]) -> str | None:
            return next((f"{name}: {counts[name]:g}" for name in self._proofs() if counts.get(name, 0) >= 1), None)

        return [Watch(site.fault, (), proof, [traffic])]

    def felt(self, record: Record, fault: str) -> Evidence | None:
        """What the kernel counted on the job's connections to the proxy while the fault was on; for a fault that breaks
        them, also that the job's log says of the proxy's address, which nobody else has, that it could not be used."""
        found = counted(record, fault, *self._proofs())
        if found or "ended" not in self.proofs:
            return found
        addresses = [str(event.data["at"]) for event in record.of_fault(fault, Kind.EFFECT) if "at" in event.data]
        return logged(record, fault, "endpoint", "the job could not use it", addresses)

    def _proofs(self) -> tuple[str, ...]:
        """Of what flows only the direction that the toxic is on counts."""
        hidden = {"upstream": {"got_bytes"}, "downstream": {"sent_bytes"}}.get(self.stream, set())
        return tuple(name for name in self.proofs if name not in hidden)

    def _endpoint(self, site: NodeSite) -> Endpoint:
        try:
            return site.endpoints[self.endpoint]
        except KeyError as error:
            raise ChaosError(f"there is no proxy before {self.endpoint}; name it in job.endpoints") from error
