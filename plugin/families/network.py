"""Faults of the network between nodes, and of the addresses that the job uses."""

from torchaos.harness.fault_drivers.network.links import Link, helper_of, link_of, sides
from torchaos.harness.fault_drivers.network.network_faults import PacketDropFault, ShapedFault
from torchaos.harness.fault_drivers.network.traffic_counters import (
    counted,
    late,
    limited,
    logged,
    measured,
    meter_handle,
    read,
    refusals,
    resent,
)
from torchaos.harness.fault_drivers.proxy import ProxyFault
from torchaos.harness.rollback.network_handles import QDISC_MARK, mark_of

__all__ = [
    "PacketDropFault", "Link", "ProxyFault", "QDISC_MARK", "ShapedFault", "counted", "helper_of", "late", "limited",
    "link_of", "logged", "mark_of", "measured", "meter_handle", "read", "refusals", "resent", "sides",
]  # fmt: skip
