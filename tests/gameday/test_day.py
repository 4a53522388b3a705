"""A whole game day, with a stand-in for its rounds: what is run, when it ends, and how it is continued."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from torchaos.harness.analysis.verdict import verdict_of
from torchaos.harness.cli import cli
from torchaos.harness.gameday.day import Day, DayRun
from torchaos.harness.gameday.day_grammar import GameDay
from torchaos.harness.gameday.fault_schedule import cut, draw, load, mix_of
from torchaos.harness.interfaces import UsageError
from torchaos.harness.minimize.scenario_shrink import Child, Ran
from torchaos.harness.protocol.wire import Kind
from torchaos.harness.record.plan import Named
from torchaos.harness.record.record import Record
from torchaos.harness.record.result import Result
from torchaos.harness.running.planner import make_plan
from torchaos.harness.scenario.loader import load as load_scenario

FILE: dict[str, Any] = {
    "gameday": "night",
    "job": {"command": "torchrun --nproc-per-node 2 train.py --dir {day}/ckpt", "checkpoints": {"path": "{day}/ckpt"}},
    "duration": "2h",
    "arrivals": {"every": "20m"},
    "round": {"faults": 2, "length": "1h"},
    "faults": [{"inject": "process.kill", "target": {"rank": 1}}],
}
Play = Callable[[dict[str, Any]], Record]


class Played(Child):
    """Leaves what a run of the round would have left, of an ideal trainer; `codes`: with which exit codes."""

    def __init__(self, play: Play, codes: Sequence[int] = ()) -> None:
        super().__init__()
        self._play, self._codes, self.scenarios = play, list(codes), list[dict[str, Any]]()
        self.meanwhile: Callable[[], None] = lambda: None

    def run(
        self, scenario: dict[str, Any], home: Path, seed: int, consent: Sequence[str], fds: Sequence[int] = ()
    ) -> Ran:
        self.scenarios.append(scenario)
        folder = home / "run" / "one"
        (folder / "events").mkdir(parents=True)
        path = home / "scenario.yaml"
        path.write_text(yaml.safe_dump(scenario))
        plan = make_plan(load_scenario(path), path, seed)
        record = self._play(scenario)
        plan = replace(plan, asserts=(Named("recovery_time", {}),))
        plan.write(folder / "plan.json")
        lines = [json.dumps({**asdict(event), "kind": event.kind.value}) for event in record.events]
        (folder / "events" / "all.jsonl").write_text("".join(f"{line}\n" for line in lines))
        (folder / "artifacts").mkdir()
        result: Result = verdict_of(replace(record, plan=plan), [], str(folder))
        self.meanwhile()
        code = self._codes.pop(0) if self._codes else int(result.exit_code)
        return Ran(code, replace(result, exit_code=code))


@pytest.fixture
def recovers(trainer: Any) -> Play:
    """Each fault of the round kills rank 1, and the job comes back."""

    def play(scenario: dict[str, Any]) -> Record:
        names = [fault["id"] for fault in scenario["faults"]]
        run = trainer(steps=60, kills=[(12 + 12 * n, 1) for n in range(len(names))]).record()
        return called(run, iter(names))

    return play


def called(run: Record, names: Iterator[str]) -> Record:
    """With these names for its faults, in order of time."""
    events = [replace(e, data={**e.data, "fault": next(names)}) if e.kind is Kind.APPLYING else e for e in run.events]
    return replace(run, events=tuple(events))


def at(tmp_path: Path, child: Child, keep: bool = False, **more: Any) -> tuple[DayRun, Path]:
    path = tmp_path / "night.yaml"
    path.write_text(yaml.safe_dump({**FILE, **more}))
    day = load(path)
    folder = tmp_path / "day"
    (folder / "job").mkdir(parents=True, exist_ok=True)
    return DayRun(day, planned(day, tmp_path), folder, keep, lambda _text: None, child), folder


def planned(day: GameDay, here: Path) -> Day:
    mix = mix_of(day)
    return Day("night", 1, str(here), (), (), tuple(cut(day, draw(day, mix.risks, 1))), mix.without)


def test_all_rounds_are_run_and_scored(tmp_path: Path, recovers: Play) -> None:
    """Each once, in order, with the faults that were drawn; of what passed only the score is kept."""
    run, folder = at(tmp_path, child := Played(recovers))
    rounds, cut_short = run()
    assert (len(rounds), cut_short) == (3, "")
    assert [len(one["faults"]) for one in child.scenarios] == [2, 2, 1]
    assert {fault.outcome.value for one in rounds for fault in one.faults} == {"recovered"}
    kept = [(folder / "rounds" / f"{n:03d}" / "run" / "one").exists() for n in range(3)]
    assert kept == [one.verdict != "passed" for one in rounds]


def test_it_goes_on_where_it_was_ended(tmp_path: Path, recovers: Play) -> None:
    """What was cut short is done again, what was done is not, and the plan is that of the beginning."""
    run, _ = at(tmp_path, child := Played(recovers))
    child.meanwhile = lambda: child.stop("SIGTERM was received") if len(child.scenarios) == 2 else None
    rounds, cut_short = run()
    assert (len(rounds), cut_short) == (1, "SIGTERM was received")
    again, _ = at(tmp_path, later := Played(recovers))
    rounds, cut_short = again()
    assert (len(rounds), cut_short) == (3, "")
    assert later.scenarios == [child.scenarios[1], *later.scenarios[1:]]


def test_a_day_has_one_runner(tmp_path: Path, recovers: Play) -> None:
    """A second one is refused while the first, or a round of it, is under way."""
    run, _ = at(tmp_path, child := Played(recovers))
    told: list[str] = []

    def another() -> None:
        with pytest.raises(UsageError) as refused:
            at(tmp_path, Played(recovers))[0]()
        told.append(str(refused.value))

    child.meanwhile = another
    run()
    assert "under way" in told[0]


def test_rollback_that_is_incomplete_ends_the_day(tmp_path: Path, recovers: Play) -> None:
    """No other fault is put on a machine that is not as it was."""
    rounds, cut_short = at(tmp_path, Played(recovers, [0, 4]))[0]()
    assert len(rounds) == 2
    assert cut_short.startswith("round 1: ")


def test_a_job_that_gets_stuck_again_and_again_ends_the_day(tmp_path: Path, trainer: Any) -> None:
    """After as many rounds in a row as the file says."""

    def dies(scenario: dict[str, Any]) -> Record:
        run = trainer(kills=[(18, 1)]).record()
        name = scenario["faults"][0]["id"]
        dead = [e for e in run.events if e.attempt in (0, None) and e.kind is not Kind.JOB_EXITED]
        return called(replace(run, events=tuple(dead)), iter([name]))

    rounds, cut_short = at(tmp_path, Played(dies), give_up=2)[0]()
    assert len(rounds) == 2
    assert "stuck in 2 rounds, one after the other" in cut_short


def test_nothing_is_begun_too_late(tmp_path: Path, recovers: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the rounds took longer than planned, faults that can't be over by the end of the day are left out, and the
    last round ends with the day."""
    clock = [0.0]
    monkeypatch.setattr("torchaos.harness.gameday.day.time.monotonic", lambda: clock[0])
    run, _ = at(tmp_path, child := Played(recovers))
    child.meanwhile = lambda: clock.__setitem__(0, clock[0] + 5700)  # of 7200 s
    rounds, cut_short = run()
    assert (len(rounds), cut_short) == (2, "")
    assert [len(one["faults"]) for one in child.scenarios] == [2, 1]
    assert [one["until"][0]["wall"]["longer_than"] for one in child.scenarios] == ["2400.000s", "1500.000s"]


def test_the_time_is_over_before_the_last_round(
    tmp_path: Path, recovers: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the last round has no fault, and the rounds before took all of the time, the day is over, and not cut
    short."""
    clock = [0.0]
    monkeypatch.setattr("torchaos.harness.gameday.day.time.monotonic", lambda: clock[0])
    run, _ = at(tmp_path, child := Played(recovers), arrivals={"trace": ["10m"]})
    child.meanwhile = lambda: clock.__setitem__(0, clock[0] + 7210)  # of 7200 s, of which a round is 3600
    rounds, cut_short = run()
    assert (len(rounds), cut_short) == (1, "")


def test_a_short_day_without_a_fault_trains(tmp_path: Path, recovers: Play) -> None:
    """However short a day is, its first round is run."""
    run, _ = at(tmp_path, Played(recovers), arrivals={"trace": ["1h"]}, duration="30s")
    assert len(run()[0]) == 1


def test_the_plan_survives_the_disk(tmp_path: Path) -> None:
    """day.json holds all that was drawn, and a damaged one is refused."""
    path = tmp_path / "night.yaml"
    path.write_text(yaml.safe_dump({**FILE, "faults": [{"inject": "process.freeze", "target": "all", "for": "2s"}]}))
    plan = planned(load(path), tmp_path)
    (tmp_path / "day.json").write_text(json.dumps(plan.to_json()))
    assert Day.read(tmp_path) == plan
    (tmp_path / "day.json").write_text("{}")
    with pytest.raises(UsageError, match="damaged"):
        Day.read(tmp_path)
    with pytest.raises(UsageError, match="no game day"):
        Day.read(tmp_path / "nowhere")


def test_the_plan_can_be_printed_and_is_the_same_again(tmp_path: Path) -> None:
    """`--plan` twice: the same, and nothing was made."""
    path = tmp_path / "night.yaml"
    path.write_text(yaml.safe_dump(FILE))
    told = [CliRunner().invoke(cli, ["gameday", str(path), "--plan", "--json", "--seed", "9"]) for _ in range(2)]
    assert told[0].output == told[1].output
    assert json.loads(told[0].output)["seed"] == 9
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["night.yaml", "--json"], "write --plan too"),
        (["--resume", "day", "--json"], "write --plan too"),
        (["--resume", "day", "--seed", "3"], "--seed changes nothing in a game day that was begun"),
        (["--resume", "day", "--set", "rest=1s"], "--set changes nothing"),
    ],
)
def test_a_wish_that_would_be_ignored_starts_no_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], says: str
) -> None:
    """Who asks for JSON wants to look, not hours of faults; who changes a day that was begun gets another one than
    written. One sentence, and nothing is started or made."""
    monkeypatch.chdir(tmp_path)
    Path("night.yaml").write_text(yaml.safe_dump(FILE))
    with pytest.raises(UsageError, match=says):
        CliRunner().invoke(cli, ["gameday", *words], catch_exceptions=False)
    assert [path.name for path in tmp_path.iterdir()] == ["night.yaml"]


def test_tables_are_printed_with_their_sources() -> None:
    """Each preset, and what stands for each cause."""
    told = CliRunner().invoke(cli, ["gameday", "--presets"]).output
    assert "2407.21783" in told
    assert "nothing" in told


@pytest.mark.parametrize(
    ("score", "codes", "code", "bad"),
    [
        ({"ettr": 0.01}, [], 0, {}),
        ({"ettr": 1.0}, [], 1, {"ettr": "failure"}),
        ({"ettr": 1.0}, [0, 4], 4, {"ettr": "failure", "rollback": "error", "faults": "error"}),
        ({"ettr": 0.01}, [0, -9], 2, {"rollback": "error", "faults": "error"}),
    ],
)
def test_junit_says_what_the_exit_code_says(
    tmp_path: Path, recovers: Play, monkeypatch: pytest.MonkeyPatch,
    score: dict[str, float], codes: list[int], code: int, bad: dict[str, str],
) -> None:  # fmt: skip
    """A case for the faults, each bound and the rollback; until the day is over each is an error, so that a gate which
    reads the file fails closed."""
    path, junit = tmp_path / "night.yaml", tmp_path / "junit.xml"
    path.write_text(yaml.safe_dump({**FILE, "score": score}))
    before: list[tuple[str, ...]] = []

    def cases() -> dict[str, tuple[str, ...]]:
        return {str(one.get("name")): tuple(part.tag for part in one) for one in ET.parse(junit).iter("testcase")}

    child = Played(recovers, codes)
    child.meanwhile = lambda: before.extend(cases().values())
    monkeypatch.setattr("torchaos.harness.gameday.day.Child", lambda: child)
    done = CliRunner().invoke(cli, ["gameday", str(path), "--out", str(tmp_path / "days"), "--junit", str(junit)])
    assert done.exit_code == code, done.output
    assert before
    assert all("error" in one for one in before)
    found = cases()
    assert set(found) >= {"faults", "ettr", "stuck", "damaged", "rollback"}
    marked = {name: tag for name, tags in found.items() for tag in tags if tag in ("error", "failure")}
    assert {name: tag for name, tag in marked.items() if name != "run"} == bad, done.output


def test_a_junit_file_that_cannot_be_written(tmp_path: Path) -> None:
    """One clear error before anything is done."""
    (tmp_path / "night.yaml").write_text(yaml.safe_dump(FILE))
    given = ["gameday", str(tmp_path / "night.yaml"), "--out", str(tmp_path / "days"), "--junit", str(tmp_path)]
    done = CliRunner().invoke(cli, given)
    assert isinstance(done.exception, UsageError), done.output
    assert "the report can't be written" in str(done.exception)
    assert not (tmp_path / "days").exists()


def test_what_was_never_judged_is_done_again(tmp_path: Path, recovers: Play) -> None:
    """A round whose process was killed says nothing, not even that it took everything back."""
    rounds, cut_short = at(tmp_path, Played(recovers, [0, -9]))[0]()
    assert (len(rounds), rounds[1].exit_code) == (2, -9)
    assert cut_short
    rounds, cut_short = at(tmp_path, later := Played(recovers))[0]()
    assert (len(rounds), cut_short) == (3, "")
    assert len(later.scenarios) == 2


def test_what_could_not_be_taken_back_is_told_though_it_was_stopped(tmp_path: Path, recovers: Play) -> None:
    """A round that was stopped and left something behind is no round to forget."""
    run, _ = at(tmp_path, child := Played(recovers, [4]))
    child.meanwhile = lambda: child.stop("SIGTERM was received")
    rounds, cut_short = run()
    assert ([one.exit_code for one in rounds], bool(cut_short)) == ([4], True)


def test_an_old_junit_file_is_no_answer(tmp_path: Path) -> None:
    """A file of an earlier night is gone, also where this one can't begin; nothing but such a file is touched."""
    night, junit = tmp_path / "night.yaml", tmp_path / "junit.xml"
    night.write_text(yaml.safe_dump({**FILE, "durration": "1h"}))
    for text, stays in (('<?xml version="1.0"?>\n<testsuites tests="1"/>', False), ("gameday: another", True)):
        junit.write_text(text)
        done = CliRunner().invoke(cli, ["gameday", str(night), "--junit", str(junit), "--out", str(tmp_path / "days")])
        assert isinstance(done.exception, UsageError), done.output
        assert junit.exists() == stays
