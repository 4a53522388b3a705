"""Notices a hang from outside the job. Several observers watch different signs, and a rule combines their opinions.
Input: the processes, sockets, logs and stamps of a job. Output: the events of a suspicion and of a hang.

No observer may read anything about faults: not the plan, not the control pages, not the events of faults."""
