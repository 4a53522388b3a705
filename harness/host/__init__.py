"""This machine: its processes, disks, network namespaces and GPUs, and the programs and servers that the harness asks
(Docker, kubectl, Slurm, Toxiproxy, NVIDIA's driver).

Other rooms call these functions with pids, paths and addresses, and get plain values or an error. The code here knows
nothing of runs, faults and verdicts."""
