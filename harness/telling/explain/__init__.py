"""The story of a run in plain words: the plan, the events, the evidence, and why the verdict is what it is."""
