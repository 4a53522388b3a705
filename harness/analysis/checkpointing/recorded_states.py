"""The recorded states of a run by global step, their parts by name (agent/state/state_check_sums.py), and other places
where the same value was recorded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise

from torchaos.harness.analysis.checkpointing.saved_parameters import step_of
from torchaos.harness.analysis.checkpointing.state_differences import EXCHANGED, INPUTS, RNG, Other
from torchaos.harness.analysis.claims import said
from torchaos.harness.record.history import History
from torchaos.harness.record.history.snapshots import State, states
from torchaos.harness.record.record import Record

_DIGITS, _FEW = 16, 3
Entry = Sequence[str]  # type and shape, check sum
Of = Mapping[int, State]  # by rank


class Recorded:
    """All recorded states of a run, by global step. `history`: with the twin; None: of the run alone."""

    def __init__(self, run: Record, history: History | None = None) -> None:
        self._history = history or run.history
        self._at: dict[int, list[State]] = defaultdict(list)
        for state in states(run.beside_steps):
            step = step_of(self._history, state.event)
            if step is not None:
                self._at[step].append(state)

    def begun(self, step: int, *, attempt: int | None = None, before_s: float = float("inf")) -> dict[int, State]:
        """By rank: the last state at the beginning of step `step` + 1, in this attempt, before this time."""
        return {
            state.event.rank or 0: state
            for state in self._at.get(step, ())
            if state.begun and state.event.mono_s < before_s and attempt in (None, state.event.attempt)
        }

    def saved(self, step: int, before_s: float) -> dict[int, State]:
        found = (state for state in self._at.get(step, ()) if not state.begun and state.event.mono_s < before_s)
        return {state.event.rank or 0: state for state in found}

    @property
    def always_drawn(self) -> frozenset[str] | None:
        """The generators that had changed each time that their state was recorded. None if it was recorded only a few
        times: then a generator that is used now and then, as by a loader at the start of an epoch, can't be told
        apart."""
        first = min((one.number for one in self._history.attempts), default=0)
        own = [by_rank[0].rng for step in sorted(self._at) if 0 in (by_rank := self.begun(step, attempt=first))]
        if len(own) < _FEW:
            return None
        return frozenset(name for name in own[0] if all(a[name] != b.get(name) for a, b in pairwise(own) if name in a))

    @cached_property
    def fresh(self) -> dict[int, State]:
        """The states with which the job began."""
        return self.begun(0, attempt=min((one.number for one in self._history.attempts), default=0))

    def went_the_same_way(self, twin: Recorded, quantity: str, step: int, before_s: float) -> bool:
        """Whether run and twin had the same values of a quantity the last time both were recorded before a resume from
        `step`. If not, the job is not deterministic, and the twin's values prove nothing."""
        for at in sorted((at for at in self._at if at <= step), reverse=True):
            for begun in (True, False):
                mine = self.begun(at, before_s=before_s) if begun else self.saved(at, before_s)
                twins = twin.begun(at) if begun else twin.saved(at, float("inf"))
                both = mine.keys() & twins.keys()
                known = [(values_of(mine[rank], quantity), values_of(twins[rank], quantity)) for rank in both]
                if pairs := [pair for pair in known if None not in pair]:
                    return all(ours == theirs for ours, theirs in pairs)
        return True

    def after(self, quantity: str, name: str, entry: Entry, before_s: float, but: int | None = None) -> int | None:
        """The last step after which this part of the state had these values, recorded before `before_s`: what the
        attempt did later does not explain its beginning. `but`: a step to leave out."""
        for step in sorted(self._at, reverse=True):
            before = (state for state in self._at[step] if state.event.mono_s < before_s)
            if step != but and any(is_recorded_as(state, quantity, name, entry) for state in before):
                return step
        return None


def values_of(state: State, quantity: str) -> dict[str, Entry] | None:
    """The parts of one quantity, by name. None if nothing of it was recorded."""
    if quantity == RNG:
        return {name: ("", digest) for name, digest in state.rng.items()} or None
    if quantity == INPUTS:
        return dict(state.inputs) or None
    values = state.sums.get(quantity)
    return None if values is None else dict(values)


def names_of_parameters(state: State) -> set[str]:
    """The names of all parameters, also of frozen ones."""
    return {*state.sums.get("parameters", ()), *state.sums.get("frozen", ())}


def is_recorded_as(state: State, quantity: str, name: str, entry: Entry) -> bool:
    """Whether this part of the state was recorded with these values."""
    known = state.sums.get(quantity, {}).get(name)
    return known is not None and tuple(known) == tuple(entry)


def after_step(step: int, base: int) -> str:
    """A clause: these values are those after `step`, in an attempt that went on from the step `base`."""
    return said("after later" if step > base else "after", step=step)


class Origins:
    """Explains, in words, where the values came from with which an attempt began. `due`: the states with which the
    attempt should have begun; `saved`: the states at the save."""

    def __init__(self, own: Recorded, base: int, since_s: float, due: Of, saved: Of) -> None:
        self._own, self._base, self._since_s, self._due, self._saved = own, base, since_s, due, saved

    def of(self, other: Other, rank: int, mine: State, entry: Entry) -> Iterator[str]:
        """Yields the explanations that fit, the most likely first."""
        quantity, name = other.quantity, other.name
        due = (values_of(self._due[rank if rank in self._due else min(self._due)], quantity) if self._due else {}) or {}
        if name in due and due[name][0] != entry[0]:
            yield said("form", ours=entry[0], due=due[name][0])
        if quantity == INPUTS:
            return
        fresh = self._own.fresh.get(rank)
        if fresh is not None and (values_of(fresh, quantity) or {}).get(name) == entry:
            yield said("fresh")
        if quantity == RNG:
            ranks = (r for r, state in self._due.items() if r != rank and state.rng.get(name) == entry[1])
            yield from (said("of a rank", rank=of) for of in ranks)
            return
        yield from self._of_the_save(quantity, name, entry)
        if int(entry[1][-_DIGITS:], 16):  # zeros are equal everywhere
            yield from self._of_another_part(quantity, name, entry, due)
            if quantity == "frozen":
                yield from self._of_the_trained(name, entry, mine)

    def _of_the_save(self, quantity: str, name: str, entry: Entry) -> Iterator[str]:
        for saver, state in self._saved.items():
            if is_recorded_as(state, quantity, name, entry):
                if saver in self._due and is_recorded_as(self._due[saver], quantity, name, entry):
                    yield said("of the saver", rank=saver)
                yield said("during the save")

    def _of_another_part(self, quantity: str, name: str, entry: Entry, due: Mapping[str, Entry]) -> Iterator[str]:
        """Explains a value that is that of another name, or of another step."""
        of = [one for one, known in due.items() if one != name and tuple(known) == tuple(entry)]
        if of:
            yield f"{EXCHANGED} {of[0].partition('/')[0]}"
        if (step := self._own.after(quantity, name, entry, self._since_s, self._base)) is not None:
            yield after_step(step, self._base)

    def _of_the_trained(self, name: str, entry: Entry, mine: State) -> Iterator[str]:
        """Explains a value that is a copy of the trained module, made after the load."""
        if (step := self._own.after("parameters", name.rpartition(":")[2], entry, self._since_s)) is not None:
            yield said("after of trained", step=step)
        if tuple(entry) in map(tuple, (values_of(mine, "parameters") or {}).values()):
            yield said("copy of trained")
