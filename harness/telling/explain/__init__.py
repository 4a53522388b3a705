"""The story of a run in plain words: what was planned, what happened when, what was seen, and why the verdict."""
