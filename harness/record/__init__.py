"""What a run is going to be, and what it left: the plan, the run directory, its events, its history of steps, its
result.

Whoever runs a job writes here; whoever judges or tells reads here. A `Record` is everything that a run left, read once.
Nothing here starts a process, changes a machine, or knows what a verdict is made of."""
