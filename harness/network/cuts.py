"""The mechanics of `network.partition` and `network.loss`: a cut between the target nodes and others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torchaos.harness.contracts import Evidence, Handle, Probe, Site
from torchaos.harness.network.cut import Cut, sides
from torchaos.harness.network.evidence import counted
from torchaos.harness.network.metering import measured, meter_handle
from torchaos.harness.network.probes import drops
from torchaos.harness.record import Record


class CutFault(Protocol):
    """An injector of a cut: `percent` of what goes over it is dropped. `direction`, as the target sees it."""

    peers: Sequence[int]  # by default all others
    direction: str  # both, out, in
    ports: Sequence[int]  # of TCP; none named: all that goes over the link
    percent: float

    def asked(self) -> Mapping[str, float]: ...


def changes(fault: CutFault, site: Site) -> Sequence[Handle]:
    return [*_cut(fault, site).handles, meter_handle(site)]


def apply(fault: CutFault, site: Site) -> None:
    _cut(fault, site).apply()


def probes(fault: CutFault, site: Site) -> Sequence[Probe]:
    asked = {} if fault.ports or fault.peers else fault.asked()
    return [*drops(site, _cut(fault, site)), *measured(site, asked, inward=fault.direction == "in")]


def felt(fault: CutFault, record: Record, name: str) -> Evidence | None:
    return counted(record, name, "dropped")


def _cut(fault: CutFault, site: Site) -> Cut:
    inside, outside = sides(site.nodes, site.cluster, fault.peers)
    if fault.direction == "in":
        inside, outside = outside, inside
    return Cut(site.fault, inside, outside, fault.direction == "both", fault.ports, fault.percent)
