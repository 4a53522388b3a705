"""The rule that combines the opinions of the observers. Pure."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torchaos.harness.monitoring.observers.hang_detectors import Learned, Opinion, Rule

LONG = 5.0


def test_one_alone_is_a_suspicion() -> None:
    """One observer that has seen nothing for long suspects; it takes a second one for a hang."""
    alone = [Opinion("metrics", LONG, 0.1), Opinion("log", 0.0, 0.1)]
    assert [one.observer for one in Rule().suspects(alone)] == ["metrics"]
    assert Rule().agree(alone) == []
    assert len(Rule().agree([*alone[:1], Opinion("log", LONG, 0.1)])) == 2


def test_no_progress_alone_is_no_hang() -> None:
    """Log and collectives say the same in two ways: a rank at work on its first checkpoint is late as well."""
    both = [Opinion("log", LONG, 0.1), Opinion("collectives", LONG, 0.1)]
    assert Rule().agree(both) == []
    assert Rule().agree([*both, Opinion("stacks", LONG, 0.0)])


def test_pauses_that_the_job_makes_bound_the_others() -> None:
    """Where the log is known to rest for ten seconds, the processes may, too."""
    rest = [Opinion("metrics", LONG, 0.1), Opinion("stacks", LONG, 0.0)]
    assert Rule().agree(rest)
    assert not Rule().agree([*rest, Opinion("log", LONG, 10.0)])


def test_an_observer_that_learns_no_pause_takes_none_away() -> None:
    """NCCL's service and the kernel know of no usual pause, and the log's still bounds the processes."""
    rest = [Opinion("metrics", LONG, 0.1), Opinion("stacks", LONG, 0.0), Opinion("log", LONG, 10.0)]
    assert not Rule().agree([*rest, Opinion("nccl-ras", 0.1, 0.0), Opinion("kernel", 0.1, 0.0)])


def test_one_that_has_seen_too_little_says_nothing() -> None:
    """An observer that is not ready neither suspects nor agrees."""
    not_ready = [Opinion("log", LONG, 0.0, ready=False), Opinion("stacks", LONG, 0.0)]
    assert len(Rule().suspects(not_ready)) == 1
    assert not Rule().agree(not_ready)


@given(st.lists(st.floats(0.01, 30.0), min_size=5, max_size=40))
def test_no_pause_that_was_seen_before_is_a_hang(gaps: list[float]) -> None:
    """Whatever a job's pauses are, as long as the longest one is never a hang a second time."""
    learned, now = Learned(), 0.0
    for gap in gaps:
        learned.happened(now)
        now += gap
    learned.happened(now)
    opinion = learned.opinion("log", now + max(gaps))
    assert not Rule().agree([opinion, Opinion("stacks", max(gaps), 0.0)]) or max(gaps) < 1e-9 or opinion.quiet_s < 0.8


def test_what_was_before_training_teaches_nothing() -> None:
    """The minutes of a start don't make every later bound as long."""
    learned = Learned()
    learned.happened(0.0, counts=False)
    learned.happened(60.0, counts=False)
    learned.happened(60.5)
    assert learned.opinion("log", 61.0).usual_s == 0.5
