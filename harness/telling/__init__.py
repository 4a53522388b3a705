"""Turns plans, runs and results into text for people and machines: terminal, page, JUnit, JSON, stories, and a script
that shows a finding.

Results and records come in; text goes out. No verdict is made or changed here."""
