"""Notices a hang from outside the job: four observers that look at different things, and a rule that joins their
opinions. In: the processes, sockets, logs and stamps of a job. Out: the events of a suspicion and of a hang.

No observer may read anything about faults: not the plan, not the control pages, not the faults' events.
"""
