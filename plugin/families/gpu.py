"""Reports of unhealthy GPUs."""

from torchaos.harness.fault_drivers.gpu.gpu_fault import XIDS, OverlayFault, first_effect, pci_of

__all__ = ["OverlayFault", "XIDS", "first_effect", "pci_of"]
