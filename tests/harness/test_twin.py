"""The cache of twins: what may be kept in it, and what it is kept under."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from torchaos.harness.agent.wire import Kind
from torchaos.harness.engine.scenario_run import ScenarioRun
from torchaos.harness.engine.twin import Twins, finished_well
from torchaos.harness.engine.twin_key import key_of
from torchaos.harness.judging.verdict import judge
from torchaos.harness.plan import Plan, PlannedJob
from torchaos.harness.record import Record
from torchaos.harness.rundir import RunDir


def plan_of(*command: str, cwd: Path = Path("/")) -> Plan:
    return Plan("x", "", 0, PlannedJob(command, str(cwd), {}, 2, 1, 60.0), (), ())


def leaves(run: Record) -> Callable[[Plan, RunDir], None]:
    """A run of a twin that leaves this record."""

    def execute(plan: Plan, folder: RunDir) -> None:
        plan.write(folder.plan)
        (folder.events / "all.jsonl").write_bytes(b"".join(event.to_line() for event in run.events))

    return execute


def stopped(run: Record) -> Record:
    end = run.events[-1]
    note = replace(end, kind=Kind.STOPPED, seq=end.seq - 1, data={"reason": "SIGINT", "interrupted": True})
    return replace(run, events=(*run.events[:-1], note, end))


def test_a_twin_that_was_ended_early_is_not_kept(trainer: Any, tmp_path: Path) -> None:
    """A job that saves on SIGTERM and ends with exit code 0 looks whole, and lacks its last steps."""
    run, to = trainer().record(), RunDir(tmp_path / "run").create()
    cut = stopped(run)
    assert finished_well(run)
    assert not finished_well(cut)
    plan = plan_of("train")
    assert not Twins(plan, leaves(cut), tmp_path / "cache").give(0, to)
    assert Twins(plan, leaves(run), tmp_path / "cache").give(0, to)
    assert (to.twins / "0" / "plan.json").is_file()


def test_what_a_killed_harness_left_is_no_hindrance(trainer: Any, tmp_path: Path) -> None:
    """Containers count pids from 1: the next harness may well have the number of the one that was killed."""
    to, plan = RunDir(tmp_path / "run").create(), plan_of("train")
    twins = Twins(plan, leaves(trainer().record()), tmp_path / "cache")
    home = tmp_path / "cache" / "twins" / key_of(twins._plan)
    for name in (f"run-0-{os.getpid()}", f".0-{os.getpid()}", "run-0-1", ".1-1"):
        (home / name / "events").mkdir(parents=True)
    assert twins.give(0, to)
    assert {path.name for path in home.iterdir()} == {"0", "lock"}, "what nobody will ever look at is left"


def test_waiting_for_another_run_can_be_given_up(trainer: Any, tmp_path: Path) -> None:
    """Ctrl-C while another run makes the twin: nobody waits for its end."""
    to, plan = RunDir(tmp_path / "run").create(), plan_of("train")
    asked = count()
    twins = Twins(plan, leaves(trainer().record()), tmp_path / "cache", lambda: next(asked) > 0)
    home = tmp_path / "cache" / "twins" / key_of(twins._plan)
    home.mkdir(parents=True)
    with open(home / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert not twins.give(0, to)


@pytest.mark.parametrize("changed", ["train.py", "src/model.py", "package/loop.py", "data/tokens.bin", "config.yaml"])
def test_the_key_changes_with_what_the_job_reads(tmp_path: Path, changed: str) -> None:
    """Scripts, the packages beside them, modules run by -m, data and settings that the command names."""
    for name in ("train.py", "src/model.py", "package/loop.py", "data/tokens.bin", "config.yaml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("1")
    for number in range(30):  # a virtual environment in the same folder, whose name sorts before all others
        (tmp_path / ".venv" / f"{number}.py").parent.mkdir(exist_ok=True)
        (tmp_path / ".venv" / f"{number}.py").write_text("")
    words = ("train.py",) if "package" not in changed else ("-m", "package.loop")
    plan = plan_of("torchrun", *words, "--data", "data", "--config=config.yaml", cwd=tmp_path)
    before = key_of(plan)
    assert key_of(plan) == before
    (tmp_path / changed).write_text("22")
    assert key_of(plan) != before


def test_the_key_changes_with_variables_that_the_sources_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """EPOCHS is read by the script, and OTHER by nobody."""
    (tmp_path / "train.py").write_text("import os\nepochs = int(os.environ.get('EPOCHS', 1))\n")
    plan = plan_of("torchrun", "train.py", cwd=tmp_path)
    before = key_of(plan)
    monkeypatch.setenv("OTHER", "3")
    assert key_of(plan) == before
    monkeypatch.setenv("EPOCHS", "3")
    assert key_of(plan) != before


def test_a_large_file_is_not_read(tmp_path: Path) -> None:
    """A data set of many gigabytes that the command names: its size and time of change must do."""
    with open(tmp_path / "data.bin", "wb") as file:
        file.truncate(1 << 40)  # a hole
    assert key_of(plan_of("torchrun", "data.bin", cwd=tmp_path))


def test_an_interrupt_during_the_twin_is_told(trainer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run itself never began; its verdict says why, also when it is judged again."""
    source = tmp_path / "scenario.yaml"
    source.write_text("")
    plan = replace(plan_of("train"), twin={"runs": 3})
    scenario_run = ScenarioRun(plan, RunDir(tmp_path / "run"), source, [])

    def execute(plan: Plan, folder: RunDir) -> None:
        leaves(stopped(trainer().record()))(plan, folder)
        scenario_run.stop("SIGINT was received")

    monkeypatch.setattr("torchaos.harness.engine.twin.user_cache_path", lambda _name: tmp_path / "cache")
    monkeypatch.setattr(scenario_run, "_execute", execute)
    result = scenario_run()
    assert "SIGINT" in result.reason
    assert judge(RunDir(tmp_path / "run")).reason == result.reason


def test_an_interrupt_during_a_further_twin_fails_nothing(
    trainer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run differs from the first twin, and whether twins differ among themselves was never found out."""
    source = tmp_path / "scenario.yaml"
    source.write_text("")
    plan = replace(plan_of("train"), twin={"runs": 3})
    folder = RunDir(tmp_path / "run")
    scenario_run = ScenarioRun(plan, folder, source, [])
    made = count()

    def execute(plan: Plan, where: RunDir) -> None:
        number = next(made)
        run = trainer(noise=float(number + 1)).record()
        leaves(run if number < 2 else stopped(run))(plan, where)
        if number == 2:
            scenario_run.stop("SIGINT was received")

    monkeypatch.setattr("torchaos.harness.engine.twin.user_cache_path", lambda _name: tmp_path / "cache")
    monkeypatch.setattr(scenario_run, "_execute", execute)
    result = scenario_run()
    assert next(made) == 3
    assert result.verdict.value == "inconclusive", result
    assert "SIGINT" in result.reason
