"""sample_accounting: over the final history, each sample is consumed exactly as in the twin."""

from __future__ import annotations

import random
import zlib
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest

from torchaos.assertions.sample_accounting import SampleAccounting
from torchaos.harness.analysis.replica_verdict import judged
from torchaos.harness.base_classes import Assertion
from torchaos.harness.interfaces import First, Outcome, What
from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.record.history.step_evidence import SAMPLES
from torchaos.harness.record.record import Record
from torchaos.harness.record.steps.execution import of_payload, sums_of

KILL = [(18, 1)]


def _shift(run: Any, by: int, renamed: str = "d") -> Any:
    """The record in which the second attempt drew samples `by` further on."""

    def moved(e: Any) -> Any:
        indices = [index + by for index in e.data["indices"]]
        return replace(e, data={**e.data, "indices": indices, "samples": [f"{renamed}{index}" for index in indices]})

    return replace(run, events=tuple(moved(e) if e.kind is Kind.STEP and e.attempt == 1 else e for e in run.events))


def _beyond(run: Any, kept: int = 3, attempts: tuple[int, ...] = (0, 1)) -> Any:
    """The record of a job whose samples are more than the bound: after `kept` steps of each attempt there are only
    sums."""

    def summed(e: Any) -> Any:
        if e.kind is not Kind.STEP or e.step <= kept or e.attempt not in attempts:
            return e
        execution = of_payload(e.rank, e.attempt, e.step, e.mono_s, e.data)
        return replace(e, data={**e.data, "samples": None, "indices": None, "sums": list(sums_of(execution))})

    return replace(run, events=tuple(map(summed, run.events)))


@pytest.mark.parametrize("twin_too", [True, False])
def test_beyond_the_bound_sums_are_compared(trainer: Any, twin_too: bool) -> None:
    """A healthy recovery passes, also if only one of the two runs is beyond the bound, and the reason says what was
    compared."""
    twin = trainer().record()
    finding = SampleAccounting().judge(_beyond(trainer(kills=KILL).record()), [_beyond(twin) if twin_too else twin])
    assert finding.outcome is Outcome.PASSED, finding.reason
    assert finding.measured["samples"] == 240
    assert "only the sum of the samples was kept" in finding.reason


@pytest.mark.parametrize("kept", [0, 3])
def test_data_that_starts_over_fails_beyond_the_bound(trainer: Any, kept: int) -> None:
    """A sampler that restarts is found by the sums alone. How much was repeated in all is not claimed."""
    run = trainer(kills=KILL, broken=frozenset({"sampler"})).record()
    seen = _beyond(run, 1, (0,)) if kept else _beyond(run, 1)
    finding = SampleAccounting().judge(_beyond(seen, kept or 1, (1,)), [_beyond(trainer().record(), 1)])
    assert finding.outcome is Outcome.FAILED, finding.reason
    assert "step 16 consumed the samples of step 1." in finding.reason
    assert finding.measured == {"step": 16}


def test_other_samples_deep_beyond_the_bound_fail(trainer: Any) -> None:
    """Samples that go wrong only in steps of which nothing but sums was kept are found in the first such step."""
    run = _beyond(trainer(kills=KILL).record())

    def off(e: Any) -> Any:
        if e.kind is Kind.STEP and e.attempt == 1 and e.step == 5 and e.rank == 0:
            return replace(e, data={**e.data, "sums": [e.data["sums"][0], e.data["sums"][1] ^ 1, *e.data["sums"][2:]]})
        return e

    finding = SampleAccounting().judge(replace(run, events=tuple(map(off, run.events))), [_beyond(trainer().record())])
    assert finding.outcome is Outcome.FAILED
    assert "step 20 consumed other samples than in the twin: their sums differ" in finding.reason


def test_a_sampler_that_restarted_without_a_twin_is_not_passed_beyond_the_bound(trainer: Any) -> None:
    """Without a twin, samples that come twice in one epoch show only if each is known: nothing is claimed. Steps done
    again are compared by their sums."""
    for broken in (frozenset(), frozenset({"sampler"})):
        run = trainer(kills=[(16, 1)], broken=broken).record()
        finding = SampleAccounting().judge(_beyond(run), [])
        assert finding.outcome is Outcome.INCONCLUSIVE, finding.reason
        assert "can't be seen" in finding.reason
    again = SampleAccounting().judge(_beyond(trainer(kills=KILL, broken=frozenset({"sampler"})).record()), [])
    assert again.outcome is Outcome.FAILED
    assert "step 16, done again by attempt 1, consumed other samples" in again.reason


def test_the_base_is_found_by_sums(trainer: Any) -> None:
    """Samples beyond the bound are still a witness of the step from which an attempt went on."""
    run = _beyond(trainer(kills=KILL, loads_seen=False, counters_seen=False, losses_seen=False).record(), kept=0)
    (witness,) = [one for one in run.history.attempts[1].witnesses if one.name == SAMPLES]
    assert witness.value == 15


def test_healthy_recovery_consumes_each_sample_once(trainer: Any) -> None:
    """What was drawn twice and counts once is neither skipped nor repeated."""
    assert isinstance(SampleAccounting(), Assertion)
    finding = SampleAccounting().judge(trainer(kills=KILL).record(), [trainer().record()])
    assert finding.outcome is Outcome.PASSED, finding.reason
    assert finding.measured == {"samples": 240, "skipped": 0, "repeated": 0}


def test_a_sampler_that_restarted_is_named(trainer: Any) -> None:
    """Samples of the first step come again right after the resume: the sampler restarted."""
    run = trainer(kills=KILL, broken=frozenset({"sampler"})).record()
    finding = SampleAccounting().judge(run, [trainer().record()])
    assert finding.outcome is Outcome.FAILED
    assert "samples 0-7 were consumed twice, in steps 1 and 16" in finding.reason
    assert "the data starts over: most likely the sampler restarted, or the RNG that draws" in finding.reason
    assert (finding.measured["step"], finding.measured["skipped"], finding.measured["repeated"]) == (16, 120, 120)


def test_batches_that_were_taken_and_not_trained_on_are_not_blamed(trainer: Any) -> None:
    """A job takes a whole epoch from its loader, and after a resume leaves out the batches that it had trained on: the
    loader hands out the first again. Its losses and parameters are the twin's bit for bit. If they are not, or were not
    seen, its data was rewound."""

    def rewound(run: Record) -> Record:
        return _changed(run, lambda e: (e.attempt, e.step) == (1, 1), {"samples": ["d0"] * 5, "indices": [0] * 5})

    def _changed(run: Record, wanted: Any, data: dict[str, Any]) -> Record:
        events = (replace(e, data={**e.data, **data}) if e.kind is Kind.STEP and wanted(e) else e for e in run.events)
        return replace(run, events=tuple(events))

    twin = trainer(state_seen=True).record()
    run = rewound(trainer(kills=[(18, 1)], state_seen=True).record())
    finding = SampleAccounting().judge(run, [twin])
    assert finding.outcome is Outcome.PASSED, finding.reason
    assert "in step 16 the data loader handed out other batches than in the twin" in finding.reason
    assert finding.measured["not_compared"] == 1
    unseen = _changed(run, lambda e: (e.attempt, e.step) == (1, 1), {"samples": None, "indices": None})
    assert SampleAccounting().judge(unseen, [twin]).outcome is Outcome.INCONCLUSIVE  # other batches were not seen
    for change in ({"losses": [1.25]}, {"parameters": None}):
        blamed = _changed(run, lambda e: (e.attempt, e.step) == (1, 1), change)
        assert SampleAccounting().judge(blamed, [twin]).outcome is Outcome.FAILED


def test_samples_that_were_skipped_are_named(trainer: Any) -> None:
    """A loader that had run ahead of training: the samples in between are gone. The last steps consume samples that
    the twin does not reach, none of them twice."""
    finding = SampleAccounting().judge(_shift(trainer(kills=KILL).record(), 16), [trainer().record()])
    assert finding.outcome is Outcome.FAILED
    assert (
        "samples 120-135 were skipped after the resume from step 15: step 16 consumed the samples of step 18"
        in finding.reason
    )
    assert finding.reason.endswith("In all, 16 samples were skipped, and 16 consumed that the twin never consumed.")
    assert finding.measured["repeated"] == 0


def test_data_that_was_rewound_or_drawn_anew_is_told_apart(trainer: Any) -> None:
    """A batch of the attempt before comes again; or samples come that the twin never had."""
    rewound = SampleAccounting().judge(_shift(trainer(kills=KILL).record(), -8), [trainer().record()])
    assert "samples 112-119 were consumed twice, in steps 15 and 16" in rewound.reason
    assert "the data was rewound" in rewound.reason
    other = SampleAccounting().judge(_shift(trainer(kills=KILL).record(), 10_000), [trainer().record()])
    assert "the twin never consumed them" in other.reason


def test_new_samples_that_are_used_as_often_as_others_are_not_repeated(trainer: Any) -> None:
    """A job that uses each sample twice, as PPO does, used other samples after the resume: twice, too."""

    def twice(run: Any) -> Any:
        def doubled(e: Any) -> Any:
            more = {name: [one for one in e.data[name] for _ in (1, 2)] for name in ("samples", "indices")}
            return replace(e, data={**e.data, **more})

        return replace(run, events=tuple(doubled(e) if e.kind is Kind.STEP else e for e in run.events))

    run, twin = twice(_shift(trainer(kills=KILL).record(), 10_000)), twice(trainer().record())
    finding = SampleAccounting().judge(run, [twin])
    assert (finding.measured["skipped"], finding.measured["repeated"]) == (240, 0)
    assert "In all, 240 samples were skipped, and 240 consumed that the twin never consumed" in finding.reason


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([8, 9, 64, 65], "samples 8-9, 64-65 in step 16 are not those of the twin on rank 1 alone, after the resume "
         "from step 15: other samples were drawn, which the twin consumed in other steps"),
        ([8, 64, 9000, 9001], "the twin never consumed 2 of them"),
    ],
)  # fmt: skip
def test_only_samples_that_are_wrong_are_counted(trainer: Any, given: list[int], says: str) -> None:
    """A rank that draws from another rank's buffer gets samples of several steps. The other rank's are right."""
    finding = SampleAccounting().judge(_drawn(trainer, {(1, 1): given}), [trainer().record()])
    assert says in finding.reason


@pytest.mark.parametrize("indexed", [True, False])
def test_another_order_is_told_from_another_selection(trainer: Any, indexed: bool) -> None:
    """It is another order only if the next steps have, in all, the samples that the twin has there. Then none of them
    is said to have been skipped, or consumed twice, or to be of a later step."""
    twin = trainer().record()
    due = {(rank, step): list(twin.history.by_step()[15 + step][rank].indices) for rank in (0, 1) for step in (1, 2, 3)}
    pool = sorted((sample for of in due.values() for sample in of), key=lambda sample: (sample * 7) % 24)
    orders = (
        ("steps 16 to 18", {place: pool[at * 4 : at * 4 + 4] for at, place in enumerate(due)}),
        ("steps 16 to 17", {(1, 1): due[1, 1][:3] + due[1, 2][:1], (1, 2): due[1, 1][3:] + due[1, 2][1:]}),
    )
    for steps, given in orders:
        finding = SampleAccounting().judge(_drawn(trainer, given, indexed), [_drawn(trainer, {}, indexed, twin)])
        assert finding.outcome is Outcome.FAILED
        assert f"{steps} consumed the samples that they consumed in the twin, in another order, " in finding.reason
        assert "skipped" not in finding.reason
        assert "twice" not in finding.reason
        assert finding.reason.endswith("In the end each sample was consumed as often as in the twin.")
    one_is_another = {**orders[0][1], (1, 3): [*orders[0][1][1, 3][:3], 9000]}
    finding = SampleAccounting().judge(_drawn(trainer, one_is_another, indexed), [_drawn(trainer, {}, indexed, twin)])
    assert "order" not in finding.reason
    assert "other samples were drawn, which the twin consumed in other steps" in finding.reason
    assert indexed or " of 8 samples in step 16 are not those of the twin" in finding.reason


def _drawn(trainer: Any, given: dict[tuple[int, int], list[int]], indexed: bool = True, of: Any = None) -> Any:
    """The record `of` a run, or that of one that was killed, in which attempt 1 drew other samples, by rank and step of
    the attempt."""
    run = of or trainer(kills=KILL).record()

    def moved(e: Any) -> Any:
        if e.kind is not Kind.STEP:
            return e
        own = given.get((e.rank, e.step), e.data["indices"]) if e.attempt == 1 else e.data["indices"]
        return replace(e, data={**e.data, "samples": [f"d{at}" for at in own], "indices": own if indexed else []})

    return replace(run, events=tuple(map(moved, run.events)))


def test_the_right_indices_with_other_contents_point_to_augmentation(trainer: Any) -> None:
    """The index is right and the digest isn't: what is drawn for the sample came from another RNG."""
    finding = SampleAccounting().judge(_shift(trainer(kills=KILL).record(), 0, "x"), [trainer().record()])
    assert (finding.outcome, "augmentation" in finding.reason) == (Outcome.FAILED, True)


@pytest.mark.parametrize("kept", [True, False])
def test_another_world_size(trainer: Any, kept: bool) -> None:
    """Fewer ranks that share the same global batch pass; a global batch that shrank with them fails, and is named."""
    run = trainer(kills=KILL, worlds={1: 1}, global_batch=kept).record()
    finding = SampleAccounting().judge(run, [trainer().record()])
    assert finding.outcome is (Outcome.PASSED if kept else Outcome.FAILED), finding.reason
    assert ("the global batch changed" in finding.reason) is not kept


def test_without_a_twin_redone_steps_and_repeats_are_seen(trainer: Any) -> None:
    """Steps done again are compared with their first execution; a replay that no step shows is seen by its indices."""
    healthy = SampleAccounting().judge(trainer(kills=KILL).record(), [])
    assert (healthy.outcome, "can't be found" in healthy.reason) == (Outcome.PASSED, True)
    broken = SampleAccounting().judge(trainer(kills=KILL, broken=frozenset({"sampler"})).record(), [])
    assert (broken.outcome, "samples 0-7 were consumed twice" in broken.reason) == (Outcome.FAILED, True)
    assert broken.first == First(What.SAMPLES, 16)
    replay = SampleAccounting().judge(trainer(kills=[(11, 1)], broken=frozenset({"sampler"})).record(), [])
    assert (replay.outcome, "twice in one epoch" in replay.reason) == (Outcome.FAILED, True)
    assert replay.first == First(What.SAMPLES, 11)
    assert SampleAccounting().judge(trainer(kills=[(16, 1)]).record(), []).outcome is Outcome.INCONCLUSIVE


def test_a_job_that_draws_with_replacement_repeats_no_epoch(trainer: Any) -> None:
    """What came twice before any fault may come twice after it: nothing is made of it."""
    run = trainer(kills=[(11, 1)], broken=frozenset({"sampler"})).record()
    again = [
        replace(e, data={**e.data, "indices": [0, 1, 2, 3]}) if e.kind is Kind.STEP and e.step == 3 else e
        for e in run.events
    ]
    finding = SampleAccounting().judge(replace(run, events=tuple(again)), [])
    assert finding.outcome is Outcome.INCONCLUSIVE, finding.reason


def test_epochs_that_leave_out_a_rest_are_no_replay(trainer: Any) -> None:
    """A shuffled loader with drop_last leaves out other samples in each epoch: some come first in a late epoch, after a
    batch all of which had come before. That is no replay, and without a twin too none is told of."""

    def moved(e: Any, base: int) -> Any:
        step = e.step + base * e.attempt
        epoch, batch = divmod(step - 1, 7)  # 60 samples, 7 batches of 8
        order = random.Random(epoch).sample(range(60), 60)[8 * batch :][:8]
        indices = order[4 * e.rank : 4 * e.rank + 4]
        return replace(e, data={**e.data, "indices": indices, "samples": [f"d{index}" for index in indices]})

    for kill, base in ((8, 5), (18, 15)):
        run = trainer(kills=[(kill, 1)]).record()
        events = tuple(moved(e, base) if e.kind is Kind.STEP else e for e in run.events)
        finding = SampleAccounting().judge(replace(run, events=events), [])
        assert finding.outcome is Outcome.PASSED, finding.reason


def test_unseen_samples_are_inconclusive_by_name(trainer: Any) -> None:
    """Nothing seen in the run, in the twin, or in one step: inconclusive, and it says which."""
    run, twin, blind = trainer(kills=KILL).record(), trainer().record(), trainer(samples_seen=False).record()
    assert "no sample was seen: the model got no input" in judged(SampleAccounting(), blind, [twin]).reason
    assert "the twin's samples were not seen" in SampleAccounting().judge(run, [blind]).reason
    holed = [
        replace(e, data={**e.data, "samples": [None]}) if e.step == 3 and e.kind is Kind.STEP else e for e in run.events
    ]
    finding = SampleAccounting().judge(replace(run, events=tuple(holed)), [twin])
    assert (finding.outcome, "step 3" in finding.reason) == (Outcome.INCONCLUSIVE, True)


def test_a_twin_with_other_samples_before_the_fault_is_no_measure(trainer: Any) -> None:
    """Two runs of a job without a seed differ from the start."""
    twin = trainer(kills=[(1, 0)]).record()
    other = _shift(twin, 8)
    finding = SampleAccounting().judge(trainer(kills=KILL).record(), [other])
    assert (finding.outcome, "can't be compared" in finding.reason) == (Outcome.INCONCLUSIVE, True)


def test_steps_that_never_took_place_skip_their_samples(trainer: Any) -> None:
    """A job that ends early never consumed the rest."""
    run = trainer(kills=KILL).record()
    cut = replace(run, events=tuple(e for e in run.events if not (e.attempt == 1 and (e.step or 0) > 10)))
    finding = SampleAccounting().judge(cut, [trainer().record()])
    assert finding.outcome is Outcome.FAILED
    assert finding.reason.endswith("5 steps (26 to 30) consumed 40 samples in the twin, and never took place")
    assert finding.measured["skipped"] == 40


@pytest.mark.parametrize("blind", ["run", "twin"])
def test_a_rank_that_tells_nothing_any_more_fails_nobody(trainer: Any, blind: str) -> None:
    """The agent of rank 1 stepped aside in step 20: what the others consumed is not all, and is no smaller batch."""
    records = {"run": trainer(kills=KILL).record(), "twin": trainer().record()}
    whole = records[blind]
    late = next(e.mono_s for e in reversed(whole.events) if e.kind is Kind.STEP and e.rank == 1) - 0.5
    seen = [e for e in whole.events if e.kind is not Kind.STEP or e.rank != 1 or e.mono_s < late]
    records[blind] = replace(whole, events=tuple(seen))
    finding = SampleAccounting().judge(records["run"], [records["twin"]])
    assert finding.outcome is Outcome.INCONCLUSIVE, finding.reason


def test_samples_whose_contents_are_drawn_anew_are_told_by_index(trainer: Any) -> None:
    """Augmented data is never the same twice, so that digests know no earlier step: the indices do."""
    run, twin = trainer(kills=KILL).record(), trainer().record()
    again = SampleAccounting().judge(_shift(run, -120, renamed="a"), [twin])
    assert (again.outcome, "in steps 1 and 16" in again.reason) == (Outcome.FAILED, True)
    assert again.measured["repeated"] == 120
    ahead = SampleAccounting().judge(_shift(run, 8, renamed="a"), [twin])
    assert (
        "samples 120-127 were skipped after the resume from step 15: step 16 consumed the samples of step 17"
        in ahead.reason
    )


def test_a_rank_that_is_ahead_by_a_part_of_a_batch_is_named(trainer: Any) -> None:
    """Rank 1 alone leaves two samples out: which, and from where those come that it was given."""
    run = trainer(kills=KILL).record()

    def moved(e: Any) -> Any:
        indices = [index + (2 if index % 8 < 6 else 6) for index in e.data["indices"]]
        return replace(e, data={**e.data, "indices": indices, "samples": [f"d{index}" for index in indices]})

    late = [e.kind is Kind.STEP and (e.attempt, e.rank) == (1, 1) for e in run.events]
    events = tuple(moved(e) if wanted else e for e, wanted in zip(run.events, late, strict=True))
    finding = SampleAccounting().judge(replace(run, events=events), [trainer().record()])
    assert finding.outcome is Outcome.FAILED
    assert "samples 124-125 were skipped on rank 1 alone, after the resume from step 15" in finding.reason
    assert "samples 132-133 of step 17 came in step 16" in finding.reason


def _each(run: Any, change: Any) -> Any:
    """The record with other data in each step: `change` gets the event and its global step."""

    def changed(e: Any) -> Any:
        step = (e.step or 0) + (15 if e.attempt else 0)
        return replace(e, data={**e.data, **change(e, step)}) if e.kind is Kind.STEP else e

    return replace(run, events=tuple(changed(e) for e in run.events))


def test_samples_that_nobody_digested_are_told_apart_by_index(trainer: Any) -> None:
    """Where the digests are of something that all batches hold, their indices show that the sampler restarted."""

    def masked(run: Any) -> Any:
        return _each(run, lambda e, step: {"samples": ["mask"] * 5})

    twin = masked(trainer().record())
    healthy = SampleAccounting().judge(masked(trainer(kills=KILL).record()), [twin])
    assert (healthy.outcome, healthy.measured["samples"]) == (Outcome.PASSED, 240), healthy.reason
    finding = SampleAccounting().judge(masked(trainer(kills=KILL, broken=frozenset({"sampler"})).record()), [twin])
    assert finding.outcome is Outcome.FAILED
    assert "samples 0-7 were consumed twice, in steps 1 and 16" in finding.reason
    assert "the data starts over: most likely the sampler restarted, or the RNG that draws" in finding.reason


def test_no_sampler_is_blamed_that_nobody_saw(trainer: Any) -> None:
    """Without indices there may be no sampler at all: only that the data began again is said."""
    runs = [trainer(kills=KILL, broken=frozenset({"sampler"})).record(), trainer().record()]
    run, twin = (_each(one, lambda e, step: {"indices": None}) for one in runs)
    reason = SampleAccounting().judge(run, [twin]).reason
    assert reason.count("the data starts over") == 1
    assert "sampler" not in reason


def test_what_comes_later_is_not_skipped(trainer: Any) -> None:
    """Every epoch has the same order, and the job goes on for longer: what it left out after the resume came later, so
    that nothing is called skipped in one sentence, and none in the next."""

    def in_epochs(run: Any, ahead: int) -> Any:
        def one(e: Any, step: int) -> dict[str, Any]:
            indices = [(index + (ahead if e.attempt else 0)) % 64 for index in e.data["indices"]]
            return {"indices": indices, "samples": [f"d{index}" for index in indices]}

        return _each(run, one)

    run = in_epochs(trainer(kills=KILL, steps=37).record(), 24)
    finding = SampleAccounting().judge(run, [in_epochs(trainer().record(), 0)])
    assert finding.outcome is Outcome.FAILED
    assert "came later than they were due, after the resume from step 15: step 16 consumed the samples of step 19" in (
        finding.reason
    )
    assert finding.reason.endswith("In all, none was skipped and 56 samples were consumed too often.")
    assert (finding.measured["skipped"], finding.measured["repeated"]) == (0, 56)


def test_ranks_that_make_unequal_numbers_of_steps_share_none(trainer: Any) -> None:
    """Under DDP's Join a rank with fewer batches is at another sample in the same step: what was due is not known."""
    whole = trainer().record()
    ends = [e for e in whole.events if not (e.kind is Kind.STEP and e.rank == 1 and (e.step or 0) > 20)]
    twin = replace(whole, events=tuple(ends))
    finding = SampleAccounting().judge(_shift(trainer(kills=KILL).record(), 16), [twin])
    assert finding.outcome is Outcome.INCONCLUSIVE, finding.reason
    assert "rank 0 made 30 steps and rank 1 made 20" in finding.reason


def test_steps_without_indices_hide_none_of_the_others(trainer: Any) -> None:
    """A generator is fed with noise in each second step, and the critic with samples: theirs are named by index."""

    def fed(run: Any, renamed: str) -> Any:
        def one(e: Any, step: int) -> dict[str, Any]:
            if step % 2:
                return {"indices": None, "samples": [f"noise{step}-{e.rank}"]}
            return {"samples": [f"{renamed if e.attempt else 'd'}{index}" for index in e.data["indices"]]}

        return _each(run, one)

    run = fed(trainer(kills=KILL, broken=frozenset({"sampler"})).record(), "a")
    finding = SampleAccounting().judge(run, [fed(trainer().record(), "d")])
    assert finding.outcome is Outcome.FAILED
    assert "samples 0-7 in step 16" in finding.reason


@pytest.mark.parametrize(("all_alike", "outcome"), [(False, Outcome.PASSED), (True, Outcome.FAILED)])
def test_indices_that_count_from_another_sample(trainer: Any, all_alike: bool, outcome: Outcome) -> None:
    """A resume takes a Subset of what is left of an epoch, and the indices of its packed batches begin at 0 again. The
    contents show that they are the twin's samples, unless all steps have the same contents."""

    def packed(run: Any, subset: bool) -> Any:
        def moved(e: Any) -> Any:
            samples = [f"{0 if all_alike else index}{part}" for index in e.data["indices"] for part in "ab"]
            by = 150 if subset and e.attempt else 0
            return replace(e, data={**e.data, "samples": samples, "indices": [i - by for i in e.data["indices"]]})

        return replace(run, events=tuple(moved(e) if e.kind is Kind.STEP else e for e in run.events))

    run, twin = packed(trainer(kills=KILL).record(), True), packed(trainer().record(), False)
    finding = SampleAccounting().judge(run, [twin])
    assert finding.outcome is outcome, finding.reason


def test_single_samples_may_have_other_indices(trainer: Any) -> None:
    """With a digest for each sample, the digests decide, in whatever order a batch has them: after a resume the indices
    may count from another sample."""
    run = trainer(kills=KILL).record()
    events = []
    for event in run.events:
        if event.kind is Kind.STEP and event.attempt:
            indices = [index - 150 for index in event.data["indices"]]
            event = replace(
                event, data={**event.data, "samples": event.data["samples"][::-1], "indices": indices[::-1]}
            )
        events.append(event)
    finding = SampleAccounting().judge(replace(run, events=tuple(events)), [trainer().record()])
    assert finding.outcome is Outcome.PASSED, finding.reason


def test_indices_that_begin_again_do_not_name_other_samples(trainer: Any) -> None:
    """After a resume, the dataset is what is left of the epoch less two batches, and its indices begin at 0: two
    batches were skipped. No sample is said to be consumed twice, and no random numbers are blamed."""
    run = _shift(trainer(kills=KILL).record(), 16)
    late = _each(run, lambda e, step: {"indices": [i - 136 for i in e.data["indices"]]} if e.attempt else {})
    finding = SampleAccounting().judge(late, [trainer().record()])
    assert finding.outcome is Outcome.FAILED
    assert "16 samples were skipped after the resume from step 15: step 16 consumed the samples of step 18" in (
        finding.reason
    )
    assert "twice" not in finding.reason
    assert "RNG" not in finding.reason


def test_without_a_twin_indices_that_begin_again_are_no_replay(trainer: Any) -> None:
    """A job resumes with the rest of the epoch as a dataset of its own: its indices are those of earlier steps and its
    contents are new. That is no proof that samples were consumed twice."""
    run = trainer(kills=[(11, 1)]).record()
    late = _each(run, lambda e, step: {"indices": [i - 80 for i in e.data["indices"]]} if e.attempt else {})
    finding = SampleAccounting().judge(late, [])
    assert finding.outcome is Outcome.INCONCLUSIVE, finding.reason


@pytest.mark.parametrize(("has_losses", "outcome"), [(False, Outcome.PASSED), (True, Outcome.INCONCLUSIVE)])
def test_a_middle_stage_of_a_pipeline_is_left_out(trainer: Any, has_losses: bool, outcome: Outcome) -> None:
    """A rank without samples is left out if it has no loss either; a rank with a loss computes it from samples that
    nobody saw. The samples of the other rank decide."""

    def staged(run: Any) -> Any:
        blind: dict[str, Any] = {"samples": None, "indices": None} | ({} if has_losses else {"losses": []})
        return _each(run, lambda e, step: blind if e.rank == 1 else {})

    twin = staged(trainer().record())
    healthy = SampleAccounting().judge(staged(trainer(kills=KILL).record()), [twin])
    assert healthy.outcome is outcome, healthy.reason
    assert ("rank 1 has no samples and no loss" in healthy.reason) is not has_losses
    broken = SampleAccounting().judge(staged(trainer(kills=KILL, broken=frozenset({"sampler"})).record()), [twin])
    assert broken.outcome is (Outcome.INCONCLUSIVE if has_losses else Outcome.FAILED), broken.reason


def _computed(run: Any, off: float = 0.0, after: int = 16) -> Any:
    """The record of a job that computes its samples from its parameters: they have no indices, and their digests are
    exact. `off`: by which part of itself each loss of attempt 1 is off in the steps after this global step, and with
    it the samples."""
    base = 15

    def changed(event: Event) -> Event:
        late = event.attempt == 1 and base + (event.step or 0) > after
        losses = [loss * (1 + off if late else 1.0) for loss in event.data["losses"]]
        samples = [f"{losses[0]!r}/{event.rank}/{row}" for row in range(3)]  # and one that rounding left as it was
        samples.append(f"{(base if event.attempt else 0) + (event.step or 0)}/{event.rank}")
        return replace(event, data={**event.data, "losses": losses, "samples": samples, "indices": None})

    events = (changed(event) if event.kind is Kind.STEP else event for event in run.events)
    return replace(run, events=tuple(events))


def _as_buffer(run: Any, by: int = 0) -> Any:
    """The record of a job that trains on a buffer of what it computed, by a data loader. `by`: the indices of the steps
    after step 16 in attempt 1 are so many further on."""
    first = {(e.attempt, e.rank, e.step): 100 * (15 * (e.attempt or 0) + (e.step or 0)) for e in run.events}
    events = (
        replace(e, data={**e.data, "phases": {"data": 0.01}, "indices": [
            first[e.attempt, e.rank, e.step] + 4 * (e.rank or 0) + row + by * (e.attempt == 1 and (e.step or 0) > 1)
            for row in range(4)
        ]}) if e.kind is Kind.STEP else e for e in run.events
    )  # fmt: skip
    return replace(run, events=tuple(events))


def _with_loader(run: Any) -> Any:
    """The record with a data loader that gives the batches."""
    events = (replace(e, data={**e.data, "phases": {"data": 0.01}}) if e.kind is Kind.STEP else e for e in run.events)
    return replace(run, events=tuple(events))


@pytest.mark.parametrize(
    ("world", "off", "after", "outcome"), [
        (3, 1e-7, 16, Outcome.PASSED), (3, 0.0, 16, Outcome.PASSED), (2, 0.0, 16, Outcome.PASSED),
        (3, 1e-7, 15, Outcome.FAILED),  # in the first step they come from what was restored
        (2, 1e-7, 16, Outcome.FAILED),  # two ranks have one order of summation
        (3, 1e-4, 16, Outcome.INCONCLUSIVE),  # the losses may be rounding that has grown
        (3, 0.5, 16, Outcome.FAILED),
    ],
)  # fmt: skip
def test_samples_that_the_job_computes(trainer: Any, world: int, off: float, after: int, outcome: Outcome) -> None:
    """Parameters that differ by rounding make inputs that differ by rounding: exact digests of such samples are no
    evidence that data was skipped, while the losses agree."""
    twin = _computed(trainer(world=world).record())
    run = _computed(trainer(world=world, kills=[(18, 1)]).record(), off, after)
    finding = SampleAccounting().judge(run, [twin])
    assert finding.outcome is outcome, finding.reason
    if outcome is Outcome.PASSED and off:
        assert "the samples of 16 steps were consumed exactly as in the twin" in finding.reason
        assert "The samples of 14 steps (17 to 30) have no indices and come from no data loader" in finding.reason
        assert (finding.measured["not_compared"], finding.measured["skipped"]) == (14, 0)
    if outcome is Outcome.FAILED:
        computed = after == 16
        assert finding.first == First(What.COMPUTED if computed else What.SAMPLES, after + 1)
        assert ("trained on other samples than in the twin" in finding.reason) == computed


def test_samples_of_a_data_set_are_not_computed(trainer: Any) -> None:
    """Batches that a data loader gave, samples with an index, and samples that the twin used in another step are those
    of a data set, however well the losses agree."""
    twin, run = (trainer(world=3, kills=kills).record() for kills in ((), [(18, 1)]))
    same, off = _computed(twin), _computed(run, 1e-7)
    finding = SampleAccounting().judge(_with_loader(off), [_with_loader(same)])
    assert (finding.outcome, finding.first) == (Outcome.FAILED, First(What.SAMPLES, 17)), finding.reason
    named = replace(off, events=tuple(
        replace(e, data={**e.data, "indices": [1, 2, 3, 4]}) if e.kind is Kind.STEP else e for e in off.events
    ))  # fmt: skip
    assert SampleAccounting().judge(named, [same]).outcome is Outcome.FAILED
    buffered, twins = _as_buffer(off), _as_buffer(same)
    finding = SampleAccounting().judge(buffered, [twins])
    assert finding.outcome is Outcome.PASSED, finding.reason
    assert "The samples of 14 steps (17 to 30) have the twin's indices and other contents" in finding.reason
    shifted = SampleAccounting().judge(_as_buffer(off, 4), [twins])
    assert (shifted.outcome, shifted.first) == (Outcome.FAILED, First(What.SAMPLES, 17)), shifted.reason
    augmented = SampleAccounting().judge(_as_buffer(_computed(run, 1e-7, 15)), [twins])
    assert (augmented.outcome, augmented.first) == (Outcome.FAILED, First(What.SAMPLES, 16)), augmented.reason
    of_step = {(e.rank, e.step): e.data["samples"] for e in same.events if e.kind is Kind.STEP}
    again = replace(off, events=tuple(
        replace(e, data={**e.data, "samples": of_step[e.rank, 7]})
        if e.kind is Kind.STEP and (e.attempt, e.step) == (1, 5) else e for e in off.events
    ))  # fmt: skip
    finding = SampleAccounting().judge(again, [same])
    assert (finding.outcome, finding.first) == (Outcome.FAILED, First(What.SAMPLES, 20)), finding.reason


def test_computed_samples_of_steps_that_were_done_again(trainer: Any) -> None:
    """Without a twin, a step that was done again is compared with its first execution by the same rule."""
    for off, outcome in ((1e-7, Outcome.PASSED), (0.01, Outcome.FAILED)):
        run = _computed(trainer(world=3, kills=[(18, 1)]).record(), off)
        finding = SampleAccounting().judge(run, [])
        assert finding.outcome is outcome, finding.reason
    run = _computed(trainer(world=3, kills=[(18, 1)]).record(), 1e-7)
    assert "the job computes those of step 17" in SampleAccounting().judge(run, []).reason


def test_samples_after_equal_parameters_are_not_computed_from_others(trainer: Any) -> None:
    """The step began with the twin's parameters and moments, so nothing earlier explains other samples."""

    def seen(record: Any) -> Any:
        events = (
            replace(e, data={**e.data, "parameters": f"of {(e.step or 0) + 15 * (e.attempt or 0)}", "moments": ""})
            if e.kind is Kind.STEP else e
            for e in record.events
        )  # fmt: skip
        return replace(record, events=tuple(events))

    run = _computed(trainer(kills=[(18, 1)]).record(), 0.5)
    twin = _computed(trainer().record())
    may_follow = SampleAccounting().judge(run, [twin])
    assert may_follow.first == First(What.COMPUTED, 17)
    assert "the job may compute them, and then they may follow from what differed before" in may_follow.reason
    assert SampleAccounting().judge(seen(run), [seen(twin)]).first == First(What.SAMPLES, 17)


def test_the_places_of_a_small_world_come_again(trainer: Any) -> None:
    """A policy that was wrong meets other places than the twin's, which the twin met in other steps: they follow from
    its weights all the same, and nothing was skipped or repeated."""

    def met(record: Any) -> Any:
        events = (
            replace(e, data={**e.data, "samples": [str(zlib.crc32(each.encode()) % 3) for each in e.data["samples"]]})
            if e.kind is Kind.STEP else e
            for e in record.events
        )  # fmt: skip
        return replace(record, events=tuple(events))

    run = met(_computed(trainer(kills=[(18, 1)]).record(), 0.5))
    finding = SampleAccounting().judge(run, [met(_computed(trainer().record()))])
    assert finding.first == First(What.COMPUTED, 18)
    assert "never used" not in finding.reason


def test_steps_without_samples_in_both_runs_are_left_out(trainer: Any) -> None:
    """An evaluation trains a probe of its own for some steps: no sample of them can be seen, with a fault or without.
    The other steps are judged; where the twin's sample was seen, or most steps have none, nothing passes."""

    def blinded(run: Record, steps: Collection[int]) -> Record:
        base = {attempt.number: attempt.base or 0 for attempt in run.history.attempts}
        return replace(run, events=tuple(
            replace(e, data={**e.data, "samples": [None] * len(e.data["samples"])})
            if e.kind is Kind.STEP and base[e.attempt or 0] + (e.step or 0) in steps else e
            for e in run.events
        ))  # fmt: skip

    run, twin = trainer(kills=((13, 1),)).record(), trainer().record()
    probe = (7, 8, 9, 17, 18, 19)
    found = SampleAccounting().judge(blinded(run, probe), [blinded(twin, probe)])
    assert (found.outcome, "in 6 steps (7 to 19), no sample is seen in the twin either" in found.reason) == (
        Outcome.PASSED,
        True,
    ), found.reason
    for ours, theirs in ((probe, probe[:-1]), (range(1, 40), range(1, 40))):
        assert SampleAccounting().judge(blinded(run, ours), [blinded(twin, theirs)]).outcome is Outcome.INCONCLUSIVE
