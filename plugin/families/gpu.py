"""Reports of unhealthy GPUs."""

from torchaos.harness.fault_drivers.gpu import XIDS, OverlayFault, first_effect, pci_of

__all__ = ["OverlayFault", "XIDS", "first_effect", "pci_of"]
