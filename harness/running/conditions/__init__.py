"""Conditions that a scenario waits for: before a fault, to stop a run early, or to end it on purpose. All are pure
functions. Input: events. Output: whether the condition holds, or that this is not known yet. If a condition needs more
than events, it brings a probe."""
