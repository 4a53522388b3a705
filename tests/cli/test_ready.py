"""Ready scenarios by name, against the user's own job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from torchaos.harness import registry
from torchaos.harness.cli import cli
from torchaos.harness.cli.run import run
from torchaos.harness.interfaces import UsageError
from torchaos.harness.record.redaction import mask
from torchaos.harness.running import planner
from torchaos.harness.running.planner.fault_plans import OWN_STORE
from torchaos.harness.scenario.loader import job_in, job_of, load, text_of
from torchaos.harness.scenario.yaml_source import parse

MINE = ["torchrun", "--nproc-per-node", "2", "--max-restarts", "3", "train.py", "--out={run}/ck"]
JOB = """\
# a scenario of the user
scenario: mine
job:
  command: torchrun --nproc-per-node 2 --max-restarts 3 train.py --out {run}/ck
  checkpoints: {path: "{run}/ck"}
  timeout: 42s
assert: [completed]
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").touch()
    (tmp_path / "mine.yaml").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def planned(*words: str) -> dict[str, Any]:
    done = CliRunner().invoke(cli, ["plan", "--json", *words], catch_exceptions=False)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_ready_scenario_runs_against_a_command_line(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault is the scenario's and the job is the user's, in the current folder; its checkpoints are below {run}."""
    monkeypatch.setenv(OWN_STORE, "1")
    plan = planned("process/kill-rank", "--", *MINE)
    assert plan["faults"][0]["inject"] == "process.kill"
    assert plan["job"]["command"][1:] == MINE[1:]
    assert (plan["job"]["cwd"], plan["job"]["checkpoints"], plan["job"]["env"]) == (str(project), "{run}/ck", {})
    assert plan["warnings"] == []


def test_a_ready_scenario_runs_against_the_job_of_a_file(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any scenario's job will do; its folder is where the job's paths begin."""
    (project / "elsewhere").mkdir()
    monkeypatch.chdir(project / "elsewhere")
    job = planned("process/kill-rank", "--job", "../mine.yaml", "--set", "job.env.A=b")["job"]
    assert (job["timeout_s"], job["checkpoints"], job["env"]) == (42, "{run}/ck", {"A": "b"})
    assert Path(job["cwd"]).resolve() == project


def test_what_the_scheduler_does_stays_in_the_scenario(project: Path) -> None:
    """A fault that ends torchrun itself needs somebody who starts it again."""
    assert planned("process/kill-agent", "--", *MINE)["job"]["resubmit_times"] == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["kill-rank"], "no such file, and no ready scenario of this name; did you mean process/kill-rank?"),
        (["process/kill-rnak"], "did you mean process/kill-rank"),
        (["what/ever"], "`torchaos list scenarios` shows the ready ones"),
        (["proxy/s3-slow", "--", *MINE], "s3-slow.yaml:4:12: this scenario needs its own job"),
        (["gpu/xid-79", "--", *MINE], "needs its own job"),
        (["process/kill-rank", "--job", "mine.yaml", "--", *MINE], "the job is given twice"),
        (["process/kill-rank", "--job", "none.yaml"], "none.yaml:2:1: there is no job here; write `job:`"),
        (["process/kill-rank", "--job", "bad.yaml"], "bad.yaml:3:3: unknown key 'comand'; did you mean 'command'?"),
        (["process/kill-rank", "--", *MINE[:-1], "{rnu}"], "the command line: unknown placeholder {rnu}"),
        (["process/kill-rank", "--", *MINE[:-2], "trian.py"], "trian.py: there is no such file"),
    ],
)  # fmt: skip
def test_what_is_refused(project: Path, words: list[str], said: str) -> None:
    """In one line that says where, what, and what to do, before anything starts."""
    (project / "none.yaml").write_text("# no job\nscenario: x\n")
    (project / "bad.yaml").write_text("job:\n  command: torchrun train.py\n  comand: x\n")
    with pytest.raises(UsageError) as error:
        CliRunner().invoke(cli, ["plan", *words], catch_exceptions=False)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_the_run_directory_keeps_the_scenario_with_the_job(project: Path) -> None:
    """It can be run again from there, and a gate never takes it for a run of the file alone."""
    file = registry.scenarios_folder() / "process/kill-rank.yaml"
    assert text_of(file, None) == file.read_bytes()
    for job in (job_of(MINE), job_in(project / "mine.yaml")):
        kept = yaml.safe_load(text_of(file, job))
        assert kept["faults"] == yaml.safe_load(file.read_text())["faults"]
        assert kept["job"]["cwd"] == str(project)
        assert "train.py" in str(kept["job"]["command"])
        assert parse(file, text_of(file, job).decode()).data == kept


def test_the_kept_job_names_no_file_relative_to_its_own(project: Path) -> None:
    """Its folder is not that of the run: {here}, the manifest of pods and mounts are written out; the folder in the
    pods is not made up."""
    job = {
        "command": "torchrun {here}/train.py", "env": {"A": "{{here}}{here}/a", "B": "{run}"},
        "pods": {"manifest": "pods.yaml"}, "container": {"image": "host", "mounts": ["data:/data"]},
    }  # fmt: skip
    (project / "pods-job.yaml").write_text(yaml.safe_dump({"job": job}))
    kept = yaml.safe_load(
        text_of(registry.scenarios_folder() / "process/kill-rank.yaml", job_in(project / "pods-job.yaml"))
    )["job"]
    assert kept == {
        "command": f"torchrun {project}/train.py", "env": {"A": f"{{{{here}}}}{project}/a", "B": "{run}"},
        "pods": {"manifest": f"{project}/pods.yaml"},
        "container": {"image": "host", "mounts": [f"{project}/data:/data"]},
    }  # fmt: skip


def test_a_secret_of_the_command_line_is_masked_in_the_kept_scenario(project: Path) -> None:
    """As in a scenario file: the page of a run shows the text."""
    text = text_of(
        registry.scenarios_folder() / "process/kill-rank.yaml", job_of([*MINE, "--api-token", "s3cr3t-word"])
    ).decode()
    assert "s3cr3t-word" in text
    assert "s3cr3t-word" not in mask(text)


def test_which_ready_scenarios_take_another_job(monkeypatch: pytest.MonkeyPatch, project: Path) -> None:
    """All but those whose command starts something beside torchrun, on as many nodes as they need. A fault in NCCL's
    network connections says what the job's environment lacks."""
    monkeypatch.setattr(planner, "_check_machine", lambda needs, file: None)
    two_nodes = [MINE[0], "--nnodes", "2", "--nproc-per-node", "1", *MINE[3:]]
    refused = {}
    for name in registry.scenario_names():
        file = registry.scenarios_folder() / f"{name}.yaml"
        try:
            job = job_of(MINE if "launcher:" not in file.read_text() else two_nodes)
            scenario = load(file, (), job)
            planner.make_plan(scenario, file, 0, None, scenario.consent, job.path)
        except UsageError as error:
            refused[name] = str(error)
    plain = ("process/", "checkpoint/", "collective/", "numeric/")
    assert {name for name in refused if name.startswith(plain) and "/nccl-" not in name} == set()
    assert {"proxy/s3-slow", "gpu/xid-79", "node/minority-goes-on", "storage/really-full"} <= refused.keys()
    assert all("NCCL_P2P_DISABLE" in why for name, why in refused.items() if "/nccl-" in name)
    assert len(refused) < len(registry.scenario_names()) / 3


def test_names_are_listed_and_completed() -> None:
    """`torchaos list scenarios` has every name with its description, and a shell completes the names."""
    shown = CliRunner().invoke(cli, ["list", "scenarios"], catch_exceptions=False).stdout
    assert [line.split()[0] for line in shown.splitlines() if "/" in line][-5:] == [*registry.FIRST_SCENARIOS]
    assert shown.count("process/kill-rank") == 1
    assert "One rank dies without warning" in " ".join(shown.split())
    completions = ShellComplete(cli, {}, "torchaos", "_C").get_completions(["run"], "process/kill-r")
    assert [one.value for one in completions if one.type == "plain"] == ["process/kill-rank"]


def test_a_family_is_listed() -> None:
    """`torchaos list checkpoint` has a line for each scenario and each fault of that family, and nothing else."""
    shown = CliRunner().invoke(cli, ["list", "checkpoint"], catch_exceptions=False).stdout
    names = {line.split()[0] for line in shown.splitlines() if line.startswith("   ")}
    assert {"checkpoint/torn-write", "checkpoint/flipped-bits", "checkpoint.nan"} <= names
    assert all(name.startswith("checkpoint") for name in names)


def test_help_shows_where_the_command_goes() -> None:
    """The usage line ends with it."""
    done = CliRunner().invoke(run, ["--help"])
    assert "FILES... [-- COMMAND...]" in done.stdout
