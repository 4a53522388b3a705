"""From a record to a verdict: pure, and the same again offline. It knows no particular fault and no assertion."""
