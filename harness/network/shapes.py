"""The mechanics of `network.delay` and its kin: what the target nodes send goes through a shaper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torchaos.harness.contracts import Evidence, Handle, Probe, Site
from torchaos.harness.network.evidence import counted
from torchaos.harness.network.link import link_of
from torchaos.harness.network.metering import measured, meter_handle
from torchaos.harness.network.probes import came, slower
from torchaos.harness.network.shaper import Shape, Shaper
from torchaos.harness.record import Record


class ShapedFault(Protocol):
    """An injector of a shape. `counter`: that of the receiving kernels which shows it, with `words` for what it says;
    for rtt_ms, the round trip on the job's connections, it has to come to `least`."""

    counter: str
    words: str

    @property
    def least(self) -> float: ...

    def shape(self) -> Mapping[str, float]: ...

    def asked(self) -> Mapping[str, float]: ...


def changes(fault: ShapedFault, site: Site) -> Sequence[Handle]:
    return [*(handle for shaper in _shapers(fault, site) for handle in shaper.handles()), meter_handle(site)]


def apply(fault: ShapedFault, site: Site) -> None:
    for shaper in _shapers(fault, site):
        shaper.apply()


def probes(fault: ShapedFault, site: Site) -> Sequence[Probe]:
    seen = slower(site, fault.least) if fault.counter == "rtt_ms" else came(site, fault.counter, fault.words)
    return [*seen, *measured(site, fault.asked(), jitter_ms=fault.shape().get("jitter", 0.0))]


def felt(fault: ShapedFault, record: Record, name: str) -> Evidence | None:
    return counted(record, name, fault.counter, least=fault.least)


def _shapers(fault: ShapedFault, site: Site) -> list[Shaper]:
    return [Shaper(site.fault, link_of(live), Shape(**fault.shape())) for live in site.nodes]
