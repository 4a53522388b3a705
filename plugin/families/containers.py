"""Faults that the container engine makes."""

from torchaos.harness.fault_drivers.containers import ContainerDeath, ContainerFault, Held, Hit, fill, limit

__all__ = ["ContainerDeath", "ContainerFault", "Held", "Hit", "fill", "limit"]
