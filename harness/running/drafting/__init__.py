"""Drafts a scenario for a command line: what the command and the script say, and what a run without faults shows.

In: words of a command line. Out: the text of a scenario file, what was assumed, and what must be checked."""
