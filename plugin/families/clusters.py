"""Faults that a scheduler makes: Slurm, or Kubernetes."""

from torchaos.harness.fault_drivers.scheduler import PodDeath, SchedulerFault

__all__ = ["PodDeath", "SchedulerFault"]
