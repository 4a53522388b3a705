"""The check sums of each parameter at the begin of each save, from the events of all ranks (see agent/kept.py)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torchaos.harness.agent.check_sums import COPY, MODULUS, PART, SHARD
from torchaos.harness.agent.names import plain_name
from torchaos.harness.agent.wire import Event
from torchaos.harness.record.history import History
from torchaos.harness.record.record import Record
from torchaos.harness.record.states import states

_DIGITS = 16


@dataclass
class Values:
    """The check sums of one parameter after one step. There are several if the parameter changed between two saves of
    the step, if the step was done again, or if ranks have different parameters of the same name."""

    kind: str  # type and shape of the parameter
    whole: set[int] = field(default_factory=set)  # sums of the whole parameter
    parts: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))  # sums of each rank's part
    sure: bool = True  # all ranks reported, and they agree, so no other sum is possible


class ParameterSums:
    def __init__(self, run: Record) -> None:
        self._values: dict[int, dict[str, Values]] = defaultdict(dict)
        for step, world, of_ranks in _snapshots(run):
            for name in dict.fromkeys(name for found in of_ranks.values() for name in found):
                own = {rank: found[name] for rank, found in of_ranks.items() if name in found}
                kind = next(iter(own.values()))[0]
                values = self._values[step].setdefault(name, Values(kind))
                _add({rank: text for rank, (_kind, text) in own.items()}, len(of_ranks) == world, values)

    @property
    def steps(self) -> list[int]:
        return sorted(self._values)

    def at(self, step: int) -> Mapping[str, Values]:
        return self._values.get(step, {})

    def total_at(self, step: int) -> int | None:
        """The plain sum of all parameters at the begin of the saves of a step. None if it is not known, or if the saves
        of the step differ."""
        found = self.at(step).values()
        if not found or not all(values.sure and len(values.whole) == 1 for values in found):
            return None
        return sum(total for values in found for total in values.whole) % MODULUS

    def parameter_of(self, step: int, entry: str) -> str | None:
        """The parameter that a tensor in a checkpoint is named after, or None. Prefixes from nested containers in the
        tensor's name are ignored."""
        parts = plain_name(entry.rpartition(":")[2]).split(".")
        names = (".".join(parts[place:]) for place in range(len(parts)))
        return next((name for name in names if name in self._values.get(step, {})), None)


def _add(texts: Mapping[int, str], complete: bool, values: Values) -> None:
    """Adds check sums. `texts`: by rank, the kind of the sum and its digits; `complete`: whether all ranks of the job
    reported."""
    sums = {rank: int(text[-_DIGITS:], 16) for rank, text in texts.items()}
    prefixes = {rank: text[:-_DIGITS] for rank, text in texts.items()}
    if all(prefix.startswith(PART) for prefix in prefixes.values()):
        by_place = {prefixes[rank]: part for rank, part in sums.items()}
        agree = all(by_place[prefixes[rank]] == part for rank, part in sums.items())
        values.sure &= complete and agree
        for rank, part in sums.items():
            values.parts[rank].add(part)
        if complete and agree:
            values.whole.add(sum(by_place.values()) % MODULUS)
    elif set(prefixes.values()) <= {SHARD, COPY}:
        values.sure &= complete
        for rank, part in sums.items():
            values.parts[rank].add(part)
        if complete:
            shards = (part for rank, part in sums.items() if prefixes[rank] == SHARD)
            values.whole.add(sum(shards) % MODULUS)
    elif set(prefixes.values()) == {""}:
        values.sure &= len(set(sums.values())) == 1
        values.whole |= set(sums.values())
    else:
        values.sure = False


def _snapshots(run: Record) -> Iterator[tuple[int, int, Mapping[int, Mapping[str, Sequence[str]]]]]:
    """Yields (global step, number of ranks in the job, check sums by rank and name) for each report of the
    ranks. There may be several reports in one step of one attempt."""
    found: dict[tuple[int, int, int], dict[int, Mapping[str, Sequence[str]]]] = defaultdict(dict)
    times: dict[tuple[int, int, int], int] = defaultdict(int)
    for state in states(run.beside_steps):
        event = state.event
        step, rank, attempt = step_of(run.history, event), event.rank or 0, event.attempt or 0
        if step is not None and not state.begun:
            found[attempt, step, times[attempt, step, rank]][rank] = state.sums["parameters"]
            times[attempt, step, rank] += 1
    worlds = {attempt.number: attempt.world_size for attempt in run.history.attempts}
    for (attempt, step, _time), of_ranks in found.items():
        yield step, worlds.get(attempt, 0), of_ranks


def step_of(history: History, event: Event) -> int | None:
    own = [segment for segment in history.segments if segment.number == (event.attempt or 0)]
    begun = [segment for segment in own if (segment.after, segment.started_s) < (event.step or 0, event.mono_s)] or own[
        :1
    ]
    return begun[-1].global_step(event.step or 0) if begun else None
