"""What a scenario waits for: before a fault comes, to stop a run early, or to end it on purpose. All pure.

Events come in; "it holds", "it does not hold" or "not known yet" goes out. If a condition must look at something else,
it brings a probe."""
