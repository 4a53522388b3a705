"""Handles: each describes, as data, how one change is undone. A plug-in can't add a kind of handle. In a rank, handles
can be imported but not used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchaos.harness.protocol import IN_RANK

if TYPE_CHECKING or not IN_RANK:
    from torchaos.harness.rollback.cgroup_handles import CpuCgroup, MemoryCgroup, freeze, freezer_for, starve, throttle
    from torchaos.harness.rollback.cluster_handles import KubernetesNode, SlurmNodeState, SlurmWork
    from torchaos.harness.rollback.file_handles import File, Mount
    from torchaos.harness.rollback.handles import JobProcesses, Process
    from torchaos.harness.rollback.network_handles import LinkUp, Names, NftTable, Qdisc
else:
    from torchaos.plugin._outside import stand_ins

    __getattr__ = stand_ins(__name__)

__all__ = [
    "CpuCgroup", "File", "JobProcesses", "KubernetesNode", "LinkUp", "MemoryCgroup", "Mount", "Names", "NftTable",
    "Process", "Qdisc", "SlurmNodeState", "SlurmWork", "freeze", "freezer_for", "starve", "throttle",
]  # fmt: skip
