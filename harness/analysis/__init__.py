"""Makes a verdict from a record.

Input: the `Record` of a run and the records of its twins. Output: what happened, what it means, and why. `verdict`
makes the result. Each other part answers one question, also for assertions. Nothing here reads a file or looks at the
machine, so a stored run gets the same verdict again. No particular fault or assertion is known here."""
