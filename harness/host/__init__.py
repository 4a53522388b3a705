"""This machine: its processes, disks, network namespaces, and the servers that run on it (Docker, Toxiproxy).

Other rooms call these functions with pids, paths and addresses, and get plain values or an error. It knows nothing of
runs, faults and verdicts.
"""
