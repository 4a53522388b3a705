"""What starts a job and knows its ranks. `job.py` is shared by all platforms; each platform is one small class."""

from torchaos.harness.running.launchers.of_plan import job_for

__all__ = ["job_for"]
