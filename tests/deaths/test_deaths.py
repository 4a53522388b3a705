"""A sample of the deaths that `python ci/campaigns/deaths.py` dies; none of them leaves anything behind."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from dying import campaign
from dying.families import FAMILIES
from dying.scene import At, Death

H, R, J = "harness", "reaper", "job"


def at(point: str, *who: str, nth: int = 1) -> At:
    return point, nth, who


# The points that matter most, each with the deaths that it is worst for.
SAMPLE = [
    Death("kill", (at("harness after start reaper", H),)),
    Death("kill", (at("harness after start process", H, nth=1),)),
    Death("freeze-for", (at("harness after request guard", H, R, nth=2),)),
    Death("freeze-on", (at("harness after signal", H),)),
    Death("freeze-on", (at("harness after event fault.applied", R),)),
    Death("freeze-on", (at("harness after event fault.applied", H), at("reaper before restore process", R))),
    Death("damage", (at("harness after event fault.applied", H, R),)),
    Death("damage", (at("harness after event fault.applied", H), at("reaper after restore file", R))),
    Death("damage", (at("reaper half a line", R, nth=3),)),
    Death("kill-agent", (at("harness after event job.exited", H),)),
    Death("kill-in-recovery", (at("harness after event rank.exited", H, J),)),
    Death("twin", (at("harness after event job.started", H, R),)),
    Death("attach", (at("harness after event fault.applied", H),)),
]


@pytest.mark.parametrize("seed", [0])
def test_a_sample_of_deaths(tmp_path: Path, seed: int) -> None:
    """With stand-ins for jobs: whoever dies, and wherever, nothing is left of the run."""
    _assert_nothing_left(SAMPLE, tmp_path, least=len(SAMPLE) - 2)


@pytest.mark.job
@pytest.mark.long
def test_real_jobs(tmp_path: Path) -> None:
    """The same with real torchrun jobs."""
    points = ("harness after event rank.up", "harness after event fault.guarded", "harness after event step")
    deaths = [Death("real-freeze", (at("harness after event fault.applied", H),)),
              Death("real-kill", (at(points[0], H, R),)),
              Death("real-kill-agent", (at("harness after event fault.applied", H, J),))]  # fmt: skip
    _assert_nothing_left(deaths, tmp_path, least=len(deaths))


def _assert_nothing_left(deaths: Sequence[Death], folder: Path, least: int) -> None:
    """`least`: so many of them must have come to pass, or the test shows nothing."""
    done = campaign.play(deaths, 4, folder / "leaks")
    assert [(str(death), told.leaks) for death, told in done if told.leaks] == []
    assert sum(told.died for _death, told in done) >= least, [str(death) for death, told in done if not told.died]


def test_every_injector_of_processes_has_a_family() -> None:
    """A process fault that is added without a family in the campaign fails here."""
    ours = {fault["inject"] for family in FAMILIES.values() for fault in family.faults}
    there = {path.stem.replace("process_", "process.", 1) for path in _injectors("process_*.py")}
    assert there <= ours


def _injectors(pattern: str) -> list[Path]:
    return sorted((Path(__file__).parents[2] / "injectors").glob(pattern))


def test_the_choice_holds_every_event_first() -> None:
    """Every journal point is among the deaths, and a seed gives the same choice again."""
    trace = ["harness after event run.stage 1", "harness after event run.stage 2", "harness before request guard 1",
             "reaper before line planned 1", "harness after event job.started 1",
             "harness after event fault.applied 1"]  # fmt: skip
    ways = list(campaign.strata("kill", campaign.points_of(trace)))
    chosen = campaign.choose(ways, 5, random.Random(1))
    assert {death.at[0][0] for death in chosen if death.kind == H} >= {
        "harness after event run.stage", "harness after event job.started", "harness after event fault.applied",
    }  # fmt: skip
    assert campaign.choose(ways, 8, random.Random(1)) == campaign.choose(ways, 8, random.Random(1))
