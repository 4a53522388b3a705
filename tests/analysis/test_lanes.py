"""The ranks that have a lane in the timeline of a large run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torchaos.harness.analysis.hit_targets import landings
from torchaos.harness.protocol.wire import Kind
from torchaos.harness.reporting.html.page_timeline import timeline_of

RANKS = 40


def _lanes(run: Any, *ranks: int) -> tuple[list[int], list[str]]:
    timeline = timeline_of(run, [], (), ranks)
    return [int(lane["name"].split()[1]) for lane in timeline.lanes if lane["kind"] == "rank"], timeline.left_out


def _run(trainer: Any, behind: int) -> Any:
    """A run in which rank 35 is killed, and the rank `behind` once ends a step ten seconds after the others."""
    run = trainer(world=RANKS, steps=12, kills=[(8, 35)]).record()

    def late(e: Any) -> bool:
        return e.kind is Kind.STEP and e.attempt == 0 and (e.rank, e.step) == (behind, 3)

    return replace(run, events=tuple(replace(e, mono_s=e.mono_s + 10) if late(e) else e for e in run.events))


def test_ranks_that_matter_have_a_lane(trainer: Any) -> None:
    """Of 40 ranks, 32 have a lane: the rank that was hit, the rank that was once behind all others, and the first
    ranks. The page says so."""
    run = _run(trainer, behind=38)
    assert {rank for landing in landings(run) for rank in landing.ranks} == {35}
    shown, left_out = _lanes(run)
    assert len(shown) == 32
    assert {35, 38} <= set(shown)
    assert set(range(24)) <= set(shown)
    assert len(left_out) == 1
    assert left_out[0].startswith("32 of 40 ranks have a lane")


def test_ranks_that_were_asked_for_have_a_lane(trainer: Any) -> None:
    """The user names two ranks: they have a lane, beside the ranks that matter, and no other rank has. A rank that the
    run does not have is left out."""
    shown, left_out = _lanes(_run(trainer, behind=38), 30, 39, 4000)
    assert {30, 35, 38, 39} <= set(shown)
    assert len(shown) <= 3 + 8
    assert "those given by --ranks" in left_out[0]


def test_a_small_run_has_all_ranks(trainer: Any) -> None:
    """Two ranks have two lanes, and nothing was left out."""
    assert _lanes(trainer(kills=[(18, 1)]).record()) == ([0, 1], [])
