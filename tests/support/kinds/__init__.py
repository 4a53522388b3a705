"""The kinds of files and folders that people keep beside checkpoints, or take for checkpoints."""
