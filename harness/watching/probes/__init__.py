"""Records what can be seen of a job from outside: which processes are its ranks, how they end, and what its log says.
In: process ids and lines of output. Out: events. No probe knows about faults."""
