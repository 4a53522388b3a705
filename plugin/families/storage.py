"""Faults of the file system that holds the checkpoints."""

from torchaos.harness.fault_drivers.fs_rules import GROWS, SYNCS, Rules, operations
from torchaos.harness.fault_drivers.storage_faults import FillFault, StorageFault

__all__ = ["FillFault", "GROWS", "Rules", "SYNCS", "StorageFault", "operations"]
