"""The steps of a job without an agent, from its log."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise

from torchaos.harness.agent.wire import Event, Kind
from torchaos.harness.record.steps.execution import Execution, floats


def from_log(events: Sequence[Event], attempts: Sequence[tuple[int, float]]) -> list[Execution]:
    """The steps that the job printed, for a job without an agent. The step number in a log line is taken as the global
    step. `attempts`: (number, start in seconds), in order of time."""
    found: dict[tuple[int, int, int], Execution] = {}
    for line in events:
        if line.kind is not Kind.LOG_STEP or not isinstance(line.data.get("step"), int):
            continue
        started = [number for number, start_s in attempts if start_s <= line.mono_s]
        attempt = line.attempt if line.attempt is not None else (started[-1] if started else 0)
        step = line.data["step"]
        key = (attempt, line.rank or 0, step)
        loss, rate = floats(line.data.get("loss")), floats(line.data.get("lr"))
        lr = tuple(value for value in rate if value is not None)
        earlier = found.get(key)
        if earlier is None:
            found[key] = Execution(line.rank or 0, attempt, step, line.mono_s, step, losses=loss, lr=lr)
    return list(found.values())


def log_interval(executions: Iterable[Execution]) -> int:
    """The usual number of steps between two log lines."""
    by_attempt: dict[int, set[int]] = defaultdict(set)
    for execution in executions:
        by_attempt[execution.attempt].add(execution.local_step)
    gaps = Counter(b - a for steps in by_attempt.values() for a, b in pairwise(sorted(steps)))
    return gaps.most_common(1)[0][0] if gaps else 1
