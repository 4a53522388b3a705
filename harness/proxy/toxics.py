"""The mechanics of `proxy.*`: toxics on a proxy, or its being down, and what the kernel says of the job's connections.

Toxics are Toxiproxy's own, see "Toxics" in its README; times there are in ms, rates in KB/s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

from torchaos.harness.agent.wire import Kind
from torchaos.harness.contracts import ChaosError, Evidence, Handle, Probe, Site
from torchaos.harness.network.evidence import counted, logged
from torchaos.harness.network.sampling import Watch
from torchaos.harness.proxy.server import Endpoint
from torchaos.harness.proxy.traffic import Traffic, connections
from torchaos.harness.record import Record
from torchaos.harness.undo.network import mark_of
from torchaos.harness.undo.proxy import Toxic

BOTH = ("upstream", "downstream")


class ProxyFault(Protocol):
    """An injector of a toxic. No attributes: the proxy is down."""

    endpoint: str
    stream: str  # upstream: what the job sends; downstream: what it gets; both
    toxic: ClassVar[str]
    proofs: ClassVar[tuple[str, ...]]  # counts of traffic.py; any of them

    def attributes(self) -> Mapping[str, Any]: ...


def changes(fault: ProxyFault, site: Site) -> Sequence[Handle]:
    one = _endpoint(fault, site)
    mark, down = mark_of(site.fault), not fault.toxic
    return [Toxic(one.api.pid, one.api.start_ticks, one.api.port, one.name, mark, down)]


def apply(fault: ProxyFault, site: Site) -> None:
    """Raises OSError where the server does not answer, ChaosError where it did not do what it was told."""
    one, mark = _endpoint(fault, site), mark_of(site.fault)
    streams = (BOTH if fault.stream == "both" else (fault.stream,)) if fault.toxic else ()
    toxics = [
        {"type": fault.toxic, "name": f"{mark}_{stream}", "stream": stream, "attributes": dict(fault.attributes())}
        for stream in streams
    ]
    before = connections(one)
    said = one.api.ask(proxy=one.name, **({"add": toxics} if toxics else {"enabled": False})).get(one.name, {})
    if not {toxic["name"] for toxic in toxics} <= {*said.get("toxics", ())} or said.get("enabled") is not bool(toxics):
        raise ChaosError(f"Toxiproxy did not do what it was told before {one.name}: it says {said}")
    site.emit(Kind.EFFECT, {"fault": site.fault, "effect": f"{one.name} is reached by {one.listen}", "at": one.listen})
    if not toxics and (ended := len(before.keys() - connections(one).keys())):
        site.emit(Kind.NETWORK, {"fault": site.fault, "counts": {"ended": ended}})


def probes(fault: ProxyFault, site: Site) -> Sequence[Probe]:
    traffic = Traffic(_endpoint(fault, site))

    def proof(counts: Mapping[str, float]) -> str | None:
        return next((f"{name}: {counts[name]:g}" for name in _proofs(fault) if counts.get(name, 0) >= 1), None)

    return [Watch(site.fault, (), proof, [traffic])]


def felt(fault: ProxyFault, record: Record, name: str) -> Evidence | None:
    """What the kernel counted on the job's connections to the proxy while the fault was on; for one that breaks them,
    also that the job's log says of the proxy's address, which nobody else has, that it could not be used."""
    found = counted(record, name, *_proofs(fault))
    if found or "ended" not in fault.proofs:
        return found
    addresses = [str(event.data["at"]) for event in record.of_fault(name, Kind.EFFECT) if "at" in event.data]
    return logged(record, name, "endpoint", "the job could not use it", addresses)


def _proofs(fault: ProxyFault) -> tuple[str, ...]:
    """Of what flows only the direction that the toxic is on counts."""
    hidden = {"upstream": {"got_bytes"}, "downstream": {"sent_bytes"}}.get(fault.stream, set())
    return tuple(name for name in fault.proofs if name not in hidden)


def _endpoint(fault: ProxyFault, site: Site) -> Endpoint:
    try:
        return site.endpoints[fault.endpoint]
    except KeyError as error:
        raise ChaosError(f"there is no proxy before {fault.endpoint}; name it in job.endpoints") from error
