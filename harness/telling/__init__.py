"""What people and machines are told of plans, runs and results: terminal, page, JUnit, JSON, stories, and a script that
shows a finding.

Results and records come in; text goes out. A verdict is never made or changed here."""
