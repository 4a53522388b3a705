"""Finds the most likely cause why a resumed job computes other values than its twin: of everything that was recorded,
what differed first in the order of the data flow.

A quantity is said to differ or to agree only if it was seen, and a quantity that was not recorded is never a cause
(claims.py). A quantity that acts only in the update can't have changed the first loss after a resume."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from torchaos.harness.analysis.checkpointing.carried_state import carried_into, mixed_state
from torchaos.harness.analysis.checkpointing.checkpoint_diff import first_number_apart
from torchaos.harness.analysis.checkpointing.restored_state import begun_with, trained_since
from torchaos.harness.analysis.checkpointing.resumed_from import (
    apart,
    files_of_others,
    is_of_other_replicas,
    ranks_apart_in_words,
)
from torchaos.harness.analysis.checkpointing.saved_parameters import ranks_apart
from torchaos.harness.analysis.checkpointing.state_differences import (
    INPUTS,
    MODES,
    MOMENTS,
    RNG,
    TRAINED,
    Other,
    in_words,
    of_optimizer,
)
from torchaos.harness.analysis.claims import said
from torchaos.harness.analysis.comparison.agreement import OTHER_WORLD, Difference, Differing, story
from torchaos.harness.analysis.comparison.sample_counts import other_iterations, with_losses_of_whole_batches
from torchaos.harness.analysis.comparison.sample_reasons import carried_inputs
from torchaos.harness.analysis.comparison.step_facts import (
    Fact,
    accumulation,
    counter_fact,
    listed,
    loads_fact,
    loss_scale,
    no_update,
    other_in,
    pairs,
    samples_fact,
    skipped_update,
    weights_in_words,
    weights_with,
    with_samples_of_their_own,
)
from torchaos.harness.analysis.tolerance import ROUNDING, WEIGHTS, Steps, relative
from torchaos.harness.record.history import Execution, History, Segment, StepTable
from torchaos.harness.record.plan import enumerated
from torchaos.harness.record.record import Record
from torchaos.harness.record.steps import Both
from torchaos.harness.record.steps.columns import lengths

# These act in the update, so only on later losses.
_UPDATE = (TRAINED, MOMENTS, "update", "optimizer counter", "learning rate")
_NAMES = {
    "samples": "samples", INPUTS: "inputs of the model", "parameters": "weights at the start",
    "frozen": "frozen parameters", "buffers": "buffers", RNG: "RNG states", TRAINED: "set of trained parameters",
    MOMENTS: "optimizer's moments at the start", "optimizer counter": "optimizer counter",
    "learning rate": "learning rate",
}  # fmt: skip
_BY_RANK = ("optimizer counter", "learning rate")  # compared only in steps that the same ranks made
_PLURAL = ("samples", "inputs", "weights", "frozen parameters", "buffers", "RNG states", "optimizer's moments")
_SETTLED = 5  # steps: a job that is not deterministic differs from its twin earlier


def _is_one(names: Sequence[str]) -> bool:
    return len(names) == 1 and not names[0].startswith(_PLURAL)


def _is_late(fact: Fact, first: Difference) -> bool:
    """Whether the quantity acts only in the update, which comes after the loss that differs."""
    return fact.quantity in _UPDATE and fact.step == first.step and first.what == "loss"


class Cause(NamedTuple):
    """The most likely cause of a difference from the twin."""

    words: str  # a sentence about the attempt with the first difference
    short: str = ""  # the cause alone; empty if it is not known
    before_samples: bool = False  # the cause acted before the samples of the step that differ, which follow from it


def likeliest_cause(
    run: Record, history: History, ours: Steps, theirs: Steps, first: Difference, twin: Record | None = None,
    twins: Sequence[Steps] = (),
) -> Cause:  # fmt: skip
    """The most likely cause of the first difference. `history`: the run's history, from its agent or from its log.
    `ours`, `theirs`: the steps of the run and of its first twin. `twin`: None if the steps are compared with their
    first execution. `twins`: the steps of all twins; a quantity that differs between them explains nothing."""
    cause = _cause(run, history, ours, theirs, first, twin, twins)
    return cause if twin else cause._replace(words=_without_twin(cause.words), short=_without_twin(cause.short))


def _without_twin(words: str) -> str:
    return words.replace("in the twin", "the first time").replace("the twin's", "that of the first time")


def _cause(
    run: Record, history: History, ours: Steps, theirs: Steps, first: Difference, twin: Record | None,
    all_twins: Sequence[Steps],
) -> Cause:  # fmt: skip
    here = next(iter(ours[first.step].values()))
    part = _part_of(history, here)
    if words := _apart_before(run, history, here.attempt, twin):
        return Cause(said("cause", where="before the job was restarted", causes=words, besides=""), words)
    if (life := history.attempt(here.attempt)) is not None and is_of_other_replicas(life):
        return Cause(said("other replicas"))
    if part is None or part.base is None:
        return Cause(said("unplaced"))
    later = any(segment.number == part.number and segment.after < part.after for segment in history.segments)
    if part.base == 0 and part is history.segments[0]:
        agreed = sum(step < first.step for step in ours.keys() & theirs.keys())
        what = {"learning rate": "rates", "parameters": "parameters"}.get(first.what, "losses")
        return Cause(said("fault or job") if agreed < _SETTLED else said("fault", agreed=agreed, what=what))
    found = _Resumed(run, history, ours, theirs, first, part, twin, all_twins)
    where = f"{'after the job went back to step' if later else 'in the attempt that resumed after step'} {part.base}"
    if words := mixed_state(history, part):
        return Cause(said("cause", where=where, causes=words, besides=""), words)
    if words := ranks_apart_in_words(part):
        return Cause(said("cause", where=where, causes=words, besides=""), words)
    if words := found.position_apart():
        return Cause(said("cause", where=where, causes=words, besides=""), words)
    facts = found.facts
    late = [fact for fact in facts if _is_late(fact, first)]
    acted = [fact.clause for fact in facts if fact not in late]
    besides = f" Besides, {'; '.join(fact.clause for fact in late)}." if late else ""
    if acted:
        causes = "; ".join(acted)
        early = found.samples_follow({fact.quantity for fact in facts})
        return Cause(said("cause", where=where, causes=causes, besides=besides), causes, early)
    equal, unseen = found.compared({fact.quantity for fact in facts})
    guess = found.unrecorded()
    clauses = [said("equal", found=f"{enumerated(equal)} {'is' if _is_one(equal) else 'are'}")] if equal else []
    clauses += [said("unseen", found=f"{enumerated(unseen)} {'was' if _is_one(unseen) else 'were'}")] if unseen else []
    clauses += [said("noisy samples")] if found.noisy else []
    clauses.append(guess)
    return Cause(f"{where[0].upper()}{where[1:]}, {'; '.join(clauses)}.{besides}", guess)


def _apart_before(run: Record, history: History, attempt: int, twin: Record | None) -> str:
    """How ranks came to differ in an attempt before this one. Empty if they did not, or if the twin's did too."""
    drifted = ranks_apart(run)
    if not drifted or drifted.attempt >= attempt or (twin and ranks_apart(twin)):
        return ""
    parts = (segment for segment in history.segments if segment.number == drifted.attempt)
    known = list(filter(None, map(ranks_apart_in_words, parts)))
    return known[-1] if known else said("apart", step=drifted.step, attempt=drifted.attempt)


class _Resumed:
    """The part of an attempt with the first difference, compared with the twin and with the run's own record."""

    def __init__(
        self, run: Record, history: History, ours: Steps, theirs: Steps, first: Difference, part: Segment,
        twin: Record | None, twins: Sequence[Steps],
    ) -> None:  # fmt: skip
        self._run, self._history, self._ours, self._theirs, self._first = run, history, ours, theirs, first
        self._twin, self._part, self._attempt = twin, part, part.number
        self._base = part.base or 0
        self._since = [step for step in sorted(ours.keys() & theirs.keys()) if self._base < step <= first.step]
        self.noisy = with_samples_of_their_own(self._since, twins)
        self._ranks = sorted(ours[first.step])
        self._begun = begun_with(run, part.number, self._base, part.started_s, twin, history)
        self._carried = carried_into(run, part.number, part.after)
        known = {one.part: one for one in (self._carried.others if self._carried else ())}
        self._begun.others = [known.get(other.part, other) for other in self._begun.others]  # it may say of which step
        self._weights = self._ranks_with_other_weights()

    def _ranks_with_other_weights(self) -> Mapping[int, str] | None:
        if self._carried and (moved := self._carried.moved.get("parameters")):
            return {rank: said("of a rank", rank=of) for rank, of in moved.items()}
        if self._carried and self._carried.parameters:
            return {}
        if (equal := self._begun.equal("parameters")) is not None:
            return {} if equal else {0: ""}
        return weights_with(self._base, self._ours, self._theirs)

    @property
    def facts(self) -> list[Fact]:
        """The differences, in the order of the data flow."""
        ours, theirs, since = self._ours, self._theirs, self._since
        exact = [accumulation(self._base, ours, theirs, self._first), loss_scale(ours, theirs, self._first)]
        skips = other_iterations(ours, theirs, self._first.step)  # the samples and the schedule follow from them
        exact.append(skips)
        data, state = None if skips else samples_fact(since, ours, theirs, self.noisy), list(self._state())
        if data and data.step > self._base + 1 and any(fact.quantity not in (RNG, *_UPDATE) for fact in state):
            data = None  # this began to differ later than what differed from the start, and may follow from it
        elif not data and not skips:
            state = [*self._inputs(), *state] if not any(fact.quantity == "parameters" for fact in state) else state
        skip = skipped_update(since, ours, theirs)
        update = [*self._of_update(bool(skips), skip)]
        if exact[0] and data and data.step == self._first.step:
            data = None  # the samples of the rest of the step
        elif data and data.step == self._base + 1 and (carried := carried_inputs(self._run, self._begun)):
            data = Fact(INPUTS, self._base + 1, carried)
        elif data and data.made and (state or (data.step > self._base + 1 and any(update))):
            data = None  # the job made them from what differed
        elif data and data.step == self._first.step and self.samples_follow({fact.quantity for fact in state}):
            data = None
        if skip and not any((*exact, data, *state)):
            update = [fact for fact in (skip, *update) if fact and fact.step <= skip.step]  # later ones follow from it
        proved = [Fact("", self._first.step, clause) for clause in exact if clause]
        found = [fact for fact in (*proved, data, *state, *update) if fact]
        if all(_is_late(fact, self._first) for fact in found) and (others := self._begun.changed_generators):
            found.insert(0, self._generators(others))  # the loop may draw from these; nothing else explains it
        found = found or [*self._files()]
        loads = loads_fact(self._run.history, self._twin, range(self._base + 1, self._first.step))
        return [loads, *found] if loads and all(fact.step >= loads.step for fact in found) else found

    def _of_update(self, skips: bool, skip: Fact | None) -> Iterator[Fact]:
        """The differences in the updates. `skips`: the twin makes other iterations; `skip`: an update that was skipped
        in only one of run and twin. The consequences of these two are left out."""
        since, ours, theirs = self._since, self._ours, self._theirs
        counter = counter_fact(since, ours, theirs, "optimizer counter", lambda step: step.opt_step, self._base)
        if skips and counter and counter.step == self._first.step:
            counter = None
        schedule = None if skips else self._schedule()
        if skip and schedule and schedule.step >= skip.step:
            schedule = None
        found = [fact for fact in (self._trained(), *self._moments()) if fact]
        yield from found
        idle = None if skip or found or schedule else no_update(since, ours, theirs)
        if idle and counter and counter.step >= idle.step:
            counter = None
        yield from filter(None, (idle, counter, schedule))

    def _files(self) -> Iterator[Fact]:
        """Finds ranks that loaded a checkpoint of another step; used if no value shows a difference."""
        if other := apart(self._part):
            words = said("files apart", ranks=listed(other.ranks), step=other.step, base=self._base)
            yield Fact("files", self._base + 1, words)

    def samples_follow(self, differ: Collection[str]) -> bool:
        """Whether the samples differ only after the loss that differs, and may follow from what else differs."""
        return self._first.before_samples and bool({RNG, "parameters", "frozen", "buffers"} & set(differ))

    def _state(self) -> Iterator[Fact]:
        begun = self._begun
        weights = [other for other in begun.of("parameters", "frozen") if other.quantity != "frozen" or other.trained]
        if self._weights or weights:
            of_save = bool(weights) and all(other.holds == said("during the save") for other in weights)
            else_ = "" if weights else weights_in_words(self._base, self._weights or {})
            yield self._told("parameters", "weights of the save" if of_save else "weights", weights, else_)
        frozen = [other for other in begun.of("frozen") if not other.trained]
        if frozen:
            yield self._told("frozen", "frozen", frozen)
        if buffers := begun.of("buffers"):
            yield self._told("buffers", "buffers in forward" if begun.after_forward else "buffers", buffers)
        if modes := begun.of(MODES):
            yield self._told(MODES, "modes", modes)
        if begun.lost_generators:
            yield self._generators(begun.lost_generators)

    def _generators(self, others: Sequence[Other]) -> Fact:
        return Fact(RNG, self._base + 1, self._begun.generators_in_words(others, len(self._ranks)))

    def _told(self, quantity: str, claim: str, others: Sequence[Other], else_: str = "") -> Fact:
        return Fact(quantity, self._base + 1, said(claim, found=in_words(others, len(self._ranks)) or else_))

    def _trained(self) -> Fact | None:
        if others := self._begun.of(TRAINED):
            return self._told(TRAINED, "trained", others)
        since = range(self._base + 2, self._first.step + 1)
        if self._twin is None or not (later := trained_since(self._run, self._twin, self._attempt, since)):
            return None
        found = f"in step {later[0]}, {in_words(later[1], len(self._ranks))}"
        return Fact(TRAINED, later[0], said("trained", found=found))

    def _inputs(self) -> Iterator[Fact]:
        step = self._base + 1
        others = () if step in self.noisy else self._begun.of(INPUTS)
        mine, twins = self._ours.get(step, {}), self._theirs.get(step, {})
        if others and all(
            rank in mine and rank in twins and mine[rank].samples_seen and twins[rank].samples_seen
            for rank in others[0].ranks
        ):
            yield Fact(INPUTS, step, said("inputs", found=in_words(others, len(self._ranks)), step=step))

    def _moments(self) -> Iterator[Fact]:
        others = self._begun.of(MOMENTS)
        if others or (self._carried and self._carried.moments is False):
            found = in_words(others, len(self._ranks)) or (self._carried.instead(MOMENTS) if self._carried else "")
            yield Fact(MOMENTS, self._base + 1, said("moments", what=of_optimizer(others), found=found))

    def position_apart(self) -> str:
        """A clause if the job went on at two places at once: its weights are those after the base, and its samples and
        learning rates are those of the twin after another step. (A job may keep its position in another file than its
        weights.) Otherwise empty."""
        begun = [step for step in range(self._base + 1, self._base + 1 + _SETTLED) if step in self._ours]
        if self._twin is None or self._weights != {} or len(begun) < _SETTLED:
            return ""

        def equal(step: int, other: int) -> bool:
            mine, twins = self._ours[step], self._theirs.get(other, {})
            return mine.keys() == twins.keys() and all(
                one.samples_seen and twins[rank].samples_seen and one.samples == twins[rank].samples
                and bool(one.lr) and all(relative(a, b) <= 1e-9 for a, b in zip(one.lr, twins[rank].lr, strict=False))
                for rank, one in mine.items()
            )  # fmt: skip

        shifts = [
            other - begun[0] for other in self._theirs if all(equal(step, step + other - begun[0]) for step in begun)
        ]
        if len(shifts) != 1 or not shifts[0]:
            return ""
        # Constant rates tell no step: the samples alone are ahead or behind.
        if not other_in(begun, self._ours, self._theirs, "lr"):
            return ""
        first, last = self._base + 1, self._base + shifts[0]
        which = f"update of step {first} is" if shifts[0] == 1 else f"updates of steps {first} to {last} are"
        lost = f", and the {which} lost" if shifts[0] > 0 else ""
        apart = "one step" if abs(shifts[0]) == 1 else f"{abs(shifts[0])} steps"
        return said("position", weights=self._base, step=last, apart=apart, lost=lost)

    def _schedule(self) -> Fact | None:
        since, ours, theirs = self._since, self._ours, self._theirs
        if counted := counter_fact(since, ours, theirs, "schedule", lambda step: step.sched_step, self._base):
            return counted
        for step, run, twin in pairs(other_in(since, ours, theirs, "lr"), ours, theirs):
            for group, (mine, twins) in enumerate(zip(run.lr, twin.lr, strict=False)):
                if relative(mine, twins) > 1e-9:
                    if step == self._base + 1 and run.sched_step is not None and run.sched_step == twin.sched_step:
                        return Fact("learning rate", step, said("rate", ours=mine, theirs=twins, step=step))
                    words = story(self._history, ours, theirs, Differing(step, run.rank, group, mine, twins))
                    told = f"{words[0].lower()}{words[1:].rstrip('.')}"
                    clause = said("learning rate", ours=mine, theirs=twins, step=step, story=told)
                    return Fact("learning rate", step, clause)
        return None

    def compared(self, differ: set[str]) -> tuple[list[str], list[str]]:
        """The quantities that are equal, and the quantities that were not seen. If a quantity was seen on only some of
        the ranks, these are named."""
        mine, twins = StepTable.of(self._ours).at(self._since), StepTable.of(self._theirs).at(self._since)
        same_ranks, both = not len(Both.of(mine, twins).apart), (mine.executions, twins.executions)
        every, begun, carried = set(self._ranks), self._begun, self._carried
        in_all_steps = {
            "samples": all(steps.samples_seen.all() for steps in both),
            "parameters": self._weights is not None,
            MOMENTS: bool(carried and carried.moments) and not self._acts_later(),
            "optimizer counter": not any(np.isnan(steps.column("opt_step")).any() for steps in both),
            "learning rate": all((lengths(steps.column("lr")) > 0).all() for steps in both),
        }
        equal, unseen = [], []
        for quantity, name in _NAMES.items():
            if not same_ranks and quantity in _BY_RANK and in_all_steps[quantity]:
                continue  # they were seen, and can't be compared
            seen = every if in_all_steps.get(quantity) else begun.seen[quantity] & every
            is_idle = quantity == RNG and begun.drawn == frozenset()  # the model draws from none
            if (quantity == MOMENTS and self._acts_later()) or (quantity in ("samples", INPUTS) and self.noisy):
                continue
            if quantity == "samples" and other_in(self._since, self._ours, self._theirs, "samples"):
                continue  # what was seen may be the inputs of another part of the model
            if quantity in differ or begun.of(quantity) or is_idle or quantity in begun.absent:
                continue
            if seen:
                equal.append(name if seen == every else f"{name} of rank {listed(sorted(seen))}")
            if (missing := every - seen) and quantity not in (INPUTS, "frozen", TRAINED):
                unseen.append(name if missing == every else f"{name} of rank {listed(sorted(missing))}")
        return equal, unseen

    def unrecorded(self) -> str:
        """If every recorded quantity agrees: a clause about the part of a step in which the cause acts."""
        first, agreed = self._first, self._first.step - self._base - 1
        if first.what == "number of losses":
            step = [StepTable.of({first.step: steps[first.step]}) for steps in (self._ours, self._theirs)]
            return said(
                "batch divided" if with_losses_of_whole_batches(step[0], step[1], OTHER_WORLD)[1] else "backwards"
            )
        if first.what == "parameters":
            if first.ours is None or first.theirs is None:
                return said("not recorded", such="", part="backward or the update", why="no loss differs")
            return said("update") if first.ours == first.theirs else said("gradients", step=first.step)
        if self._acts_later():
            return said("acts later", step=self._base + 1)
        before = [step for step in self._since if step < first.step]
        bent = next((step for step in self._since if self._other(step, "norm")), None) if agreed else None
        moved = next((step for step in before if self._other(step, "parameters")), None)
        if moved is not None and (bent is None or moved < bent) and self._other(moved, "norm") is False:
            return said("update")
        if bent is not None:
            return said("gradients", step=bent)
        if agreed:
            why = "the first loss agrees" if agreed == 1 else f"the first {agreed} losses agree"
            return said("not recorded", such=self._hint(), part="backward or the update, or shows late", why=why)
        mine, twins = self._ours[first.step], self._theirs[first.step]
        differ = [rank for rank in sorted(mine) if rank in twins and mine[rank].losses != twins[rank].losses]
        only = f" of rank {listed(differ)} alone" if 0 < len(differ) < len(mine) else ""
        seen = all(one.samples_seen for by_rank in (mine, twins) for one in by_rank.values())
        saved = self._hint()
        such = saved if seen else said("samples first", saved=saved)
        return said("not recorded", such=such, part="forward or in the loss", why=f"the first loss{only} differs")

    def _hint(self) -> str:
        """A phrase about a number in a checkpoint after the resume that is not the twin's, such as a position in the
        data; or about ranks that loaded files of other ranks. Empty if there is neither."""
        clash = self._twin and first_number_apart(self._run, self._twin, self._base)
        if not clash:
            files = files_of_others(self._history, self._attempt, self._base)
            return said("files of others", found=files) if files else ""
        return said("saved apart", checkpoint=clash.path, name=clash.name, ours=clash.ours, theirs=clash.theirs)

    def _acts_later(self) -> bool:
        """Whether the first step after the resume left other moments than in the twin, although its losses and the
        parameters after it are equal bit for bit, and so its gradients are too."""
        mine, twins = (steps.get(self._base + 1, {}) for steps in (self._ours, self._theirs))
        pairs = [(mine[rank], twins[rank]) for rank in mine if rank in twins]
        same = all(
            one.loss_seen and one.parameters is not None
            and (one.losses, one.parameters) == (other.losses, other.parameters)
            for one, other in pairs
        )  # fmt: skip
        return same and any(None not in (one.moments, two.moments) and one.moments != two.moments for one, two in pairs)

    def _other(self, step: int, what: Literal["norm", "parameters"]) -> bool | None:
        """Whether the gradients' norms of a step, or the parameters after it, differ from the twin's although its
        losses agree. None if they were not recorded, or if the losses differ."""
        mine, twins = self._ours[step], self._theirs[step]
        pairs = [(mine[rank], twins[rank]) for rank in mine if rank in twins]
        if not all(one.loss_seen and one.losses == other.losses for one, other in pairs):
            return None
        if what == "parameters":
            seen = all(one.sketch and other.sketch for one, other in pairs)
            return WEIGHTS.distance(mine, twins, 0.0) > ROUNDING if pairs and seen else None
        norms = [(one.norm, other.norm) for one, other in pairs if one.norm is not None and other.norm is not None]
        return any(relative(one, other) > ROUNDING for one, other in norms) if norms else None


def _part_of(history: History, execution: Execution) -> Segment | None:
    """The segment of the history to which a step belongs."""
    where = execution.attempt, execution.segment
    return next((part for part in history.segments if (part.number, part.after) == where), None)
