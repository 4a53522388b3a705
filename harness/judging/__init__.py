"""Makes a verdict from a record.

In: the `Record` of a run and the records of its twins. Out: what happened, what it means, and why. `verdict` makes the
result; each other part answers one question, and assertions call these parts too. Nothing here reads a file or looks at
the machine, so a stored run gets the same verdict again. No particular fault or assertion is known here."""
