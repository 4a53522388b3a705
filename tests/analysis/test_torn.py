"""A file that a thread wrote from live tensors: what it claims, and what its weights are, are of two steps."""

from __future__ import annotations

from typing import Any

import pytest
import worlds

from torchaos.assertions.completed import Completed
from torchaos.assertions.loss_continuity import LossContinuity
from torchaos.assertions.no_lost_work import NoLostWork
from torchaos.assertions.sample_accounting import SampleAccounting
from torchaos.assertions.state_restored import StateRestored
from torchaos.harness.interfaces import Outcome
from torchaos.harness.record.plan import Plan, PlannedJob
from torchaos.harness.record.record import Record

PLAN = Plan("made-up", "", 7, PlannedJob(("torchrun", "train.py"), "/job", {}, 2, 1, 60.0, worlds.ROOT), (), ())
KILLED: dict[str, Any] = {"ranks": 2, "steps": 24, "kills": (12,), "contents": "step", "state": "all"}


class Torn(worlds.Trainer):
    """Some parts of the state that a resume finds in its file are of `by` steps later."""

    by = 2
    parts: tuple[str, ...] = ("weights", "moments", "opt_step")

    def __init__(self, world: worlds.World) -> None:
        super().__init__(world)
        self._after: dict[tuple[int, int], Any] = {}

    def _step(
        self, attempt: int, ranks: range, state: Any, step: int, warm: int, without: int | None = None
    ) -> None:  # fmt: skip
        super()._step(attempt, ranks, state, step, warm, without)
        self._after[attempt, step] = worlds._copy(state)

    def _resume(self, attempt: int, everyone: range, fresh: Any) -> Any:
        state = super()._resume(attempt, everyone, fresh)
        if attempt:
            late = worlds._copy(self._after[0, state.step + self.by])
            for part in self.parts:
                setattr(state, part, getattr(late, part))
        return state


def _record(trainer: Any) -> Any:
    return Record(PLAN, tuple(trainer.run().events), {})


def _told(parts: tuple[str, ...], by: int = 2, **of: Any) -> list[Any]:
    """What state_restored, loss_continuity and sample_accounting say."""
    world = worlds.World(**{**KILLED, **of})
    trainer = Torn(world)
    trainer.parts, trainer.by = parts, by
    run, twin = _record(trainer), _record(worlds.Trainer(world.straight))
    return [assertion().judge(run, [twin]) for assertion in (StateRestored, LossContinuity, SampleAccounting)]


NAMES = pytest.mark.parametrize("names", ["step-{}", "ckpt_{}.pt", "last.pt", "save_{n}.pt"])


@NAMES
@pytest.mark.parametrize(("parts", "counter"), [
    (("weights", "moments", "opt_step"), True), (("weights", "moments"), False),
])  # fmt: skip
def test_the_file_is_blamed_and_not_the_data(names: str, parts: tuple[str, ...], counter: bool) -> None:
    """The job goes on with the data of the step that the file claims, from the weights of a later one: the data is not
    said to have been rewound."""
    told = _told(parts, names=names, counter=counter)
    name = names.format(8, n=2)
    for found in told:
        assert found.outcome is Outcome.FAILED, found.reason
        assert f"{name} is of step 8, and the job went on from there, but the weights that it began with are those " \
            "after step 10: they were written, or copied, while the training went on" in found.reason  # fmt: skip
        assert "rewound" not in found.reason
        assert "the data: " not in found.reason


@NAMES
@pytest.mark.parametrize(
    ("parts", "counter"), [(("weights", "moments"), True), (("weights",), True), (("weights",), False)]
)
def test_weights_alone_are_of_another_step_than_all_else(names: str, parts: tuple[str, ...], counter: bool) -> None:
    """The file, the data, and the optimizer's counter or its moments are of step 8: the job went on from there, and its
    weights are blamed."""
    state, loss, samples = _told(parts, names=names, counter=counter)
    for found in (state, loss):
        assert found.outcome is Outcome.FAILED, found.reason
        assert "the parameters layer0.weight and 1 more are those after step 10, as if they were written while" in (
            found.reason
        )
    assert samples.outcome is Outcome.PASSED, samples.reason


def test_weights_of_an_earlier_step_are_lost_work() -> None:
    """All else goes on from the newest checkpoint: what was trained after the step of the weights is lost all the
    same. Weights of a later step are not."""
    for by, outcome in ((-3, Outcome.FAILED), (2, Outcome.PASSED)):
        trainer = Torn(worlds.World(**KILLED))
        trainer.parts, trainer.by = ("weights", "moments"), by
        found = NoLostWork().judge(_record(trainer), [])
        assert found.outcome is outcome, found.reason
        told = "went on from step 8, but with the weights after step 5: what 3 steps had changed in them was lost"
        assert (told in found.reason) is (by < 0)


def test_a_thread_that_was_seen_to_write_late() -> None:
    """Then the record of the save fits several steps; its number and the data of the next step are those of one."""
    for found in _told(("weights", "moments", "opt_step"), names="ckpt_{}.pt", lag=2, every=4, kills=(11,)):
        assert found.outcome is Outcome.FAILED, found.reason
        assert "ckpt_8.pt is of step 8" in found.reason
        assert "the weights that it began with are those after step 10" in found.reason


def test_weights_of_an_earlier_step() -> None:
    """A copy that was not renewed: it was not written late."""
    for found in _told(("weights", "moments", "opt_step"), by=-3):
        assert "ckpt" not in found.reason
        assert "step-8 is of step 8, and the job went on from there, but the weights" in found.reason
        assert "those after step 5" in found.reason
        assert "while the training went on" not in found.reason


def test_data_that_was_rewound_is_told_as_before() -> None:
    """The file and the weights are of one step: then the data alone is of another."""
    found = _told(("position",), by=-2)
    assert [one.outcome for one in found] == [Outcome.PASSED, Outcome.FAILED, Outcome.FAILED]
    assert "the data was rewound" in found[2].reason
    assert "is of step" not in "".join(one.reason for one in found)


def test_moments_or_a_counter_of_a_later_step() -> None:
    """The optimizer is ahead of its weights: the sums say of which step its moments are, and the counter by how much
    it is ahead; neither is called lost."""
    state, loss, samples = _told(("moments",), by=2)
    assert (state.outcome, samples.outcome) == (Outcome.FAILED, Outcome.PASSED)
    state, loss, samples = _told(("opt_step",), by=1)
    assert (state.outcome, samples.outcome) == (Outcome.PASSED, Outcome.PASSED)
    assert (
        "the optimizer's own step counter was 1 ahead, in another step than the weights: it stood at 10" in loss.reason
    )
    assert "not restored" not in loss.reason


@pytest.mark.parametrize(("by", "words"), [(1, "1 ahead: it stood at 9"), (-2, "2 behind: it stood at 6")])
def test_a_schedule_of_another_step(by: int, words: str) -> None:
    """The schedule's counter was restored, but of another moment: it is not called lost."""
    _, loss, _ = _told(("sched_step",), by=by, schedule="counted")
    assert f"the LR schedule's own step counter was {words}" in loss.reason
    assert "not restored" not in loss.reason


def test_sums_say_of_which_step_the_moments_are() -> None:
    """Without names, from the check sums after each step."""
    state, loss, _samples = _told(("moments",), by=-4, state="steps")
    assert "of the optimizer with which attempt 1 began are not those that attempt 0 had after step 8" in state.reason
    assert "they are those after step 4" in state.reason
    assert "the optimizer's moments were not restored: they are those after step 4" in loss.reason


@pytest.mark.parametrize("lag", [0, 2])
def test_a_copy_that_is_written_late_is_healthy(lag: int) -> None:
    """A thread writes a copy of an earlier step under that step's name."""
    assert [found.outcome for found in _told((), lag=lag)] == [Outcome.PASSED] * 3


def test_weights_of_one_file_and_the_rest_of_another() -> None:
    """No file claims a step, but the optimizer's counter and the samples are of one, and the weights of another, as if
    those of another file had been loaded later."""
    for found in _told(("weights", "moments"), by=3, contents="none", names="last.pt", saves=False):
        assert (
            "the weights that it began with are those after step 11, and the optimizer's counter and the samples go on "
            "after step 8: it loaded last.pt" in found.reason
        )
        assert "rewound" not in found.reason


def test_a_number_in_a_name_of_no_known_kind() -> None:
    """It is the step of the data: the file was written over later."""
    for found in _told(("weights", "moments", "opt_step"), contents="none", names="snap-{}.pt"):
        assert "snap-8.pt is of step 8, and the job went on from there, but the weights that it began with" in (
            found.reason
        )


@pytest.mark.parametrize(("by", "ends"), [(2, "went on to step 26, 2 beyond 24"), (-3, "in step 21, 3 short of 24")])
def test_a_job_that_ends_in_another_step_says_why(by: int, ends: str) -> None:
    """It makes as many steps as are due after the step that the file claims. No counter shows that step."""
    world = worlds.World(**KILLED, counter=False)
    trainer = Torn(world)
    trainer.parts, trainer.by = ("weights", "moments"), by
    run, twin = _record(trainer), _record(worlds.Trainer(world.straight))
    finding = Completed().judge(run, [twin])
    assert finding.outcome is Outcome.FAILED
    assert f"{ends}: step-8 is of step 8, and the job went on from there, but the weights" in finding.reason


def test_a_resume_after_a_warm_up_is_a_resume() -> None:
    """Steps before the load that only warm up do not hide that the attempt began with what was saved."""
    run = _record(worlds.Trainer(worlds.World(**KILLED, warm=3)))
    assert any(part.after == 3 for part in run.history.segments)
    assert StateRestored().judge(run, []).outcome is Outcome.PASSED


def test_a_rank_that_makes_no_steps_is_named() -> None:
    """Such as an actor, or a writer of checkpoints: that the others have back what they had says nothing of it."""
    run = _record(worlds.Trainer(worlds.World(**KILLED, role=True)))
    found = StateRestored().judge(run, [])
    assert found.outcome is Outcome.PASSED, found.reason
    assert "; rank 2 made no step, so it is not known what was restored there" in found.reason
