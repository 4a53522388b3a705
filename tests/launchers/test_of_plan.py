"""Makes the job of a plan."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from torchaos.harness.interfaces import UsageError
from torchaos.harness.protocol.wire import Kind
from torchaos.harness.record.events.journal import Journal
from torchaos.harness.record.plan import Plan, PlannedJob
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.running.launchers.job import BOOTSTRAP
from torchaos.harness.running.launchers.job_factory import job_for

SAY = "import json, os, sys; json.dump([sys.argv[1:], os.getcwd(), dict(os.environ)], open(sys.argv[1], 'w'))"


def plan(code: str, *arguments: str, cwd: Path, log: Mapping[str, Any] | None = None, **job: Any) -> Plan:
    command = (sys.executable, "-S", "-c", code, *arguments)
    planned = PlannedJob(command, str(cwd), {"OUT": "{run}/out"}, 2, 1, 60.0, log=log, **job)
    return Plan("test", "", 1, planned, (), ())


def test_the_command_runs_as_it_was_written(tmp_path: Path) -> None:
    """Argument list and working directory are the user's, with `{run}` filled in; the environment has our marks."""
    folder = RunDir(tmp_path / "run").create()
    journal = Journal(folder.events)
    job = job_for(plan(SAY, "{run}/said", "a b", cwd=tmp_path), folder, "the-run", journal)
    job.start()
    assert job.wait(300) == 0
    job.stop()
    journal.close()
    arguments, cwd, env = json.loads((folder.job / "said").read_text())
    assert (arguments, cwd) == ([str(folder.job / "said"), "a b"], str(tmp_path))
    assert (env["OUT"], env["TORCHAOS_RUN_ID"]) == (str(folder.job / "out"), "the-run")
    assert env["TORCHAOS_PLAN"] == str(folder.agent_plan)
    assert env["PYTHONPATH"].split(os.pathsep)[0] == str(BOOTSTRAP)
    assert (folder.logs / "job-0.log").exists()


def test_lightnings_file_is_followed(tmp_path: Path) -> None:
    """With `format: lightning` the steps come from metrics.csv below lightning_logs in the working directory."""
    folder = RunDir(tmp_path / "run").create()
    journal = Journal(folder.events)
    code = (
        "import os; os.makedirs('lightning_logs/version_0');"
        "open('lightning_logs/version_0/metrics.csv', 'w').write('epoch,step,train_loss\\n0,4,6.5\\n')"
    )
    job = job_for(plan(code, cwd=tmp_path, log={"format": "lightning"}), folder, "the-run", journal)
    job.start()
    assert job.wait(300) == 0
    job.stop()
    journal.close()
    steps = [event for event in journal.snapshot() if event.kind is Kind.LOG_STEP]
    assert [(one.attempt, one.data["step"], one.data["loss"], one.data["adapter"]) for one in steps] == [
        (0, 4, 6.5, "lightning")
    ]


@pytest.mark.parametrize(
    ("job", "message"),
    [
        ({"log": {"format": "megatrom"}}, "no log format"),
        ({"attach_pid": os.getpid()}, "no torchelastic agent"),
        ({"attach_pid": 2**22 + 1}, "there is no such process"),
    ],
)
def test_what_can_not_be_is_refused(tmp_path: Path, job: dict[str, Any], message: str) -> None:
    """An unknown log format and a process that is no torchrun are refused before anything starts."""
    folder = RunDir(tmp_path / "run").create()
    journal = Journal(folder.events)
    with pytest.raises(UsageError, match=message):
        job_for(plan(SAY, cwd=tmp_path, **job), folder, "the-run", journal)
    journal.close()


def test_each_replica_is_a_command_of_its_own(tmp_path: Path) -> None:
    """Two commands run side by side, each told which replica it is, with a rendezvous and a log of its own; the job
    ends when both have, and with an error where one does."""
    folder = RunDir(tmp_path / "run").create()
    journal = Journal(folder.events)
    code = SAY.replace("sys.argv[1],", "sys.argv[1] + os.environ['REPLICA_GROUP_ID'],")
    code += "; print('RuntimeError: Connection closed by peer'); sys.exit(os.environ['REPLICA_GROUP_ID'] == '1' and 3)"
    two = plan(code, "{run}/said", cwd=tmp_path, replicas=2)
    job = job_for(two, folder, "the-run", journal)
    job.start()
    assert job.wait(300) == 3
    job.stop()
    for number in (0, 1):
        _arguments, _cwd, env = json.loads((folder.job / f"said{number}").read_text())
        assert (env["REPLICA_GROUP_ID"], env["NUM_REPLICA_GROUPS"]) == (str(number), "2")
        assert (env["TORCHAOS_REPLICA"], env["PET_RDZV_ENDPOINT"]) == (str(number), "localhost:0")
    exits = [event.data for event in journal.snapshot() if event.kind is Kind.NODE_EXITED]
    assert sorted((data["node"], data["exit_code"]) for data in exits) == [(0, 0), (1, 3)]
    causes = [event.data["replica"] for event in journal.snapshot() if event.kind is Kind.LOG_CAUSE]
    assert sorted(causes) == [0, 1]
    assert {path.name for path in folder.logs.iterdir()} == {"job-0.log", "job-0.node1.log"}
    journal.close()
