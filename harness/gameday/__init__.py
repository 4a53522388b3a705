"""Game days: many faults over a long run, drawn from what really fails, and the score of it.

    grammar -> draw (the whole plan, from the seed alone) -> rounds -> day (runs them) -> score -> report

A game day is a sequence of *rounds*. Each is an ordinary run of an ordinary scenario with the next few faults: so all
that holds for a run (undo, gates, evidence, assertions) holds for a game day, its memory and its disk stay as small as
those of one round however long it lasts, and a round that failed is a scenario that can be run again, or shrunk. What
is common to the rounds is the job's own state: `{day}` is a folder of the day's, where its checkpoints are.
"""
