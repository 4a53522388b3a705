"""Judges many runs at once: a release gate over several scenarios, and repetitions of one scenario.

Results and run directories come in; one verdict on all of them goes out. Nothing is started here."""
