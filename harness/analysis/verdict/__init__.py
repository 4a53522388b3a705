"""From a record to a Result: first the gates that every fault must pass, then the assertions. Pure. `verdict` is the
entry point.

A fault that did not land, or was not felt, proves nothing, and no assertion can change that."""
