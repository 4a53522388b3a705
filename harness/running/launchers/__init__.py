"""Launchers start a job and know its ranks. Each platform is one small class. `job` has the code that all jobs share;
`local_job` is a job on this machine, and `remote_job` a job whose nodes are other machines. `factory` makes the job of
a plan.

This file imports nothing: the agent of a node uses some of these modules, and must start quickly on every node of a
cluster."""
