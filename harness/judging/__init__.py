"""From a record to a verdict: pure, and the same again offline. It knows no particular fault and no assertion.

A `Record` and those of its twins come in; what happened, what it means, and why, go out. `verdict` puts it together;
the other parts answer one question each, and assertions ask them too. Nothing here reads a file or looks at a
machine."""
