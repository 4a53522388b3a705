"""Conditions that a scenario waits for: before a fault, to stop a run early, or to end it on purpose. All pure.

Input: events. Output: whether the condition holds, or that it is not known yet. If a condition needs anything but
events, it brings a probe."""
