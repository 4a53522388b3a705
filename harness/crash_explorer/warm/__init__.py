"""Warm ranks: a parent process that has imported the job's libraries, and that forks the ranks of each resume. `parent`
runs in the job's own Python and imports nothing of torchaos. Only explorations start ranks like this."""
