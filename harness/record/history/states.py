"""The training states that were seen in a run, by their check sums: at saves, at the first step of an attempt and after
loads (agent/wire.py: KEPT, BEGUN), and after each step if the plan asks for it (agent/state.py).

Two states are equal if the same parameters have the same bits. So a state shows after which step it was, whatever the
file is called from which it came."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchaos.harness.agent.check_sums import MODULUS, SHARD, is_whole
from torchaos.harness.agent.wire import Event, Kind
from torchaos.harness.record.history.segments import Segment
from torchaos.harness.record.steps import Executions

_DIGITS = 16  # of a plain sum


@dataclass(frozen=True)
class Snapshot:
    """The parameters of one rank at one time."""

    attempt: int
    rank: int
    local_step: int  # steps completed in the attempt
    mono_s: float
    begins: bool  # the state with which the next step began; False: the state at the begin of a save
    sums: Mapping[str, str]  # check sums by name


def read_snapshots(events: Iterable[Event]) -> list[Snapshot]:
    return [
        Snapshot(event.attempt or 0, event.rank or 0, event.step or 0, event.mono_s, event.kind is Kind.BEGUN,
                 {name: str(text) for name, (_kind, text) in event.data["parameters"].items()})
        for event in events
        if event.kind in (Kind.KEPT, Kind.BEGUN) and event.data.get("parameters")
    ]  # fmt: skip


class States:
    """The steps after which each state was seen. Attempts that are placed are added one after the other."""

    def __init__(self, snapshots: Sequence[Snapshot] = ()) -> None:
        self._snapshots: dict[int, list[Snapshot]] = defaultdict(list)
        for snapshot in snapshots:
            self._snapshots[snapshot.attempt].append(snapshot)
        self._steps: dict[Hashable, set[int]] = defaultdict(set)

    def add(self, number: int, segments: Sequence[Segment], own: Executions, until_s: float) -> None:
        """Adds the states of steps that are placed (`own`), and the snapshots of their attempt up to that time."""
        seen = [each for each in self._snapshots[number] if each.mono_s <= until_s]
        for (local_step, _times), of_ranks in _together(seen).items():
            begun = min(each.mono_s for each in of_ranks.values())
            part = segment_at(segments, local_step, begun)
            step = part.global_step(local_step) if part.after <= local_step else None
            if step is not None:
                self._steps[_key({rank: each.sums for rank, each in of_ranks.items()})].add(step)
        for step, texts in _by_step(own, "parameters").items():
            self._steps[_key_of_sums(texts)].add(step)
        for step, texts in _by_step(own, "restored").items():
            self._steps[_key_of_sums(texts)].add(step - 1)

    def began_with(self, number: int, after: int, own: Executions) -> tuple[int, ...]:
        """The known steps whose state is the one with which the attempt went on after `after` local steps."""
        begun = {
            snapshot.rank: snapshot.sums for snapshot in self._snapshots[number]
            if snapshot.begins and snapshot.local_step == after
        }  # fmt: skip
        found = self._steps.get(_key(begun), set()) if begun else set()
        if not found:
            first = own.at(own.local_step == after + 1).with_state
            restored = {execution.rank: execution.restored for execution in first}
            texts = [text for text in restored.values() if text is not None]
            found = self._steps.get(_key_of_sums(texts), set()) if texts and len(texts) == len(restored) else set()
        return tuple(sorted(found))


def segment_at(segments: Sequence[Segment], local_step: int, mono_s: float) -> Segment:
    """The segment of an attempt to which something belongs that happened after so many steps, at that time."""
    begun = [part for part in segments if (part.after, part.started_s) < (local_step, mono_s)]
    return (begun or segments[:1])[-1]


def _together(snapshots: Sequence[Snapshot]) -> Mapping[tuple[int, int], Mapping[int, Snapshot]]:
    """The snapshots of all ranks that belong together: the first of each rank after the same step, and so on."""
    found: dict[tuple[int, int], dict[int, Snapshot]] = defaultdict(dict)
    times: dict[tuple[int, int], int] = defaultdict(int)
    for snapshot in snapshots:
        key = (snapshot.rank, snapshot.local_step)
        found[snapshot.local_step, times[key]][snapshot.rank] = snapshot
        times[key] += 1
    return found


def _by_step(own: Executions, name: str) -> Mapping[int, list[str]]:
    """By global step: this check sum of all ranks. Steps that a rank did not report are left out."""
    found: dict[int, list[Any]] = defaultdict(list)
    for execution in own.with_state:
        if execution.global_step is not None:
            found[execution.global_step].append(getattr(execution, name))
    return {step: texts for step, texts in found.items() if None not in texts}


def _key(of_ranks: Mapping[int, Mapping[str, str]]) -> Hashable:
    by_name: dict[str, list[str]] = defaultdict(list)
    for sums in of_ranks.values():
        for name, text in sums.items():
            by_name[name].append(text)
    return frozenset((name, _over_ranks(texts)) for name, texts in by_name.items())


def _key_of_sums(texts: Collection[str]) -> Hashable:
    return ("all", _over_ranks(texts))


def _over_ranks(texts: Collection[str]) -> Hashable:
    """The value of a tensor that all ranks hold whole, or of which each rank holds a part."""
    if all(map(is_whole, texts)):
        return frozenset(texts)
    shares = [text.removeprefix(SHARD) for text in texts if text.startswith(SHARD)]
    parts = ([int(share[at : at + _DIGITS], 16) for share in shares] for at in range(0, len(shares[0]), _DIGITS))
    return tuple(sum(part) % MODULUS for part in parts)
