"""Faults of a GPU's health as NVML reports it, by orders to the NVML overlay (injectors/native/nvml)."""
