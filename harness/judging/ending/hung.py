"""How a job hung that the run had to end: from what its ranks did at that moment. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from torchaos.harness.agent.wire import Event, Kind
from torchaos.harness.record.history import Attempt
from torchaos.harness.record.record import Record
from torchaos.harness.watching.diagnosis.calls import ranges

# Signs of life of a rank, beside its steps.
_SIGNS = frozenset({
    Kind.RANK_UP, Kind.AGENT_STARTED, Kind.GROUP_JOINED, Kind.SAVE_BEGIN, Kind.SAVE_END, Kind.LOAD_BEGIN, Kind.LOAD_END,
    Kind.LOG_STEP, Kind.LOSS,
})  # fmt: skip
_LEAST_S, _PAUSES = 5.0, 3.0  # a hang is longer than this, and than so many times the longest usual pause
_LEAST_AT_START_S = 20.0  # before the first step of a job nobody knows what is usual
_MOST = 4  # groups of ranks that do the same


@dataclass(frozen=True)
class Hang:
    """`since_s`: the last sign of life of its ranks, CLOCK_MONOTONIC."""

    attempt: int
    since_s: float
    words: str


def hang_at_end(run: Record) -> Hang | None:
    """The hang in which the run ended the job. None if the job ended by itself, or may just have been slow, or if
    nothing was recorded about its ranks."""
    found = list(run.of_kind(Kind.HANG_AT_END))
    if not found or not run.history.attempts:
        return None
    end, attempt = found[-1], run.history.attempts[-1]
    ranks = [one for one in end.data["ranks"] if isinstance(one.get("rank"), int) and isinstance(one.get("verb"), str)]
    since_s = _last_sign(run, attempt, end)
    if not ranks or end.mono_s - since_s < _bound_s(run, attempt):
        return None
    waits = any(one.get("waits") is True for one in ranks)
    lasted = f"{end.mono_s - since_s:.0f} s"
    what = "hung" if waits else f"did not go on for its last {lasted},"
    words = f"attempt {attempt.number} {what} {_where(run, attempt)}; {ranks_in_words(ranks)}"
    gone = {rank: code for rank, code in attempt.exit_codes.items() if rank not in {one["rank"] for one in ranks}}
    for rank, code in gone.items():
        words += f", rank {rank} is gone{'' if code is None else f' (exit code {code})'}"
    culprits = set(end.data["culprits"]) - gone.keys()
    if waits and culprits and len(culprits) < len(ranks):
        words += f"; {ranges(sorted(culprits))} held up the other{'s' if len(ranks) - len(culprits) > 1 else ''}"
    return Hang(attempt.number, since_s, words + _unread(end, ranks))


def ranks_in_words(ranks: Sequence[dict[str, object]]) -> str:
    """What each rank does, such as `rank 0 waits in barrier, ranks 1, 2 are busy in train at train.py:7`."""
    groups: dict[tuple[str, str], list[int]] = {}
    for one in ranks:
        rank = one.get("rank")
        if isinstance(rank, int):
            groups.setdefault((str(one.get("verb", "")), str(one.get("where", ""))), []).append(rank)
    words, before = [], ""
    for (verb, where), members in list(groups.items())[:_MOST]:
        said = verb if len(members) == 1 else _plural(verb)
        words.append(" ".join(filter(None, (ranges(members), "" if said == before and where else said, where))))
        before = said
    left = sum(map(len, list(groups.values())[_MOST:]))
    return ", ".join([*words, *([f"and {left} more ranks elsewhere"] if left else [])])


def _plural(verb: str) -> str:
    return f"are{verb[2:]}" if verb.startswith("is ") else verb.removesuffix("s")


def _last_sign(run: Record, attempt: Attempt, end: Event) -> float:
    steps_s = run.history.executions.of_attempt(attempt.number).last_s()
    signs = [e.mono_s for e in run.beside_steps if e.kind in _SIGNS and e.attempt == attempt.number]
    return max([attempt.started_s, *([] if steps_s is None else [steps_s]), *(at for at in signs if at <= end.mono_s)])


def _bound_s(run: Record, attempt: Attempt) -> float:
    """From how many seconds on the job does not just pause, as far as its steps, and the starts of its other attempts,
    show what is usual."""
    if len(run.history.executions.of_attempt(attempt.number)):
        return max(_LEAST_S, _PAUSES * _longest_pause_s(run))
    starts = [
        first_s - other.started_s
        for other in run.history.attempts
        if (first_s := run.history.executions.of_attempt(other.number).first_s()) is not None
    ]
    return max([_LEAST_S, *starts] if starts else [_LEAST_AT_START_S])


def _longest_pause_s(run: Record) -> float:
    """The longest time between two steps of a rank in an attempt, before the first fault if steps were made then."""
    first_s = min((event.mono_s for event in run.of_kind(Kind.APPLYING)), default=float("inf"))
    steps = run.history.executions
    calm = steps.at(steps.mono_s <= first_s)
    steps = calm if len(calm) > 1 else steps
    ordered = steps.at(np.lexsort((steps.mono_s, steps.rank, steps.attempt)))
    same = (np.diff(ordered.rank) == 0) & (np.diff(ordered.attempt) == 0)
    return float(np.diff(ordered.mono_s)[same].max(initial=0.0))


def _where(run: Record, attempt: Attempt) -> str:
    saves = any(save.attempt == attempt.number and save.ended_s is None for save in run.history.saves)
    inside = ", in a save" if saves else ", in a load" if _is_loading(run, attempt) else ""
    if not len(run.history.executions.of_attempt(attempt.number)):
        return f"before its first step{inside}"
    return (f"after step {attempt.last_step}" if attempt.last_step is not None else "after some steps") + inside


def _is_loading(run: Record, attempt: Attempt) -> bool:
    own = [event for event in run.beside_steps if event.attempt == attempt.number]
    begun = [event.rank for event in own if event.kind is Kind.LOAD_BEGIN]
    ended = [event.rank for event in own if event.kind is Kind.LOAD_END]
    return any(begun.count(rank) > ended.count(rank) for rank in begun)


def _unread(end: Event, ranks: Sequence[dict[str, object]]) -> str:
    unread = [rank for one in ranks if not one.get("where") and isinstance(rank := one.get("rank"), int)]
    return f"; the stacks of {ranges(unread)} could not be had" if unread else ""
