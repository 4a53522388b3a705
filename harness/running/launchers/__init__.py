"""Launchers start a job and know its ranks. Each platform is one small class. `job` has what all jobs share;
`local_job` is a job on this machine, and `remote_job` one whose nodes are other machines. `factory` makes the job of a
plan.

Nothing is imported here: the agent of a node uses some of these modules, and starts on every node of a cluster."""
