"""The plan of a run, its directory, its events, its history of steps, and its result.

Code that runs a job writes here. Code that judges or reports reads here. A `Record` has everything that a run left; it
is read once. Nothing here starts a process, changes a machine, or makes a verdict."""
