"""The story of a run in plain words: the plan, the events, the evidence, and the reasons for the verdict."""
