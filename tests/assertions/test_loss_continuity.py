"""loss_continuity: a healthy recovery passes, and each state that was not restored is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from torchaos.assertions.loss_continuity import LossContinuity
from torchaos.assertions.lr_continuity import LrContinuity
from torchaos.assertions.sample_accounting import SampleAccounting
from torchaos.assertions.state_restored import StateRestored
from torchaos.harness.analysis.comparison.agreement import agree, wants_more
from torchaos.harness.analysis.replica_verdict import judged
from torchaos.harness.analysis.tolerance import Tolerances
from torchaos.harness.base_classes import Assertion
from torchaos.harness.interfaces import Outcome
from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.record.record import Record

KILL = [(18, 1)]


def _edit(run: Any, kind: Kind, **data: Any) -> Any:
    """The record with these entries in the payload of each event of the kind."""
    events = [replace(e, data={**e.data, **data}) if e.kind is kind else e for e in run.events]
    return replace(run, events=tuple(events))


def _scale_loss(run: Any, wanted: Any, factor: float) -> Any:
    """The record with the losses of the wanted steps scaled."""
    events = [
        replace(e, data={**e.data, "losses": [loss * factor for loss in e.data["losses"]]})
        if e.kind is Kind.STEP and wanted(e)
        else e
        for e in run.events
    ]
    return replace(run, events=tuple(events))


def test_healthy_recovery_is_bitwise_the_twin(trainer: Any) -> None:
    """A job that restores everything passes, twice over: with one kill and with three."""
    twin = trainer().record()
    assert isinstance(LossContinuity(), Assertion)
    for kills in (KILL, [(18, 1), (16, 0), (23, 1)]):
        finding = LossContinuity().judge(trainer(kills=kills).record(), [twin])
        assert finding.outcome is Outcome.PASSED, finding.reason
        assert "bitwise equal" in finding.reason
        assert finding.measured["largest_difference"] == 0.0


@pytest.mark.parametrize(
    ("broken", "step", "words"),
    [
        (
            "rng",
            16,
            "the RNG state was not restored, and the model draws from it: the states of the RNG torch are those of a "
            "fresh start",
        ),
        ("rng1", 16, "the states of the RNG torch on rank 1 are those of a fresh start"),
        (
            "optimizer",
            17,
            "the optimizer's state was not restored: its own step counter stood at 1 after step 16, and at 16 in",
        ),
        (
            "momentum",
            17,
            "the optimizer's moments were not restored: the moments of weight are missing",
        ),
        ("schedule", 16, "the LR schedule was not restored: its own step counter stood at 0"),
        ("sampler", 16, "the data: ranks 0, 1 were given other samples in step 16"),
        ("weights", 16, "the model's weights were not restored: the parameters weight are those of a fresh start"),
    ],
)
def test_what_was_not_restored_is_named(trainer: Any, broken: str, step: int, words: str) -> None:
    """Each broken trainer fails, at the step where it first shows, with its cause in words."""
    run = trainer(kills=KILL, broken=frozenset({broken}), named=True).record()
    finding = LossContinuity().judge(run, [trainer(named=True).record()])
    assert finding.outcome is Outcome.FAILED
    assert words in finding.reason
    assert finding.measured["step"] == step


def test_nothing_is_said_to_agree_that_was_not_seen(trainer: Any) -> None:
    """A sampler that starts over, with no samples recorded: they stay a possible cause, and are said to be unseen."""
    run = trainer(kills=KILL, broken=frozenset({"sampler"}), samples_seen=False).record()
    reason = LossContinuity().judge(run, [trainer(samples_seen=False).record()]).reason
    assert "optimizer counter and learning rate are equal; samples, weights at the start, buffers, RNG states" in reason
    assert (
        "were not seen; something that was not recorded, such as the samples, acts in the forward or in the loss"
        in reason
    )
    assert "not restored" not in reason


def test_no_counter_and_no_sample_leaves_all_open(trainer: Any) -> None:
    """Of what nobody recorded nothing is said."""
    blind: dict[str, Any] = {"samples_seen": False, "counters_seen": False}
    run = trainer(kills=KILL, broken=frozenset({"momentum"}), **blind).record()
    reason = LossContinuity().judge(run, [trainer(**blind).record()]).reason
    assert "learning rate is equal; samples, " in reason
    assert (
        "optimizer counter were not seen; something that was not recorded acts in the backward or the update" in reason
    )
    assert "momentum" not in reason


def test_what_acts_later_is_no_cause(trainer: Any) -> None:
    """The optimizer's state acts in the update: it cannot have changed the first loss, which the RNG did."""
    run = trainer(kills=KILL, broken=frozenset({"rng", "optimizer"}), named=True).record()
    reason = LossContinuity().judge(run, [trainer(named=True).record()]).reason
    assert "Most likely cause, in the attempt that resumed after step 15: the RNG state was not restored" in reason
    assert "Besides, the optimizer's moments were not restored: the moments of weight are missing; the optim" in reason
    assert "its own step counter stood at 1 after step 16" in reason


def test_a_later_difference_of_the_data_is_no_cause(trainer: Any) -> None:
    """Samples that differ only after the first loss that does are not what changed it."""
    run, twin = trainer(kills=KILL, broken=frozenset({"rng"})).record(), trainer().record()
    events = [
        replace(e, data={**e.data, "samples": ["x"] * 4}) if (e.kind, e.attempt, e.step) == (Kind.STEP, 1, 9) else e
        for e in run.events
    ]
    assert "other samples" not in LossContinuity().judge(replace(run, events=tuple(events)), [twin]).reason


def test_a_schedule_that_changes_no_loss_yet_is_seen_in_the_rate(trainer: Any) -> None:
    """The learning rate is compared too, so a restarted schedule shows one step before the loss."""
    finding = LossContinuity().judge(trainer(kills=KILL, broken=frozenset({"schedule"})).record(), [trainer().record()])
    assert "the learning rate differs first in step 16" in finding.reason


def test_twin_that_differs_before_the_fault_is_no_measure(trainer: Any) -> None:
    """Another seed: the two disagree before anything was injected, and nothing follows from it."""
    finding = LossContinuity().judge(trainer(kills=KILL).record(), [trainer(seed=8).record()])
    assert finding.outcome is Outcome.INCONCLUSIVE
    assert "the twin can't be compared with this run" in finding.reason
    assert finding.measured["step"] == 1


@pytest.mark.parametrize("killed", [(18, 1), (1, 1)])
def test_a_step_that_only_some_ranks_finished_is_no_measure(trainer: Any, killed: tuple[int, int]) -> None:
    """A rank that dies in its optimizer leaves a step that the others finished: it doesn't make the twin invalid."""
    twin, run = trainer().record(), trainer(kills=[killed]).record()
    landed = next(event for event in run.events if event.kind is Kind.APPLYING)
    done = next(e for e in twin.events if e.kind is Kind.STEP and (e.rank, e.step) == (0, killed[0]))
    early = replace(done, mono_s=landed.mono_s - 0.001, seq=len(run.events))
    finding = LossContinuity().judge(replace(run, events=(*run.events, early)), [twin])
    assert finding.outcome is Outcome.PASSED, finding.reason


def test_tolerance_is_learned_from_twins_that_differ(trainer: Any) -> None:
    """A noisy job passes within what its twins differ by, fails when it lost its RNG, and fails beside one twin."""
    twins = [trainer(noise=n).record() for n in (1, 2, 3)]
    loss = Tolerances.learned([twin.history.by_step() for twin in twins]).loss
    assert 0 < loss.largest < 1e-6
    run = trainer(kills=KILL, noise=4).record()
    finding = LossContinuity().judge(run, twins)
    assert finding.outcome is Outcome.PASSED, finding.reason
    assert finding.bound["basis"] == "learned from 3 twins that differ from each other"
    broken = trainer(kills=KILL, noise=5, broken=frozenset({"rng"})).record()
    assert LossContinuity().judge(broken, twins).outcome is Outcome.FAILED
    assert LossContinuity().judge(run, twins[:1]).outcome is Outcome.INCONCLUSIVE
    assert LossContinuity(tolerance=1e-5).judge(run, twins[:1]).outcome is Outcome.PASSED


def test_more_twins_are_wanted_only_while_they_tell_more(trainer: Any) -> None:
    """A run that equals its twin needs no other; one that differs needs a second, and twins that differ a third."""
    twin, healthy = trainer().record(), trainer(kills=KILL).record()
    broken = trainer(kills=KILL, broken=frozenset({"rng"})).record()
    noisy = [trainer(noise=n).record() for n in (1, 2, 3)]
    assert agree(healthy, [twin])
    assert not wants_more(healthy, [twin])
    assert wants_more(broken, [twin])
    assert not wants_more(broken, [twin, trainer().record()])
    assert wants_more(broken, noisy[:2])
    assert not wants_more(broken, noisy)


def test_a_twin_that_is_not_wanted_changes_no_verdict(trainer: Any) -> None:
    """With twins that are not wanted, the outcome stays the same. With one that is wanted, it may change."""
    same = [trainer().record() for _ in range(3)]
    noisy = [trainer(noise=n).record() for n in (1, 2, 3)]
    healthy = trainer(kills=KILL).record()
    broken = trainer(kills=KILL, broken=frozenset({"rng"})).record()
    unsteady = trainer(kills=KILL, noise=4).record()
    found = []
    for run, twins in ((healthy, same), (broken, same), (unsteady, noisy)):
        outcomes = [LossContinuity().judge(run, twins[:many]).outcome for many in (1, 2, 3)]
        enough = next(many for many in (1, 2, 3) if many == 3 or not wants_more(run, twins[:many]))
        assert len(set(outcomes[enough - 1 :])) == 1
        found.append((enough, outcomes[0], outcomes[-1]))
    assert found == [
        (1, Outcome.PASSED, Outcome.PASSED), (2, Outcome.FAILED, Outcome.FAILED),
        (3, Outcome.INCONCLUSIVE, Outcome.PASSED),
    ]  # fmt: skip


def test_without_a_twin_only_redone_steps_are_compared(trainer: Any) -> None:
    """Steps done again are compared with their first execution, and the verdict says what that can't see."""
    healthy = LossContinuity().judge(trainer(kills=KILL).record(), [])
    assert healthy.outcome is Outcome.PASSED
    assert "(16 to 17)" in healthy.reason
    assert "steps that were done only once were compared with nothing" in healthy.reason
    broken = LossContinuity().judge(trainer(kills=KILL, broken=frozenset({"rng"})).record(), [])
    assert broken.outcome is Outcome.FAILED
    assert "RNG" in broken.reason
    assert LossContinuity().judge(trainer(kills=[(16, 1)]).record(), []).outcome is Outcome.INCONCLUSIVE


def test_unseen_losses_are_inconclusive_by_name(trainer: Any) -> None:
    """A backward hook that never fired is named; so is one that failed, and a single loss that is missing."""
    twin = trainer().record()
    blind = trainer(kills=KILL, losses_seen=False).record()
    finding = judged(LossContinuity(), blind, [twin])
    assert (finding.outcome, "the backward hook never fired" in finding.reason) == (Outcome.INCONCLUSIVE, True)
    failure = Event(Kind.AGENT_FAILED, "rank0-a0", 9_999, 0.0, 100.5, 0, 0, None, {"hook": "loss", "error": "boom"})
    failed = judged(LossContinuity(), replace(blind, events=(*blind.events, failure)), [twin])
    assert "the agent's hook loss failed: boom" in failed.reason
    run = trainer(kills=KILL).record()
    holed = [
        replace(e, data={**e.data, "losses": [None]}) if e.step == 3 and e.kind is Kind.STEP else e for e in run.events
    ]
    one = LossContinuity().judge(replace(run, events=tuple(holed)), [twin])
    assert (one.outcome, "the loss of step 3 on rank 0 was not seen" in one.reason) == (Outcome.INCONCLUSIVE, True)
    assert (
        "the twin's losses were not seen" in LossContinuity().judge(run, [trainer(losses_seen=False).record()]).reason
    )


def test_missing_and_extra_steps_fail(trainer: Any) -> None:
    """A history that ends early or late is not the twin's."""
    short = LossContinuity().judge(trainer(kills=KILL, steps=30).record(), [_longer(trainer)])
    assert (short.outcome, short.measured) == (Outcome.FAILED, {"missing": 5})
    long = LossContinuity().judge(_longer(trainer, kills=KILL), [trainer().record()])
    assert (long.outcome, long.measured) == (Outcome.FAILED, {"extra": 5})


def _longer(trainer: Any, **how: Any) -> Any:
    """A job that goes on to step 35 at the pace of the one that ends with 30."""
    run = trainer(steps=30, **how).record()
    last = [e for e in run.events if e.kind is Kind.STEP][-2:]
    more = [
        replace(
            e, step=(e.step or 0) + n, seq=5_000 + n, mono_s=e.mono_s + 0.001 * n, data={**e.data, "opt_step": 30 + n}
        )
        for n in range(1, 6)
        for e in last
    ]  # fmt: skip
    return replace(run, events=tuple(sorted([*run.events, *more], key=lambda e: e.mono_s)))


def test_a_step_that_the_fault_changed_is_not_laid_at_the_restart(trainer: Any) -> None:
    """A loss that differs in an attempt that was never restarted points to the fault itself."""
    run = trainer(freeze=(10, 1, 2.0)).record()
    changed = _scale_loss(run, lambda e: (e.step or 0) >= 12, 1.5)
    finding = LossContinuity().judge(changed, [trainer().record()])
    assert finding.outcome is Outcome.FAILED
    assert (
        "The job had not been restarted by then, and the losses of the 11 steps before agree: most likely"
        in finding.reason
    )
    early = LossContinuity().judge(
        _scale_loss(trainer(freeze=(1, 1, 2.0)).record(), lambda _e: True, 1.5), [trainer().record()]
    )
    assert "or the job is not deterministic" in early.reason


def _went_back(run: Any, to: int, after: int, by_s: float = 100.0) -> Any:
    """The record of a job that, after a step, goes back to a state in memory, in the same attempt."""
    events = [one for one in run.events if one.mono_s <= _end_of(run, after)]
    for one in run.events:
        if one.mono_s > _end_of(run, to):
            local = None if one.step is None else one.step + after - to
            events.append(replace(one, seq=one.seq + 10_000, mono_s=one.mono_s + by_s, step=local))
    return replace(run, events=tuple(events))


def _end_of(run: Any, step: int) -> float:
    return float(max(one.mono_s for one in run.events if one.kind is Kind.STEP and one.step == step))


def test_a_rollback_in_the_process_is_a_resume(trainer: Any) -> None:
    """Losses that differ after the job went back to a state in memory are compared from there: what was seen to differ
    is the cause, and it is not said that the job is not deterministic."""
    run = _went_back(trainer(freeze=(15, 1, 2.0), every=50).record(), to=12, after=16)
    twin = trainer(every=50).record()
    assert LossContinuity().judge(run, [twin]).outcome is Outcome.PASSED
    changed = _scale_loss(run, lambda e: (e.step or 0) > 16, 0.9)
    finding = LossContinuity().judge(changed, [twin])
    assert finding.outcome is Outcome.FAILED
    assert "After the job went back to step 12, samples, optimizer counter and learning rate are" in finding.reason
    assert (
        "something that was not recorded acts in the forward or in the loss, since the first loss differs"
        in finding.reason
    )
    events = [
        replace(e, data={**e.data, "lr": [0.7 * e.data["lr"][0]]}) if e.kind is Kind.STEP and (e.step or 0) > 16 else e
        for e in run.events
    ]
    rates = LrContinuity().judge(replace(run, events=tuple(events)), [twin])
    assert "No shift of the twin's rates explains the rates after the job went back to step 12" in rates.reason


def test_a_lost_loss_scale_is_told(trainer: Any) -> None:
    """Every loss after the resume is the twin's times one power of two; times three it is something else."""
    run, twin = trainer(kills=KILL).record(), trainer().record()
    lost = LossContinuity().judge(_scale_loss(run, lambda e: e.attempt == 1, 0.25), [twin])
    assert (
        "the loss scale (GradScaler) was not restored: every loss of step 16, times its scale, is exactly 0.25 times "
        "the twin's" in lost.reason
    )
    assert lost.reason.startswith("the loss times its scale differs first in step 16")
    other = LossContinuity().judge(_scale_loss(run, lambda e: e.attempt == 1, 3.0), [twin])
    assert "loss scale" not in other.reason


def test_a_counter_lacks_the_steps_that_were_skipped(trainer: Any) -> None:
    """A loss scale that is too high overflows, and its step is skipped: the counter has counted rightly, and is in the
    step of the weights. A counter that lacks more than that was not restored rightly."""

    def judged(fewer: int) -> str:
        def skipping(event: Event) -> Event:
            if event.kind is not Kind.STEP or event.attempt != 1:
                return event
            data = {**event.data, "opt_step": event.data["opt_step"] - fewer, "skipped": event.step == 1}
            return replace(event, data=data)

        run = _scale_loss(trainer(kills=KILL).record(), lambda e: e.attempt == 1, 8.0)
        run = replace(run, events=tuple(map(skipping, run.events)))
        return LossContinuity().judge(run, [trainer().record()]).reason

    assert "the loss scale (GradScaler) was not restored" in judged(1)
    assert "counter" not in judged(1).partition("Most likely")[2]
    assert "the optimizer's own step counter was 2 behind" in judged(2)


def test_a_cut_accumulation_is_told(trainer: Any) -> None:
    """The first step after the resume has one backward, and the twin's has two; the losses after it are others."""

    def twice(run: Any, spared: Any) -> Any:
        return replace(run, events=tuple(
            replace(e, data={**e.data, "losses": e.data["losses"] * 2}) if e.kind is Kind.STEP and not spared(e) else e
            for e in run.events
        ))  # fmt: skip

    run = twice(trainer(kills=KILL).record(), lambda e: (e.attempt, e.step) == (1, 1))
    run = _scale_loss(run, lambda e: e.attempt == 1 and e.step > 1, 1.01)
    twin = twice(trainer().record(), lambda e: False)
    assert "the first step had 1 backward and 2 in the twin" in LossContinuity().judge(run, [twin]).reason
    others = trainer(kills=KILL, broken=frozenset({"sampler"})).record()
    others = twice(others, lambda e: (e.attempt, e.step) == (1, 1))
    reason = LossContinuity().judge(others, [twin]).reason  # the tail of an epoch that had been done, say
    assert ("accumulation" in reason, "given other samples in step 16" in reason) == (False, True), reason


def test_the_samples_of_a_cut_accumulation_follow_from_it(trainer: Any) -> None:
    """The step after the resume has only the last half of its losses and samples: no data is blamed."""

    def edited(run: Any, cut: bool) -> Any:
        def of(data: Any, half: bool) -> Any:
            own = {name: data[name][len(data[name]) // 2 :] for name in ("samples", "indices")} if half else {}
            return {**data, **own, "losses": data["losses"] * (1 if half else 2)}

        events = tuple(
            replace(e, data=of(e.data, cut and (e.attempt, e.step) == (1, 1))) if e.kind is Kind.STEP else e
            for e in run.events
        )
        return replace(run, events=events)

    run = _scale_loss(edited(trainer(kills=KILL).record(), True), lambda e: e.attempt == 1 and e.step > 1, 1.01)
    twin = edited(trainer().record(), False)
    reason = LossContinuity().judge(run, [twin]).reason
    assert "the first step had 1 backward and 2 in the twin" in reason
    assert "the data: " not in reason
    reason = SampleAccounting().judge(run, [twin]).reason
    assert "step 16 consumed the last 4 of its 8 samples in the twin, as if the checkpoint was written in" in reason
    assert reason.endswith("No step has the other 4.")


def test_what_was_put_back_is_not_blamed(trainer: Any) -> None:
    """Losses that go wrong after the first one: the optimizer's moments are not named if they are known to be right."""
    for seen in (False, True):
        run = trainer(kills=KILL, state_seen=seen).record()
        run = _scale_loss(run, lambda e: e.attempt == 1 and e.step > 1, 1.01)
        reason = LossContinuity().judge(run, [trainer(state_seen=seen).record()]).reason
        equal, unseen = reason.partition("In the attempt")[2].split("; ")[:2]
        assert ("optimizer's moments at the start" in equal, "moments" in unseen) == (seen, not seen), reason
        assert "something that was not recorded acts in the backward or the update" in reason
        assert StateRestored().judge(run, []).outcome is (Outcome.PASSED if seen else Outcome.INCONCLUSIVE)


def test_weights_that_the_job_changed_before_it_saved_them_are_not_blamed(trainer: Any) -> None:
    """They are not those after the step, and were put back as they were saved. Weights that were lost are blamed."""

    class Clips(trainer):  # type: ignore[misc]
        def _save(self, attempt: int, world: int, state: Any, step: int, local: int) -> None:
            state.weight *= 0.999
            super()._save(attempt, world, state, step, local)

    twin = Clips(state_seen=True).record()
    for broken, blamed in ((frozenset(), False), (frozenset({"weights"}), True)):
        run = _scale_loss(Clips(kills=KILL, state_seen=True, broken=broken).record(), lambda e: e.attempt == 1, 1.01)
        reason = LossContinuity().judge(run, [twin]).reason
        assert ("the model's weights were not restored" in reason) is blamed, reason


def test_means_are_compared_when_the_world_changed(trainer: Any) -> None:
    """With fewer ranks after the restart, the mean over the ranks must stay near, and a broken one does not."""
    twin = trainer().record()
    shrunk = trainer(kills=KILL, worlds={1: 1}, global_batch=True).record()
    finding = LossContinuity().judge(shrunk, [twin])
    assert finding.outcome is Outcome.PASSED, finding.reason
    assert "the means over the ranks were compared, and are within 0.01 of the twin's" in finding.reason
    lost = trainer(kills=KILL, worlds={1: 1}, global_batch=True, broken=frozenset({"weights"})).record()
    assert LossContinuity().judge(lost, [twin]).outcome is Outcome.FAILED


def test_a_given_tolerance_holds_for_means_too(trainer: Any) -> None:
    """A scenario that allows a thousandth does not pass with a hundredth because the number of ranks has changed: after
    that, only means can show that the weights are others."""
    twin, late = trainer().record(), lambda e: e.attempt == 1
    same = trainer(kills=KILL, worlds={1: 1}).record()  # makes the same mean
    same = replace(same, events=tuple(_with_twins_mean(e, twin) if e.attempt == 1 else e for e in same.events))
    assert LossContinuity(0.001).judge(same, [twin]).outcome is Outcome.PASSED
    off = LossContinuity(0.001).judge(_scale_loss(same, late, 1.005), [twin])
    assert off.outcome is Outcome.FAILED, off.reason
    assert off.reason.startswith("the loss differs first in step 16 on average over the ranks"), off.reason
    assert LossContinuity().judge(_scale_loss(same, late, 1.005), [twin]).outcome is Outcome.PASSED


def _with_twins_mean(event: Event, twin: Record) -> Event:
    """A step after the resume from step 15, with the mean of the twin's losses."""
    if event.kind is not Kind.STEP:
        return event
    losses = [e.data["losses"][0] for e in twin.of_kind(Kind.STEP) if e.step == (event.step or 0) + 15]
    return replace(event, data={**event.data, "losses": [sum(losses) / len(losses)]})


def test_moments_that_act_later_are_told(trainer: Any) -> None:
    """The momentum of an outer optimizer was not restored: the first steps after the resume are the twin's, and their
    moments are not. The inner optimizer's moments, which alone have names, are not said to be equal."""
    twin = trainer(state_seen=True).record()
    run = _scale_loss(trainer(kills=KILL, state_seen=True).record(), lambda e: e.attempt == 1 and e.step > 4, 1.01)

    def with_moments(of: Record, later: str, earlier: str | None) -> Record:
        events = (
            replace(e, data={**e.data, "moments": later if e.attempt else earlier}) if e.kind is Kind.STEP else e
            for e in of.events
        )
        return replace(of, events=tuple(events))

    words = "these moments act later, such as those of an outer optimizer"
    one, other = f"{1:032x}", f"{2:032x}"
    for lost in (True, False):
        ours = with_moments(run, other if lost else one, None)  # with what attempt 0 saved is not known
        reason = LossContinuity().judge(ours, [with_moments(twin, one, one)]).reason
        assert (words in reason) is lost, reason
        assert not (lost and "moments at the start" in reason)


def test_means_that_differ_by_less_than_is_allowed_are_told(trainer: Any) -> None:
    """They may be the beginning of the defect: the first step that is too far off is not the first that differs."""
    twin, late = trainer().record(), lambda e: e.attempt == 1 and (e.step or 0) > 3
    shrunk = trainer(kills=KILL, worlds={1: 1}, global_batch=True).record()
    reason = LossContinuity().judge(_scale_loss(shrunk, late, 1.05), [twin]).reason
    assert "In 3 steps (16 to 18) before, made by other ranks than in the twin, the mean loss is up to 0.00" in reason
    alone = LossContinuity().judge(_scale_loss(trainer(kills=KILL).record(), late, 1.05), [twin])
    assert alone.outcome is Outcome.FAILED
    assert "made by other ranks" not in alone.reason


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_that_exchange_their_samples(trainer: Any, world: int) -> None:
    """The training does not change by it, so it passes, and the reason says it. Weights that are lost are found."""
    twin, healthy = trainer(world=world).record(), trainer(world=world, kills=KILL, rotates=True)
    finding = LossContinuity().judge(healthy.record(), [twin])
    assert finding.outcome is Outcome.PASSED, finding.reason
    assert "in 15 steps (16 to 30) the ranks had each other's samples, and were compared by samples" in finding.reason
    broken = trainer(world=world, kills=KILL, rotates=True, broken=frozenset({"weights"}))
    finding = LossContinuity().judge(broken.record(), [twin])
    assert finding.outcome is Outcome.FAILED
    assert "the data: " not in finding.reason


@pytest.mark.parametrize("parts", [1, 0.5, 0.25])
def test_parts_of_a_batch_on_fewer_ranks(trainer: Any, parts: float) -> None:
    """One rank accumulates what two ranks did. Each of its two losses is that of a part, or the share of the part in
    the loss of the whole; a loss that is neither differs."""
    run = trainer(kills=KILL, worlds={1: 1}, global_batch=True).record()
    events = tuple(
        replace(event, data={**event.data, "losses": [parts * loss for loss in event.data["losses"] * 2]})
        if event.kind is Kind.STEP and event.attempt == 1 else event
        for event in run.events
    )  # fmt: skip
    finding = LossContinuity().judge(replace(run, events=events), [trainer().record()])
    assert finding.outcome is (Outcome.FAILED if parts == 0.25 else Outcome.PASSED), finding.reason


def test_log_lines_alone_can_be_judged(trainer: Any) -> None:
    """Without an agent the printed losses are compared, and the reason says that it is only those."""
    twin = trainer(log_only=1).record()
    finding = LossContinuity().judge(trainer(kills=KILL, log_only=1).record(), [twin])
    assert finding.outcome is Outcome.PASSED, finding.reason
    assert "as far as the job's log shows" in finding.reason
    broken = trainer(kills=KILL, log_only=1, broken=frozenset({"rng"})).record()
    assert LossContinuity().judge(broken, [twin]).outcome is not Outcome.PASSED


def test_nan_equals_nan(trainer: Any) -> None:
    """A job that is NaN like its twin goes on as if nothing had happened; NaN against a number differs."""
    run, twin = trainer(kills=KILL).record(), trainer().record()
    nan = {"losses": [float("nan")]}
    assert (
        LossContinuity().judge(_edit(run, Kind.STEP, **nan), [_edit(twin, Kind.STEP, **nan)]).outcome is Outcome.PASSED
    )
    late = [replace(e, data={**e.data, **nan}) if e.attempt == 1 and e.kind is Kind.STEP else e for e in run.events]
    assert LossContinuity().judge(replace(run, events=tuple(late)), [twin]).outcome is Outcome.FAILED


def test_steps_that_nobody_can_place_are_inconclusive(trainer: Any) -> None:
    """Where no witness knows the base, nothing is judged; a twin's samples may still tell."""
    blind = {"loads_seen": False, "counters_seen": False, "samples_seen": False, "broken": frozenset({"rng"})}
    finding = LossContinuity().judge(trainer(kills=KILL, **blind).record(), [trainer().record()])
    assert (finding.outcome, "it is not known which global steps" in finding.reason) == (Outcome.INCONCLUSIVE, True)
    seen = {"loads_seen": False, "counters_seen": False}
    assert (
        LossContinuity().judge(trainer(kills=[(16, 1)], **seen).record(), [trainer().record()]).outcome
        is Outcome.PASSED
    )


def _off_by(run: Any, by: Callable[[int], float]) -> Any:
    """The record with the losses of each global step after the resume (from step 15) off by a part of themselves."""
    events = [
        replace(e, data={**e.data, "losses": [loss * (1 + by(15 + (e.step or 0))) for loss in e.data["losses"]]})
        if e.kind is Kind.STEP and e.attempt == 1
        else e
        for e in run.events
    ]
    return replace(run, events=tuple(events))


@pytest.mark.parametrize(("world", "by", "outcome", "words"), [
    (4, lambda step: 1e-7, Outcome.PASSED, "equal except for rounding, at most 1e-07, from step 16 on"),
    (2, lambda step: 1e-7, Outcome.FAILED, "differs first in step 16"),
    (4, lambda step: 9e-6, Outcome.PASSED, "equal except for rounding"),
    (4, lambda step: 1e-3, Outcome.FAILED, "differs first in step 16"),
    (4, lambda step: 1e-3 * (step > 17), Outcome.INCONCLUSIVE, "low precision"),
    (4, lambda step: 1e-2 * (step > 17), Outcome.FAILED, "differs first in step 18"),
    (4, lambda step: 1e-8 * 3 ** (step - 15), Outcome.INCONCLUSIVE, "has grown to 0.13"),
], ids=["rounding", "two ranks", "below the bound", "at once", "low precision", "a jump", "grown"])  # fmt: skip
def test_rounding_after_a_restart_of_three_ranks_or_more(
    trainer: Any, world: int, by: Any, outcome: Outcome, words: str
) -> None:
    """What three ranks or more sum in another order passes; what is too large for that is failed, unless it grew out of
    rounding, or may be a lower precision's. Two ranks have only one order."""
    run = _off_by(trainer(world=world, kills=KILL).record(), by)
    finding = LossContinuity().judge(run, [trainer(world=world).record()])
    assert finding.outcome is outcome, finding.reason
    assert words in finding.reason


def test_rounding_excuses_no_learning_rate(trainer: Any) -> None:
    """Losses that differ by rounding hide no schedule that was lost after them."""
    run = _off_by(trainer(world=4, kills=KILL).record(), lambda step: 1e-7)
    events = [
        replace(e, data={**e.data, "lr": [0.07]}) if e.kind is Kind.STEP and e.attempt == 1 and (e.step or 0) > 5 else e
        for e in run.events
    ]
    finding = LossContinuity().judge(replace(run, events=tuple(events)), [trainer(world=4).record()])
    assert (finding.outcome, finding.measured["step"]) == (Outcome.FAILED, 21), finding.reason


def test_nothing_is_rounding_before_the_restart(trainer: Any) -> None:
    """A last bit that a fault of the first attempt changed is no rounding."""
    run = trainer(world=4, freeze=(10, 1, 2.0)).record()
    changed = _scale_loss(run, lambda e: (e.step or 0) >= 12, 1 + 1e-7)
    assert LossContinuity().judge(changed, [trainer(world=4).record()]).outcome is Outcome.FAILED


@pytest.mark.parametrize("blind", ["run", "twin"])
@pytest.mark.parametrize("gone", ["steps", "losses"])
def test_what_a_rank_does_not_tell_is_neither_equal_nor_different(trainer: Any, blind: str, gone: str) -> None:
    """From some step on nothing is seen of rank 1, or not its loss, in the run or in the twin: the rest is no proof."""
    records = {"run": trainer(kills=KILL).record(), "twin": trainer().record()}
    whole = records[blind]
    late = next(e.mono_s for e in reversed(whole.events) if e.kind is Kind.STEP and e.rank == 1) - 0.5
    told = [e for e in whole.events if e.kind is Kind.STEP and e.rank == 1 and e.mono_s >= late]
    less = [replace(e, data={**e.data, "losses": [None]}) for e in told] if gone == "losses" else []
    rest = [e for e in whole.events if e not in told]
    events = tuple(sorted([*rest, *less], key=lambda e: e.mono_s))
    records[blind] = replace(whole, events=events)
    finding = LossContinuity().judge(records["run"], [records["twin"]])
    assert finding.outcome is Outcome.INCONCLUSIVE, finding.reason


def _changed(run: Any, change: Callable[[Event], Any]) -> Any:
    """The record with the losses that `change` makes of a step's event; None: as they were."""
    events = []
    for e in run.events:
        losses = change(e) if e.kind is Kind.STEP else None
        events.append(e if losses is None else replace(e, data={**e.data, "losses": losses}))
    return replace(run, events=tuple(events))


def test_twins_that_are_far_apart_excuse_nothing(trainer: Any) -> None:
    """Weights that are drawn without a seed: each run has other losses, and one that loaded nothing can't pass."""
    twins = [_scale_loss(trainer().record(), lambda e: True, by) for by in (1.0, 1.6, 2.2)]
    run = _scale_loss(trainer(kills=KILL, broken=frozenset({"weights"})).record(), lambda e: True, 1.3)
    finding = LossContinuity().judge(run, twins)
    assert (finding.outcome, "too noisy to judge" in finding.reason) == (Outcome.INCONCLUSIVE, True), finding.reason


def test_noise_after_the_fault_is_no_excuse_before_it(trainer: Any) -> None:
    """Twins that are equal up to step 17 are no measure for a run that differs from them in step 3, or in step 16."""
    twins = [_scale_loss(trainer().record(), lambda e: (e.step or 0) > 17, by) for by in (1.0, 1.001, 1.002)]
    for step in (3, 16):
        early = (0, step)
        run = _scale_loss(trainer(kills=KILL).record(), lambda e, at=early: (e.attempt, e.step) == at, 1.0005)
        finding = LossContinuity().judge(run, twins)
        assert finding.outcome is Outcome.INCONCLUSIVE, finding.reason
        assert "before any fault" in finding.reason


def test_a_nan_in_one_twin_excuses_no_other_step(trainer: Any) -> None:
    """A run that blew up after the resume is failed, whatever one twin had in one step."""
    odd = _changed(trainer().record(), lambda e: [float("nan")] if e.step == 4 else None)
    twins = [trainer().record(), odd, trainer().record()]
    blown = _changed(trainer(kills=KILL).record(), lambda e: [5e6] if e.attempt == 1 else None)
    assert LossContinuity().judge(blown, twins).outcome is Outcome.FAILED
    well = LossContinuity().judge(trainer(kills=KILL).record(), twins)
    assert well.outcome is Outcome.PASSED, well.reason
    assert "except step 4, where the twins differ too much to decide" in well.reason


def test_a_defect_that_is_larger_than_the_noise_is_failed(trainer: Any) -> None:
    """Noise of 1e-7 and losses that are off by 1e-4 after the resume; a spike in one step alone is no proof."""
    twins = [trainer(noise=n).record() for n in (1, 2, 3)]
    run = trainer(kills=KILL, noise=4).record()
    found = LossContinuity().judge(_off_by(run, lambda step: 1e-4), twins)
    assert (found.outcome, found.measured["step"]) == (Outcome.FAILED, 16), found.reason
    assert "more than the twins differ from each other" in found.reason
    spike = LossContinuity().judge(_off_by(run, lambda step: 1e-4 * (step == 20)), twins)
    assert (spike.outcome, "a defect, or chance" in spike.reason) == (Outcome.INCONCLUSIVE, True), spike.reason


def test_noise_of_the_loss_excuses_no_learning_rate(trainer: Any) -> None:
    """Twins with other losses and one schedule: a run with another schedule is failed."""
    twins = [trainer(noise=n).record() for n in (1, 2, 3)]
    run = trainer(kills=KILL, noise=4).record()
    events = [
        replace(e, data={**e.data, "lr": [e.data["lr"][0] * (1 + 1e-7)]}) if e.kind is Kind.STEP and e.attempt else e
        for e in run.events
    ]
    finding = LossContinuity().judge(replace(run, events=tuple(events)), twins)
    assert (finding.outcome, "the learning rate differs" in finding.reason) == (Outcome.FAILED, True), finding.reason


@pytest.mark.parametrize("unseen", [[], [None]], ids=["no backward", "no scalar"])
def test_a_stage_without_a_loss_is_left_out(trainer: Any, unseen: list[None]) -> None:
    """A rank that has no loss in any step, in the run or in the twin, is a stage of a pipeline; the losses of the other
    rank decide."""
    run, twin = (
        _changed(record, lambda e: unseen if e.rank == 0 else None)
        for record in (trainer(kills=KILL).record(), trainer().record())
    )
    finding = LossContinuity().judge(run, [twin])
    assert finding.outcome is Outcome.PASSED, finding.reason
    assert "on 1 rank are bitwise equal" in finding.reason
    assert "rank 0 has none, in the run or in the twin, and was left out" in finding.reason
    lost = _changed(
        trainer(kills=KILL, broken=frozenset({"rng"})).record(), lambda e: unseen if e.rank == 0 else None
    )  # fmt: skip
    assert LossContinuity().judge(lost, [twin]).outcome is Outcome.FAILED
    half = LossContinuity().judge(run, [trainer().record()])
    assert half.outcome is Outcome.INCONCLUSIVE, half.reason


def test_ranks_with_other_numbers_of_steps_are_not_failed(trainer: Any) -> None:
    """Uneven inputs under Join: rank 1 makes fewer steps than rank 0, so a difference says nothing of a defect."""
    twin = trainer().record()
    uneven = replace(twin, events=tuple(
        e for e in twin.events if not (e.kind is Kind.STEP and e.rank == 1 and (e.step or 0) > 25)
    ))  # fmt: skip
    run = trainer(kills=KILL, broken=frozenset({"weights"})).record()
    finding = LossContinuity().judge(run, [uneven])
    assert finding.outcome is Outcome.INCONCLUSIVE, finding.reason
    assert "the ranks make different numbers of steps in the twin too, 30 (rank 0) and 25 (rank 1)" in finding.reason


def test_the_loss_of_one_backward_is_not_told_as_that_of_the_step(trainer: Any) -> None:
    """With gradient accumulation a step has several losses."""

    def twice(record: Any, factor: float) -> Any:
        def losses(event: Event) -> list[float]:
            return [*event.data["losses"], *(loss * factor ** bool(event.attempt) for loss in event.data["losses"])]

        events = [replace(e, data={**e.data, "losses": losses(e)}) if e.kind is Kind.STEP else e for e in record.events]
        return replace(record, events=tuple(events))

    finding = LossContinuity().judge(twice(trainer(kills=KILL).record(), 1.5), [twice(trainer().record(), 1.0)])
    assert finding.reason.startswith("the loss of backward 2 of 2 differs first in step 16 on rank 0: ")


@pytest.mark.parametrize(("by", "tolerance", "passes"), [(1.0, 1e-3, True), (2.0, 1e-3, False), (1.0, None, False)])
def test_a_batch_that_is_divided_into_more_backwards(
    trainer: Any, by: float, tolerance: float | None, passes: bool
) -> None:
    """After a restart, a job may halve its micro-batches: with a tolerance, the sums of the losses are compared. A job
    that then forgets to divide the losses fails, and so does the job without a tolerance."""

    def divided(event: Event) -> Event:
        if event.kind is not Kind.STEP or not event.attempt:
            return event
        half = by * event.data["losses"][0] / 2
        return replace(event, data={**event.data, "losses": [half * (1 + 1e-6), half]})

    run = trainer(kills=[(18, 1)]).record()
    run = replace(run, events=tuple(map(divided, run.events)))
    found = LossContinuity(tolerance=tolerance).judge(run, [trainer().record()])
    assert (found.outcome is Outcome.PASSED) is passes, found.reason
    told = (
        "the same samples had another number of backwards"
        if passes
        else (
            "as if the batch was divided anew: give a tolerance"
            if by == 1.0
            else "why it had another number of backwards"
        )
    )
    assert told in found.reason, found.reason
