"""Game days: many faults over a long run, drawn at the rates of real clusters, and the score of the run. A game day is
a sequence of *rounds*. Each round is an ordinary run of an ordinary scenario with the next few faults. So undo, gates,
evidence and assertions work as in any run, and a failed round is a scenario that can be run again or shrunk. The rounds
share only the job's own state: `{day}` is a folder of the game day that holds the checkpoints. day_grammar.py reads the
file; fault_schedule.py makes the whole plan from the seed; day.py runs the rounds; fault_outcomes.py judges the faults
of a round; score.py adds the rounds up; report.py shows the result."""
