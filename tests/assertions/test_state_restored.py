"""The state that a resume restored, compared with the saved state, on any number of ranks."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import pytest

from torchaos.assertions.loss_continuity import LossContinuity
from torchaos.assertions.sample_accounting import SampleAccounting
from torchaos.assertions.state_restored import StateRestored
from torchaos.harness.analysis.checkpointing.carried_state import _equal, mixed_state
from torchaos.harness.analysis.checkpointing.restored_state import Begun, begun_with
from torchaos.harness.analysis.checkpointing.state_differences import RNG, Other, in_words
from torchaos.harness.analysis.claims import said
from torchaos.harness.analysis.verdict import verdict_of
from torchaos.harness.interfaces import Finding, Outcome, What
from torchaos.harness.protocol.check_sums import MIXED
from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.record.history import Executions, History, Load, Save, Segment, Witness
from torchaos.harness.record.history.step_evidence import CONTENTS, RECORD, SAMPLES, STATE
from torchaos.harness.record.plan import Named
from torchaos.harness.record.record import Record
from torchaos.harness.reporting.story import _why


def judged(trainer: Any, **more: Any) -> Finding:
    run = trainer(kills=((13, 1),), state_seen=True, global_batch=True, **more)
    return StateRestored().judge(run.record(), ())


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("worlds", [{0: 2, 1: 2}, {0: 4, 1: 2}, {0: 2, 1: 4}])
def test_a_resume_that_puts_all_back_passes(trainer: Any, sharded: bool, worlds: dict[int, int]) -> None:
    """Replicas and shards, on as many ranks as before, on fewer and on more: no twin is asked for."""
    found = judged(trainer, world=worlds[0], worlds=worlds, sharded=sharded)
    assert found.outcome is Outcome.PASSED, found.reason
    assert "resume from step 10" in found.reason


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("worlds", [{0: 2, 1: 2}, {0: 4, 1: 2}])
@pytest.mark.parametrize("forgotten", ["momentum", "weights"])
def test_what_is_not_put_back_fails(trainer: Any, sharded: bool, worlds: dict[int, int], forgotten: str) -> None:
    """Moments that are lost when the job shrinks show in no other assertion; lost weights are named too."""
    found = judged(trainer, world=worlds[0], worlds=worlds, sharded=sharded, broken=frozenset({forgotten}))
    assert found.outcome is Outcome.FAILED, found.reason
    assert {"momentum": "the moments of the optimizer", "weights": "the parameters"}[forgotten] in found.reason
    assert "after step 10" in found.reason


def test_without_names_the_sums_are_said_to_be_others(trainer: Any) -> None:
    """They are those of no step."""
    found = judged(trainer, off=1e-9)
    assert "attempt 0 had after step 10: their check sums are others" in found.reason


def test_the_state_itself_tells_where_the_attempt_went_on(trainer: Any) -> None:
    """With no load, counter, sample or loss to tell. If the weights are those of no step, the moments tell it."""
    blind = {f"{name}_seen": False for name in ("loads", "counters", "samples", "losses")}
    assert judged(trainer, **blind).outcome is Outcome.PASSED
    found = judged(trainer, off=1e-9, **blind)
    assert found.outcome is Outcome.FAILED, found.reason
    assert "the parameters with which attempt 1 began are not those that attempt 0 had after step 10" in found.reason


@pytest.mark.parametrize(("broken", "outcome"), [((), Outcome.PASSED), (("weights",), Outcome.INCONCLUSIVE)])
def test_parts_that_do_not_add_up(trainer: Any, broken: tuple[str, ...], outcome: Outcome) -> None:
    """Every rank holds other parameters under no scheme that is known: that each has what it had can be told, and what
    it means that they have others can't."""
    found = judged(trainer, parts=True, broken=frozenset(broken))
    assert found.outcome is outcome
    assert outcome is Outcome.PASSED or "can't be added up" in found.reason


@pytest.mark.parametrize("late", [False, True])
def test_parts_beside_whole_tensors_show_their_step(trainer: Any, late: bool) -> None:
    """Under tensor parallelism some parameters are parts and others whole, so that the sums of ranks can't be added up.
    Rank by rank they still show the step of the weights, and that a thread wrote the moments of a later one."""

    class Mixed(trainer):  # type: ignore[misc]
        def _sum(self, value: float, rank: int, world: int) -> str:
            return MIXED + hashlib.md5(f"{value} {rank}".encode()).hexdigest()

        def _step(self, attempt: int, world: int, state: Any, step: int, local: int) -> None:
            super()._step(attempt, world, state, step, local)
            if late and (attempt, step) == (0, 12):  # the file of step 10 is written only now
                self._saved[10].momentum, self._saved[10].opt_step = state.momentum, state.opt_step

    run = Mixed(kills=((14, 1),), state_seen=True, sharded=True, loads_seen=False).record()
    assert run.history.attempts[1].base == 10
    found = StateRestored().judge(run, ())
    assert found.outcome is (Outcome.FAILED if late else Outcome.PASSED), found.reason
    if late:
        assert "after step 10: they are those after step 12" in found.reason
        cause = LossContinuity().judge(run, [trainer(state_seen=True, sharded=True).record()]).reason
        assert "moments were not restored: they are those after step 12" in cause


def _with_experts(run: Record, **of: int) -> Record:
    """The record of a job whose rank 1 also holds parameters of its own (experts), with moments. Only rank 0 saves, so
    that they are recorded as check sums alone. `of`: the rank whose values rank 1 began with after the resume."""
    last = max(one.attempt or 0 for one in run.events)

    def own(text: str, rank: int) -> str:
        return hashlib.md5(f"{text} {rank}".encode()).hexdigest()

    def changed(event: Event) -> Event | None:
        data = dict(event.data)
        if event.kind is Kind.STEP:
            for name in ("parameters", "moments", "restored", "restored_moments"):
                rank = event.rank or 0
                if of and rank and event.attempt == last:
                    rank = of.get(name, 1 if name in ("restored", "restored_moments") else 9)
                if name in data:
                    data[name] = own(str(data[name]), rank)
        if event.kind is Kind.BEGUN:
            if event.rank and event.step:
                return None
            data["parameters"] = {**data["parameters"], "expert": ["float32 1", f"{event.rank:016x}"]}
            data["moments"] = {**data["moments"], "expert/momentum": ["float32 1", f"{7 + (event.rank or 0):016x}"]}
        return replace(event, data=data)

    return replace(run, events=tuple(one for event in run.events if (one := changed(event))))


def test_moments_that_nobody_saw_are_not_said_to_be_restored(trainer: Any) -> None:
    """An optimizer of a plain class may keep them where nothing finds them; the check sums are those of no tensor."""

    def without(event: Event) -> Event:
        data = {name: "0" * 32 if name in ("moments", "restored_moments") else of for name, of in event.data.items()}
        return replace(event, data=data | {"moments": {}} if event.kind is Kind.BEGUN else data)

    run = trainer(kills=((13, 1),), state_seen=True).record()
    run = replace(run, events=tuple(without(e) if e.kind in (Kind.STEP, Kind.BEGUN) else e for e in run.events))
    found = StateRestored().judge(run, ())
    assert found.outcome is Outcome.PASSED
    assert found.reason.startswith("parameters are bit for bit as before, over the resume from step 10")
    assert found.reason.endswith("no moments of an optimizer were seen")


@pytest.mark.parametrize(
    ("of", "outcome", "words"),
    [
        ({}, Outcome.PASSED, "parameters and moments of the optimizer are bit for bit as before"),
        ({"restored_moments": 0}, Outcome.FAILED, "the moments of the optimizer"),
        ({"restored": 0}, Outcome.FAILED, "the parameters"),
        ({"restored_moments": 5}, Outcome.INCONCLUSIVE, "parts of the model"),
    ],
)
@pytest.mark.parametrize("named", [True, False])
def test_each_rank_gets_its_own_state_back(
    trainer: Any, named: bool, of: dict[str, int], outcome: Outcome, words: str
) -> None:
    """A job that gathers the weights of experts and saves the moments of rank 0 alone gives those to rank 1, too. What
    is recorded of rank 1 are check sums: they are its own again, or another rank's, or nobody's."""
    run = _with_experts(trainer(kills=((13, 1),), state_seen=True, named=named).record(), **of)
    found = StateRestored().judge(run, ())
    assert (found.outcome, words in found.reason) == (outcome, True), found.reason
    assert ("on rank 1 they are those of rank 0" in found.reason) is (outcome is Outcome.FAILED)
    if "restored_moments" in of and outcome is Outcome.FAILED:
        twin = _with_experts(trainer(state_seen=True, named=named).record())
        apart = [replace(one, data={**one.data, "losses": [9.0]}) if one.kind is Kind.STEP and one.attempt == 1
                 and one.step == 2 else one for one in run.events]  # fmt: skip
        cause = LossContinuity().judge(replace(run, events=tuple(apart)), [twin]).reason
        assert "moments were not restored: on rank 1 they are those of rank 0" in cause, cause


@pytest.mark.parametrize(
    ("swaps", "moves", "outcome"),
    [(False, False, Outcome.PASSED), (True, False, Outcome.FAILED), (True, True, Outcome.PASSED)],
)
def test_parts_that_changed_ranks_are_wrong_unless_the_ranks_changed_places(
    trainer: Any, swaps: bool, moves: bool, outcome: Outcome
) -> None:
    """Each rank has a part of each tensor, and the parts of all ranks add up to the state that was. That proves nothing
    if each rank got another one's part at its own place in the mesh. No save is seen, as of copies in memory, so that
    names and places are recorded in the first step of each attempt alone."""
    run = trainer(kills=((13, 1),), state_seen=True, sharded=True, named=True).record()

    def changed(event: Event) -> Event | None:
        data, rank = dict(event.data), event.rank or 0
        if event.kind is Kind.BEGUN:
            if event.step:
                return None
            place = 1 - rank if moves and event.attempt else rank
            for what in ("parameters", "moments"):
                data[what] = {name: [kind, f"part{place}-{text}"] for name, (kind, text) in data[what].items()}
        elif event.kind is Kind.STEP and event.attempt and swaps:
            data = dict(other[event.step, 1 - rank])
        return replace(event, data=data)

    other = {(one.step, one.rank): one.data for one in run.events if one.kind is Kind.STEP and one.attempt}
    run = replace(run, events=tuple(one for event in run.events if (one := changed(event))))
    found = StateRestored().judge(run, ())
    assert found.outcome is outcome, found.reason
    if outcome is Outcome.FAILED:
        assert "on rank 0 they are those of rank 1; on rank 1 they are those of rank 0" in found.reason


@pytest.mark.parametrize(("broken", "outcome"), [((), Outcome.PASSED), (("momentum",), Outcome.FAILED)])
def test_parameters_that_change_between_a_step_and_the_save(
    trainer: Any, broken: tuple[str, ...], outcome: Outcome
) -> None:
    """A job that shrinks its weights after each step saves others than the step left. The step after the resume is done
    twice: where it leads to the same, all was put back."""

    class Shrinks(trainer):  # type: ignore[misc]
        def _step(self, attempt: int, world: int, state: Any, step: int, local: int) -> None:
            state.weight *= 0.999
            super()._step(attempt, world, state, step, local)

    found = judged(Shrinks, broken=frozenset(broken))
    assert found.outcome is outcome, found.reason


@pytest.mark.parametrize(
    ("broken", "keeps", "outcome"),
    [((), True, Outcome.PASSED), (("weights",), True, Outcome.FAILED), ((), False, Outcome.FAILED)],
    ids=["puts all back", "loses the weights", "saves what it does not train"],
)
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("world", [2, 3])
def test_parameters_that_change_before_the_save_of_a_job_that_is_not_bitwise(
    trainer: Any, world: int, sharded: bool, keeps: bool, broken: tuple[str, ...], outcome: Outcome
) -> None:
    """A job clips its weights after the step and before the save, and no step done twice leads to quite the same. What
    the resume put back is compared with what the job went on with. A job that saves others than it goes on with, such
    as averaged weights, has lost its own."""

    class Clips(trainer):  # type: ignore[misc]
        went_on: Any = None

        def _save(self, attempt: int, world: int, state: Any, step: int, local: int) -> None:
            trained = state.weight
            state.weight *= 0.999
            super()._save(attempt, world, state, step, local)
            state.weight = state.weight if keeps else trained
            self.went_on = (local + 1, state.weight)

        def emit(self, kind: Kind, data: Any, *who: Any, **when: Any) -> None:
            # The agent looks again after a save: on all ranks that saved, of replicas on the first.
            rank, _attempt, step = (*who, None, None, None)[:3]
            if kind is Kind.STEP and self.went_on and self.went_on[0] == step and (sharded or rank == 0):
                weight = self.went_on[1]
                data = {**data, "restored": self._sum(weight, rank, world) if sharded else f"{weight!r}"}
            super().emit(kind, data, *who, **when)

    found = judged(Clips, sharded=sharded, noise=True, world=world, broken=frozenset(broken))
    assert found.outcome is outcome, found.reason


@pytest.mark.parametrize(
    ("off", "outcome"), [(0.0, Outcome.PASSED), (1e-6, Outcome.FAILED)], ids=["puts all back", "off by 1e-6"]
)
def test_parameters_that_change_before_the_save_of_a_job_killed_in_the_next_step(
    trainer: Any, off: float, outcome: Outcome
) -> None:
    """A job that clips its weights before it saves dies in the step after the save, so no step shows the parameters
    with which it went on. The sums that the agent takes at the begin of the save show them."""

    class Clips(trainer):  # type: ignore[misc]
        def _save(self, attempt: int, world: int, state: Any, step: int, local: int) -> None:
            state.weight *= 0.999
            for rank in range(world):
                total = self._sum(state.weight, rank, world)[16:]
                data = {"parameters": {"weight": ["float32 1", total]}}
                self.emit(Kind.KEPT, data, rank, attempt, local)
            super()._save(attempt, world, state, step, local)

        def emit(self, kind: Kind, data: Any, *who: Any, **when: Any) -> None:
            if kind is Kind.STEP:
                weights = {name: data[name] for name in ("parameters", "restored") if name in data}
                data = {**data, **{name: self._sum(float(text), 0, 1) for name, text in weights.items()}}
            super().emit(kind, data, *who, **when)

    run = Clips(kills=((11, 1),), state_seen=True, global_batch=True, off=off)
    found = StateRestored().judge(run.record(), ())
    assert found.outcome is outcome, found.reason


def test_a_job_that_started_from_scratch_is_inconclusive(trainer: Any) -> None:
    """No step was resumed from, so there is nothing to compare with: no_lost_work says what that means."""

    class Afresh(trainer):  # type: ignore[misc]
        def _resume(self, attempt: int, world: int) -> Any:
            self._saved.clear()
            return super()._resume(attempt, world)

    for found in (judged(trainer, every=50), judged(Afresh)):  # no save of it was seen; and it passed one over
        assert found.outcome is Outcome.INCONCLUSIVE
        assert "nothing was restored" in found.reason


def test_a_job_that_was_killed_before_its_first_save_passes(trainer: Any) -> None:
    """There was nothing that it could have put back."""
    found = judged(trainer, every=15)
    assert found.outcome is Outcome.PASSED
    assert "no save of a checkpoint was complete" in found.reason


def test_a_job_that_was_not_restarted_passes_when_it_went_well(trainer: Any) -> None:
    """Nothing had to be put back, and nobody could have missed a restart."""
    record = trainer(state_seen=True).record()
    found = StateRestored().judge(record, ())
    assert found.outcome is Outcome.PASSED, found.reason
    assert "the job was not restarted" in found.reason
    unseen = replace(record, events=tuple(e for e in record.events if e.kind is not Kind.JOB_EXITED))
    assert StateRestored().judge(unseen, ()).outcome is Outcome.INCONCLUSIVE


RAISED = (18, 1, 8.0)


@pytest.mark.parametrize(
    ("more", "outcome", "words"),
    [
        ({}, Outcome.PASSED, "over the resume from step 16 in attempt 0"),
        ({"broken": frozenset({"momentum"})}, Outcome.FAILED, "moments"),
        ({"broken": frozenset({"weights"})}, Outcome.FAILED, "the parameters with which the job went on after it had"),
        ({"blind": True}, Outcome.INCONCLUSIVE, "not all ranks reported"),
        ({"named": True}, Outcome.PASSED, "over the resume from step 16 in attempt 0"),
        ({"named": True, "broken": frozenset({"momentum"})}, Outcome.FAILED, "moments"),
    ],
)
def test_a_resume_in_the_same_process_is_judged(
    trainer: Any, more: dict[str, Any], outcome: Outcome, words: str
) -> None:
    """A supervisor caught the exception and called the training function again, which loaded a checkpoint."""
    found = StateRestored().judge(trainer(raises=RAISED, state_seen=True, every=4, **more).record(), ())
    assert (found.outcome, words in found.reason) == (outcome, True), found.reason
    assert "not restarted" not in found.reason


@pytest.mark.parametrize("broken", [frozenset[str](), frozenset({"momentum"})])
def test_a_load_that_no_fault_explains_is_not_judged_as_a_resume(trainer: Any, broken: frozenset[str]) -> None:
    """A job may load its best weights into the model and go on with a new optimizer, as it was written to do."""
    run = trainer(raises=RAISED, state_seen=True, every=4, broken=broken).record()
    own = replace(run, events=tuple(e for e in run.events if e.kind is not Kind.APPLYING))
    assert "not restarted" in StateRestored().judge(own, ()).reason
    hit = next(e for e in run.events if e.kind is Kind.APPLYING)
    early = next(e for e in run.events if e.kind is Kind.STEP and e.step == 10)
    first = replace(hit, mono_s=early.mono_s + 1e-4)  # and two steps more were made before the load
    events = sorted((first if e is hit else e for e in run.events), key=lambda e: e.mono_s)
    found = StateRestored().judge(replace(run, events=tuple(events)), ())
    assert found.outcome is (Outcome.INCONCLUSIVE if broken else Outcome.PASSED), found.reason
    assert "not restarted" not in found.reason


def test_a_journal_of_an_agent_without_moments_is_inconclusive(trainer: Any) -> None:
    """Journals from before the moments were recorded are still read."""
    record = trainer(kills=((13, 1),), state_seen=True).record()
    for event in record.events:
        for name in ("moments", "restored_moments"):
            event.data.pop(name, None)
    assert StateRestored().judge(record, ()).outcome is Outcome.INCONCLUSIVE


NAMES = ("net.0.weight", "net.2.weight")


def _entry(value: float) -> list[str]:
    return ["float32 4x4", f"{int(value * 2**40) % 2**64:016x}"]


def _named(
    trainer: Any, begins: Any = None, during_save: float = 0.0, goes_on: bool = True, savers: int = 1, **how: Any
) -> Any:
    """A trainer whose agent records the state by name: two parameters with a moment each, one of which an optimizer of
    a plain class keeps; a frozen parameter, and a buffer of each rank. The first `savers` ranks save. `begins` changes
    what attempt 1 begins with."""

    class Named(trainer):  # type: ignore[misc]
        def _state(self, step: int, rank: int = 0) -> dict[str, Any]:
            moments = {f"{NAMES[0]}/exp_avg": _entry(step + 1.5), f"{NAMES[1]}/m": _entry(step + 1.75)} if step else {}
            return {
                "parameters": {NAMES[0]: _entry(step + 1.0)}, "frozen": {NAMES[1]: _entry(step + 1.25)},
                "buffers": {"norm.mean": _entry(step + 0.125 + rank / 32), "cache": _entry(step + 0.25)},
                "unsaved": ["cache"], "moments": moments, "rng": {"torch": f"{rank}{step:015x}"}, "at": "forward",
                "drawn": ["torch"], "inputs": {".0.0": _entry(step + 0.0625)},
            }  # fmt: skip

        def _step(self, attempt: int, world: int, state: Any, step: int, local: int) -> None:
            for rank in range(world if local == 1 else savers):
                if local == 1 or ((step - 1) % self.every == 0 and goes_on):
                    begun = self._state(step - 1, rank)
                    if attempt and local == 1 and begins:
                        begins(begun, rank)
                    self.emit(Kind.BEGUN, begun, rank, attempt, local - 1)
            super()._step(attempt, world, state, step, local)

        def _save(self, attempt: int, world: int, state: Any, step: int, local: int) -> None:
            kept = {name: of for name, of in self._state(step).items() if name not in ("at", "drawn", "inputs")}
            kept["parameters"] = {NAMES[0]: _entry(step + 1.0 + during_save)}
            self.emit(Kind.KEPT, kept, 0, attempt, local)
            super()._save(attempt, world, state, step, local)

    return Named(**{"kills": ((13, 1),), **how}, state_seen=True, noise=True, global_batch=True)


def _exchanged(begun: Any, rank: int) -> None:
    moments = begun["moments"]
    first, second = moments
    moments[first], moments[second] = moments[second], moments[first]


@pytest.mark.parametrize(
    ("begins", "words"),
    [
        (None, None),
        (lambda begun, rank: begun["moments"].pop(f"{NAMES[1]}/m"), "the moments of net.2.weight are missing"),
        (_exchanged, "the moments of net.0.weight hold those of net.2.weight, and 1 more hold those of others"),
        (lambda begun, rank: begun["moments"].update({f"{NAMES[1]}/m": _entry(6.75)}),
         "the moments of net.2.weight are those after step 5"),
        (lambda begun, rank: begun["frozen"].update({NAMES[1]: _entry(1.25)}),
         "the frozen parameters net.2.weight are those of a fresh start"),
        (lambda begun, rank: rank and begun["frozen"].update({NAMES[1]: _entry(99)}),
         "the frozen parameters net.2.weight on rank 1 are others"),
        (lambda begun, rank: begun["buffers"].update({"norm.mean": _entry(0.125)}),
         "the buffers norm.mean on rank 0 are those of a fresh start"),
        (lambda begun, rank: begun["buffers"].update({"cache": ["float32 4x4", "1" * 16]}), None),
        (lambda begun, rank: begun["parameters"].update({NAMES[0]: _entry(99)}), "the parameters net.0.weight are"),
        (lambda begun, rank: begun["rng"].update(torch="7" * 16), None),
    ],
)  # fmt: skip
def test_each_part_of_the_state_is_seen_by_its_name(trainer: Any, begins: Any, words: str | None) -> None:
    """What an optimizer of a plain class keeps, frozen parameters, buffers, moments on the wrong parameters: it is said
    what they are instead, and on which rank. Random numbers are no part of this question."""
    found = StateRestored().judge(_named(trainer, begins).record(), ())
    assert (found.outcome is Outcome.FAILED) is (words is not None), found.reason
    assert (words or "parameters, frozen parameters, buffers and moments of the optimizer are") in found.reason


def test_buffers_that_were_read_after_the_forward_may_have_been_written_by_it(trainer: Any) -> None:
    """A position in a buffer that was not restored makes the forward write elsewhere; the buffers themselves may be
    whole."""

    class Late(_named(trainer).__class__):  # type: ignore[misc]
        def emit(self, kind: Kind, data: Any, *who: Any, **when: Any) -> None:
            if kind is Kind.BEGUN:
                buffers = {**data["buffers"], **({"norm.mean": _entry(99.0)} if who[1] else {})}
                data = {**data, "at": "backward", "buffers": buffers}
            super().emit(kind, data, *who, **when)

    job = Late(kills=((13, 1),), state_seen=True, noise=True, global_batch=True)
    found = StateRestored().judge(job.record(), ())
    assert found.outcome is Outcome.FAILED
    assert found.reason.startswith(
        "after the first forward of attempt 1, which went on from step 10, the buffers are not"
    )
    assert "They were not restored, or that forward wrote other values into them" in found.reason
    run = Late(kills=((13, 1),), state_seen=True, noise=True, global_batch=True, broken=frozenset({"rng"}))
    twin = _named(trainer)
    twin.kills = ()
    reason = LossContinuity().judge(run.record(), [twin.record()]).reason
    assert "buffers of the model were not restored, or the first forward wrote other values into them" in reason, reason


def test_ranks_that_train_apart_have_moments_of_their_own(trainer: Any) -> None:
    """Between two meetings of local SGD. Only rank 0 saves, so what rank 1 had is not known by name, and it is not
    measured by what rank 0 had, nor by the weights that rank 0 had after the meeting."""

    class Apart(_named(trainer).__class__):  # type: ignore[misc]
        def _state(self, step: int, rank: int = 0) -> dict[str, Any]:
            found = super()._state(step, rank)
            return {**found, "moments": {name: _entry(step + 2.5 + rank / 64) for name in found["moments"]}}

    run = Apart(kills=((13, 1),), state_seen=True, noise=True, global_batch=True).record()
    assert StateRestored().judge(run, ()).outcome is Outcome.FAILED  # of replicas, one is not as the other
    sums = {e.step: e.data["parameters"] for e in run.events if e.kind is Kind.STEP and e.attempt == 0}
    met = next(e.data["restored"] for e in run.events if e.kind is Kind.STEP and e.attempt == 1)
    apart = []  # after its step each rank has weights of its own, and a meeting before the save makes them equal
    for e in run.events:
        if e.kind is Kind.STEP and e.attempt == 0:
            of_its_own = sums[((e.step or 0) + 3 * (e.rank or 0)) % 12 + 1]
            seen = met if (e.rank, e.step) == (0, 11) else None  # in the step after its save
            e = replace(e, data={**e.data, "parameters": of_its_own, "restored": seen})
        apart.append(e)
    found = StateRestored().judge(replace(run, events=tuple(apart)), ())
    assert found.outcome is not Outcome.FAILED, found.reason


def test_what_the_optimizer_of_another_rank_trains_is_not_called_frozen(trainer: Any) -> None:
    """Each rank's optimizer has a part of the parameters (ZeRO), and all of them get gradients."""

    class Zero(_named(trainer, lambda begun, rank: None).__class__):  # type: ignore[misc]
        def emit(self, kind: Kind, data: Any, *who: Any, **when: Any) -> None:
            if kind in (Kind.BEGUN, Kind.KEPT):
                data = {**data, "trained": [*data["parameters"], *data["frozen"]]}
            super().emit(kind, data, *who, **when)

    job = Zero(kills=((13, 1),), state_seen=True, noise=True, global_batch=True)
    found = StateRestored().judge(job.record(), ())
    assert found.outcome is Outcome.PASSED, found.reason
    assert found.reason.startswith("parameters, buffers and moments of the optimizer are bit for bit as before")


@pytest.mark.parametrize(
    ("begins", "name", "words"),
    [
        (11.0, NAMES[0], "are the trained parameters after step 10"),
        (11.0, "0.weight", "have the values of trained parameters"),
        (77.0, NAMES[0], "are others"),
    ],
)
def test_a_frozen_copy_is_explained_by_what_came_before_it(trainer: Any, begins: float, name: str, words: str) -> None:
    """A teacher that is copied after the load has the loaded weights instead of the first ones. It stays as it is, and
    that later steps of the attempt have it too explains nothing."""

    class Teacher(_named(trainer).__class__):  # type: ignore[misc]
        def emit(self, kind: Kind, data: Any, *who: Any, **when: Any) -> None:
            if kind in (Kind.BEGUN, Kind.KEPT):
                data = {**data, "frozen": {f"Net:{name}": _entry(begins if who[1] else 0.5)}}
            super().emit(kind, data, *who, **when)

    job = Teacher(kills=((13, 1),), state_seen=True, noise=True, global_batch=True)
    reason = StateRestored().judge(job.record(), ()).reason
    assert f"the frozen parameters Net:{name} {words}" in reason, reason


def test_an_rng_that_was_lost_is_told_beside_what_was_restored(trainer: Any) -> None:
    """And the story does not say that all of the state held. A model that draws nothing has lost nothing."""

    def other(begun: Any, rank: int) -> None:
        begun["rng"].update(torch="7" * 16)

    run, twin = _named(trainer, other).record(), _named(trainer).record()
    found = StateRestored().judge(run, ())
    assert "the RNG state differs, and the model draws from it: attempt 1 began step 11 with another" in found.reason
    plan = replace(run.plan, asserts=(Named("state_restored", {}), Named("loss_continuity", {})))
    result = verdict_of(replace(run, plan=plan), [twin], "/run")
    assert any(line.startswith("What held: state restored (but the RNG state differs)") for line in _why(result))

    class Idle(_named(trainer).__class__):  # type: ignore[misc]
        def _state(self, step: int, rank: int = 0) -> dict[str, Any]:
            return {**super()._state(step, rank), "drawn": []}

        def emit(self, kind: Kind, data: Any, *who: Any, **when: Any) -> None:
            if kind is Kind.BEGUN and who[1]:
                other(data, who[0])
            super().emit(kind, data, *who, **when)

    job = Idle(kills=((23, 1),), state_seen=True, noise=True, global_batch=True)
    assert "RNG" not in StateRestored().judge(job.record(), ()).reason


@pytest.mark.parametrize(
    ("ranks", "savers", "words"),
    [
        (
            (0,),
            1,
            "the model draws from it: attempt 1 began step 11 with another state of the RNG torch than attempt 0 (",
        ),
        (
            (0, 1),
            2,
            "the model draws from it: attempt 1 began step 11 with another state of the RNG torch than attempt 0 (",
        ),
        (
            (1,),
            2,
            "the model draws from it: rank 1 of attempt 1 began step 11 with another state of the RNG torch than",
        ),
    ],
    ids=["one rank was seen", "all ranks", "one of two ranks"],
)
def test_another_rng_state_is_told_as_it_was_seen(
    trainer: Any, ranks: tuple[int, ...], savers: int, words: str
) -> None:
    """Whether it was restored is not known: a state of another moment was restored, or something drew from it since. A
    rank is named only if another rank has the same state as before."""

    def other(begun: Any, rank: int) -> None:
        if rank in ranks:
            begun["rng"].update(torch="7" * 16)

    reason = StateRestored().judge(_named(trainer, other, savers=savers).record(), ()).reason
    assert words in reason
    assert "(not restored, restored from another moment, or drawn from since)" in reason
    assert "others" not in reason


@pytest.mark.parametrize("rank", [0, 1, None])
def test_a_state_that_one_rank_lost_makes_the_replicas_differ(trainer: Any, rank: int | None) -> None:
    """That the replicas differ follows from it. A state that all ranks lost is no reason for that."""

    def lost(begun: Any, own: int) -> None:
        if rank in (own, None):
            begun["frozen"].update({NAMES[1]: _entry(99)})

    found = StateRestored().judge(_named(trainer, lost).record(), ())
    assert found.first is not None
    assert found.first.what is (What.PARAMETERS if rank is None else What.REPLICAS)
    assert (", and rank" in found.reason) is (rank is not None)
    assert rank is None or f"on rank {rank} are others, and rank {1 - rank}'s were restored" in found.reason


def test_a_model_without_buffers_has_lost_and_kept_none(trainer: Any) -> None:
    """Nothing is said of a part of the state that is nowhere."""

    class Bare(_named(trainer).__class__):  # type: ignore[misc]
        def _state(self, step: int, rank: int = 0) -> dict[str, Any]:
            return {**super()._state(step, rank), "buffers": {}, "frozen": {}, "unsaved": []}

    job = Bare(kills=((13, 1),), state_seen=True, noise=True, global_batch=True)
    found = StateRestored().judge(job.record(), ())
    assert found.reason.startswith("parameters and moments of the optimizer are bit for bit"), found.reason
    twin = Bare(state_seen=True, noise=False, global_batch=True).record()
    reason = LossContinuity().judge(job.record(), [twin]).reason
    assert "buffers" not in reason
    assert "frozen" not in reason


@pytest.mark.parametrize(
    ("step", "ours", "twins", "words"),
    [
        (15, [], ["weight"], "are trained than before: the parameters weight are no longer trained; the"),
        (15, ["weight"], [], "are trained than before: the parameters weight are trained, and were not; the"),
        (15, ["weight"], ["weight"], ""),
        (20, [], ["weight"], "before: in step 21, the parameters weight are not trained, and are in the twin"),
        (20, ["weight"], [], "before: in step 21, the parameters weight are trained, and are not in the twin"),
    ],
)
def test_the_set_of_trained_parameters(trainer: Any, step: int, ours: list[str], twins: list[str], words: str) -> None:
    """Weights that were frozen after the resume, or unfrozen late or early: the cause says which, and when."""

    def record(kills: Any, trained: dict[int, list[str]], **more: Any) -> Any:
        made = trainer(kills=kills, named=True, **more).record()
        events = []
        for event in made.events:
            if event.kind is Kind.BEGUN:
                at = (event.step or 0) + 15 * (event.attempt or 0)
                frozen = {**event.data["frozen"], **event.data["parameters"]}
                data = {**event.data, "parameters": {}, "frozen": frozen, "trained": trained[event.attempt or 0]}
                event = replace(event, data=data if at == step else event.data)
            events.append(event)
        return replace(made, events=tuple(events))

    broken = frozenset({"momentum"} if step == 15 else ())
    run = record([(18, 1)], {0: twins, 1: ours}, broken=broken)
    twin = record([], {0: twins})
    if step == 20:  # the loss of a later step differs
        events = [
            replace(e, data={**e.data, "losses": [e.data["losses"][0] * 1.5]})
            if e.kind is Kind.STEP and e.attempt == 1 and e.step == 8 else e
            for e in run.events
        ]  # fmt: skip
        run = replace(run, events=tuple(events))
    reason = LossContinuity().judge(run, [twin]).reason
    assert words in reason
    assert words or "are trained than before" not in reason


@pytest.mark.parametrize(("others", "words"), [
    ((5, 10), "ckpt-13.pt is of step 13, and the job went on from there, but the weights that it began with are those "
              "after step 14: they were written, or copied, while the training went on"),
    ((4, 9), ""),  # this job counts from 0
    ((5, 9), ""),  # nobody knows how it counts
])  # fmt: skip
def test_a_file_that_claims_another_step_than_that_of_its_weights(others: tuple[int, ...], words: str) -> None:
    """A save at a signal is called by the step before: the names of the other saves show what this name claims."""

    def save(told: int, step: int) -> Save:
        return Save(f"/job/ckpt-{told}.pt", "torch", 0, step, (0,), step, step + 0.2, True, 0.2, step)

    saves = (*map(save, others, (5, 10)), save(13, 14))
    load = Load("/job/ckpt-13.pt", 1, 0, 20.0, True, {"step": 13})
    history = History((), Executions.of([]), saves, (load,), "agent")
    said_by = Witness(STATE, (14,), ""), Witness(RECORD, (14,), ""), Witness(CONTENTS, (13, 14), "")
    assert mixed_state(history, Segment(1, 0, 20.0, 14, (*said_by, Witness(SAMPLES, (13,), "")))) == words
    assert not mixed_state(history, Segment(1, 0, 20.0, 14, (*said_by, Witness(SAMPLES, (14,), ""))))


def test_other_values_in_the_model_during_the_save(trainer: Any) -> None:
    """A job saves an average and goes on with its own parameters: a resume that goes on with the average has lost them,
    and one that puts its own back has not."""

    def average(begun: Any, rank: int) -> None:
        begun["parameters"] = {NAMES[0]: _entry(11.5)}

    lost = StateRestored().judge(_named(trainer, average, during_save=0.5).record(), ())
    assert lost.outcome is Outcome.FAILED
    assert "are those that were in the model during the save, and not those with which the job went on" in lost.reason
    assert StateRestored().judge(_named(trainer, during_save=0.5).record(), ()).outcome is Outcome.PASSED
    run = _named(trainer, average, during_save=0.5, broken=frozenset({"weights"})).record()
    reason = LossContinuity().judge(run, [_named(trainer, kills=(), during_save=0.5).record()]).reason
    assert (
        "the model's weights after the resume: the parameters net.0.weight are those that were in the model during the"
        in reason
    )
    assert "were not restored" not in reason


@pytest.mark.parametrize(
    ("during_save", "value", "words"),
    [
        (0.0, 11.0, "are those of rank 0, and were other ones on this rank before, and rank 0's were restored"),
        (0.5, 11.0, "are others, and rank 0's were restored"),
        (0.5, 11.5, "are those that were in the model during the save, and not those with which the job went on"),
    ],
)
def test_a_rank_with_the_values_of_the_rank_that_saved(
    trainer: Any, during_save: float, value: float, words: str
) -> None:
    """Ranks hold parameters of their own, and rank 1 begins with those of rank 0. That is told of a swap around the
    save only if it begins with what was swapped in."""

    def takes(begun: Any, rank: int) -> None:
        begun["parameters"] = {NAMES[0]: _entry(value if rank else 11.0)}

    job = _named(trainer, takes, during_save=during_save, savers=2)
    state = job._state
    job._state = lambda step, rank=0: {
        **state(step, rank), "parameters": {NAMES[0]: _entry(step + 1.0 + rank / 8)},
    }  # fmt: skip
    found = StateRestored().judge(job.record(), ())
    assert f"the parameters net.0.weight on rank 1 {words}" in found.reason


def test_what_was_not_seen_is_not_called_equal(trainer: Any) -> None:
    """The job died before it went on after its save: its buffers may have changed after the save."""
    found = StateRestored().judge(_named(trainer, goes_on=False).record(), ())
    assert found.reason.startswith("parameters, frozen parameters and moments of the optimizer are bit for bit"), found


def test_a_buffer_without_effect_is_no_state(trainer: Any) -> None:
    """A cache in no state_dict, and a step that led to the same as before; a buffer of the state_dict counts though."""

    def same(name: str, **how: Any) -> Finding:
        def begins(begun: Any, rank: int) -> None:
            begun["buffers"][name] = ["float32 4x4", "1" * 16]

        job = _named(trainer, begins, **how)
        job.noise = 0.0
        return StateRestored().judge(job.record(), ())

    assert same("cache").outcome is Outcome.PASSED
    assert same("norm.mean").outcome is Outcome.FAILED
    assert "the buffers cache on rank 0 are others" in same("cache", broken=frozenset({"rng"})).reason  # it may act


def test_the_buffers_of_the_rank_that_saved_are_right(trainer: Any) -> None:
    """Running statistics of each rank, and a checkpoint with those of rank 0: DDP gives them to all ranks anyway."""

    def judged_with(value: float) -> Outcome:
        def begins(begun: Any, rank: int) -> None:
            begun["buffers"]["norm.mean"] = _entry(value)

        return StateRestored().judge(_named(trainer, begins, savers=2).record(), ()).outcome

    assert (judged_with(10.125), judged_with(9.0)) == (Outcome.PASSED, Outcome.FAILED)


def test_samples_of_which_the_job_made_others_are_not_called_equal(trainer: Any) -> None:
    """The loader gave the right samples, and the job cut or normalised them in another way after the resume."""

    def cut(begun: Any, rank: int) -> None:
        begun["inputs"] = {".0.0": ["float32 4x2", "1" * 16]}

    for begins, words in ((None, "consumed exactly as in the twin"), (cut, "have the form float32 4x2 instead of")):
        found = SampleAccounting().judge(_named(trainer, begins).record(), [_named(trainer).record()])
        assert found.outcome is Outcome.PASSED, found.reason
        assert words in found.reason
    assert "exactly" not in found.reason


@pytest.mark.parametrize(
    ("digest", "words"),
    [
        (None, None),
        (f"1{0:015x}", "the states of the RNG torch on rank 1 are those of a fresh start, and rank 0's were restored"),
        (f"0{10:015x}", "the states of the RNG torch on rank 1 are those of rank 0, and rank 0's were restored"),
    ],
)
def test_the_generator_of_a_rank_that_saves_nothing(trainer: Any, digest: str | None, words: str | None) -> None:
    """Its state after the step was not recorded. It was lost if it is that of the start, or that of the rank that
    saved; otherwise nothing is known about it."""

    def begins(begun: Any, rank: int) -> None:
        if rank and digest:
            begun["rng"]["torch"] = digest

    run = _named(trainer, begins).record()
    attempt = run.history.attempts[1]
    others = begun_with(run, attempt.number, 10, attempt.started_s).of(RNG)
    assert in_words(others, 2) == (f"{words}" if words else "")


@pytest.mark.parametrize(
    ("digests", "words"),
    [
        ((1, 0), "ranks began with the RNG state of another rank, and the model draws from it: rank 0 began with the "
         "state of the RNG torch of rank 1, and rank 1 with that of rank 0"),
        ((1, None), "the RNG state was not restored, and the model draws from it: the states of the RNG torch on rank "
         "0 are those of rank 1; the states of the RNG torch on rank 1 are those of a fresh start"),
    ],
)  # fmt: skip
def test_it_is_said_which_rank_has_whose_generator(trainer: Any, digests: Any, words: str) -> None:
    """Ranks that load each other's states restored them all, each on the wrong rank. The states are no part of the
    question, and what passed does not say that they are."""

    def begins(begun: Any, rank: int) -> None:
        of = digests[rank]
        begun["rng"]["torch"] = f"{rank}{0:015x}" if of is None else f"{of}{10:015x}"

    run = _named(trainer, begins, savers=2).record()
    found = StateRestored().judge(run, ())
    assert found.outcome is Outcome.PASSED
    assert found.reason.endswith(f"in attempt 1. It does not judge RNG states: {words}")


def test_generators_that_went_round() -> None:
    """Several generators of several ranks are told rank by rank; one that is equal on all ranks went nowhere."""
    found = Begun(drawn=frozenset({"torch"}))
    names = ("torch", "numpy")
    others = [Other(RNG, name, (r,), said("of a rank", rank=(r + 1) % 8)) for name in names for r in range(8)]
    assert found.generators_in_words(others, 8) == (
        "ranks began with the RNG state of another rank, and the model draws from it: rank 0 began with the states of "
        "the RNG torch and numpy of rank 1, rank 1 with those of rank 2, rank 2 with those of rank 3, and 5 more "
        "with those of others"
    )
    both_of_0 = [Other(RNG, "torch", (1, 2), said("of a rank", rank=0), equal=(0,))]
    assert found.generators_in_words(both_of_0, 3) == (
        "the RNG state was not restored, and the model draws from it: the states of the RNG torch on ranks 1, 2 are "
        "those of rank 0, and rank 0's were restored"
    )


def test_parts_that_are_shared_out_in_another_way(trainer: Any) -> None:
    """Two ranks had the halves of a parameter, and one rank has the whole after the resume: the sums are compared."""

    def halves(whole: int) -> Any:
        class Shared(trainer):  # type: ignore[misc]
            def _step(self, attempt: int, world: int, state: Any, step: int, local: int) -> None:
                for rank in range(world):
                    parts = (f"part{rank}-", 50 + rank + 100 * step), ("", whole + 200 * step)
                    place, own = parts[0] if world == 2 else parts[1]
                    sums = {"weight": ["float32 4x4", f"{place}{own:016x}"]}
                    data = {"parameters": sums, "frozen": {}, "buffers": {}, "moments": {}, "rng": {}, "at": "forward"}
                    self.emit(Kind.BEGUN, data, rank, attempt, local - 1)
                super()._step(attempt, world, state, step, local)

        run = Shared(kills=((13, 1),), state_seen=True, noise=True, global_batch=True, worlds={1: 1}).record()
        return begun_with(run, 1, 10, run.history.attempts[1].started_s).equal("parameters")

    assert (halves(101), halves(102)) == (True, False)


def test_stages_of_a_pipeline_that_are_divided_anew(trainer: Any) -> None:
    """Each rank had a layer, and one rank has both after the resume: each is compared with what the other rank had."""

    def both(second: int) -> Any:
        class Stages(trainer):  # type: ignore[misc]
            def _step(self, attempt: int, world: int, state: Any, step: int, local: int) -> None:
                layers = {f"layer{n}": ["float32 4x4", f"{100 * step + n:016x}"] for n in range(2)}
                if world == 1:
                    layers["layer1"] = ["float32 4x4", f"{100 * step + second:016x}"]
                for rank in range(world):
                    own = layers if world == 1 else {f"layer{rank}": layers[f"layer{rank}"]}
                    moments = {f"{name}/exp_avg": of for name, of in own.items()}
                    data = {
                        "parameters": own,
                        "moments": moments,
                        "frozen": {},
                        "buffers": {},
                        "rng": {},
                        "at": "forward",
                    }
                    self.emit(Kind.BEGUN, data, rank, attempt, local - 1)
                super()._step(attempt, world, state, step, local)

        run = Stages(kills=((13, 1),), state_seen=True, noise=True, global_batch=True, worlds={1: 1}).record()
        found = begun_with(run, 1, 10, run.history.attempts[1].started_s)
        return found.equal("parameters"), found.equal("moments"), [(one.quantity, one.name) for one in found.others]

    assert both(1) == (True, True, [])
    assert both(0) == (False, False, [("parameters", "layer1"), ("moments", "layer1/exp_avg")])


def test_moments_that_are_missing_on_all_ranks_that_share_them(trainer: Any) -> None:
    """Parameters and moments are shared out (FSDP2), and no rank has any moment after the resume."""

    class Shared(trainer):  # type: ignore[misc]
        def _step(self, attempt: int, world: int, state: Any, step: int, local: int) -> None:
            for rank in range(world):
                own = {"weight": ["float32 4x4", f"part{rank}-{step:016x}"]}
                moments = {f"weight/{name}": of for name, of in own.items()} if not attempt else {}
                data = {"parameters": own, "frozen": {}, "buffers": {}, "moments": moments, "rng": {}, "at": "forward"}
                self.emit(Kind.BEGUN, data, rank, attempt, local - 1)
            super()._step(attempt, world, state, step, local)

    run = Shared(kills=((13, 1),), state_seen=True, sharded=True, parts=True, noise=True).record()
    found = StateRestored().judge(run, ())
    assert found.outcome is Outcome.FAILED, found.reason
    assert "the moments of weight are missing" in found.reason


@pytest.mark.parametrize("worlds", [{1: 1}, {}])
def test_inputs_of_another_number_of_ranks_are_not_compared(trainer: Any, worlds: dict[int, int]) -> None:
    """Each rank gets another share of the batch: that is no loss of state."""

    class Shares(trainer):  # type: ignore[misc]
        def emit(self, kind: Any, data: Any, *where: Any, **how: Any) -> None:
            if kind is Kind.BEGUN:
                size = "4x4" if attempt_of(where) == 0 else "8x4"
                data = {**data, "inputs": {".0.0": [f"float32 {size}", "0" * 16]}}
            super().emit(kind, data, *where, **how)

    def attempt_of(where: tuple[Any, ...]) -> int:
        return int(where[1])

    run = Shares(kills=((13, 1),), named=True, global_batch=True, worlds=worlds).record()
    begun = begun_with(run, 1, 10, run.history.attempts[1].started_s)
    assert bool(begun.of("inputs")) is not bool(worlds)


def test_a_resume_after_the_job_had_gone_back_by_itself(trainer: Any) -> None:
    """A job goes back after a spike of its loss, as it is written to, and its steps count on; later a rank dies. What
    counts is the state that was saved after that."""
    run = trainer(raises=(10, 1, 0.5), kills=((18, 1),), state_seen=True, named=True, every=4).record()
    raised = min((e for e in run.events if e.kind is Kind.APPLYING), key=lambda e: e.mono_s)
    own = replace(run, events=tuple(e for e in run.events if e is not raised))
    assert [(part.number, part.after, part.base) for part in own.history.segments] == [(0, 0, 0), (1, 0, 17)]
    found = StateRestored().judge(own, ())
    assert found.outcome is Outcome.PASSED, found.reason
    assert found.measured["resumes"] == 1


def test_inputs_that_are_those_of_the_twin_are_right(trainer: Any) -> None:
    """After it went back, a job skips the data of the spike, and does a step again with other inputs. So does the
    twin."""

    def begins(begun: Any, rank: int) -> None:
        begun["inputs"] = {".0.0": ["float32 4x2", "1" * 16]}

    def twin(of: str) -> Record:
        own: Record = _named(trainer, kills=(), savers=2).record()
        data = {"inputs": {".0.0": ["float32 4x2", of * 16]}}
        events = (replace(e, data={**e.data, **data}) if e.kind is Kind.BEGUN else e for e in own.events)
        return replace(own, events=tuple(events))

    run = _named(trainer, begins, savers=2).record()
    words = [SampleAccounting().judge(run, [twin(of)]).reason for of in "12"]
    assert ["but the model's inputs" in each for each in words] == [False, True], words


def test_sums_of_no_moments_show_no_step(trainer: Any) -> None:
    """The check sums of the steps leave out what optimizers of plain classes keep, and so are equal after each step."""

    def other(begun: Any, rank: int) -> None:
        begun["moments"][f"{NAMES[1]}/m"] = _entry(77.0)

    run = _named(trainer, other, broken=frozenset({"weights"})).record()
    nothing = {"moments": "0" * 32, "restored_moments": "0" * 32}
    events = (replace(e, data={**e.data, **nothing}) if e.kind is Kind.STEP else e for e in run.events)
    reason = StateRestored().judge(replace(run, events=tuple(events)), ()).reason
    assert f"the moments of {NAMES[1]} are others" in reason, reason


def test_replicas_that_no_longer_hold_the_same_are_others() -> None:
    """All ranks held the same whole tensors. Sums that differ from each other can't all be that sum, although they
    can't be added up; of ranks that hold parts, nothing is known."""
    before, parts = dict.fromkeys((0, 1), "a" * 32), {0: "b" * 32, 1: "c" * 32}
    assert _equal({0: "a" * 32, 1: "b" * 32}, before) is False
    assert _equal({0: "a" * 32, 1: None}, before) is None
    assert _equal({0: "a" * 32, 1: "b" * 32}, parts) is None
    assert _equal(parts, parts) is True


def test_what_a_warm_up_began_with_is_no_reference(trainer: Any) -> None:
    """A job loads, warms up with made-up data, and puts its state back: the state before counts, of the attempt
    before."""
    run = trainer(kills=((13, 1),), named=True).record()

    def with_inputs(event: Event, total: str) -> Event:
        return replace(event, data={**event.data, "inputs": {".0.0": ["float32 4x4", total]}})

    begun = [event for event in run.events if event.kind is Kind.BEGUN and event.attempt == 1 and event.step == 0]
    between_s = begun[0].mono_s - 1e-4
    warmed = [replace(with_inputs(event, "1" * 16), mono_s=between_s - 1e-4) for event in begun]
    events = [with_inputs(event, "0" * 16) if event.kind is Kind.BEGUN else event for event in run.events]
    every = sorted((*events, *warmed), key=lambda event: event.mono_s)
    found = begun_with(replace(run, events=tuple(every)), 1, 10, between_s)
    assert found.seen["inputs"] == {0, 1}
    assert not found.of("inputs")
