"""The journal of a run: each file has one writer, and reading merges the files into one sequence of checked events.

Files of several nodes come in, with their own clocks and process ids. Events with one clock and one pid namespace go
out, and reports of damaged or missing lines."""
