"""Where resumes began, in simulated trainers of all kinds (tests/support/worlds.py)."""

from __future__ import annotations

import random
from typing import Any

import pytest
import worlds
from hypothesis import example, given, settings
from hypothesis import strategies as st

from torchaos.assertions.no_lost_work import NoLostWork
from torchaos.harness.record.history import History
from torchaos.harness.record.record import Record

World, Trainer = worlds.World, worlds.Trainer


@settings(max_examples=100, derandomize=True)  # lab/campaigns/worlds.py draws others
@given(st.builds(World, **{
    name: st.sampled_from(values) for name, values in worlds.DOMAINS.items() if name != "role"
}))  # fmt: skip
@pytest.mark.slow
@example(World(best=True, names="last.pt", counter=False))
@example(World(names="ckpt_{}.pt", lag=2))
@example(World(warm=3, counter=False, schedule="linear"))
@example(World(warm=3, warm_data="other"))
def test_steps_are_right_or_not_known(world: Any) -> None:
    """Whatever a trainer is like, and whatever is recorded of it, no step gets a wrong number."""
    assert worlds.outcome(world) != "wrong"


@pytest.mark.slow
def test_few_steps_are_not_known() -> None:
    """Of worlds drawn at random, in which parts may be unseen, at most a few leave steps without a number."""
    drawn = [worlds.drawn(random.Random(number)) for number in range(200)]
    unknown = [world for world in drawn if worlds.outcome(world) == "unknown"]
    assert len(unknown) <= 6, unknown


@pytest.mark.parametrize("world", [
    World(names="last.pt", best=True), World(names="last.pt", best=True, best_last=False),
    World(names="ckpt_{}.pt", lag=2), World(names="checkpoint-{}", lag=3),
    World(warm=3, counter=False), World(warm=2, counter=False, log=1), World(names="last.pt", role=True),
    World(names="iter_{}/model.pt", shards=True, ranks=4, ranks_later=3), World(older=True, names="save_{n}.pt"),
    World(pretrained="/else/step-5000.pt", counter=False, kills=(3, 9)),
])  # fmt: skip
def test_shapes_that_once_were_placed_wrongly(world: Any) -> None:
    """A file that is only looked into, a thread that writes late, steps that only warm up, ranks without steps."""
    assert worlds.outcome(world) == "right"


@pytest.mark.parametrize("world", [
    World(ranks=2, ranks_later=3, warm=3, counter=False, schedule="counted", loads=False, state="none", log=1),
    World(names="checkpoint-{n}", lag=3, warm=3, first_warm=False, counter=False, pretrained="/else/m",
          state="none"),
    World(ranks=4, ranks_later=3, kills=(6, 8), warm=3, first_warm=False, counter=False, saves=False, loads=False,
          state="none"),
    World(ranks=4, ranks_later=3, names="checkpoint-{}", every=5, lag=1, state="none", losses=False),
    World(names="model_{n}/x.pt", every=1, pretrained="/else/model.pt", saves=False, counter=False, log=1,
          state="none"),
    World(warm=2, names="epoch{n}.pt", older=True, named_by="copy", contents="step", log=1, log_from=-1, ahead=1,
          state="none"),
    World(ranks=3, ranks_later=2, names="model_{n}/x.pt", warm=2, warm_data="other", saves=False, counter=False,
          twin=False),
    World(names="model_{n}/x.pt", lag=2, warm=2, role=True, counter=False, samples=False, twin=False),
    World(ranks=2, uneven="acts", samples=False, saves=False, schedule="counted", twin=False, kills=(6, 8), every=3),
    World(ranks=3, uneven="epochs"), World(ranks=2, uneven="joins", kills=(12, 12), every=5),
    # The state is recorded again after something that was not seen.
    World(ranks_later=2, warm=2, counter=False, loads=False, role=True),
    World(ranks=2, ranks_later=1, lag=1, warm=2, counter=False, loads=False),
    World(lag=1, warm=2, counter=False, losses=False, loads=False),
    # The number in a name or a file, or of a log, is behind by one, by the delay of a thread, or by a warm-up.
    World(ranks=2, ranks_later=1, from_zero=True, lag=1, counter=False),
    World(from_zero=True, lag=1, counter=False, losses=False),
    World(lag=1, warm=2, counter=False, losses=False, state="none", role=True, outlives=True),
    World(ranks=2, ranks_later=1, lag=1, contents="step", warm=2, log=1, counter=False, state="none"),
    World(kills=(5, 9, 13), lag=1, contents="step", warm=2, warm_data="other", log=1, state="none", twin=False,
          outlives=True),
    World(ranks_later=2, every=1, kills=(6, 8), lag=3, contents="step", warm=3, warm_data="other", state="none"),
    World(log=1, log_anew=True, counter=False, saves=False, loads=False, twin=False),
    World(ranks_later=2, log=5, log_anew=True, counter=False, saves=False, loads=False),
    # A log, or what is done again, begins anew in each attempt; a counter stands still after a warm-up.
    World(warm=2, log=1, log_anew=True, counter=False, state="none", twin=False, named_by="copy"),
    World(kills=(3,), warm=2, first_warm=False, counter=False, state="none", twin=False),
    World(every=1, kills=(3,), warm=3, warm_data="other", saves=False, state="none", twin=False),
    World(every=1, kills=(3,), warm=3, warm_data="other", loads=False, state="none"),
    # Ranks with counts of their own: one shows the first step, or none shows another.
    World(ranks=2, older=True, warm=3, shards=True, rounding=True, uneven="epochs"),
    World(ranks=2, kills=(6, 8), counter=False, swapped=True, uneven="epochs"),
    World(ranks_later=2, kills=(3,), warm=2, state="none", uneven="acts"),
    World(ranks_later=2, every=1, counter=False, role=True, uneven="acts"),
    World(ranks=2, kills=(3,), warm=2, first_warm=False, state="none", twin=False, uneven="acts"),
    # A warm-up of later attempts, on fewer ranks, begins with the rates of the first steps; a rank dies early.
    worlds.drawn(random.Random(95000125)), worlds.drawn(random.Random(95000904)),
    # A rank has no data for the steps after a warm-up; a rank joins later; a log counts anew after a load; the warm-up
    # is as long as the step of another file that was loaded.
    World(ranks=2, kills=(13,), warm=2, counter=False, loads=False, state="none", uneven="joins"),
    World(ranks=2, ranks_later=3, kills=(3, 3), warm=3, warm_data="other", state="none"),
    World(kills=(5, 9), warm=2, warm_data="other", log=1, log_anew=True, schedule="linear", shuffled=False,
          samples=False, state="none", twin=False, named_by="copy", seed=12),
    World(ranks_later=2, every=3, names="checkpoint-{n}", older=True, contents="step", warm=3, counter=False,
          saves=False, twin=False),
    # A rank whose last step was in the warm-up saves with the others all the same.
    World(ranks=2, kills=(12, 12), every=1, warm=3, counter=False, loads=False, swapped=True, uneven="joins"),
    # More ranks than before: only the attempt's own warm-up has samples to compare.
    World(ranks=2, ranks_later=3, steps=24, every=3, kills=(3, 3), names="ckpt_{}.pt", best=True,
          pretrained="/else/step-5000.pt", writers="first", lag=3, contents="from_zero", warm=3, log=1, log_from=-1,
          log_anew=True, counter=False, schedule="counted", epoch=11, shuffled=False, losses=False, state="none",
          named_by="rename", seed=1),
    # The first losses are equal to the end of what is known; elsewhere later ones were compared, too, and differed.
    World(kills=(3,), warm=2, counter=False, samples=False, state="none", rounding=True, twin=False),
    # A copy of the newest checkpoint, loaded after an older one; each checkpoint has a folder of its own.
    World(names="model_{n}/x.pt", older=True, counter=False, twin=False, named_by="copy", swapped=True),
    # The job changes its weights after the optimizer's step, so that they are none that a step made.
    World(warm=2, loads=False, state="steps", changed=True, ranks_later=2),
    World(ranks=2, ranks_later=1, warm=2, loads=False, counter=False, state="steps", last=True, changed=True),
    World(every=1, ranks=2, ranks_later=1, kills=(3,), warm=3, log=1, loads=False),
    # Older weights are put back while all else goes on, and nothing but the log shows it; then they are saved.
    World(ranks=3, ranks_later=1, every=3, kills=(6, 8), log=1, counter=False, loads=False, state="steps",
          reloads=True),
])  # fmt: skip
def test_shapes_that_were_placed_wrongly_are_right_or_not_known(world: Any) -> None:
    """Steps that only warm up where no state was recorded; copies; ranks that make steps of their own. Their numbers
    were wrong; several can't be known."""
    assert worlds.outcome(world) != "wrong"


@pytest.mark.parametrize("world", [
    World(ranks_later=2, counter=False, loads=False, swapped=True),
    World(ranks=2, ranks_later=3, writers="first", counter=False, shards="pairs", named_by="copy"),
])  # fmt: skip
def test_the_moments_show_the_step_if_the_weights_do_not(world: Any) -> None:
    """Other weights are saved than those that train, or other shards than are loaded; the moments are those of one
    step."""
    assert worlds.outcome(world) == "right"


def test_samples_that_come_again_in_each_epoch_hide_no_step() -> None:
    """The rank that dies first has not seen the samples of the step that is done again, and its counter shows it."""
    assert worlds.outcome(World(ranks=3, epoch=6, shuffled=False, twin=False, uneven="dies", seed=11)) == "right"


@pytest.mark.parametrize("world", [
    World(ranks=2, ranks_later=1, every=1, kills=(6, 8), lag=3, schedule="linear", twin=False, uneven="epochs"),
    worlds.drawn(random.Random(404555)),  # with shards, of which both ranks have equal sums
], ids=["whole", "shards"])  # fmt: skip
def test_a_state_is_not_put_back_because_another_rank_counts_fewer_steps(world: Any) -> None:
    """Two ranks report one state, and one of them has made a step less. No rank goes back to a state of its own."""
    assert worlds.outcome(world) == "right"


@pytest.mark.parametrize("world", [
    World(changed=True), World(changed=True, state="steps"), World(changed=True, state="all", kills=(5, 9, 13)),
])  # fmt: skip
def test_weights_that_the_job_changes_after_a_step_are_not_put_back(world: Any) -> None:
    """A job clips its weights after the optimizer's step, or averages them: it does not go back to another step."""
    assert worlds.outcome(world) == "right"


@pytest.mark.parametrize("world", [
    World(reloads=True), World(reloads=True, counter=False, log=1), World(reloads=True, kills=(6, 8), loads=False),
    World(reloads=True, every=5, lag=1), World(reloads=True, every=3, names="last.pt", lag=3, kills=(12,), state="all"),
    World(reloads=True, warm=2, log=1, log_from=-1), World(reloads=True, every=3, state="steps", rounding=True),
    World(reloads=True, every=5, ranks_later=2),
    World(reloads=True, every=3, log=1, log_anew=True, kills=(6, 8), swapped=True),
    World(reloads=True, every=3, log=1, state="steps", counter=False, best=True, seed=9),
    World(reloads=True, every=5, kills=(9,), log=1, log_from=-1),
    World(reloads=True, every=5, kills=(9, 9), log=1, log_from=-1, names="iter_{}/model.pt", from_zero=True),
    World(reloads=True, every=5, kills=(9,), log=1, log_from=-1, losses=False, samples=False),
])  # fmt: skip
def test_weights_that_are_put_back_alone_leave_the_step_where_it_was(world: Any) -> None:
    """A job goes back to older weights, such as the best ones, while its data, its counter and its log go on. It does
    not undo its steps."""
    assert worlds.outcome(world) == "right"


@pytest.mark.parametrize("number", [301694, 302419, 302499, 601271])
def test_shapes_that_were_not_known(number: int) -> None:
    """Nothing had been saved, and saves are seen; a counter begins anew where it began anew in the first attempt; a log
    that counted anew in the attempt before is no witness any more."""
    assert worlds.outcome(worlds.drawn(random.Random(number))) == "right"


@pytest.mark.parametrize("world", [
    # Fewer or more ranks: the rates are the same on all, and a counter shows a warm-up.
    worlds.drawn(random.Random(84102633)), worlds.drawn(random.Random(84101347)),
    # A rank that makes fewer steps than the others has the same rate in all of them: that shows nothing.
    worlds.drawn(random.Random(87000756)),
    # The job changes its weights after each step, or no save was seen; the sums of the moments show the step.
    worlds.drawn(random.Random(84100362)), worlds.drawn(random.Random(84101244)),
    # The steps of the attempt's own warm-up, with other data, are not the steps that are done again after it.
    worlds.drawn(random.Random(84100164)), worlds.drawn(random.Random(84100864)),
    # After the warm-up the samples, or the first loss, are those of the first step.
    worlds.drawn(random.Random(84102053)), worlds.drawn(random.Random(84100399)),
    # The moments and the random numbers are put back, too; a schedule's counter shows the step of a rank that died.
    worlds.drawn(random.Random(84101322)), worlds.drawn(random.Random(84101431)),
])  # fmt: skip
def test_a_part_of_the_state_that_was_no_witness_shows_the_step(world: Any) -> None:
    """What is the same on all ranks is compared whatever their number, and a warm-up is no reference."""
    assert worlds.outcome(world) == "right"


def test_a_file_of_another_run_is_known_after_a_warm_up() -> None:
    """Each attempt warms up before it loads the file with which the first attempt began. The checkpoint that is loaded
    after it is the one that counts, and the file's number contradicts nothing."""
    run = Trainer(World(pretrained="/else/step-5000.pt", warm=2, contents="step", state="none", counter=False))
    again = History.of(run.run().events).attempt(1)
    assert again is not None
    assert (again.base, again.conflicts) == (8, ())


@pytest.mark.parametrize("number", [3006111, 4002634, 4008386, 5000271, 5000814])
def test_weights_that_were_put_back_are_not_only_those_of_that_step(number: int) -> None:
    """A state that was seen first when it was put back, while a thread saved it late; a file that was saved unseen,
    loaded after another one that was seen. Their steps were wrong."""
    assert worlds.outcome(worlds.drawn(random.Random(number))) == "right"


@pytest.mark.parametrize("number", [
    8500017, 8500148, 8500149, 8500157, 8500165, 8500184, 8500188, 8500206, 8500242, 8500294,
    9600039,
])  # fmt: skip
def test_two_parts_that_were_lost_do_not_outweigh_the_rest(number: int) -> None:
    """Old weights with the moments of the right step; first weights after a load; a counter in a job that skips other
    updates than before; a counter and the losses after a lost optimizer, which say the same. Their steps were wrong."""
    assert worlds.outcome(worlds.composed(number)) in ("right", "unknown")


@pytest.mark.parametrize("number", [4000871, 4001794, 3002663, 3005357, 5002676])
def test_one_counter_alone_does_not_show_that_steps_were_no_warm_up(number: int) -> None:
    """After a few steps the first weights are put back, and one counter goes on. Either they only warmed up and the
    counter was forgotten, or the job reloads weights: nothing else was seen that tells the two apart."""
    assert worlds.outcome(worlds.drawn(random.Random(number))) == "unknown"


@pytest.mark.parametrize("uneven", ["dies", "joins"])
def test_ranks_at_different_steps_have_those_in_common_that_all_made(uneven: str) -> None:
    """A rank that dies a few steps before the others, and one that has no data for the last steps."""
    assert worlds.outcome(World(ranks=3, uneven=uneven, kills=(9, 12), seed=2)) == "right"


@pytest.mark.parametrize("defect", worlds.DEFECTS)
def test_a_planted_defect_is_found_with_its_cause(defect: str) -> None:
    """In trainers of all kinds, a part of the state that the resume does not restore is named, or the verdict says what
    is not known; it never passes, and no other cause is told."""
    told = [worlds.judged(worlds.planted(number, defect)) for number in range(5)]
    assert {outcome for outcome, _text in told} <= {"cause right", "unknown"}, told
    assert [outcome for outcome, _text in told].count("cause right") >= 2, told


@pytest.mark.parametrize(("defect", "writers", "told"), [
    ("", "all", "passed"), ("", "first", "unknown"), ("moments exchanged", "all", "cause right"),
    ("older moments", "all", "cause right"), ("RNG of a fresh start", "all", "cause right"),
])  # fmt: skip
def test_ranks_with_steps_of_their_own_are_judged_one_by_one(defect: str, writers: str, told: str) -> None:
    """One rank makes two steps while the other makes one, so that after a restart no step is that of both. If it saves
    nothing of its own, nothing shows from which of its steps it went on."""
    acts: dict[str, Any] = {"ranks": 2, "steps": 24, "every": 5, "kills": (12,), "uneven": "acts", "state": "all"}
    assert worlds.judged(World(**acts, writers=writers, defect=defect))[0] == told


@pytest.mark.parametrize("number", [30000505, 30003408])
def test_the_first_loss_and_a_log_alone_show_no_step_if_warm_ups_are_not_seen(number: int) -> None:
    """The first state gives its loss in a warm-up, too, and a log of which no line was compared with a step may leave
    out a warm-up. Their steps were wrong."""
    assert worlds.outcome(worlds.drawn(random.Random(number))) == "unknown"


def test_healthy_trainers_do_not_fail() -> None:
    """The same trainers without a defect."""
    told = [worlds.judged(worlds.planted(number, "")) for number in range(20)]
    assert not [text for outcome, text in told if outcome not in ("passed", "unknown")]


def test_the_newest_save_beside_a_best_file() -> None:
    """A resume that takes the checkpoint before the newest, and reads the best one as well, does not pass."""
    told = [worlds.judged(worlds.planted(number, "takes an older checkpoint"))[0] for number in (5, 12, 14, 78)]
    assert "passed" not in told


def test_a_best_file_that_was_read_is_not_the_checkpoint_that_the_job_went_on_from() -> None:
    """A lost counter beside the best file of the step before is told as that, and not as the weights of another
    step."""
    assert worlds.judged(worlds.planted(5, "counter behind"))[0] == "cause right"


@pytest.mark.parametrize("number", [8, 10, 11, 19, 31, 32, 34, 35])
def test_a_newer_save_in_another_folder(number: int) -> None:
    """A resume that takes the checkpoint before the newest, in jobs that save in memory and on disk in turn, does not
    pass: nothing shows whether it could have resumed from the other folder."""
    assert worlds.judged(worlds.planted(number, "takes an older checkpoint"))[0] == "unknown"


def test_no_work_is_lost_by_trainers_that_take_their_newest_checkpoint() -> None:
    """Nor said to be: also if threads write late, steps only warm up, and parts are unseen."""
    for number in (*range(120), 242, 340, 505, 578):
        world = worlds.drawn(random.Random(number))
        run = worlds.Trainer(world).run()
        finding = NoLostWork().judge(Record(worlds.PLAN, tuple(run.events), {}), [])
        assert finding.outcome.value != "failed", (number, finding.reason)
