"""Faults that a scheduler makes: Slurm, or Kubernetes."""

from torchaos.harness.fault_drivers.node_faults import PodDeath, SchedulerFault

__all__ = ["PodDeath", "SchedulerFault"]
