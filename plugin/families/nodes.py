"""Faults of whole nodes: all processes of the job on a machine."""

from torchaos.harness.analysis.caught_up import BACK
from torchaos.harness.analysis.checkpointing.checkpoint_contents import DISK_LOST
from torchaos.harness.fault_drivers.node_faults import (
    NodeDeath,
    ended,
    heads,
    kill,
    left,
    processes_of,
    resumed,
    slow_down,
    slow_helper,
    stopped,
    tell,
)
from torchaos.harness.host.processes import send

__all__ = [
    "DISK_LOST", "BACK", "NodeDeath", "ended", "heads", "kill", "left", "processes_of", "resumed", "send",
    "slow_down", "slow_helper", "stopped", "tell",
]  # fmt: skip
