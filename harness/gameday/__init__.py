"""Game days: many faults over a long run, drawn at the rates of real clusters, and the score of the run.

    grammar -> draw (the whole plan, from the seed alone) -> rounds -> day (runs them) -> score -> report

A game day is a sequence of *rounds*. Each round is an ordinary run of an ordinary scenario with the next few faults. So
undo, gates, evidence and assertions work as in any run, and a failed round is a scenario that can be run again or
shrunk. A game day needs no more memory and disk than one round, however long it lasts. The rounds share only the job's
own state: `{day}` is a folder of the game day that holds its checkpoints."""
