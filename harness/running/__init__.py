"""From a scenario to a run that is over: planned, started, hit by its faults at their Moments, taken back, recorded.

A scenario comes in; a run directory goes out. Judging, the gate and reports come afterwards, from that directory
alone."""
