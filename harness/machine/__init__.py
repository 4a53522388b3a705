"""This machine: its processes, its disks, its network namespaces, and the programs that are asked for something.

Every other room that has to do with a process, a file or a server of this machine asks here, and gets plain values or
an error. It knows nothing of runs, faults and verdicts."""
