"""Faults of a GPU's health, as NVML reports it. They are orders to the NVML overlay (injectors/native/nvml)."""
