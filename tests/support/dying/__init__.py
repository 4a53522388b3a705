"""Killing the harness, its reaper and the job at every point of a run, and looking at what is left of it.

`families` says what is run, `scene` runs it once and lets it die, `clean` looks at the machine, `worker` does many
deaths in namespaces of its own, `campaign` chooses the deaths and hands them out. `mortal` is what makes a process die
at a point.
"""
