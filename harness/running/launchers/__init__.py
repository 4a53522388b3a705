"""Launchers start a job and know its ranks. All platforms use `job.py`; each platform is one small class."""

from torchaos.harness.running.launchers.of_plan import job_for

__all__ = ["job_for"]
