"""parameter_digest: parameters must be equal on replicas and equal to the twin's; the finding names the first
difference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from torchaos.assertions.parameter_digest import ParameterDigest
from torchaos.harness.base_classes import Assertion
from torchaos.harness.interfaces import Outcome
from torchaos.harness.protocol.wire import Event, Kind

KILL = [(18, 1)]


@pytest.fixture
def trainer(trainer: Any) -> Any:
    """One whose state is seen."""
    return partial(trainer, state_seen=True)


def test_a_healthy_recovery_passes(trainer: Any) -> None:
    """Replicas equal after every step, and the twin's at each checkpoint and at the end."""
    assert isinstance(ParameterDigest(), Assertion)
    finding = ParameterDigest().judge(trainer(kills=KILL).record(), [trainer().record()])
    assert finding.outcome is Outcome.PASSED, finding.reason
    assert (finding.measured["steps"], finding.measured["checkpoints"]) == (30, 6)


def test_replicas_that_diverge_are_told(trainer: Any) -> None:
    """Rank 1 goes its own way after the resume: its number, the step, and that it began with the resume."""
    finding = ParameterDigest().judge(trainer(kills=KILL, apart=1).record(), [trainer().record()])
    assert finding.outcome is Outcome.FAILED
    assert (
        "after step 16 the parameters of rank 1 are not those of rank 0, after the resume from step 15"
        in finding.reason
    )
    assert (finding.measured["step"], finding.measured["rank"]) == (16, 1)
    assert (
        ParameterDigest(replicas_only=True).judge(trainer(kills=KILL, apart=1).record(), []).outcome is Outcome.FAILED
    )


@pytest.mark.parametrize(("broken", "step"), [("rng", 16), ("momentum", 16), ("weights", 16)])
def test_parameters_that_are_not_the_twins_are_told(trainer: Any, broken: str, step: int) -> None:
    """The first step, how far off the gradient is, the cause, and how many checkpoints it reached."""
    finding = ParameterDigest().judge(trainer(kills=KILL, broken=frozenset({broken})).record(), [trainer().record()])
    assert finding.outcome is Outcome.FAILED
    assert f"first after step {step}, on rank 0, after the resume from step 15" in finding.reason
    assert "the gradient's norm after the backward is" in finding.reason
    assert "It reached 3 checkpoints, first that of step 20" in finding.reason


def test_whether_the_weights_were_restored_is_known(trainer: Any) -> None:
    """By what a process began with: weights of a fresh start are told, and where they are right it was the RNG."""
    twin = trainer().record()
    for broken, words in (
        ("weights", "the model's weights were not restored: before step 16 those of rank 0, 1 were those of a fresh"),
        ("rng", "optimizer counter and learning rate are equal; buffers and RNG states were not seen; something that"),
    ):
        finding = ParameterDigest().judge(trainer(kills=KILL, broken=frozenset({broken})).record(), [twin])
        assert words in finding.reason


def test_ranks_that_hold_parts_are_no_replicas(trainer: Any) -> None:
    """Ranks that differ in the twin too: they are compared with the twin's, and not with each other."""
    finding = ParameterDigest().judge(trainer(kills=KILL, parts=True).record(), [trainer(parts=True).record()])
    assert finding.outcome is Outcome.PASSED, finding.reason
    assert "no replicas to compare" in finding.reason
    assert ParameterDigest().judge(trainer(kills=KILL, parts=True).record(), []).outcome is Outcome.INCONCLUSIVE


def test_a_job_that_is_never_the_same_is_asked_for_replicas_only(trainer: Any) -> None:
    """Twins that differ among themselves, or from the run before the fault: inconclusive; `replicas_only` passes."""
    noisy = [trainer(noise=n).record() for n in (1, 2)]
    run = trainer(kills=KILL, noise=3).record()
    finding = ParameterDigest().judge(run, noisy)
    assert (finding.outcome, "`replicas_only: true`" in finding.reason) == (Outcome.INCONCLUSIVE, True)
    assert ParameterDigest(replicas_only=True).judge(run, noisy).outcome is Outcome.PASSED


def test_other_sums_on_three_ranks_may_be_rounding(trainer: Any) -> None:
    """A difference that no loss shows by more than 1e-5, with three ranks: inconclusive, by that name."""
    run = trainer(kills=KILL, world=3, broken=frozenset({"momentum"})).record()
    finding = ParameterDigest().judge(run, [trainer(world=3).record()])
    assert finding.outcome in (Outcome.FAILED, Outcome.INCONCLUSIVE)
    two = ParameterDigest().judge(trainer(kills=KILL, broken=frozenset({"momentum"})).record(), [trainer().record()])
    assert two.outcome is Outcome.FAILED


def test_fewer_ranks_can_only_be_compared_with_each_other(trainer: Any) -> None:
    """After a change of the number of ranks the sums come in another order: whether it is the twin's can't be told."""
    run = trainer(kills=KILL, worlds={1: 1}, global_batch=True).record()
    finding = ParameterDigest().judge(run, [trainer().record()])
    assert finding.outcome is Outcome.INCONCLUSIVE, finding.reason


def _after(run: Any, change: Callable[[Event], Event | None]) -> Any:
    """The record with the steps of rank 1 in attempt 1 changed, or left out where None."""
    events = [
        change(event) if event.kind is Kind.STEP and (event.attempt, event.rank) == (1, 1) else event
        for event in run.events
    ]
    return replace(run, events=tuple(event for event in events if event is not None))


@pytest.mark.parametrize(
    "change",
    [
        lambda event: replace(event, data={**event.data, "parameters": None}),
        lambda event: None,
        lambda event: event if event.step > 1 else replace(event, data={**event.data, "parameters": None}),
        lambda event: event if event.step < 15 else None,
    ],
    ids=["no parameters", "no steps", "not the first", "not the last"],
)
def test_replicas_that_were_not_seen_decide_nothing(trainer: Any, change: Callable[[Event], Event | None]) -> None:
    """What rank 1 held after the resume was not seen: nobody can say that it was what rank 0 held."""
    for twins in ([trainer().record()], []):
        finding = ParameterDigest(replicas_only=True).judge(_after(trainer(kills=KILL).record(), change), twins)
        assert finding.outcome is Outcome.INCONCLUSIVE, finding.reason


def test_replicas_of_a_job_that_was_not_seen_to_go_on_decide_nothing(trainer: Any) -> None:
    """No step after the resume was seen of any rank: the 17 before the kill say nothing of it."""
    run = trainer(kills=KILL).record()
    cut = replace(run, events=tuple(e for e in run.events if e.kind is not Kind.STEP or e.attempt == 0))
    finding = ParameterDigest(replicas_only=True).judge(cut, [trainer().record()])
    assert finding.outcome is Outcome.INCONCLUSIVE, finding.reason


def test_the_last_step_before_a_resume_may_be_unseen_on_a_rank(trainer: Any) -> None:
    """Rank 1 died before it could tell of step 15, which was saved: all that came of it was seen."""
    run = trainer(kills=KILL).record()
    events = tuple(e for e in run.events if e.kind is not Kind.STEP or (e.rank, e.attempt, e.step) != (1, 0, 15))
    finding = ParameterDigest(replicas_only=True).judge(replace(run, events=events), [trainer().record()])
    assert finding.outcome is Outcome.PASSED, finding.reason


def test_one_rank_alone_has_no_replica_to_be_seen(trainer: Any) -> None:
    """After a resume on one rank nothing is missing: the steps on two ranks were all seen."""
    run = trainer(kills=KILL, worlds={1: 1}, global_batch=True).record()
    finding = ParameterDigest(replicas_only=True).judge(run, [trainer().record()])
    assert finding.outcome is Outcome.PASSED, finding.reason


def test_noise_is_learned_from_the_twins_sketches(trainer: Any) -> None:
    """A job that is never the same twice passes when its parameters stay as near to the twins' as the twins' are to
    each other, and each resume restored the very bits that were saved."""
    twins = [trainer(noise=n, sketched=True).record() for n in (1, 2, 3)]
    finding = ParameterDigest().judge(trainer(kills=KILL, noise=4, sketched=True).record(), twins)
    assert finding.outcome is Outcome.PASSED, finding.reason
    assert "each resume restored exactly the bits that were saved" in finding.reason
    assert "as near to the twins' as the twins' are to each other" in finding.reason


@pytest.mark.parametrize("off", [1e-2, 1e-4, 1e-6])
def test_noise_is_no_excuse_for_what_was_loaded(trainer: Any, off: float) -> None:
    """A weight that is off by a millionth after a resume is not what was saved, however noisy the steps are."""
    twins = [trainer(noise=n, sketched=True).record() for n in (1, 2, 3)]
    finding = ParameterDigest().judge(trainer(kills=KILL, noise=4, sketched=True, off=off).record(), twins)
    assert finding.outcome is Outcome.FAILED, finding.reason
    assert "began attempt 1 with" in finding.reason
    assert "which the checkpoint should hold to the last bit: they were not restored exactly" in finding.reason
    assert finding.measured["off"] == pytest.approx(off, rel=0.1)


def test_a_rank_that_resumed_from_another_step_has_not_lost_bits(trainer: Any) -> None:
    """Rank 1 loaded the file of step 10, and its optimizer's counter confirms it: that is why its weights are off."""
    twins = [trainer(noise=n, sketched=True).record() for n in (1, 2, 3)]
    run = trainer(kills=KILL, noise=4, sketched=True, off=0.01).record()

    def behind(event: Event) -> Event:
        data = dict(event.data)
        if (event.rank, event.attempt, event.kind) == (1, 1, Kind.LOAD_END):
            data |= {"path": "/job/checkpoints/step-10", "numbers": {"step": 10}}
        if (event.rank, event.attempt, event.kind) == (1, 1, Kind.STEP):
            data |= {"opt_step": 10 + (event.step or 0)}
        if (event.rank, event.attempt, event.kind) == (0, 1, Kind.STEP):
            data |= {"restored_sketch": None}
        return replace(event, data=data)

    run = replace(run, events=tuple(map(behind, run.events)))
    reason = ParameterDigest().judge(run, twins).reason
    assert "of their norm from those that it had after step 15: rank 1 loaded the checkpoint of step 10" in reason
    assert "exactly" not in reason


def test_what_was_loaded_may_be_off_by_a_last_bit(trainer: Any) -> None:
    """An optimizer that swaps its weights for a checkpoint, and back, changes their last bits: nobody is failed for
    that, and nobody is said to have put back the very bits."""
    twins = [trainer(noise=n, sketched=True).record() for n in (1, 2, 3)]
    finding = ParameterDigest().judge(trainer(kills=KILL, noise=4, sketched=True, off=1e-8).record(), twins)
    assert finding.outcome is not Outcome.FAILED, finding.reason
    assert "very bits" not in finding.reason


def test_twins_that_are_far_apart_tell_nothing_of_the_parameters(trainer: Any) -> None:
    """Other seeds: what was put back is known all the same, and what came of it is too noisy to judge."""
    factors = {1: 1.1, 2: 1.2, 3: 1.3}
    twins = [_moved(trainer(noise=n, sketched=True).record(), partial(_same, by), (0,)) for n, by in factors.items()]
    run = _moved(trainer(kills=KILL, noise=4, sketched=True).record(), lambda step: 1.15, (0, 1))
    finding = ParameterDigest().judge(run, twins)
    assert (finding.outcome, "too noisy to judge" in finding.reason) == (Outcome.INCONCLUSIVE, True), finding.reason


def _same(by: float, step: int) -> float:
    return by


def _moved(run: Any, by: Callable[[int], float], attempts: tuple[int, ...] = (1,)) -> Any:
    """The record with other parameters in some attempts: times a factor, by global step."""
    events = []
    for e in run.events:
        if e.kind is Kind.STEP and e.attempt in attempts:
            factor, data = by((15 if e.attempt else 0) + (e.step or 0)), dict(e.data)
            names = ["parameters"] if 0 not in attempts or e.step != 1 else ["parameters", "restored"]
            for name in names if factor != 1.0 else []:
                sketch = "sketch" if name == "parameters" else "restored_sketch"
                data |= {name: f"{factor}{data[name]}", sketch: [factor * one for one in data[sketch]]}
            e = replace(e, data=data)
        events.append(e)
    return replace(run, events=tuple(events))


@pytest.mark.parametrize(("world", "by", "outcome", "words"), [
    (3, lambda step: 1 + 1e-8 * (step > 15), Outcome.PASSED, "equal except for rounding, at most 1e-08, from step 16"),
    (2, lambda step: 1 + 1e-8 * (step > 15), Outcome.FAILED, "differ from the twin's first after step 16"),
    (3, lambda step: 1 + 1e-3 * (step > 15), Outcome.FAILED, "differ from the twin's first after step 16"),
    (3, lambda step: 1 + 1e-3 * (step > 20), Outcome.FAILED, "differ from the twin's first after step 21"),
    (3, lambda step: 1 + 5e-5 * (step > 15), Outcome.INCONCLUSIVE, "by more than rounding alone does at once"),
], ids=["rounding", "two ranks", "at once", "later", "between"])  # fmt: skip
def test_rounding_is_small_beside_an_update(trainer: Any, world: int, by: Any, outcome: Outcome, words: str) -> None:
    """After a restart on three ranks a step may lead away from the twin by a thousandth of its update, and no more."""
    run = _moved(trainer(kills=KILL, world=world, sketched=True).record(), by)
    finding = ParameterDigest().judge(run, [trainer(world=world, sketched=True).record()])
    assert finding.outcome is outcome, finding.reason
    assert words in finding.reason


def test_uneven_ranks_are_not_failed(trainer: Any) -> None:
    """Where ranks make different numbers of steps, as under Join, no difference is laid at the job."""
    twin = trainer().record()
    uneven = replace(twin, events=tuple(
        e for e in twin.events if not (e.kind is Kind.STEP and e.rank == 1 and (e.step or 0) > 25)
    ))  # fmt: skip
    finding = ParameterDigest().judge(trainer(kills=KILL, broken=frozenset({"weights"})).record(), [uneven])
    assert finding.outcome is Outcome.INCONCLUSIVE, finding.reason
    assert "different numbers of steps" in finding.reason


def test_a_fault_before_the_restart_makes_no_rounding(trainer: Any) -> None:
    """Parameters that a fault of the first attempt changed in a last bit were not summed in another order."""
    run = trainer(kills=KILL, world=3, freeze=(10, 1, 0.1), sketched=True).record()
    finding = ParameterDigest().judge(
        _moved(run, lambda step: 1 + 1e-8 * (step > 11), (0, 1)), [trainer(world=3, sketched=True).record()]
    )
    assert finding.outcome is Outcome.FAILED, finding.reason
    assert "first after step 12" in finding.reason


@pytest.mark.parametrize(("by", "attempts", "outcome", "words"), [
    (lambda step: 1 + 1e-3 * (step > 19), (1,), Outcome.FAILED, "after step 20 the parameters are 0.001 of their norm"),
    (lambda step: 1 + 1.5e-7 * (step > 19), (1,), Outcome.INCONCLUSIVE, "a defect, or chance"),
    (lambda step: 1 + 1e-3 * (step == 20), (1,), Outcome.INCONCLUSIVE, "a defect, or chance"),
    (lambda step: 1 + 1e-3 * (step == 3), (0,), Outcome.INCONCLUSIVE, "before any fault, after step 3"),
], ids=["beyond", "between", "one step", "before the fault"])  # fmt: skip
def test_noise_is_judged_by_how_far_the_twins_are_apart(
    trainer: Any, by: Any, attempts: tuple[int, ...], outcome: Outcome, words: str
) -> None:
    """Beyond them is failed, somewhat farther may be chance, and before the fault no run may be so far."""
    twins = [trainer(noise=n, sketched=True).record() for n in (1, 2, 3)]
    run = _moved(trainer(kills=KILL, noise=4, sketched=True).record(), by, attempts)
    finding = ParameterDigest().judge(run, twins)
    assert finding.outcome is outcome, finding.reason
    assert words in finding.reason


@pytest.mark.parametrize(("norm", "words"), [(2.0, "are no longer averaged"), (1.0, "what else differs was not")])
def test_replicas_that_part_after_an_exact_restore(trainer: Any, norm: float, words: str) -> None:
    """Both ranks began with the saved state, and then differ: unequal gradient norms mean that nothing is averaged."""

    def change(event: Event) -> Event:
        rank = event.rank or 0
        return replace(event, data={**event.data, "parameters": f"{rank}" * 16, "norm": norm if rank else 1.0})

    run = trainer(kills=KILL).record()
    events = tuple(change(e) if e.kind is Kind.STEP and e.attempt == 1 else e for e in run.events)
    finding = ParameterDigest().judge(replace(run, events=events), [trainer().record()])
    assert (finding.outcome, words in finding.reason) == (Outcome.FAILED, True), finding.reason


@pytest.mark.parametrize("off", [1e-6, 1e-5])
def test_rounding_is_no_excuse_for_what_was_loaded(trainer: Any, off: float) -> None:
    """On three ranks sums may be rounded in another way after a restart. That does not explain a resume that began with
    other weights than those that were saved."""
    run = trainer(kills=KILL, world=3, sketched=True, off=off).record()
    finding = ParameterDigest().judge(run, [trainer(world=3, sketched=True).record()])
    assert finding.outcome is Outcome.FAILED, finding.reason
    assert "not restored exactly" in finding.reason


def test_weights_that_were_swapped_for_a_save_are_no_other_state(trainer: Any) -> None:
    """Rank 0 puts averaged weights into the model to save them. Its state after the step is seen only then, and that of
    rank 1 when the next step begins: all steps keep their numbers."""
    run = trainer(counters_seen=False, samples_seen=False).record()
    after = {e.rank: e.data["parameters"] for e in run.events if e.kind is Kind.STEP and e.step == 10}
    events = [
        replace(e, data={**e.data, "parameters": "0" * 32}) if (e.kind, e.rank, e.step) == (Kind.STEP, 0, 10)
        else replace(e, data={**e.data, "restored": after[1]}) if (e.kind, e.rank, e.step) == (Kind.STEP, 0, 11)
        else e for e in run.events
    ]  # fmt: skip
    history = replace(run, events=tuple(events)).history
    assert (history.last_step, history.unplaced, len(history.segments)) == (30, (), 1)
