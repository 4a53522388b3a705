"""Drafts a scenario for a command line, from the command, the script, and a run without faults.

Input: the words of a command line. Output: the text of a scenario file, the assumptions that were made, and the points
that the user must check."""
