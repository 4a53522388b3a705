"""What each parameter was whenever a save began: the check sums of all ranks together (agent/kept.py). Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torchaos.harness.agent.check_sums import COPY, MODULUS, SHARD
from torchaos.harness.agent.kept import plain_name
from torchaos.harness.agent.wire import Event, Kind
from torchaos.harness.record.history import History
from torchaos.harness.record.record import Record

_DIGITS = 16


@dataclass
class Values:
    """The check sums of one parameter after one step. There are several where it was changed between two saves of the
    step, or done again in another attempt, or where ranks hold different parameters of one name."""

    kind: str  # its type and shape
    whole: set[int] = field(default_factory=set)
    parts: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))  # by rank
    sure: bool = True  # nothing else can be it: all ranks were heard, and they agree


class Kept:
    """By global step, then by the parameter's name."""

    def __init__(self, run: Record) -> None:
        self._values: dict[int, dict[str, Values]] = defaultdict(dict)
        for _attempt, step, world, of_ranks in _snapshots(run):
            for name in dict.fromkeys(name for found in of_ranks.values() for name in found):
                own = {rank: found[name] for rank, found in of_ranks.items() if name in found}
                kind = next(iter(own.values()))[0]
                values = self._values[step].setdefault(name, Values(kind))
                _add({rank: told for rank, (_kind, told) in own.items()}, len(of_ranks) == world, values)

    @property
    def steps(self) -> list[int]:
        return sorted(self._values)

    def at(self, step: int) -> Mapping[str, Values]:
        return self._values.get(step, {})

    def parameter_of(self, step: int, entry: str) -> str | None:
        """The one whose name a tensor of a checkpoint has, whatever it is nested in."""
        parts = plain_name(entry.rpartition(":")[2]).split(".")
        names = (".".join(parts[place:]) for place in range(len(parts)))
        return next((name for name in names if name in self._values.get(step, {})), None)


def _add(told: Mapping[int, str], complete: bool, values: Values) -> None:
    sums = {rank: int(one[-_DIGITS:], 16) for rank, one in told.items()}
    prefixes = {rank: one[:-_DIGITS] for rank, one in told.items()}
    if set(prefixes.values()) <= {SHARD, COPY}:
        values.sure &= complete
        for rank, one in sums.items():
            values.parts[rank].add(one)
        if complete:
            shards = (one for rank, one in sums.items() if prefixes[rank] == SHARD)
            values.whole.add(sum(shards) % MODULUS)
    elif set(prefixes.values()) == {""}:
        values.sure &= len(set(sums.values())) == 1
        values.whole |= set(sums.values())
    else:
        values.sure = False


def sums_at_saves(run: Record, attempt: int, step: int) -> set[int]:
    """The plain check sums of all parameters together, each time that a save began in an attempt after that step."""
    found = set()
    for number, after, world, of_ranks in _snapshots(run):
        if (number, after) == (attempt, step) and len(of_ranks) == world:
            told = {rank: [one for _kind, one in named.values()] for rank, named in of_ranks.items()}
            prefixes = {one[:-_DIGITS] for sums in told.values() for one in sums}
            by_rank = {
                rank: sum(int(one[-_DIGITS:], 16) for one in sums if not one.startswith(COPY)) % MODULUS
                for rank, sums in told.items()
            }
            if prefixes <= {SHARD, COPY}:
                found.add(sum(by_rank.values()) % MODULUS)
            elif prefixes == {""} and len(set(by_rank.values())) == 1:
                found |= set(by_rank.values())
    return found


def _snapshots(run: Record) -> Iterator[tuple[int, int, int, Mapping[int, Mapping[str, Sequence[str]]]]]:
    """(attempt, global step, ranks of the job, parameters' check sums by rank and name), for each time that the ranks
    reported them in one step of one attempt."""
    found: dict[tuple[int, int, int], dict[int, Mapping[str, Sequence[str]]]] = defaultdict(dict)
    times: dict[tuple[int, int, int], int] = defaultdict(int)
    for event in run.of_kind(Kind.KEPT):
        step, rank, attempt = _step_of(run.history, event), event.rank or 0, event.attempt or 0
        if step is not None:
            found[attempt, step, times[attempt, step, rank]][rank] = event.data["parameters"]
            times[attempt, step, rank] += 1
    worlds = {one.number: one.world_size for one in run.history.attempts}
    for (attempt, step, _time), of_ranks in found.items():
        yield attempt, step, worlds.get(attempt, 0), of_ranks


def _step_of(history: History, event: Event) -> int | None:
    """The global step after which it was told."""
    own = [one for one in history.segments if one.number == (event.attempt or 0)]
    begun = [one for one in own if (one.after, one.started_s) < (event.step or 0, event.mono_s)] or own[:1]
    return begun[-1].global_step(event.step or 0) if begun else None
