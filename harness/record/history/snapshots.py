"""The states that were seen in a run, by their check sums: when each save began, in the steps after loads and saves,
and after each step if the plan asks for it (agent/state/state_check_sums.py).

Two states are equal if the same parameters have the same bits. So a state itself shows after which step it was saved,
whatever the name of its file says."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchaos.harness.protocol.check_sums import COPY, MODULUS, PART, SHARD, is_whole, without_order
from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.record.history.attempts import Segment
from torchaos.harness.record.steps import Execution, Executions

QUANTITIES = ("parameters", "frozen", "buffers", "moments")
StateSums = Mapping[str, Sequence[str]]  # by name: type and shape, and the check sum on this rank


@dataclass(frozen=True)
class State:
    """The state that one rank recorded at one time. `event.step`: the steps that the rank had completed in this
    attempt."""

    event: Event
    sums: Mapping[str, StateSums]  # by quantity; one that is missing was not seen
    unsaved: frozenset[str]  # buffers that their module keeps out of its state_dict
    rng: Mapping[str, str]  # a digest of each random number generator
    inputs: StateSums  # of the model, in this step; empty if they were not seen
    drawn: frozenset[str] | None  # generators that the forward drew from; None: not seen
    trained: frozenset[str]  # parameters that get gradients and belong to an optimizer of any class
    modes: Mapping[str, str]  # of modules, see wire.py; empty if they were not seen

    @property
    def begun(self) -> bool:
        """Whether a step began with this state. Otherwise a save did."""
        return self.event.kind is Kind.BEGUN


def states(events: Iterable[Event]) -> Iterator[State]:
    """Yields the recorded states, in order of the events. The events leave out values that have not changed."""
    told: dict[tuple[int | None, int | None], dict[str, Any]] = {}
    for event in events:
        if event.kind not in (Kind.KEPT, Kind.BEGUN):
            continue
        before = told.setdefault((event.attempt, event.rank), {})
        same, data = event.data.get("same", ()), event.data
        before.update({what: data[what] for what in (*QUANTITIES, "unsaved", "trained", "modes") if what in data})
        there = {what: of for what, of in before.items() if what in data or what in same}
        drawn = data.get("drawn")
        yield State(
            event,
            {what: there[what] for what in QUANTITIES if what in there},
            frozenset(there.get("unsaved", ())),
            data.get("rng", {}),
            data.get("inputs", {}),
            None if drawn is None else frozenset(drawn),
            frozenset(there.get("trained", there.get("parameters", ()))),
            there.get("modes", {}),
        )


_DIGITS = 16  # of a plain sum
# The sums that a step reports. 1: those of the state before the step.
_OF_STEP = {"parameters": 0, "restored": 1, "moments": 0, "restored_moments": 1}
Sums = Mapping[str, str]  # by name


@dataclass
class Snapshots:
    """The steps after which each state was seen. Attempts are added one after the other, once their steps have global
    numbers."""

    _states: Mapping[int, Sequence[State]] = field(default_factory=dict)  # by attempt
    _steps: dict[Hashable, set[int]] = field(default_factory=lambda: defaultdict(set))
    _has: dict[int, bool] = field(default_factory=dict)  # by attempt
    # (attempt, local step) after which the weights of an earlier step were put back, while all else went on.
    put_back: set[tuple[int, int]] = field(default_factory=set)
    _put_in: dict[Hashable, int] = field(default_factory=dict)  # of states that were put back: the newest such step
    _unplaced: set[Hashable] = field(default_factory=set)  # also seen after a step whose number is not known

    @classmethod
    def of(cls, events: Iterable[Event]) -> Snapshots:
        by_attempt: dict[int, list[State]] = defaultdict(list)
        for state in states(events):
            if parameters_of(state):
                by_attempt[state.event.attempt or 0].append(state)
        return cls(by_attempt)

    def begun(self, number: int) -> set[int]:
        """The local steps after which a rank reported the state with which it went on."""
        return {state.event.step or 0 for state in self._states.get(number, ()) if state.begun}

    def kept(self, number: int) -> set[int]:
        """The local steps after which a rank reported the state that it saved."""
        return {state.event.step or 0 for state in self._states.get(number, ()) if not state.begun}

    def has(self, number: int, own: Executions) -> bool:
        """Whether the states with which the attempt went on were recorded. `own`: all steps of the attempt."""
        if number not in self._has:
            self._has[number] = bool(self.begun(number)) or any(each.restored for each in own.with_state)
        return self._has[number]

    def seen_again(self, number: int, own: Executions) -> tuple[set[int], set[int]]:
        """Two sets of local steps of the attempt, which may overlap. After the first, the attempt went on with a state
        that had been seen after another step. After the second, it went on with other parameters than it had at the end
        of the step. `own`: all steps of the attempt."""
        here: dict[Hashable, set[int]] = defaultdict(set)
        found = []
        for (local_step, _times), of_ranks in sorted(_together(self._states.get(number, ())).items()):
            whole, *own_keys = self._keys(number, of_ranks)
            # Ranks that make different numbers of steps count differently, so each is compared with itself.
            earlier = {step for key in own_keys for step in here[key]}
            begun = local_step and any(state.begun for state in of_ranks.values())
            if begun and local_step not in earlier and (earlier or self._fitting(whole)):
                found.append(local_step)
            for key in own_keys:
                here[key].add(local_step)
        others = dict(self._changed(list(own.with_state)))
        return {*found, *(place for place, again in others.items() if again)}, {*others}

    def _changed(self, own: Sequence[Execution]) -> Iterator[tuple[int, bool]]:
        """The local steps after which the parameters were changed; for each, whether the new parameters had been seen
        after another step. If not, the job may not have gone back: it may clip or average its weights after each
        step."""
        after, begun = (_by_step(own, name, "local_step") for name in ("parameters", "restored"))
        seen = dict[Hashable, int]()  # the first local step after which each state was seen
        for of, before in ((after, 0), (begun, 1)):
            for local_step, texts in of.items():
                key = _over_ranks(texts)
                seen[key] = min(local_step - before, seen.get(key, local_step))
        for local_step, texts in begun.items():
            place, key = local_step - 1, _over_ranks(texts)
            # The state after the step may have been seen late on one rank, while other weights were in the model.
            same = key == _over_ranks(after.get(place, texts)) or (
                all(map(is_whole, texts)) and {*texts} <= {*after[place]}
            )
            if not same:
                yield place, seen[key] < place or bool(self._fitting(_of_sums("parameters", texts)))

    def add(self, number: int, segments: Sequence[Segment], own: Executions, until: float = math.inf) -> None:
        """Adds the states of steps that have global numbers (`own`), and the snapshots of their attempt up to the local
        step `until`, without the state with which the next step began."""
        seen = [state for state in self._states.get(number, ()) if (state.event.step or 0) + state.begun <= until]
        for (local_step, _times), of_ranks in _together(seen).items():
            part = segment_at(segments, local_step, min(state.event.mono_s for state in of_ranks.values()))
            step = part.global_step(local_step) if part.after <= local_step else None
            begun = any(state.begun for state in of_ranks.values())
            for key in (*self._keys(number, of_ranks), *_other_keys(of_ranks)):
                if step is not None:
                    self._add(key, step, begun and (number, local_step) in self.put_back)
                elif 0 < local_step >= part.after:
                    self._unplaced.add(key)
        put_in = {each.global_step for each in own.with_state if (number, each.local_step - 1) in self.put_back}
        lost = [execution for execution in own.with_state if execution.global_step is None]
        for name, before in _OF_STEP.items():
            for step, texts in _by_step(own.with_state, name, "global_step").items():
                self._add(_of_sums(name, texts), step - before, bool(before) and step in put_in)
            after = {step - before: texts for step, texts in _by_step(lost, name, "local_step").items()}
            self._unplaced |= {_of_sums(name, texts) for step, texts in after.items() if step > 0}

    def _add(self, key: Hashable, step: int, was_put: bool) -> None:
        if was_put:
            self._put_in[key] = max(step, self._put_in.get(key, 0))
        else:
            self._steps[key].add(step)

    def _fitting(self, *keys: Hashable) -> set[int]:
        """The steps after which the job may have had this state. A state that was seen only when it was put back may be
        of that step or of any earlier step. Empty if this is not known."""
        if self._unplaced.intersection(keys):
            return set()
        steps = {step for key in keys for step in self._steps.get(key, ())}
        put_in = max((self._put_in[key] for key in keys if key in self._put_in), default=None)
        if put_in is None:
            return steps
        return {*steps, put_in} if steps else {*range(put_in + 1)}

    def began_with(self, number: int, after: int, own: Executions) -> tuple[int, ...]:
        """The known steps whose state is the one with which the attempt went on after `after` local steps. If only some
        ranks had reported their states before: the steps that fit all of these ranks."""
        whole, *of_ranks = self._keys(number, self._went_on_with(number, after))
        found = self._fitting(whole, *_of_first(own, after, "restored"))
        if not found and (of_each := [fits for key in of_ranks if (fits := self._fitting(key))]):
            found = set.intersection(*of_each)
        return tuple(sorted(found))

    def others_began_with(self, number: int, after: int, own: Executions) -> Mapping[str, tuple[int, ...]]:
        """By quantity ("moments" or "rng"): the known steps whose moments or random number generators are those with
        which the attempt went on after `after` local steps. A value that was the same after several steps shows
        nothing."""
        begun = self._went_on_with(number, after)
        found: dict[str, set[int]] = defaultdict(set)
        for key in (*_other_keys(begun), *_of_first(own, after, "restored_moments")):
            found[key[0]] |= self._fitting(key)
        return {quantity: tuple(steps) for quantity, steps in found.items() if len(steps) == 1}

    def _went_on_with(self, number: int, after: int) -> dict[int, State]:
        """By rank: the state with which the attempt went on after `after` local steps."""
        seen = (state for state in self._states.get(number, ()) if state.begun and state.event.step == after)
        return {state.event.rank or 0: state for state in seen}

    def _keys(self, number: int, of_ranks: Mapping[int, State]) -> list[Hashable]:
        """The keys of a state: one for all its ranks together, and one for each rank alone. If parts are missing, there
        is no key for all ranks."""
        sums = {rank: parameters_of(state) for rank, state in of_ranks.items()}
        all_there = {state.event.rank or 0 for state in self._states.get(number, ())} <= sums.keys()
        return [_key(sums.values(), all_there), *((rank, _key([own])) for rank, own in sums.items())]


def _other_keys(of_ranks: Mapping[int, State]) -> list[tuple[str, Hashable]]:
    """The keys of the moments of all ranks together, and of the random number generators of each rank."""
    moments = [_texts(of.sums.get("moments", {})) for of in of_ranks.values()]
    sums = frozenset(each for _name, each in _key(moments))  # a resumed process may have other names
    found: list[tuple[str, Hashable]] = [("moments", sums)] if sums else []
    return found + [("rng", (rank, frozenset(of.rng.items()))) for rank, of in of_ranks.items() if of.rng]


def segment_at(segments: Sequence[Segment], local_step: int, mono_s: float) -> Segment:
    """The segment of an attempt to which an event belongs that came after `local_step` steps, at `mono_s`."""
    begun = [part for part in segments if (part.after, part.started_s) < (local_step, mono_s)]
    return (begun or segments[:1])[-1]


def parameters_of(state: State) -> Sums:
    """The check sums of the trained parameters. If no optimizer of torch trains any, of all parameters."""
    of = state.sums.get("parameters") or state.sums.get("frozen") or {}
    return _texts(of)


def _texts(of: StateSums) -> Sums:
    return {name: str(text) for name, (_kind, text) in of.items()}


def _together(seen: Sequence[State]) -> Mapping[tuple[int, int], Mapping[int, State]]:
    """The states that belong together, by rank: the first of each rank after the same step, the second of each, and so
    on."""
    found: dict[tuple[int, int], dict[int, State]] = defaultdict(dict)
    times: dict[tuple[int, int, bool], int] = defaultdict(int)
    for state in seen:
        rank, step = state.event.rank or 0, state.event.step or 0
        found[step, 2 * times[rank, step, state.begun] + state.begun][rank] = state
        times[rank, step, state.begun] += 1
    return found


def _by_step(own: Iterable[Execution], name: str, number: str) -> Mapping[int, list[str]]:
    """By the number of a step (global or local): this check sum of all ranks. Steps that a rank did not report are left
    out."""
    found: dict[int, list[str | None]] = defaultdict(list)
    for execution in own:
        if (step := getattr(execution, number)) is not None:
            found[step].append(getattr(execution, name))
    return {step: [*filter(None, texts)] for step, texts in found.items() if None not in texts}


def _key(of_ranks: Iterable[Sums], add_up: bool = True) -> frozenset[tuple[str, Hashable]]:
    by_name: dict[str, list[str]] = defaultdict(list)
    for sums in of_ranks:
        for name, text in sums.items():
            by_name[name].append(text)
    return frozenset((name, _over_ranks(texts) if add_up else frozenset(texts)) for name, texts in by_name.items())


def _of_sums(name: str, texts: Collection[str]) -> tuple[str, Hashable]:
    """The key of the parameters, or of the moments, of a step that reported nothing but the sum `name`. It is made from
    the plain sums (check_sums.py), because a resumed process may have another order of the tensors."""
    return "moments" if "moments" in name else "parameters", _over_ranks([*map(without_order, texts)])


def _of_first(own: Executions, after: int, name: str) -> list[tuple[str, Hashable]]:
    """The key of this sum in the step that follows `after` local steps, if all its ranks reported it."""
    texts = _by_step(own.at(own.local_step == after + 1), name, "local_step").get(after + 1)
    return [_of_sums(name, texts)] if texts else []


def _over_ranks(texts: Collection[str]) -> Hashable:
    """The value of a tensor that all ranks hold whole, or of which each rank holds a part. Sums that do not add up,
    such as those of whole tensors and parts together, are compared as they are."""
    if not all(text.startswith((PART, SHARD, COPY)) for text in texts):
        return frozenset(texts)
    of_tensors = all(text.startswith(PART) for text in texts)
    shares = set(texts) if of_tensors else [text for text in texts if text.startswith(SHARD)]
    digits = [text.rpartition("-")[2] for text in shares]
    ends = range(_DIGITS, len(next(iter(digits), "")) + 1, _DIGITS)
    return tuple(sum(int(each[end - _DIGITS : end], 16) for each in digits) % MODULUS for end in ends)
