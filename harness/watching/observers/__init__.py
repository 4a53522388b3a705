"""Who notices a hang, from outside the job: four observers that look at different things, and the rule that joins them.

None of them reads anything of the injectors: not the plan, not the control pages, not the faults' events.
"""
