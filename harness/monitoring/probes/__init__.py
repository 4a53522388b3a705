"""Records the facts about a job that are visible from outside: its rank processes, how they end, and the lines of its
log. Input: process ids and lines of output. Output: events. No probe knows about faults."""
