"""Kills the harness, its reaper and the job at every point of a run, and checks what is left.

`families` has the scenarios, `scene` runs one and lets it die, `clean` checks the machine, `worker` plays many deaths
in its own namespaces, and `campaign` chooses the deaths and distributes them. `mortal` makes a process die at a point.
"""
