"""A job that dies before its first step: the reason is its own error, and no further run is made."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from torchaos.harness.analysis.ending import cause_of_end, last_error
from torchaos.harness.analysis.verdict import judge, verdict_of
from torchaos.harness.cli import cli
from torchaos.harness.interfaces import Target, UsageError
from torchaos.harness.protocol.agent_plan import Moment
from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.record.plan import Named, PlannedFault
from torchaos.harness.record.record import Record
from torchaos.harness.record.result import Verdict
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.reporting import result_files
from torchaos.harness.running.launchers.torchrun_line import script_of

RUNS = Path(__file__).parents[1] / "data" / "runs"
LOG = """\
{"name": "torchelastic.worker.status.START", "source": "WORKER"}
python3: can't open file '/job/trian.py': [Errno 2] No such file or directory
python3: can't open file '/job/trian.py': [Errno 2] No such file or directory
E1122 20:29:55 1 torch/elastic/multiprocessing/api.py:1] failed (exitcode: 2) local_rank: 0 (pid: 5) of binary: python3
Traceback (most recent call last):
  File "torchrun", line 8, in <module>
"""
SCENARIO = """\
scenario: typo
job:
  command: {command}
faults:
  - inject: process.kill
    target: {{rank: 1}}
    when: {{step: 18, phase: backward}}
assert: [completed]
"""


def test_the_reason_is_what_the_job_said(tmp_path: Path) -> None:
    """The exit code of the rank, and the end of the log without torchrun's own lines, each line once."""
    run = RunDir(Path(shutil.copytree(RUNS / "no-such-script", tmp_path / "run")))
    run.logs.mkdir()
    (run.logs / "job-0.log").write_text(LOG)
    result = judge(run)
    assert result.verdict is Verdict.INCONCLUSIVE
    assert result.reason == (
        "the job died before its first step was seen (exit code 2); its log ends with: python3: can't open file "
        "'/job/trian.py': [Errno 2] No such file or directory"
    )


def test_an_error_that_follows_from_the_death_of_another_rank_is_not_quoted(tmp_path: Path) -> None:
    """Of several errors in the log, the last one counts that says more than that another rank is gone."""
    run = RunDir(Path(shutil.copytree(RUNS / "no-such-script", tmp_path / "run")))
    run.logs.mkdir()
    lost = "RuntimeError: [tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:44699."
    (run.logs / "job-0.log").write_text(f"[rank0]: RuntimeError: invalid file name: .new\n[rank1]: {lost}\n{LOG}")
    assert judge(run).reason.endswith("its log ends with: RuntimeError: invalid file name: .new")


def test_a_job_that_made_steps_keeps_its_reason() -> None:
    """A job that died later is judged by what it did."""
    assert "first step" not in judge(RunDir(RUNS / "stale-store")).reason


OWN = """\
step 6 loss 0.5
Traceback (most recent call last):
  File "/job/train.py", line 9, in <module>
    raise RuntimeError("the data set ends here")
RuntimeError: the data set ends here
[rank0]:[W] a process group was not destroyed
E1122 20:29:55 1 torch/elastic/multiprocessing/api.py:1] failed (exitcode: 1) local_rank: 0 (pid: 5) of binary: python3
"""


def failing(run: Record, late: int) -> Record:
    """The same run, in which the job ended with exit code 1 and this log. `late`: the step of its fault."""
    fault = PlannedFault("kill", "process.kill", "rank", Target((1,)), Moment(0, late, None), {}, "", "")
    plan = replace(run.plan, faults=(fault,), asserts=(Named("completed", {}),))
    events = [
        replace(event, data={**event.data, "exit_code": 1}) if event.kind is Kind.JOB_EXITED else event
        for event in run.events
    ]
    return replace(run, plan=plan, events=tuple(events), log_end=tuple(OWN.splitlines()))


def test_a_job_that_dies_later_by_itself_shows_its_own_error(trainer: Any) -> None:
    """Before any fault: the error comes first, in the verdict's reason and in the case that JUnit and pytest show, and
    what other lines say after the error is left out. The verdict is what it was."""
    result = verdict_of(failing(trainer(steps=6).record(), 500), (), "/run")
    assert result.verdict is Verdict.INCONCLUSIVE
    case = next(case for case in result.cases if case.name == result.decided_by)
    for text in (result.reason, case.reason, result_files.text([result])):
        assert "the job died by itself after step 6, before any fault (exit code 1)" in text
        assert "RuntimeError: the data set ends here" in text
        assert "process group" not in text


def test_the_rank_that_failed_first_is_named(trainer: Any) -> None:
    """If the launcher ended the other ranks, their exit codes are its own doing."""
    run = failing(trainer(steps=6).record(), 500)
    pids = {rank: process.pid for rank, process in run.history.attempts[0].ranks.items()}
    end = next(event for event in run.events if event.kind is Kind.JOB_EXITED)
    events = [event for event in run.events if event.kind is not Kind.RANK_EXITED]
    for rank, code in ((0, -15), (1, -11)):
        data = {"pid": pids[rank], "start_ticks": None, "exit_code": code}
        at_s = end.mono_s - 0.1 + rank / 100
        events.append(replace(end, kind=Kind.RANK_EXITED, rank=rank, attempt=0, mono_s=at_s, data=data))
    run = replace(run, events=tuple(sorted(events, key=lambda event: event.mono_s)))
    assert "before any fault (rank 1 failed first: exit code -11)" in verdict_of(run, (), "/run").reason


def test_ranks_that_die_of_the_same_error_show_it_once(trainer: Any) -> None:
    """Torch writes the rank before each line of a traceback."""
    lines = [f"[rank{rank}]: {line}" for rank in (0, 1) for line in OWN.splitlines()[1:5]]
    reason = verdict_of(replace(failing(trainer(steps=6).record(), 500), log_end=tuple(lines)), (), "/run").reason
    assert reason.endswith("| RuntimeError: the data set ends here")
    assert reason.count("RuntimeError: the data") == 1


def test_the_first_attempt_s_error_is_the_job_s_own(trainer: Any) -> None:
    """What later attempts die of may follow from it, such as an address that an earlier attempt left behind."""
    run = failing(trainer(steps=6).record(), 500)
    later = "RuntimeError: Gloo connectFullMesh failed\nE1122 20:29:58 api.py:1] failed (exitcode: 1) local_rank: 0\n"
    reason = verdict_of(replace(run, log_end=tuple((OWN + later).splitlines())), (), "/run").reason
    assert "RuntimeError: the data set ends here" in reason
    assert "Gloo" not in reason


def test_the_first_attempt_s_error_is_read_behind_long_tracebacks_of_later_ones(tmp_path: Path) -> None:
    """Three restarts of eight ranks write more than a hundred kilobytes after it."""
    run = RunDir(Path(shutil.copytree(RUNS / "no-such-script", tmp_path / "run")))
    run.logs.mkdir()
    later = "".join(f'  File "torch/distributed/frame_{number}.py", line 9, in _new_group\n' for number in range(600))
    later += "RuntimeError: Gloo connectFullMesh failed\nE1122 20:29:58 api.py:1] failed (exitcode: 1) local_rank: 0\n"
    (run.logs / "job-0.log").write_text(OWN + 3 * later)
    assert judge(run).reason.endswith("| RuntimeError: the data set ends here")


@pytest.mark.parametrize(("own", "saves"), [(False, False), (True, False), (False, True)])
def test_a_checkpoint_of_an_earlier_run(trainer: Any, own: bool, saves: bool) -> None:
    """A job that loads one and has nothing left to do: the reason says so, unless the run's folder is its own, or the
    file may be the run's."""
    run = failing(trainer(steps=6).record(), 500)
    job = replace(run.plan.job, command=("torchrun", "train.py", *(["--out={run}"] if own else [])))
    begun, ended = run.events[0], run.events[-1]
    loaded = {"path": "/out/step-40", "format": "dcp", "ok": True, "numbers": {}}
    saved = replace(begun, kind=Kind.SAVE_BEGIN, rank=0, data={"path": "/out/step-40", "format": "dcp"})
    load = replace(begun, kind=Kind.LOAD_END, rank=0, attempt=0, step=0, data=loaded)
    missed = replace(ended, kind=Kind.MISSED, data={"fault": "kill", "reason": "it ended first", "ended_before": True})
    events = (begun, *([saved] if saves else []), load, missed, replace(ended, data={**ended.data, "exit_code": 0}))
    reason = verdict_of(replace(run, plan=replace(run.plan, job=job), events=events, log_end=()), (), "/run").reason
    said = "the job loaded step-40, which this run had not saved, and no optimizer step followed"
    other = "no optimizer step was seen, and no line of the log shows one"
    assert (said in reason, other in reason) == ((False, True) if own or saves else (True, False))


def test_a_job_that_does_not_end_well_after_a_fault_shows_its_last_error(trainer: Any) -> None:
    """The verdict is about the fault, and the job's error stands behind it; a job that wrote none says none."""
    run = failing(trainer(kills=[(18, 1)]).record(), 18)
    result = verdict_of(run, (), "/run")
    assert result.verdict is Verdict.FAILED
    assert result.reason.endswith("; the job's last error: RuntimeError: the data set ends here")
    assert "last error" not in verdict_of(replace(run, log_end=("step 6 loss 0.5",)), (), "/run").reason


@pytest.mark.parametrize("first", [True, False])
def test_the_last_error_is_not_that_another_rank_is_gone(trainer: Any, first: bool) -> None:
    """The rank that failed says why, and its peer only that the connection is closed, before or after it. If there is
    no other error, that is named."""
    run = failing(trainer(kills=[(18, 1)]).record(), 18)
    gone = "[rank0]: RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:20681"
    lines = [
        "[rank1]:   File 'x', line 3",
        "[rank1]: EOFError",
        *(f"[rank0]: line {number}" for number in range(9)),
        gone,
    ]
    log = tuple(lines if first else [lines[-1], *lines[:-1]])
    assert verdict_of(replace(run, log_end=log), (), "/run").reason.endswith("; the job's last error: EOFError")
    alone = verdict_of(replace(run, log_end=(gone,)), (), "/run").reason
    assert "the job's last error: RuntimeError: [pair.cc:553] Connection closed by peer" in alone


NO_MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
GONE = "[rank0]: RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer"
OWN_ERROR = "[default1]:[rank1]: ValueError: optimizer state has 3 groups, and the file has 2"


@pytest.mark.parametrize(
    ("causes", "log", "named"),
    [
        ([("cuda-out-of-memory", 0.1)], (NO_MEMORY,), "cuda-out-of-memory"),
        ([("cuda-out-of-memory", 0.1)], (NO_MEMORY, "the batch is halved", OWN_ERROR), ""),
        ([("cuda-out-of-memory", 0.1)], (OWN_ERROR, NO_MEMORY), "cuda-out-of-memory"),
        ([("peer-gone", 0.1)], (OWN_ERROR, GONE), ""),
        ([("peer-gone", 0.1)], (GONE, OWN_ERROR), ""),
        ([("peer-gone", 0.1)], (GONE,), "peer-gone"),
        ([("cuda-out-of-memory", 0.1), ("peer-gone", 0.2)], (NO_MEMORY, GONE), "cuda-out-of-memory"),
        ([("cuda-out-of-memory", -60.0)], (NO_MEMORY,), ""),
        ([("cuda-out-of-memory", -60.0), ("gloo-timeout", 0.1)], (), "gloo-timeout"),
        ([], (OWN_ERROR,), ""),
    ],
)
def test_the_last_error_before_the_end_counts(
    trainer: Any, causes: list[tuple[str, float]], log: tuple[str, ...], named: str
) -> None:
    """A known failure that the job survived, by steps that followed or by another error that did, is not that of its
    end; nor is the end of a peer, if a rank says why it ended. Seconds count from the last step."""
    run = failing(trainer(kills=[(18, 1)]).record(), 18)
    end_s = max(event.mono_s for event in run.events if event.kind is Kind.STEP)
    lines = [
        Event(
            Kind.LOG_CAUSE, "harness", 9_000 + number, 0.0, end_s + after, None, 1, None, {"cause": name, "line": "x"}
        )
        for number, (name, after) in enumerate(causes)
    ]
    events = tuple(sorted((*run.events, *lines), key=lambda event: event.mono_s))
    assert cause_of_end(replace(run, events=events, log_end=log), 1) == named


def test_a_long_error_keeps_its_end(trainer: Any) -> None:
    """A long path is cut between two of its parts, and the part that says which checkpoint it is stays."""
    folder = "/".join(f"folder-{number}" for number in range(40))
    line = f"[rank0]: FileNotFoundError: [Errno 2] No such file or directory: '/{folder}/step-10/model.pt'"
    said = last_error(replace(failing(trainer(kills=[(18, 1)]).record(), 18), log_end=(line,)))
    assert said.startswith(
        "; the job's last error: FileNotFoundError: [Errno 2] No such file or directory: '/folder-0/"
    )
    assert said.endswith("/folder-39/step-10/model.pt'")
    assert all(part in line for part in said.partition("error: ")[2].split(" ... "))
    assert len(said) < 240


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("torchrun --nproc-per-node 2 trian.py", r":3:12: \S+/trian.py: there is no such file"),
        ("accelerate launch train.py", ":3:12: how many ranks the job has can't be read"),
    ],
)
def test_a_plan_names_the_place(tmp_path: Path, command: str, says: str) -> None:
    """A script that is not there, and a command that names no number of ranks, are refused before anything is run."""
    file = tmp_path / "typo.yaml"
    command = command.replace("accelerate", "true")
    file.write_text(SCENARIO.format(command=command))
    with pytest.raises(UsageError, match=says):
        CliRunner().invoke(cli, ["plan", str(file)], catch_exceptions=False)


def test_the_launcher_is_named_before_the_target(tmp_path: Path) -> None:
    """A network fault at a rank of a local job: a node as the target would not help, another launcher does."""
    (tmp_path / "train.py").touch()
    file = tmp_path / "cut.yaml"
    text = SCENARIO.format(command="torchrun --nproc-per-node 2 train.py").replace("process.kill", "network.partition")
    file.write_text(text)
    with pytest.raises(UsageError, match="launcher"):
        CliRunner().invoke(cli, ["plan", str(file)], catch_exceptions=False)


def test_which_word_is_the_script() -> None:
    """Of torchrun and of Python; a module and a shell's line name none that can be looked for."""
    assert script_of(["torchrun", "--nproc-per-node", "2", "train.py", "--config", "x.py"]) == "train.py"
    assert script_of(["python", "-m", "torch.distributed.run", "train.py"]) == "train.py"
    assert script_of(["/usr/bin/python3", "train.py"]) == "train.py"
    assert script_of(["torchrun", "-m", "package.train", "x.py"]) is None
    assert script_of(["bash", "-c", "torchrun train.py"]) is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("gameday: night\nround: {faults: 3}\n", ":1:1: this is a game day; use `torchaos gameday FILE`"),
        ("gate: nightly\nwaivers: []\n", ":1:1: this is a gate; use `torchaos gate FILE`"),
        (SCENARIO.format(command="torchrun x.py").replace("18", "0"), "step is at least 1, not 0"),
    ],
)
def test_a_file_that_is_no_scenario_is_told_in_one_line(tmp_path: Path, text: str, says: str) -> None:
    """A game day, a gate, and a step that there is not: one line of our own words each."""
    file = tmp_path / "night.yaml"
    file.write_text(text)
    with pytest.raises(UsageError, match=says) as told:
        CliRunner().invoke(cli, ["plan", str(file)], catch_exceptions=False)
    assert len(str(told.value).splitlines()) == 1
