"""The faults that are drawn for a game day: from the seed alone, according to the file, and in valid scenarios."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from torchaos.harness.gameday.day_grammar import Arrivals, GameDay
from torchaos.harness.gameday.fault_schedule import SHORTEST_S, Drawn, cut, draw, load, mix_of, presets, scenario_of
from torchaos.harness.interfaces import UsageError
from torchaos.harness.record.plan import After
from torchaos.harness.running.planner import make_plan
from torchaos.harness.scenario.loader import load as load_scenario

DAY: Mapping[str, Any] = {
    "gameday": "night",
    "job": {
        "command": "torchrun --nproc-per-node 2 train.py --dir {day}/checkpoints",
        "checkpoints": {"path": "{day}/checkpoints"},
    },
    "duration": "1h",
    "arrivals": {"mtbf": "1m"},
    "faults": [
        {"inject": "process.kill", "target": {"rank": "any"}, "weight": 3},
        {"inject": "process.freeze", "target": {"rank": "any"}, "for": "5s"},
    ],
}


def day(tmp_path: Path, **more: Any) -> GameDay:
    path = tmp_path / "night.yaml"
    path.write_text(yaml.safe_dump({**DAY, **more}))
    return load(path)


def drawn(tmp_path: Path, seed: int = 1, **more: Any) -> list[Drawn]:
    one = day(tmp_path, **more)
    return draw(one, mix_of(one).risks, seed)


def test_the_seed_decides_everything(tmp_path: Path) -> None:
    """The same seed draws the same day, another one another."""
    assert drawn(tmp_path) == drawn(tmp_path)
    assert drawn(tmp_path) != drawn(tmp_path, seed=2)


def test_a_longer_day_begins_with_the_shorter_one(tmp_path: Path) -> None:
    """What comes later changes nothing of what came before."""
    short, long = drawn(tmp_path), drawn(tmp_path, duration="3h")
    assert long[: len(short)] == short
    assert len(long) > 2 * len(short)


def test_arrivals_are_poisson_and_kinds_as_weighed(tmp_path: Path) -> None:
    """Over a thousand hours the mean and the spread of the gaps are those of an exponential, and weights hold."""
    found = drawn(tmp_path, duration="1000h", arrivals={"mtbf": "10m"})
    gaps = [b.at_s - a.at_s for a, b in pairwise(found)]
    assert statistics.fmean(gaps) == pytest.approx(600, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(600, rel=0.08)
    assert drawn(tmp_path, duration="1000h", arrivals={"gpu_mtbf": "1000h", "gpus": 6000}) == found
    kinds = Counter(one.risk.inject for one in found)
    assert kinds["process.kill"] / len(found) == pytest.approx(0.75, abs=0.03)


@pytest.mark.parametrize(
    ("arrivals", "times"),
    [({"every": "20m"}, [1200.0, 2400.0]), ({"trace": ["5s", "90s", "2h"]}, [5.0, 90.0])],
)
def test_faults_come_when_the_file_says(tmp_path: Path, arrivals: Any, times: list[float]) -> None:
    """Fixed arrivals and traces; the one at the very end of the day could not be over by then."""
    assert [one.at_s for one in drawn(tmp_path, arrivals=arrivals)] == times


def test_nothing_begins_that_can_not_end(tmp_path: Path) -> None:
    """A fault that lasts beyond the end of the day is left out."""
    faults = [{"inject": "process.freeze", "target": {"rank": 0}, "for": "10m"}]
    found = drawn(tmp_path, faults=faults, arrivals={"every": "9m"})
    assert [one.at_s for one in found] == [540.0 * n for n in range(1, 6)]


def test_rounds_hold_every_fault_once_and_in_order(tmp_path: Path) -> None:
    """However the day is cut: no round has more faults than it may, and no fault comes later than it may."""
    one = day(tmp_path, round={"faults": 4, "length": "3m"})
    faults = draw(one, mix_of(one).risks, 5)
    rounds = cut(one, faults)
    assert [fault for part in rounds for fault in part.faults] == faults
    assert max(len(part.faults) for part in rounds) == 4
    assert all(0 <= f.at_s - part.start_s <= 180 for part in rounds for f in part.faults)
    assert [part.number for part in rounds] == list(range(len(rounds)))
    assert any(not part.faults for part in cut(one, [])), "a quiet day trains too"


@pytest.mark.parametrize("arrivals", [{"mtbf": "1m"}, {"mtbf": "20m"}, {"trace": ["1m", "2m"]}, {"trace": ["2h"]}])
def test_the_rounds_fill_the_day(tmp_path: Path, arrivals: Any) -> None:
    """Each round begins where the last ended, the last ends with the day, and each trains for its planned length: the
    quiet time after its last fault is part of the day."""
    one = day(tmp_path, arrivals=arrivals, round={"faults": 4, "length": "7m"})
    rounds = cut(one, draw(one, mix_of(one).risks, 5))
    assert [part.start_s for part in rounds] == [0.0, *(part.end_s for part in rounds[:-1])]
    assert rounds[-1].end_s == 3600
    assert all(SHORTEST_S <= part.end_s - part.start_s <= 420 + SHORTEST_S or part.faults for part in rounds)
    for part in rounds:
        wall = scenario_of(one, part, tmp_path, tmp_path)["until"][0]["wall"]
        assert wall == {"longer_than": f"{part.end_s - part.start_s:.3f}s"}


def test_each_round_is_a_scenario_that_can_be_planned(tmp_path: Path) -> None:
    """With the gate, each fault waits for the recovery from the one before; the job's own folder is the day's."""
    one = day(tmp_path, round={"faults": 3, "length": "10m"}, consent=[])
    part = cut(one, draw(one, mix_of(one).risks, 1))[1]
    path = tmp_path / "round.yaml"
    path.write_text(yaml.safe_dump(scenario_of(one, part, tmp_path, tmp_path / "job")))
    plan = make_plan(load_scenario(path), path, 1)
    assert [fault.id for fault in plan.faults] == [fault.id for fault in part.faults]
    first, *later = [fault.trigger for fault in plan.faults]
    assert isinstance(first, After)
    assert first.fault is None
    assert [t.fault for t in later if isinstance(t, After)] == [fault.id for fault in part.faults[:-1]]
    assert plan.job.checkpoints == f"{tmp_path}/job/checkpoints"
    assert {one.name for one in plan.until} == {"recovered", "wall"}
    assert {one.name for one in plan.stop} == {"no_progress"}


@pytest.mark.parametrize(
    ("gpu_mtbf", "gpus", "hours"), [("100000h", 512, 195.3), ("100000h", 16384, 6.1), ("50700h", 16384, 3.1)]
)
def test_a_cluster_fails_as_often_as_all_its_gpus(gpu_mtbf: str, gpus: int, hours: float) -> None:
    """The figures of the literature: of 512 GPUs that each fail once in 100,000 hours, one fails every eight days; and
    the 419 interruptions of Llama 3 in 54 days on 16,384 GPUs are one in 3.1 hours."""
    mean_s = Arrivals.model_validate({"gpu_mtbf": gpu_mtbf, "gpus": gpus}).mean_s
    assert mean_s is not None
    assert mean_s / 3600 == pytest.approx(hours, abs=0.05)


def test_without_the_gate_faults_come_at_their_times(tmp_path: Path) -> None:
    """On purpose: the next one may hit the job while it recovers."""
    one = day(tmp_path, gate="none")
    part = cut(one, draw(one, mix_of(one).risks, 1))[0]
    whens = [fault["when"] for fault in scenario_of(one, part, tmp_path, tmp_path)["faults"]]
    assert [set(when) for when in whens] == [{"time"}] * len(part.faults)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"duraton": "1h"}, "did you mean 'duration'"),
        ({"arrivals": {"mtbf": "1m", "every": "2m"}}, "exactly one"),
        ({"arrivals": {"gpu_mtbf": "50000h"}}, "of so many gpus"),
        ({"arrivals": {"mtbf": "1m", "gpus": 8}}, "of so many gpus"),
        ({"arrivals": {"gpu_mtbf": "50000h", "gpus": 0}}, "gpus"),
        ({"faults": [{"inject": "process.kil", "target": {"rank": 0}}]}, "process.kill"),
        ({"faults": [{"inject": "process.kill"}]}, "target"),
        ({"faults": [{"inject": "process.kill", "target": {"rank": 0}, "weight": 0}]}, "weight"),
        ({"faults": []}, "there are no faults"),
        ({"score": {"ettr": 2}}, "ettr"),
        ({"stop": ["no_progres"]}, "no_progress"),
    ],
)
def test_mistakes_are_said_with_their_place(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    """One line each: file, line, column, what, and what to do."""
    with pytest.raises(UsageError) as told:
        day(tmp_path, **change)
    assert words in str(told.value)
    assert f"{tmp_path}/night.yaml:" in str(told.value)


def test_every_preset_adds_up_to_what_was_published() -> None:
    """The figures of each table, by their sum; and each stand-in is named by some cause."""
    sums = {name: sum(one.count or 0 for one in table.causes) for name, table in presets().tables.items()}
    assert (sums["llama3"], sums["ft-hsdp"]) == (419, 678)
    assert sums["byterobust"] < 100
    named = {one.stands for table in presets().tables.values() for one in table.causes}
    assert set(presets().stand_ins) == named - {None}


@pytest.mark.parametrize("name", presets().tables)
def test_a_preset_draws_what_can_be_done_here_and_lists_the_rest(tmp_path: Path, name: str) -> None:
    """On one machine without links: weights stay, and no cause gets lost."""
    one = day(tmp_path, preset={"name": name}, faults=[])
    mix = mix_of(one)
    table = presets().tables[name]
    assert len(mix.risks) + len(mix.without) == len(table.causes)
    assert not any(risk.inject.startswith("network.") for risk in mix.risks)
    assert all(why for _cause, _weight, why in mix.without)


def test_a_preset_that_is_not_there(tmp_path: Path) -> None:
    """The nearest name, and the weights that it has."""
    with pytest.raises(UsageError, match="did you mean 'llama3'"):
        mix_of(day(tmp_path, preset={"name": "lama3"}))
    with pytest.raises(UsageError, match="no weights by gpu_time"):
        mix_of(day(tmp_path, preset={"name": "llama3", "by": "gpu_time"}, faults=[]))


@pytest.mark.parametrize("path", sorted(Path(str(files("torchaos.scenarios") / "gamedays")).glob("*.yaml")), ids=str)
def test_the_game_days_that_come_with_torchaos_are_well_formed(path: Path) -> None:
    """Each can be drawn, of several kinds of faults."""
    one = load(path)
    assert len({fault.risk.inject for fault in draw(one, mix_of(one).risks, one.seed)}) >= 3
