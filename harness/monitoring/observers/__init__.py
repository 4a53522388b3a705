"""Notices a hang from outside the job: observers that watch different signs, and a rule that combines their
opinions. Input: the processes, sockets, logs and stamps of a job. Output: the events of a suspicion and of a hang.

No observer may read anything about faults: not the plan, not the control pages, not the faults' events."""
