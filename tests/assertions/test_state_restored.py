"""The state that a resume restored, compared with the saved state, on any number of ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from torchaos.assertions.state_restored import StateRestored
from torchaos.harness.agent.wire import Kind
from torchaos.harness.contracts import Finding, Outcome


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


def test_a_resume_from_nobody_knows_where_is_inconclusive(trainer: Any) -> None:
    """With no load, counter, sample or loss to tell, no step of the earlier attempt can be the one it went on from."""
    blind = {f"{name}_seen": False for name in ("loads", "counters", "samples", "losses")}
    found = judged(trainer, **blind)
    assert (found.outcome, "it is not known which global steps attempt 1 made" in found.reason) == (
        Outcome.INCONCLUSIVE,
        True,
    )


@pytest.mark.parametrize(("broken", "outcome"), [((), Outcome.PASSED), (("weights",), Outcome.INCONCLUSIVE)])
def test_parts_that_do_not_add_up(trainer: Any, broken: tuple[str, ...], outcome: Outcome) -> None:
    """Every rank holds other parameters under no scheme that is known: that each has what it had can be told, and what
    it means that they have others can't."""
    found = judged(trainer, parts=True, broken=frozenset(broken))
    assert found.outcome is outcome
    assert outcome is Outcome.PASSED or "can't be added up" in found.reason


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


def test_a_journal_of_an_agent_without_moments_is_inconclusive(trainer: Any) -> None:
    """Journals from before the moments were recorded are still read."""
    record = trainer(kills=((13, 1),), state_seen=True).record()
    for event in record.events:
        for name in ("moments", "restored_moments"):
            event.data.pop(name, None)
    assert StateRestored().judge(record, ()).outcome is Outcome.INCONCLUSIVE
