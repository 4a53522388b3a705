"""Lists the runs of this user on this machine, ends them, and removes old run directories. In: the registry of open
runs, undo logs and journals. Out: views of runs, or a clean machine."""
