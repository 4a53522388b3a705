"""Finds the checkpoints that a job tried to load and could not, and whether that kept it from resuming. Pure."""

from __future__ import annotations

import posixpath
from collections.abc import Sequence
from math import inf

from torchaos.harness.analysis.checkpointing.checkpoint_contents import checkpoints_of, is_below, root_of
from torchaos.harness.record.history import Load
from torchaos.harness.record.history.saves_and_loads import checkpoint_of, is_failed
from torchaos.harness.record.record import Record


def failed_loads(run: Record, attempt: int) -> list[str]:
    """The checkpoints that an attempt tried to load before its first step, and could not load in the end, although they
    exist: their paths, in order."""
    loads = _before_steps(run, attempt)
    return list(
        dict.fromkeys(checkpoint_of(load.path) for load in loads if is_failed(load, loads) and not load.missing)
    )


def in_words(paths: Sequence[str]) -> str:
    """The names of checkpoints, as a list in a sentence."""
    names = list(dict.fromkeys(map(posixpath.basename, paths)))
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def not_resumed(run: Record) -> str:
    """A clause with the checkpoints whose load was the last of a rank and failed, in the attempts after the job's last
    step. Empty if there is none in one of them, or each rank loaded another file after it: then something else kept the
    job from resuming."""
    made = set(run.history.executions.attempt.tolist())
    idle = [one.number for one in run.history.attempts if one.number > max(made, default=-1)]
    if not made or not idle or run.exit_code == 0:
        return ""
    ends = [{load.rank: load for load in _before_steps(run, attempt)}.values() for attempt in idle]
    failed = [[load for load in last if not load.ok] for last in ends]
    if not all(failed):
        return ""
    every = [load for each in failed for load in each]
    bad, missing = (
        list(dict.fromkeys(checkpoint_of(load.path) for load in every if load.missing is gone))
        for gone in (False, True)
    )
    who = f"attempt {idle[0]}" if len(idle) == 1 else f"attempts {idle[0]} to {idle[-1]}"
    clauses = [f"could not load {in_words(bad)}{_found(run, bad[-1])}"] if bad else []
    clauses += [f"looked for {in_words(missing)}, which did not exist"] if missing else []
    return f"{who} {', and '.join(clauses)}"


def _before_steps(run: Record, attempt: int) -> list[Load]:
    first_s = run.history.executions.of_attempt(attempt).first_s()
    return [
        load for load in run.history.loads
        if load.attempt == attempt and load.mono_s <= (inf if first_s is None else first_s)
    ]  # fmt: skip


def _found(run: Record, path: str) -> str:
    """What the inventory at the end says of a checkpoint, in brackets. Empty if it says nothing."""
    for one in checkpoints_of(run) or ():
        there = posixpath.join(root_of(run), one.path)
        if one.problem and (there == path or is_below(there, path) or is_below(path, there)):
            return f" ({one.problem})"
    return ""
