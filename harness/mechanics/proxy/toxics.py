"""The base class of `proxy.*`: adds toxics to a proxy or disables it, and watches the job's connections to it.

Toxics are Toxiproxy's own, see "Toxics" in its README. Their times are in ms, their rates in KB/s."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from torchaos.harness.agent.fault import Fault
from torchaos.harness.agent.wire import Kind
from torchaos.harness.contracts import ChaosError, Evidence, Handle, Hits, NodeSite, Probe, Where
from torchaos.harness.mechanics.network.evidence import logged
from torchaos.harness.mechanics.network.sampling import Watch
from torchaos.harness.mechanics.proxy.server import Endpoint
from torchaos.harness.mechanics.proxy.traffic import WAYS, Traffic, connections
from torchaos.harness.record.record import Record
from torchaos.harness.undo.network import mark_of
from torchaos.harness.undo.proxy import Toxic

BOTH = ("upstream", "downstream")
_WORDS = {
    "unanswered": "the job sent {n} bytes to the proxy, and got none back",
    "ended": "{n} connections of the job to the proxy ended",
}


class ProxyFault(Fault):
    """Adds a toxic to the proxy of one of the job's endpoints. Without a toxic, disables the proxy."""

    where: ClassVar[tuple[Where, ...]] = ("node",)
    hits: ClassVar[Hits] = "endpoints"
    needs: ClassVar[frozenset[str]] = frozenset({"toxiproxy", "ss"})
    toxic: ClassVar[str] = ""  # the toxic's type; empty: the proxy is disabled
    proofs: ClassVar[tuple[str, ...]] = ()  # counters of traffic.py; any one is proof

    endpoint: str

    if TYPE_CHECKING:  # a parameter in some injectors, a constant in others

        @property
        def stream(self) -> str: ...  # upstream: data that the job sends; downstream: data that it gets; both

    def attributes(self) -> Mapping[str, Any]:
        """The attributes of the toxic, in Toxiproxy's units (ms, KB/s)."""
        return {}

    def changes(self, site: NodeSite) -> Sequence[Handle]:
        endpoint = self._endpoint(site)
        mark, down = mark_of(site.fault), not self.toxic
        return [Toxic(endpoint.api.pid, endpoint.api.start_ticks, endpoint.api.port, endpoint.name, mark, down)]

    def apply(self, site: NodeSite) -> None:
        """Sends the order to the server. Raises OSError if the server does not answer, ChaosError if it did not carry
        out the order."""
        endpoint, mark = self._endpoint(site), mark_of(site.fault)
        streams = (BOTH if self.stream == "both" else (self.stream,)) if self.toxic else ()
        toxics = [
            {"type": self.toxic, "name": f"{mark}_{stream}", "stream": stream, "attributes": dict(self.attributes())}
            for stream in streams
        ]
        before = connections(endpoint)
        order: dict[str, object] = {"add": toxics} if toxics else {"enabled": False}
        answer = endpoint.api.ask(proxy=endpoint.name, **order).get(endpoint.name, {})
        added = {toxic["name"] for toxic in toxics} <= {*answer.get("toxics", ())}
        if not added or answer.get("enabled") is not bool(toxics):
            raise ChaosError(f"Toxiproxy did not carry out the order for {endpoint.name}: it answered {answer}")
        effect = f"{endpoint.name} is reached by {endpoint.listen}"
        site.emit(Kind.EFFECT, {"fault": site.fault, "effect": effect, "at": endpoint.listen})
        if not toxics and (ended := len(before.keys() - connections(endpoint).keys())):
            site.emit(Kind.NETWORK, {"fault": site.fault, "counts": {"ended": ended}})

    def probes(self, site: NodeSite) -> Sequence[Probe]:
        return [Watch(site.fault, (), self._proof, [Traffic(self._endpoint(site))])]

    def felt(self, record: Record, fault: str) -> Evidence | None:
        """Evidence from the kernel's counters of the proxy's connections while the fault was on: an effect of the size
        that was asked for. If the fault breaks connections, a line of the job's log which says that the proxy's address
        could not be used is evidence too."""
        for event in record.of_fault(fault, Kind.NETWORK):
            if words := self._proof(event.data["counts"]):
                return Evidence.of(words, event)
        if "ended" not in self.proofs:
            return None
        addresses = [str(event.data["at"]) for event in record.of_fault(fault, Kind.EFFECT) if "at" in event.data]
        return logged(record, fault, "endpoint", "the job could not use it", addresses)

    def effect(self, way: str, counts: Mapping[str, float]) -> str | None:
        """A sentence if the counts of traffic.py show the fault's effect on what the job `sent` or `got`."""
        return None

    def _proof(self, counts: Mapping[str, float]) -> str | None:
        named = next(
            (_WORDS[name].format(n=f"{counts[name]:g}") for name in self.proofs if counts.get(name, 0) >= 1), None
        )
        ways = (way for stream, way in WAYS.items() if self.stream in (stream, "both"))
        return named or next((words for way in ways if (words := self.effect(way, counts))), None)

    def _endpoint(self, site: NodeSite) -> Endpoint:
        try:
            return site.endpoints[self.endpoint]
        except KeyError as error:
            raise ChaosError(f"there is no proxy in front of {self.endpoint}; name it in job.endpoints") from error
