"""Launchers start a job and know its ranks. Each platform is one small class. `submitted_job` is what all jobs share
that the harness starts; `job` adds nodes on this machine, and `far_job` nodes that are other machines. `of_plan` makes
the job of a plan.

Nothing is imported here: the agent of a node uses some of these modules, and starts on every node of a cluster."""
