"""Watches a job from outside while it runs: its processes, its output, and whether it hangs.

Input: process ids and log files. Output: events, and the diagnosis of a hang. The code here changes nothing, makes no
verdict, and knows nothing about faults."""
