"""Faults of the file system that holds the checkpoints."""

from torchaos.harness.fault_drivers.storage_faults import GROWS, SYNCS, FillFault, Rules, StorageFault, operations

__all__ = ["FillFault", "GROWS", "Rules", "SYNCS", "StorageFault", "operations"]
