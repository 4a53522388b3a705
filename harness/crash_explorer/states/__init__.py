"""The contents of the checkpoint folder that a death can leave. One module for each model of death. Input: a recording.
Output: states."""
