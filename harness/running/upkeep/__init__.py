"""Lists the runs of this user on this machine, ends them, and removes old run directories. Input: the registry of open
runs, undo logs and journals. Output: views of runs, or a clean machine."""
