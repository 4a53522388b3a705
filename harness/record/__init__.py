"""The plan of a run, its directory, its events, its history of steps, and its result.

Code that runs a job writes here; code that judges or reports reads here. A `Record` is everything that a run left, read
once. Nothing here starts a process, changes a machine, or makes a verdict."""
