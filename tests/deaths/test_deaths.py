"""A sample of the deaths that `python lab/campaigns/deaths.py` plays; none of them leaves anything behind."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from dying import campaign, worker
from dying.families import FAMILIES
from dying.scene import Aftermath, At, Death, Scene

from torchaos.harness import registry

REPOSITORY = Path(__file__).parents[2]
NOT_DIED = {
    "container": "a stand-in can't bring a Docker engine into its namespaces",
    "nccl": "its faults need a GPU for each rank; the control page that undoes them is that of collective.*",
}
H, R, J = "harness", "reaper", "job"


def at(point: str, *who: str, nth: int = 1) -> At:
    return point, nth, who


# The points that matter most, each with the deaths that it is worst for.
SAMPLE = [
    Death("kill", (at("harness after start reaper", H),)),
    Death("kill", (at("harness after start process", H, nth=1),)),
    Death("freeze-for", (at("harness after request record_undo", H, R, nth=2),)),
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
    Death("checkpoint-delete", (at("harness after event fault.applied", H, R),)),
    Death("network-delay", (at("harness after event fault.applied", H),)),
    Death("node-reboot", (at("harness after event fault.effect", H, R),)),
]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0])
def test_a_sample_of_deaths(tmp_path: Path, seed: int) -> None:
    """With stand-ins for jobs: whoever dies, and wherever, nothing is left of the run."""
    _assert_nothing_left(SAMPLE, tmp_path, least=len(SAMPLE) - 1)


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


def _ours() -> set[str]:
    return {fault["inject"] for family in FAMILIES.values() for fault in family.faults}


def test_every_injector_of_processes_has_a_family() -> None:
    """A process fault that is added without a family in the campaign fails here."""
    assert {name for name in registry.names("injectors") if name.startswith("process.")} <= _ours()


def test_every_family_of_scenarios_is_died() -> None:
    """Of each folder of ready scenarios the campaign has every group of injectors, such as network.* and cuda.*."""
    texts = [path.read_text() for path in (REPOSITORY / "scenarios").glob("*/*.yaml")]
    groups = {name for text in texts for name in re.findall(r"inject: (\w+)\.", text)}
    assert groups >= {"process", "network", "checkpoint"}
    assert groups - NOT_DIED.keys() <= {name.partition(".")[0] for name in _ours()}


@pytest.mark.parametrize("arguments", [["--only", "nope"], ["--only", "kill", "--only", "a family"]])
def test_a_family_that_is_not_there(arguments: list[str]) -> None:
    """One clear error that lists those there are, not a traceback, and not a campaign of nothing."""
    command = [sys.executable, str(REPOSITORY / "lab" / "campaigns" / "deaths.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"there is no family {arguments[-1]}; there are: kill, " in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.needs("root")
def test_what_can_not_be_cleared_away_is_a_leak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mount that a run left does not end the campaign: it is told, and gone before the next death."""

    def leave_a_mount(scene: Scene, death: Death) -> Aftermath:
        place = tmp_path / "stage" / "left"
        place.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(place)], check=True)
        return Aftermath(died=True)

    monkeypatch.setattr(Scene, "play", leave_a_mount)
    told = worker.die(tmp_path / "stage", False, SAMPLE[0], tmp_path)
    assert told.leaks
    assert "the campaign itself failed" in told.leaks[0]
    assert not (tmp_path / "stage").exists()


def test_a_worker_that_ends_is_a_leak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has seen then what is left; the deaths that follow are died by another one."""
    (tmp_path / "worker.py").write_text("import sys\nsys.stdin.readline()\nsys.exit(9)\n")
    monkeypatch.setattr(campaign, "WORKER", tmp_path / "worker.py")
    done = campaign.play(SAMPLE[:2], 1, tmp_path / "leaks")
    assert [told.leaks for _death, told in done] == [["the campaign's worker ended with exit code 9"]] * 2


def test_there_is_nothing_to_choose_from() -> None:
    """A stage without families is no error: --only may name real jobs alone."""
    assert campaign.choose([], 5, random.Random(1)) == []


def test_the_choice_holds_every_event_first() -> None:
    """Every journal point is among the deaths, and a seed gives the same choice again."""
    trace = ["harness after event run.stage 1", "harness after event run.stage 2",
             "harness before request record_undo 1", "reaper before line planned 1",
             "harness after event job.started 1", "harness after event fault.applied 1"]  # fmt: skip
    ways = list(campaign.strata("kill", campaign.points_of(trace)))
    chosen = campaign.choose(ways, 5, random.Random(1))
    assert {death.at[0][0] for death in chosen if death.kind == H} >= {
        "harness after event run.stage", "harness after event job.started", "harness after event fault.applied",
    }  # fmt: skip
    assert campaign.choose(ways, 8, random.Random(1)) == campaign.choose(ways, 8, random.Random(1))
