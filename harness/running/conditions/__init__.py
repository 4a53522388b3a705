"""Conditions that a scenario waits for: before a fault, to stop a run early, or to end it on purpose. Each condition is
a pure function of the events of the run: it returns whether it holds, or None if that is not known yet. A condition
that needs other data brings a probe, which writes the data as events."""
