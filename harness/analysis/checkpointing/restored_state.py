"""Compares, by name (agent/state/state_check_sums.py), the state with which an attempt began. What it should be: the
state with which the run went on after the same step the first time, or the twin's.

Quantities that are equal on all ranks are compared on all ranks, even if only one rank saved. A parameter counts as
equal on all ranks if each rank began the job with the whole parameter, and all with the same values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from torchaos.harness.analysis.checkpointing.recorded_states import (
    Entry,
    Of,
    Origins,
    Recorded,
    names_of_parameters,
    values_of,
)
from torchaos.harness.analysis.checkpointing.state_differences import (
    INPUTS,
    MODES,
    MOMENTS,
    RNG,
    TRAINED,
    Other,
    exchanged_in_words,
    in_words,
)
from torchaos.harness.analysis.claims import said
from torchaos.harness.protocol.check_sums import MODULUS, is_whole
from torchaos.harness.record.history import Executions, History
from torchaos.harness.record.history.snapshots import State
from torchaos.harness.record.record import Record

OF_MODEL = ("parameters", "frozen", "buffers")
_WEIGHTS = ("parameters", "frozen")
_SHARED = ("parameters", "frozen", MOMENTS)  # quantities that may be equal on all ranks
_DIGITS = 16
_MISSING = ("", "")


@dataclass
class Begun:
    """The result of comparing the state with which an attempt began. `seen`: the ranks on which each quantity was
    compared. `absent`: quantities that the job does not have, such as buffers."""

    others: list[Other] = field(default_factory=list)
    seen: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    absent: set[str] = field(default_factory=set)
    compared: dict[tuple[str, str], set[int]] = field(default_factory=lambda: defaultdict(set))  # ranks, by part
    partly: dict[str, set[int]] = field(
        default_factory=lambda: defaultdict(set)
    )  # ranks with parts that were not compared
    parameters: frozenset[str] = frozenset()  # names of those that torch optimizers train
    trained: frozenset[str] = frozenset()  # those that get gradients and belong to an optimizer of any class
    unsaved: frozenset[str] = frozenset()  # buffers that are in no state_dict
    drawn: frozenset[str] | None = None  # generators that the forward drew from; None: not seen
    changing: frozenset[str] | None = None  # generators whose state changed each time that it was recorded
    attempt: int = 0  # that began
    base: int = 0  # the global step after which it began
    after_forward: bool = False  # no earlier moment of the first step was seen, and the forward may write into buffers
    compared_with: str = ""  # whose generators it is compared with
    in_place: bool = False  # the ranks hold parts of tensors, each at its place of the job's beginning

    def equal(self, quantity: str) -> bool | None:
        """Whether the quantity was restored. None: not seen, or the job does not have this quantity."""
        if any(other.quantity == quantity for other in self.others):
            return False
        return True if self.seen.get(quantity) and quantity not in self.absent else None

    def of(self, *quantities: str) -> list[Other]:
        return [other for other in self.others if other.quantity in quantities]

    @property
    def some_inputs(self) -> list[Other]:
        """The inputs of the model that changed, if other inputs are the right ones. Otherwise empty."""
        others = self.of(INPUTS)
        every = {name for quantity, name in self.compared if quantity == INPUTS}
        return others if every - {other.name for other in others} else []

    @property
    def lost_generators(self) -> list[Other]:
        """The random generators that the forward uses and whose state was not restored."""
        of = self.changing if self.drawn is None else self.drawn
        return [other for other in self.of(RNG) if other.name in (of or ())]

    @property
    def changed_generators(self) -> list[Other]:
        """The generators that were not restored and from which code outside the forward draws: the loop, such as the
        noise of a diffusion model, or a loader."""
        return [other for other in self.of(RNG) if self.drawn is not None and other.name in (self.changing or ())]

    def generators_in_words(self, others: Sequence[Other], world: int) -> str:
        """The state of these generators, as far as seen, in clauses."""
        draws = said("draws") if self.drawn else ""
        known = [other for other in others if other.holds != said("others")]
        clauses = [said("rng", draws=draws, found=in_words(known, world))] if known else []
        if exchanged := exchanged_in_words(known):
            clauses = [said("rng exchanged", draws=draws, found=exchanged)]
        groups: dict[tuple[int, ...], list[str]] = defaultdict(list)
        for other in others:
            if other not in known:
                partly = other.equal or any(one.name == other.name for one in known)
                groups[other.ranks if partly else ()].append(other.name)
        for ranks, names in groups.items():
            who = f"rank {', '.join(map(str, ranks))} of attempt {self.attempt}" if ranks else f"attempt {self.attempt}"
            of = {"names": " and ".join(names), "before": self.compared_with}
            clauses.append(said("rng other", draws=draws, who=who, step=self.base + 1, **of))
        return "; ".join(clauses)


def begun_with(
    run: Record, attempt: int, base: int, since_s: float, twin: Record | None = None, history: History | None = None
) -> Begun:  # fmt: skip
    """Compares the state with which `attempt` began to train after step `base`. `since_s`: when it began, in seconds of
    CLOCK_MONOTONIC; the run's own state after that step was recorded before. `history`: see Recorded."""
    history = history or run.history
    own = Recorded(run, history)
    mine = {r: state for r, state in own.begun(base, attempt=attempt).items() if state.event.mono_s >= since_s}
    found = Begun(attempt=attempt, base=base)
    if not mine:
        return found
    first = next(iter(mine.values()))
    found.parameters = frozenset(name for state in mine.values() for name in state.sums.get("parameters", ()))
    found.unsaved, found.drawn, found.changing = first.unsaved, _drawn(mine), own.always_drawn
    # The state with which a warm-up of this attempt began is no reference: its inputs are made up.
    first_s = min([part.started_s for part in history.segments if (part.number, part.base) == (attempt, base)],
                  default=since_s)  # fmt: skip
    went_on, saved = own.begun(base, before_s=min(first_s, since_s)), own.saved(base, since_s)
    of_twin = Recorded(twin) if twin is not None else None
    twins = of_twin.begun(base) if of_twin else {}
    earlier = {state.event.attempt for state in went_on.values()}
    found.compared_with = f"attempt {max(one or 0 for one in earlier)}" if earlier else "the twin"
    found.in_place = _places(own.fresh) == _places(mine) and any(map(any, _places(mine).values()))
    found.after_forward = any(_at(state) == "backward" for state in mine.values())
    alike = frozenset[str]() if _trained_apart(history.executions, base, since_s) else _alike(own.fresh)
    _compare_inputs(found, mine, [went_on, twins], own.fresh.keys() == mine.keys())
    for quantity in (*OF_MODEL, MOMENTS, RNG):
        sources = [went_on, saved] if quantity in ("frozen", MOMENTS) else [went_on]
        if of_twin and own.went_the_same_way(of_twin, quantity, base, since_s):
            sources.append(twins)
        known = [values_of(state, quantity) for of in (mine, *sources) for state in of.values()]
        if None not in known and not any(known) and quantity != RNG:
            found.absent.add(quantity)
        for reference in sources:
            if due := _due(mine, reference, quantity, alike):
                _compare(found, quantity, mine, due)
                break
    _compare_trained(found, mine, went_on or saved or twins, own.fresh)
    _compare_modes(found, mine, went_on if any(state.modes for state in went_on.values()) else twins)
    _compare_unsaved_generators(found, mine, own.fresh, went_on or twins)
    origins = Origins(own, base, since_s, went_on or saved or twins, saved)
    ranks: dict[tuple[str, str, str], set[int]] = defaultdict(set)
    for other in found.others:
        for rank, holds in _instead(other, mine, origins):
            ranks[other.quantity, other.name, holds].add(rank)
    wrong, others = defaultdict[tuple[str, str], set[int]](set), list[Other]()
    for (quantity, name, _holds), of in ranks.items():
        wrong[quantity, name] |= of
    found.trained = frozenset().union(*(state.trained for state in mine.values()))
    for (quantity, name, holds), of in ranks.items():
        equal = tuple(sorted(found.compared[quantity, name] - wrong[quantity, name]))
        others.append(
            Other(quantity, name, tuple(sorted(of)), holds, equal, quantity == "frozen" and name in found.trained)
        )
    found.others = others
    return found


def _instead(other: Other, mine: Of, origins: Origins) -> Iterator[tuple[int, str]]:
    """For each rank: what it has in the place of this part of the state."""
    for rank in other.ranks:
        if other.quantity == TRAINED:
            yield rank, said("trained now" if other.name in mine[rank].trained else "trained no longer")
            continue
        if other.quantity == MODES:
            in_eval = _mode(mine[rank].modes, other.name) == "eval"
            yield rank, said("in eval" if in_eval else "in train")
            continue
        entry = (values_of(mine[rank], other.quantity) or {}).get(other.name)
        holds = origins.of(other, rank, mine[rank], entry) if entry is not None else iter([said("missing")])
        yield rank, next(holds, said("others"))


def trained_since(run: Record, twin: Record, attempt: int, since: range) -> tuple[int, list[Other]] | None:
    """The first step, `since` or later, that began with another set of trained parameters than in the twin, as far as
    recorded; and these parameters. None if there is none."""
    own, twins = Recorded(run), Recorded(twin)
    for step in since:
        found = Begun()
        mine = own.begun(step - 1, attempt=attempt)
        _compare_trained(found, mine, twins.begun(step - 1) if mine else {})
        if found.others:
            of = next(iter(mine.values())).trained
            holds = {True: said("trained here"), False: said("trained there")}
            return step, [replace(other, holds=holds[other.name in of]) for other in found.others]
    return None


def _compare_inputs(found: Begun, mine: Of, references: Sequence[Of], same_world: bool) -> None:
    """Finds inputs of the model that are neither those of the step before the resume nor the twin's. (A job that skips
    the data of a spike trains on other data when it does a step again, and so does its twin.) `same_world`: whether the
    job has as many ranks as at its beginning: others share the batch in another way. A reference may have the saving
    ranks alone."""
    compared = [Begun() for _ in references]
    for one, reference in zip(compared, references, strict=True):
        if reference.keys() == mine.keys() or (same_world and reference.keys() < mine.keys()):
            _compare(one, INPUTS, mine, _due(mine, reference, INPUTS, frozenset()))
    seen = [one for one in compared if one.seen]
    if seen:
        nearest = min(seen, key=lambda one: len(one.others))
        found.others += nearest.others
        found.seen.update(nearest.seen)
        found.compared.update(nearest.compared)
        found.partly.update(nearest.partly)


def _compare_unsaved_generators(found: Begun, mine: Of, fresh: Of, due: Of) -> None:
    """Finds generators that were not restored, on ranks whose own state after that step was not recorded, because
    another rank saved. Such a generator has the state from the beginning of the job, or the state of the rank that
    saved, although that rank began the job with other generators."""
    for rank, state in mine.items():
        if rank in found.seen[RNG] or rank not in fresh:
            continue
        for name in (found.changing if found.drawn is None else found.drawn) or ():
            of_others = {of.rng.get(name) for r, of in due.items() if r in fresh and fresh[r].rng != fresh[rank].rng}
            if state.rng.get(name) in {fresh[rank].rng.get(name), *of_others} - {None}:
                found.others.append(Other(RNG, name, (rank,), ""))


def _compare_trained(found: Begun, mine: Of, due: Of, fresh: Of = MappingProxyType({})) -> None:
    """Finds parameters that are trained now and were not before, or the other way round. `fresh`: the states with which
    the job began. A rank that had the parameters of another rank then is expected to have them still."""
    other: dict[str, list[int]] = defaultdict(list)
    for rank, state in mine.items() if due else ():
        reference = due.get(rank, due[min(due)])
        own, before = names_of_parameters(state), names_of_parameters(reference)
        # Here a rank has all its parameters, and more or fewer, such as the two of a tie that a load broke.
        is_same = mine.keys() == (fresh or due).keys() and (rank in due or names_of_parameters(fresh[rank]) == before)
        comparable = own | before if is_same and (own <= before or own >= before) else own & before
        for name in sorted((state.trained ^ reference.trained) & comparable):
            other[name].append(rank)
        found.seen[TRAINED].add(rank)
    found.others += [Other(TRAINED, name, tuple(ranks), "") for name, ranks in other.items()]


def _compare_modes(found: Begun, mine: Of, due: Of) -> None:
    """Finds modules that are in eval mode and were in train mode before, or the other way round. Names only the
    outermost ones."""
    other: dict[str, list[int]] = defaultdict(list)
    for rank, state in mine.items() if due else ():
        ours, theirs = state.modes, due.get(rank, due[min(due)]).modes
        changed = {name for name in {*ours, *theirs} if None not in (now := (_mode(ours, name), _mode(theirs, name)))
                   and now[0] != now[1]}  # fmt: skip
        for name in sorted(changed):
            if not any(around in changed and _mode(ours, name) == _mode(ours, around) for around in _around(name)):
                other[name].append(rank)
        found.seen[MODES].add(rank)
    found.others += [Other(MODES, name, tuple(ranks), "") for name, ranks in other.items()]


def _around(name: str) -> Iterator[str]:
    """The modules around a module, by name, from the inside out."""
    kind, colon, path = name.rpartition(":")
    while path:
        path = path.rpartition(".")[0]
        yield kind + colon + path


def _mode(modes: Mapping[str, str], name: str) -> str | None:
    """The mode of a module; None if its outermost module was not seen."""
    return next((modes[each] for each in (name, *_around(name)) if each in modes), None)


def _drawn(mine: Of) -> frozenset[str] | None:
    known = [state.drawn for state in mine.values() if state.drawn is not None]
    return frozenset().union(*known) if known else None


def _places(of: Of) -> dict[int, tuple[str, ...]]:
    """By rank, the places in the mesh of its parts of the parameters, in order of their names."""
    weights = {rank: [state.sums.get(what, {}) for what in _WEIGHTS] for rank, state in of.items()}
    return {rank: tuple(_place(sums[name]) for sums in both for name in sorted(sums)) for rank, both in weights.items()}


def _alike(fresh: Of) -> frozenset[str]:
    """The parameters that are equal on all ranks."""
    entries: dict[str, set[tuple[str, ...]]] = defaultdict(set)
    for state in fresh.values():
        for name, entry in (*state.sums.get("parameters", {}).items(), *state.sums.get("frozen", {}).items()):
            entries[name].add(tuple(entry))
    return frozenset(name for name, of in entries.items() if len(of) == 1 and is_whole(next(iter(of))[1]))


def _trained_apart(steps: Executions, base: int, since_s: float) -> bool:
    """Whether each rank trains parameters of its own, as between two synchronizations of local SGD: they differed after
    the last execution of step `base` before `since_s`."""
    last = steps.at((steps.global_step == base) & (steps.mono_s < since_s))
    last = last.at(last.attempt == last.attempt.max(initial=-1))
    sums = {one.parameters for one in last}
    return len(sums) > 1 and all(each is not None and is_whole(each) for each in sums)


def _due(mine: Of, reference: Of, quantity: str, alike: frozenset[str]) -> dict[int, dict[str, Entry]]:
    """The values that each rank should have, as far as they were recorded."""
    of = {rank: values for rank, state in reference.items() if (values := values_of(state, quantity)) is not None
          and (quantity not in ("buffers", RNG) or rank not in mine or _at(state) == _at(mine[rank]))}  # fmt: skip
    due = {rank: of[rank] for rank in mine if rank in of}
    if of and quantity in _SHARED:
        lent = {name: entry for name, entry in next(iter(of.values())).items() if name.partition("/")[0] in alike}
        held = {name for state in mine.values() for name in values_of(state, quantity) or ()}
        for rank in mine.keys() - due.keys():
            theirs = values_of(mine[rank], quantity) or {}
            # A rank that keeps the moments of other parameters (ZeRO stage 1) lacks none that another rank keeps.
            due[rank] = {
                name: entry for name, entry in lent.items() if name in theirs or not theirs or name not in held
            }
        # On fewer ranks, the stages of a pipeline are divided anew.
        moved = _of_one_value(of) if mine.keys() < of.keys() else {}
        due = {
            rank: {**{name: moved[name] for name in values_of(mine[rank], quantity) or () if name in moved}, **values}
            for rank, values in due.items()
        }
    if any(not is_whole(entry[1]) for values in due.values() for entry in values.values()):
        return _of_parts(mine, due, of, quantity)
    return due


def _of_one_value(of: Mapping[int, dict[str, Entry]]) -> dict[str, Entry]:
    """By name, the tensors that had the same value on all ranks that had the tensor."""
    entries: dict[str, set[tuple[str, ...]]] = defaultdict(set)
    for values in of.values():
        for name, entry in values.items():
            entries[name].add(tuple(entry))
    return {name: next(iter(each)) for name, each in entries.items() if len(each) == 1}


def _of_parts(
    mine: Of, due: Mapping[int, dict[str, Entry]], of: Mapping[int, dict[str, Entry]], quantity: str
) -> dict[int, dict[str, Entry]]:
    """The values that each rank should have, if ranks share tensors. If they share a tensor in another way than before,
    the sums over all ranks are compared; if these agree, the values of each rank are right."""
    own = {rank: values_of(state, quantity) or {} for rank, state in mine.items()}
    found: dict[int, dict[str, Entry]] = {rank: {} for rank in mine}
    for name in {name for values in of.values() for name in values}:
        before, now = ({r: v[name] for r, v in each.items() if name in v} for each in (of, own))
        if before.keys() == now.keys() and all(_place(before[r]) == _place(now[r]) for r in now):
            for rank in now:
                found[rank][name] = before[rank]
        elif before and now:
            equal = _whole(before) == _whole(now)
            for rank in now:
                found[rank][name] = now[rank] if equal else _MISSING
        elif before:  # no rank has it
            for rank in found:
                found[rank][name] = before.get(rank, _MISSING)
    return found


def _place(entry: Entry) -> str:
    return entry[1][:-_DIGITS]


def _whole(entries: Mapping[int, Entry]) -> int:
    """The sum of the whole tensor. Equal parts have equal places, and count once."""
    by_place = {_place(entry): int(entry[1][-_DIGITS:], 16) for entry in entries.values()}
    return sum(by_place.values()) % MODULUS


def _at(state: State) -> object:
    return state.event.data.get("at")


def _compare(found: Begun, quantity: str, mine: Of, due: Mapping[int, Mapping[str, Entry]]) -> None:
    """Compares one quantity. Buffers of another rank count as right: DDP gives all ranks those of rank 0 in each
    forward, and a checkpoint has the buffers of one rank."""
    of_any = {(name, tuple(entry)) for values in due.values() for name, entry in values.items()}
    other: dict[str, list[int]] = defaultdict(list)
    for rank, values in sorted(due.items()):
        have = values_of(mine[rank], quantity)
        if have is None:
            continue
        if quantity in _WEIGHTS:  # a parameter that was trained and no longer is, or the reverse, is the same parameter
            have = {**mine[rank].sums.get("frozen", {}), **mine[rank].sums.get("parameters", {})}
        if values:
            found.seen[quantity].add(rank)
        if (values_of(mine[rank], quantity) or {}).keys() - values.keys():
            found.partly[quantity].add(rank)
        for name, entry in values.items():
            lacks = name not in have and (
                quantity == MOMENTS and name.partition("/")[0] in names_of_parameters(mine[rank])
            )
            differs = name in have and tuple(have[name]) != tuple(entry)
            found.compared[quantity, name].add(rank)
            if lacks or (differs and not (quantity == "buffers" and (name, tuple(have[name])) in of_any)):
                other[name].append(rank)
    found.others += [Other(quantity, name, tuple(ranks), "") for name, ranks in other.items()]
