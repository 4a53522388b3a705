"""What a scenario waits for: before a fault comes, to stop a run early, or on purpose. All pure.

Events come in; "it holds", "it does not hold" or "not known yet" goes out. What has to be looked at brings a probe."""
