"""Launchers start a job and know its ranks. Each platform is one small class. `submitted_job` is what all jobs share
that the harness starts; `job` adds nodes on this machine, and `far_job` nodes that are other machines."""

from torchaos.harness.running.launchers.of_plan import job_for

__all__ = ["job_for"]
