"""The cache of twins: what may be stored in it, and under which key."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from packing import pack

from torchaos.harness import checkpoints
from torchaos.harness.analysis.verdict import judge
from torchaos.harness.interfaces import Target, UsageError
from torchaos.harness.protocol.agent_plan import Moment
from torchaos.harness.protocol.wire import Kind, Phase
from torchaos.harness.record.plan import After, Named, Plan, PlannedFault, PlannedJob
from torchaos.harness.record.record import Record
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.running.scenario_run import ScenarioRun
from torchaos.harness.running.twin import Twins, fault_free, finished_well, kept_twin_of, last_step_in, unreached
from torchaos.harness.running.twin_key import key_of


def last_step_of(plan: Plan, cache: Path) -> int | None:
    """The last step of the twin in the cache. None if there is no usable twin."""
    twin = kept_twin_of(plan, cache)
    return last_step_in(twin) if twin else None


def plan_of(*command: str, cwd: Path = Path("/")) -> Plan:
    return Plan("x", "", 0, PlannedJob(command, str(cwd), {}, 2, 1, 60.0), (), ())


def leaves(run: Record) -> Callable[[Plan, RunDir], None]:
    """A run of a twin that leaves this record."""

    def execute(plan: Plan, folder: RunDir) -> None:
        plan.write(folder.plan)
        (folder.events / "all.jsonl").write_bytes(b"".join(event.to_line() for event in run.events))

    return execute


def reads(run: Callable[[Plan, RunDir], None], *said: str) -> Callable[[Plan, RunDir], None]:
    """The same, and its rank recorded what it read: letters and paths."""

    def execute(plan: Plan, folder: RunDir) -> None:
        run(plan, folder)
        folder.reads.mkdir()
        (folder.reads / "rank0-a0-p1").write_bytes(b"".join(os.fsencode(one) + b"\0" for one in said))

    return execute


def stopped(run: Record) -> Record:
    end = run.events[-1]
    note = replace(end, kind=Kind.STOPPED, data={"reason": "SIGINT", "interrupted": True})
    return replace(run, events=(*run.events[:-1], note, replace(end, seq=end.seq + 1)))


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


def test_a_twin_that_died_in_the_middle_can_still_be_read(trainer: Any, tmp_path: Path) -> None:
    """Its folder has another name by then, and most of a step is read from its file only when it is asked for."""
    run = trainer().record()
    end = next(event for event in run.events if event.kind is Kind.JOB_EXITED)
    died = replace(end, data={**end.data, "exit_code": 1})
    run = replace(run, events=tuple(died if event is end else event for event in run.events))

    def execute(plan: Plan, folder: RunDir) -> None:
        leaves(run)(plan, folder)
        assert pack(folder.events / "all.jsonl") > 0

    twins = Twins(plan_of("train"), execute, tmp_path / "cache")
    assert not twins.give(0, RunDir(tmp_path / "run").create())
    assert twins.died
    assert twins.failed
    losses = [event.data["losses"] for event in run.of_kind(Kind.STEP)]
    assert [event.data["losses"] for event in twins.failed.of_kind(Kind.STEP)] == losses


def test_a_twin_of_an_older_script_tells_nothing(trainer: Any, tmp_path: Path) -> None:
    """A twin that was made for other assertions is asked only if the job's sources are older than it."""
    to, script = RunDir(tmp_path / "run").create(), tmp_path / "train.py"
    script.write_text("")
    os.utime(script, (0, 0))
    plan, cache = plan_of("python", str(script)), tmp_path / "cache"
    assert Twins(plan, leaves(trainer(steps=30).record()), cache).give(0, to)
    assert last_step_of(replace(plan, hooks=("loss",)), cache) == 30
    os.utime(script)
    assert last_step_of(replace(plan, hooks=("loss",)), cache) is None


def test_the_cache_knows_where_the_job_ends(trainer: Any, tmp_path: Path) -> None:
    """By its twin, while that is of this job as it is: before there is one, and after a file changed, nobody knows."""
    to, read = RunDir(tmp_path / "run").create(), tmp_path / "settings"
    read.write_text("1")
    os.utime(read, (0, 0))
    plan, cache = plan_of("train"), tmp_path / "cache"
    assert last_step_of(plan, cache) is None
    assert Twins(plan, reads(leaves(trainer(steps=30).record()), f"r{read}"), cache).give(0, to)
    assert last_step_of(plan, cache) == 30
    assert last_step_of(replace(plan, hooks=("loss",)), cache) == 30  # made for other assertions
    assert last_step_of(plan_of("train", "--more"), cache) is None
    read.write_text("22")
    assert last_step_of(plan, cache) is None


def test_what_a_killed_harness_left_is_no_hindrance(trainer: Any, tmp_path: Path) -> None:
    """Containers count pids from 1: the next harness may well have the number of the one that was killed."""
    to, plan = RunDir(tmp_path / "run").create(), plan_of("train")
    twins = Twins(plan, leaves(trainer().record()), tmp_path / "cache")
    home = tmp_path / "cache" / "twins" / key_of(twins._plan)
    for name in (f"run-0-{os.getpid()}", f".0-{os.getpid()}", "run-0-1", ".1-1"):
        (home / name / "events").mkdir(parents=True)
    assert twins.give(0, to)
    assert {path.name for path in home.iterdir()} == {"0", "lock", "parts.json"}, (
        "what nobody will ever look at is left"
    )


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
    """Scripts, the packages that they import, modules run by -m, data and settings that the command names."""
    for name in ("train.py", "src/model.py", "package/loop.py", "data/tokens.bin", "config.yaml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("from src import model")
    for number in range(30):  # a virtual environment in the same folder, whose name sorts before all others
        (tmp_path / ".venv" / f"{number}.py").parent.mkdir(exist_ok=True)
        (tmp_path / ".venv" / f"{number}.py").write_text("")
    words = ("train.py",) if "package" not in changed else ("-m", "package.loop")
    plan = plan_of("torchrun", *words, "--data", "data", "--config=config.yaml", cwd=tmp_path)
    before = key_of(plan)
    assert key_of(plan) == before
    (tmp_path / changed).write_text("22")
    assert key_of(plan) != before


def test_a_fault_in_a_collective_needs_no_twin_of_its_own() -> None:
    """The hook by which it lands records nothing, so that the twin of other faults will do. Stamps are a record."""
    plan = replace(plan_of("train"), hooks=("loss", "steps"))
    fault = replace(plan, hooks=("collectives", *plan.hooks))
    stamped = replace(fault, hooks=(*fault.hooks, "stamps"))
    assert fault_free(fault) == fault_free(plan)
    assert {"collectives", "stamps"} <= {*fault_free(stamped).hooks}


UNUSED = ("notes.py", "train-repro.py", "old/experiment.py", "src/unused.py", "README.md")
USED = {
    "model.py": "import model", "layers.py": "from model import (a,\n  layers)", "part.py": "from .part import x",
    "late.py": "if x: import late", "named.py": "importlib.import_module('pkg.named')",
    "pkg/__init__.py": "import pkg.a",
    "tool.py": "run('python tool.py --all')", "json.py": "", "yaml.py": "", "sitecustomize.py": "", "by_env.py": "",
    "by_config.py": "",
}  # fmt: skip


@pytest.mark.parametrize("name", UNUSED)
def test_the_key_is_not_changed_by_a_file_that_nothing_names(tmp_path: Path, name: str) -> None:
    """A note or an experiment beside the script, such as the script that `repro` writes there, is no part of the job:
    neither when it comes nor when it changes, although it names a variable that is set."""
    (tmp_path / "train.py").write_text("import src.model\n")
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "model.py").touch()
    plan = plan_of("torchrun", "train.py", cwd=tmp_path)
    before = key_of(plan)
    for text in ("import train, model", "import os; os.environ['HOME']"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        assert key_of(plan) == before


@pytest.mark.parametrize("name", USED)
def test_the_key_changes_with_a_file_that_would_be_used(tmp_path: Path, name: str) -> None:
    """Also a new one: by any form of import, a text, the environment, a file of settings that the command names,
    through another source; and a file that hides an installed module, or that Python imports by itself."""
    (tmp_path / "train.py").write_text(f"import other\n{USED[name] if name != 'layers.py' else ''}\n")
    (tmp_path / "other.py").write_text(USED["layers.py"] if name == "layers.py" else "")
    (tmp_path / "config.yaml").write_text("model: {_target_: by_config.Model}\n")
    plan = plan_of("torchrun", "train.py", "--config=config.yaml", cwd=tmp_path)
    plan = replace(plan, job=replace(plan.job, env={"MODEL": "by_env:Model"}))
    seen = {key_of(plan)}
    (tmp_path / name).parent.mkdir(exist_ok=True)
    for text in ("", "a = 1"):
        (tmp_path / name).write_text(text)
        seen.add(key_of(plan))
    assert len(seen) == 3


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("model.py", "model.py has changed"), ("config.yaml", "config.yaml has changed"), ("json.py", "json.py is new"),
        ("EPOCHS", "the variable EPOCHS has changed"), ("notes.py", ""), ("hooks", ""), ("command", ""),
    ],
)  # fmt: skip
def test_it_is_said_why_a_twin_is_made_again(
    trainer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, why: str
) -> None:
    """Where the job has changed since its newest twin: in one clause. For assertions that need other data, or another
    job, nothing is made again. No value of a variable is kept."""
    job, told = tmp_path / "job", list[str]()
    job.mkdir()
    (job / "train.py").write_text("import model, os\nos.environ['EPOCHS']\n")
    (job / "model.py").touch()
    (job / "config.yaml").touch()
    monkeypatch.setenv("EPOCHS", "secret-1")
    plan = plan_of("torchrun", "train.py", "--config", "config.yaml", cwd=job)

    def give(to: str, plan: Plan) -> None:
        twins = Twins(plan, leaves(trainer().record()), tmp_path / "cache", tell=told.append)
        assert twins.give(0, RunDir(tmp_path / to).create())

    give("first", plan)
    if name.isupper():
        monkeypatch.setenv(name, "secret-2")
    elif "." in name:
        (job / name).write_text("x = 1")
    else:
        changed = {"hooks": replace(plan, hooks=("steps",)), "command": plan_of("torchrun", "train.py", cwd=job)}
        plan = changed[name]
    give("second", plan)
    assert told == ([f"the twin is made again: {f'job/{why}' if '.' in name else why}"] if why else [])
    parts = [path.read_text() for path in (tmp_path / "cache").rglob("parts.json")]
    assert len(parts) == (1 if name == "notes.py" else 2)
    assert not any("secret" in text for text in parts)


def test_a_variable_that_a_source_reads_which_nothing_names(
    trainer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module that the job found by itself names the variable LAYERS: the twin is stale when that is set."""
    found, told = tmp_path / "plugin.py", list[str]()
    found.write_text("import os\nlayers = os.environ.get('LAYERS', 2)\n")
    os.utime(found, (1e9, 1e9))
    run = reads(leaves(trainer().record()), f"r{found}")
    for name in ("first", "second", "third"):
        twins = Twins(plan_of("train"), run, tmp_path / "cache", tell=told.append)
        assert twins.give(0, RunDir(tmp_path / name).create())
        if name == "second":
            assert not told
            monkeypatch.setenv("LAYERS", "4")
    assert told == ["the twin is made again: the variable LAYERS has changed"]


def test_the_key_changes_with_variables_that_the_sources_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """EPOCHS is read by the script, and OTHER by nobody."""
    (tmp_path / "train.py").write_text("import os\nepochs = int(os.environ.get('EPOCHS', 1))\n")
    plan = plan_of("torchrun", "train.py", cwd=tmp_path)
    before = key_of(plan)
    monkeypatch.setenv("OTHER", "3")
    assert key_of(plan) == before
    monkeypatch.setenv("EPOCHS", "3")
    assert key_of(plan) != before


def test_the_key_changes_with_each_file_that_observes_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with a format of checkpoints, which lies in a folder of its own: it reads the twin's inventory."""
    copied = shutil.copytree(checkpoints.__path__[0], tmp_path / "checkpoints")
    monkeypatch.setattr(checkpoints, "__path__", [str(copied)])
    plan = plan_of("torchrun", "train.py")
    before = key_of(plan)
    with open(copied / "formats" / "safetensors.py", "a") as file:
        file.write("# other\n")
    assert key_of(plan) != before


def test_a_large_file_is_not_read(tmp_path: Path) -> None:
    """A data set of many gigabytes that the command names: its size and time of change must do."""
    with open(tmp_path / "data.bin", "wb") as file:
        file.truncate(1 << 40)  # a hole
    assert key_of(plan_of("torchrun", "data.bin", cwd=tmp_path))


def test_an_interrupt_during_the_twin_is_told(trainer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run itself never began; its verdict says why, also when it is judged again."""
    plan = replace(plan_of("train"), twin={"runs": 3})
    scenario_run = ScenarioRun(plan, RunDir(tmp_path / "run"), b"", [])

    def execute(plan: Plan, folder: RunDir) -> None:
        leaves(stopped(trainer().record()))(plan, folder)
        scenario_run.stop("SIGINT was received")

    monkeypatch.setattr("torchaos.harness.running.twin.user_cache_path", lambda _name: tmp_path / "cache")
    monkeypatch.setattr(scenario_run, "_execute", execute)
    result = scenario_run()
    assert "SIGINT" in result.reason
    assert judge(RunDir(tmp_path / "run")).reason == result.reason


def test_an_interrupt_during_a_further_twin_fails_nothing(
    trainer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run differs from the first twin, and whether twins differ among themselves was never found out."""
    plan = replace(plan_of("train"), twin={"runs": 3})
    folder = RunDir(tmp_path / "run")
    scenario_run = ScenarioRun(plan, folder, b"", [])
    made = count()

    def execute(plan: Plan, where: RunDir) -> None:
        number = next(made)
        run = trainer(noise=float(number + 1)).record()
        leaves(run if number < 2 else stopped(run))(plan, where)
        if number == 2:
            scenario_run.stop("SIGINT was received")

    monkeypatch.setattr("torchaos.harness.running.twin.user_cache_path", lambda _name: tmp_path / "cache")
    monkeypatch.setattr(scenario_run, "_execute", execute)
    result = scenario_run()
    assert next(made) == 3
    assert result.verdict.value == "inconclusive", result
    assert "SIGINT" in result.reason


@pytest.mark.parametrize(("steps", "runs"), [((500,), 1), ((500, 600), 1), ((500, 3), 2), ((31,), 2), ((None,), 2)])
def test_a_run_whose_faults_all_come_after_the_end_is_not_made(
    trainer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: tuple[int | None, ...], runs: int
) -> None:
    """The twin has shown where the job ends; without a fault the run would be the twin once more. A fault in the step
    after the last, 30, comes in the last save."""
    faults = tuple(
        PlannedFault(f"kill-{step}", "process.kill", "rank", Target((0,)), Moment(0, step, None), {}, "", "")
        for step in steps
    )
    scenario_run = ScenarioRun(
        replace(plan_of("train"), twin={"runs": 1}, faults=faults), RunDir(tmp_path / "x"), b"", [],
        places=["x.yaml:9:18", "x.yaml:13:18"],
    )  # fmt: skip
    made = count()

    def execute(plan: Plan, folder: RunDir) -> None:
        next(made)
        leaves(trainer().record())(plan, folder)

    monkeypatch.setattr("torchaos.harness.running.twin.user_cache_path", lambda _name: tmp_path / "cache")
    monkeypatch.setattr(scenario_run, "_execute", execute)
    if runs == 1:
        said = "x.yaml:9:18: kill-500 comes in step 500, and the job ends at step 30, as its twin did; write an earlier"
        with pytest.raises(UsageError, match=said):
            scenario_run()
    else:
        scenario_run()
    assert next(made) == runs


@pytest.mark.parametrize(("step", "runs"), [(500, 1), (3, 2)])
def test_a_job_that_dies_by_itself_before_all_faults_is_not_run_again(
    trainer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, runs: int
) -> None:
    """The twin died of the job's own error; the case that JUnit shows says so, and where the log is."""
    fault = PlannedFault("kill", "process.kill", "rank", Target((0,)), Moment(0, step, None), {}, "", "")
    plan = replace(plan_of("train"), twin={"runs": 1}, faults=(fault,))
    scenario_run, made = ScenarioRun(plan, RunDir(tmp_path / "x"), b"", []), count()

    def execute(plan: Plan, folder: RunDir) -> None:
        next(made)
        run = trainer(steps=6).record()
        events = [
            replace(event, data={**event.data, "exit_code": 1}) if event.kind is Kind.JOB_EXITED else event
            for event in run.events
        ]
        leaves(replace(run, events=tuple(events)))(plan, folder)
        (folder.logs / "job-0.log").write_text("ValueError: the data set ends here\n")

    monkeypatch.setattr("torchaos.harness.running.twin.user_cache_path", lambda _name: tmp_path / "cache")
    monkeypatch.setattr(scenario_run, "_execute", execute)
    result = scenario_run()
    assert next(made) == runs
    assert result.verdict.value == "inconclusive"
    assert "ValueError: the data set ends here" in result.cases[0].reason
    assert runs == 2 or "its files are in" in result.reason


@pytest.mark.parametrize(("step", "runs"), [(500, 1), (3, 2)])
def test_a_job_that_does_not_end_in_time_is_inconclusive(
    trainer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, runs: int
) -> None:
    """The twin runs into its time-out, and so does the run, if there is one: it is not failed for that."""
    fault = PlannedFault("kill", "process.kill", "rank", Target((0,)), Moment(0, step, None), {}, "", "")
    asserts = (Named("completed", {}),)
    plan = replace(plan_of("train"), twin={"runs": 1}, faults=(fault,), asserts=asserts)
    scenario_run, made = ScenarioRun(plan, RunDir(tmp_path / "x"), b"", []), count()

    def execute(plan: Plan, folder: RunDir) -> None:
        next(made)
        run = trainer(steps=6, kills=[(3, 0)] if plan.faults else []).record()
        end = next(event for event in run.events if event.kind is Kind.JOB_EXITED)
        data = {"reason": "it took too long", "interrupted": False, "enough": False, "timed_out": True}
        events = [replace(end, kind=Kind.STOPPED, data=data) if event is end else event for event in run.events]
        leaves(replace(run, events=tuple(events)))(plan, folder)

    monkeypatch.setattr("torchaos.harness.running.twin.user_cache_path", lambda _name: tmp_path / "cache")
    monkeypatch.setattr(scenario_run, "_execute", execute)
    result = scenario_run()
    assert next(made) == runs
    assert result.verdict.value == "inconclusive"
    assert "write a longer job.timeout" in f"{result.reason} {[case.reason for case in result.cases]}"


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """Files of a job, as they were long before it ran."""
    folder = tmp_path / "job"
    for name in ("config.json", "conf/model.yaml", "data/part-0.bin", "log.txt"):
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_text("1")
        os.utime(folder / name, (1e9, 1e9))
    return folder


CHANGES = {
    "config.json": "has changed", "conf/model.yaml": "has changed", "data/part-0.bin": "has changed",
    "local.yaml": "is there now", "data/part-1.bin": "has other files in it", "log.txt": "",
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_twin_is_made_anew_when_what_its_job_read_changed(trainer: Any, tmp_path: Path, old: Path, name: str) -> None:
    """Settings and data that no command names, a file that was looked for and not there, a folder that was listed; and
    not for a file that the job writes itself, or that was only touched."""
    run = leaves(trainer().record())
    read = [f"r{old / one}" for one in ("config.json", "conf/model.yaml", "data/part-0.bin", "local.yaml", "log.txt")]
    made, told = count(), list[str]()

    def execute(plan: Plan, folder: RunDir) -> None:
        next(made)
        reads(run, *read, f"l{old / 'data'}", f"w{old / 'log.txt'}")(plan, folder)

    def give(to: str) -> Twins:
        twins = Twins(plan_of("train"), execute, tmp_path / "cache", tell=told.append)
        assert twins.give(0, RunDir(tmp_path / to).create())
        return twins

    give("first")
    os.utime(old / "config.json")
    first = give("again")
    assert not told
    (old / name).write_text("2")
    if not CHANGES[name]:
        assert first.give(1, RunDir(tmp_path / "further").create())
        return
    assert not first.give(1, RunDir(tmp_path / "further").create()), "two twins of two ages"
    assert CHANGES[name] in first.refused
    assert give("changed").give(1, RunDir(tmp_path / "last").create())
    assert [CHANGES[name] in why for why in told] == [True]
    assert next(made) == 3


def test_a_file_that_changes_while_the_twin_runs(trainer: Any, tmp_path: Path, old: Path) -> None:
    """Whether its job had read it before or after that, nobody knows: the twin is used for this run alone."""
    run, told = reads(leaves(trainer().record()), f"r{old / 'config.json'}"), list[str]()

    def execute(plan: Plan, folder: RunDir) -> None:
        (old / "config.json").write_text("2")
        run(plan, folder)

    for name in ("first", "second"):
        twins = Twins(plan_of("train"), execute, tmp_path / "cache", tell=told.append)
        assert twins.give(0, RunDir(tmp_path / name).create())
    assert "was changed while its job ran" in told[0]


def test_a_twin_whose_reads_were_not_all_recorded_is_not_used_again(trainer: Any, tmp_path: Path) -> None:
    """The hook had failed, or somebody damaged the note of it."""
    run, told = reads(leaves(trainer().record()), "!"), list[str]()
    for name in ("first", "second"):
        twins = Twins(plan_of("train"), run, tmp_path / "cache", tell=told.append)
        assert twins.give(0, RunDir(tmp_path / name).create())
    (twins._home / "0" / "made.json").write_text("{")
    assert twins.give(0, RunDir(tmp_path / "third").create())
    assert [why.partition(": ")[2] for why in told] == ["the files that its job read are not known"] * 2


def ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, makes: Callable[[int], Record], plan: Plan | None = None
) -> tuple[ScenarioRun, Any, int]:
    """A scenario with this cache; `makes` gives the records in order of their making, twins and run alike."""
    made = count()
    plan = plan or replace(plan_of("train"), twin={"runs": 3}, asserts=(Named("loss_continuity", {}),))
    scenario_run = ScenarioRun(plan, RunDir(tmp_path / name), b"", [])
    monkeypatch.setattr("torchaos.harness.running.twin.user_cache_path", lambda _name: tmp_path / "cache")
    monkeypatch.setattr(scenario_run, "_execute", lambda plan, folder: leaves(makes(next(made)))(plan, folder))
    return scenario_run, scenario_run(), next(made)


def test_twins_of_another_job_are_never_mixed_with_new_ones(
    trainer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job was changed, in a way that no file shows: the kept twin is of another seed. It is made anew, once, and
    the run fails for what it lost, as it does with an empty cache."""
    ran(tmp_path, monkeypatch, "first", lambda number: trainer(seed=1).record())

    def later(number: int) -> Record:
        broken: dict[str, Any] = {"kills": [(13, 1)], "broken": frozenset({"momentum"})} if number == 0 else {}
        found: Record = trainer(seed=2, **broken).record()
        return found

    scenario_run, result, made = ran(tmp_path, monkeypatch, "second", later)
    assert made == 3, "the run, a twin, and one more that says that they are all alike"
    assert result.verdict.value == "failed", result
    assert any("this run differs from it before any fault" in note for note in result.notes)
    assert judge(scenario_run.folder).reason == result.reason


def test_noise_is_not_learned_from_twins_of_two_ages(
    trainer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is as the kept twin until a fault; a twin that is made now is not. Which of them is the job's own noise,
    and which is a change, only twins of one age tell."""
    ran(tmp_path, monkeypatch, "first", lambda number: trainer().record())

    def later(number: int) -> Record:
        broken: dict[str, Any] = {"kills": [(13, 1)], "broken": frozenset({"momentum"})} if number == 0 else {}
        found: Record = trainer(**broken, **({"noise": float(number)} if number else {})).record()
        return found

    _, result, made = ran(tmp_path, monkeypatch, "second", later)
    assert made == 5, "the run, a twin of another age than the kept one, and three of one age"
    assert any("a twin that was made now differs from it" in note for note in result.notes)


def test_kept_twins_of_a_noisy_job_are_used_again(
    trainer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It differs from each of them as they do among themselves: no twin is made for that."""
    ran(tmp_path, monkeypatch, "first", lambda number: trainer(noise=1.0 + number).record())
    _, result, made = ran(tmp_path, monkeypatch, "second", lambda number: trainer(noise=9.0).record())
    assert made == 1, result
    assert not result.notes


@pytest.mark.parametrize(
    ("trigger", "said"),
    [
        (Moment(0, 7, Phase.CHECKPOINT_WRITE), "comes in the save of a checkpoint, and the job saves none"),
        (Moment(0, None, Phase.CHECKPOINT_WRITTEN), "comes in the save of a checkpoint, and the job saves none"),
        (After(checkpoints=1), "comes after a checkpoint, and the job saves none"),
        (After(checkpoints=2), "comes after 2 checkpoints, and the job saves none"),
        (Moment(0, 7, Phase.BACKWARD), ""),
        (Moment(0, 7, Phase.BACKWARD, attempt=0), ""),
        (After(5.0), ""),
    ],
)
def test_a_moment_that_the_twin_never_had(trainer: Any, trigger: Moment | After, said: str) -> None:
    """A job that saves nothing has no save in which a fault could come. With saves, or if nobody looked for saves, the
    moment may come."""
    fault = PlannedFault("kill", "process.kill", "rank", Target((0,)), trigger, {}, "", "")
    plan = replace(plan_of("train"), faults=(fault,))

    def twin(every: int, *hooks: str) -> Record:
        run: Record = trainer(every=every).record()
        return replace(run, plan=replace(run.plan, hooks=hooks))

    found = unreached(plan, twin(1000, "checkpoints"))
    assert len(found) == bool(said)
    assert all(said in text for text in found.values())
    assert unreached(plan, twin(5, "checkpoints")) == unreached(plan, twin(1000)) == {}


def test_a_second_twin_says_why_it_is_made(trainer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user sees one more run of the job begin after the run that he asked for, and for what difference. The note is
    of that twin alone."""
    plan = replace(plan_of("train"), twin={"runs": 2})
    scenario_run, made, told = ScenarioRun(plan, RunDir(tmp_path / "run"), b"", []), count(), list[list[str]]()

    def execute(plan: Plan, where: RunDir) -> None:
        told.append([*scenario_run._unsaid])
        leaves(trainer(noise=float(next(made) + 1)).record())(plan, where)

    monkeypatch.setattr("torchaos.harness.running.twin.user_cache_path", lambda _name: tmp_path / "cache")
    monkeypatch.setattr(scenario_run, "_execute", execute)
    result = scenario_run()
    assert told == [[], [], ["the loss of step 1 differs from the twin's: a second twin shows whether that is noise"]]
    assert not any("second twin" in note for note in result.notes)


def test_an_attempt_that_the_twin_never_had(trainer: Any) -> None:
    """Only another fault can restart the job; then the attempt may come."""
    kill = PlannedFault("kill", "process.kill", "rank", Target((0,)), Moment(0, 7, None), {}, "", "")
    later = replace(kill, id="again", trigger=Moment(0, 9, None, attempt=1))
    plan, twin = plan_of("train"), trainer().record()
    said = unreached(replace(plan, faults=(later,)), twin)[0]
    assert said.startswith("again comes in attempt 1, and the job makes only attempt 0, as its twin did; add a fault")
    assert unreached(replace(plan, faults=(kill, later)), twin) == {}
