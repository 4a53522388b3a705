"""Drafts a scenario for a command line. The facts come from the command, from the script, and from a run without
faults.

Input: the words of a command line. Output: the text of a scenario file, the assumptions in it, and the points that the
user must check."""
