"""Watches a job from outside while it runs: its processes, its output, and whether it hangs.

In: process ids and log files. Out: events, and the diagnosis of a hang. Nothing is changed, no verdict is made, and
faults are not known here."""
