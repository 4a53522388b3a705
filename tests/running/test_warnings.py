"""Warnings of `plan` and `run` about scenarios that can be carried out but do not test what was meant."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from torchaos.harness.cli import cli, main
from torchaos.harness.interfaces import UsageError
from torchaos.harness.record import environment
from torchaos.harness.running import capabilities, planner
from torchaos.harness.running.capabilities import Finding
from torchaos.harness.running.planner import job_plan
from torchaos.harness.running.planner.fault_plans import OWN_STORE, Machine
from torchaos.harness.scenario.loader import load

Capture = pytest.CaptureFixture[str]
READY = Path(__file__).parents[2] / "scenarios"
GOOD = """\
scenario: kill-rank
job:
  command: torchrun --nproc-per-node 2 --max-restarts 3 train.py --out {run}
  checkpoints: {path: "{run}/checkpoints"}
faults:
  - inject: process.kill
    target: {rank: 1}
    when: {step: 18, phase: backward}
assert: [completed, checkpoint_integrity]
"""


@pytest.fixture(autouse=True)
def own_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each attempt of the job gets its own store, so that gloo is nothing to warn of."""
    monkeypatch.setenv(OWN_STORE, "1")


def planned(folder: Path, text: str, *more: str) -> Result:
    (folder / "train.py").touch()
    (folder / "kill.yaml").write_text(text)
    return CliRunner().invoke(cli, ["plan", str(folder / "kill.yaml"), *more], catch_exceptions=False)


def warned(folder: Path, text: str) -> list[str]:
    """Without the path of the file."""
    found = json.loads(planned(folder, text, "--json").stdout)["warnings"]
    return [str(one).removeprefix(f"{folder}/kill.yaml") for one in found]


def test_nothing_is_warned_of_without_a_cause(tmp_path: Path) -> None:
    """A scenario as the tutorial writes it has no warning, and the console has no such line."""
    assert warned(tmp_path, GOOD) == []
    assert "arning" not in planned(tmp_path, GOOD).stdout


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (" --out {run}", "", ":3:12: nothing tells the job to write its checkpoints below {run}"),
        (" --max-restarts 3", "", ":3:12: process.kill ends a rank, and torchrun starts none again (--max-restarts 0)"),
        ('checkpoints: {path: "{run}/checkpoints"}', "timeout: 60s",
         ":9:21: checkpoint_integrity can't read the checkpoints; write job.checkpoints.path"),
        ("assert:", "consent: [kmsgs]\nassert:", ":9:11: consent: no fault asks for 'kmsgs'; did you mean 'kmsg'?"),
    ],
)  # fmt: skip
def test_what_is_warned_of(tmp_path: Path, old: str, new: str, said: str) -> None:
    """Each of these is one warning with its place and what to do, in the JSON and on the console."""
    text = GOOD.replace(old, new)
    (warning,) = warned(tmp_path, text)
    assert warning.startswith(said)
    shown = " ".join(planned(tmp_path, text).stdout.split())
    assert "warning:" in shown
    assert said.partition(": ")[2] in shown


@pytest.mark.parametrize(("gpus", "old", "new", "many"), [
    (0, "", "", 1), (8, "", "", 0), (0, "process.kill", "process.freeze", 0),
    (0, "  checkpoints:", '  env: {TORCH_DISABLE_SHARE_RDZV_TCP_STORE: "1"}\n  checkpoints:', 0),
])  # fmt: skip
def test_a_restart_that_gloo_does_not_survive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: int, old: str, new: str, many: int
) -> None:
    """Without a GPU and without the switch that gives each attempt its own store, a kill is followed by failures that
    are torch's; a fault that restarts nothing has no such warning."""
    monkeypatch.delenv(OWN_STORE)
    monkeypatch.setattr(Machine, "this", lambda: Machine(gpus))
    found = warned(tmp_path, GOOD.replace(old, new))
    assert len(found) == many
    assert all("the ranks may use gloo" in one and "pytorch/pytorch#135712" in one for one in found)


@pytest.mark.parametrize(("options", "torch", "keeps"), [
    ("", "2.13.0", False), ("", "2.12.1", True), ("", "2.4.1", False), ("", None, False),
    ("--standalone ", "2.12.1", False), ("--master-port 29501 ", "2.13.0", True),
    ("--rdzv-backend c10d ", "2.12.1", False), ("--rdzv-backend static --rdzv-endpoint h0:1 ", "2.13.0", True),
])  # fmt: skip
def test_a_store_that_torchrun_keeps_over_its_attempts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: str, torch: str | None, keeps: bool
) -> None:
    """With the static rendezvous the restarts under gloo fail although each attempt should get its own store; it is
    the default of older versions of torch."""
    packages = tmp_path / "venv/lib/python3.12/site-packages"
    (tmp_path / "venv/bin").mkdir(parents=True)
    (tmp_path / "venv/bin/torchrun").touch(0o755)
    if torch:
        (packages / f"torch-{torch}.dist-info").mkdir(parents=True)
    monkeypatch.setenv("PATH", str(tmp_path / "venv/bin"), prepend=os.pathsep)
    monkeypatch.setattr(Machine, "this", Machine)
    found = warned(tmp_path, GOOD.replace("torchrun ", f"torchrun {options}"))
    assert [one.endswith("write --standalone") for one in found] == [True] * keeps


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("  checkpoints:", "  resubmit: {times: 1}\n  checkpoints:"),
        ("  checkpoints:", "  env: {PET_MAX_RESTARTS: '2'}\n  checkpoints:"),
        ("process.kill", "process.freeze"),
        ("[completed, checkpoint_integrity]", "[restarts: {gives_up_within: 60s}]"),
    ],
)
def test_a_job_that_need_not_restart(tmp_path: Path, old: str, new: str) -> None:
    """No restart by torchrun is no mistake where something else starts the job again, nobody dies, or it is to fail."""
    assert warned(tmp_path, GOOD.replace(" --max-restarts 3", "").replace(old, new)) == []


def test_the_run_folder_may_stand_in_the_environment(tmp_path: Path) -> None:
    """A job that reads its folder from a variable is told by that."""
    text = GOOD.replace(" --out {run}", "").replace("  checkpoints:", '  env: {OUT: "{run}"}\n  checkpoints:')
    assert warned(tmp_path, text) == []


@pytest.mark.parametrize(("last", "wrong"), [(16, True), (17, False), (18, False)])
def test_a_step_that_the_twin_never_made(
    trainer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: int, wrong: bool
) -> None:
    """A trigger beyond the last step of the twin in the cache, and beyond its last save, can't be reached. If no other
    fault is there, nothing is run. The twin may have been made for a scenario with other assertions."""
    monkeypatch.setattr(planner, "kept_twin_of", lambda plan: trainer(steps=last).record())
    for text in (GOOD, GOOD.replace("[completed, checkpoint_integrity]", "[completed]")):
        if not wrong:
            assert warned(tmp_path, text) == []
            continue
        with pytest.raises(UsageError, match=r":8:18: process.kill comes in step 18, and the job ends at step 16"):
            warned(tmp_path, text)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--steps 12", "and the job ends at step 12, as --steps says; write an earlier step"),
        ("--max_steps=12", "and the job ends at step 12, as --max_steps says"),
        ("--train-iters 12", "and the job ends at step 12, as --train-iters says"),
        ("--steps 18", ""),
        ("--save-steps 5", ""),
    ],
)
def test_a_step_after_those_that_the_command_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str, said: str
) -> None:
    """Without a twin in the cache, the command may say how many steps there are."""
    monkeypatch.setattr(planner, "kept_twin_of", lambda plan: None)
    found = warned(tmp_path, GOOD.replace("--out", f"{option} --out"))
    assert len(found) == bool(said)
    assert all(said in one for one in found)


def test_a_ready_gpu_scenario_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its health agent reads NVML by nvidia-ml-py: without it nothing is started."""
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "pynvml" else find(name))
    with pytest.raises(UsageError, match=r"xid-79.yaml: this machine lacks pynvml .*; pip install 'torchaos\[gpu\]'"):
        CliRunner().invoke(cli, ["plan", "gpu/xid-79"], catch_exceptions=False)


@pytest.mark.parametrize("folder", ["process", "checkpoint"])
def test_the_ready_scenarios_warn_of_nothing(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each does what it means."""
    monkeypatch.setattr(planner, "_check_machine", lambda needs, file: None)
    monkeypatch.setattr(planner, "kept_twin_of", lambda plan: None)
    found = []
    for file in sorted((READY / folder).glob("*.yaml")):
        scenario = load(file)
        plan = planner.make_plan(scenario, file, 0, None, scenario.consent)
        found += planner.warnings_of(plan, scenario, file)
    assert found == []
    assert list((READY / folder).glob("*.yaml"))


def test_validate_looks_for_the_script(tmp_path: Path) -> None:
    """As `plan` does."""
    (tmp_path / "kill.yaml").write_text(GOOD)
    with pytest.raises(UsageError, match=r":3:12: \S+/train.py: there is no such file"):
        CliRunner().invoke(cli, ["validate", str(tmp_path / "kill.yaml")], catch_exceptions=False)


def test_validate_takes_a_folder(tmp_path: Path) -> None:
    """All our files of the folder are checked, and no other YAML; a folder that has none is a mistake."""
    (tmp_path / "train.py").touch()
    for name in ("one.yaml", "two.yml"):
        (tmp_path / name).write_text(GOOD)
    (tmp_path / "notes.txt").touch()
    (tmp_path / "config.yaml").write_text("model: {layers: 2}\njob: queue\n")
    (tmp_path / "broken.yaml").write_text("model: [\n")
    done = CliRunner().invoke(cli, ["validate", str(tmp_path)], catch_exceptions=False)
    assert done.stdout.splitlines() == [f"{tmp_path / name}: well-formed" for name in ("one.yaml", "two.yml")]
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="it holds no scenario or game day or gate"):
        CliRunner().invoke(cli, ["validate", str(tmp_path / "empty")], catch_exceptions=False)


@pytest.mark.parametrize("text", ["scenario: x\njob: [\n", GOOD.replace("scenario:", "scenaro:")])
def test_a_broken_scenario_in_a_folder_is_told(tmp_path: Path, text: str) -> None:
    """It is no other YAML: it has the key of a scenario, or all else that makes one."""
    (tmp_path / "train.py").touch()
    (tmp_path / "good.yaml").write_text(GOOD)
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(UsageError, match=r"bad.yaml:\d"):
        CliRunner().invoke(cli, ["validate", str(tmp_path)], catch_exceptions=False)


def test_plan_and_validate_take_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder, a ready scenario, another job: what can be run can be planned and validated with the same words. A
    folder's game days are no scenarios for `plan`."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    Path("chaos").mkdir()
    Path("chaos/one.yaml").write_text(GOOD.replace("train.py", "../train.py"))
    Path("chaos/two.yaml").write_text(GOOD.replace("train.py", "../train.py"))
    Path("chaos/day.yaml").write_text("gameday: night\n")
    Path("job.yaml").write_text("job: {command: torchrun --nproc-per-node 2 train.py}\n")
    for words in (["chaos"], ["process/kill-rank", "--job", "job.yaml"],
                  ["process/kill-rank", "--", "torchrun", "--nproc-per-node", "2", "train.py"]):  # fmt: skip
        plans = CliRunner().invoke(cli, ["plan", *words], catch_exceptions=False)
        assert plans.stdout.count("nothing has been changed") == (2 if words == ["chaos"] else 1)
        if words != ["chaos"]:
            done = CliRunner().invoke(cli, ["validate", *words], catch_exceptions=False)
            assert (done.exit_code, done.stdout.count("well-formed")) == (0, 1), done.output
    wrong = ["validate", "process/kill-rank", "--", "torchrun", "--nproc-per-node", "2", "nosuch.py"]
    with pytest.raises(UsageError, match=r"nosuch\.py: there is no such file"):
        CliRunner().invoke(cli, wrong, catch_exceptions=False)


def test_a_plan_says_only_what_there_is(tmp_path: Path) -> None:
    """No name without a value, and the assertions without bounds once."""
    (tmp_path / "train.py").touch()
    text = GOOD.split("assert:")[0] + "assert: [completed, clean_exit, {recovery_time: {catch_up: 60s}}]\n"
    said = " ".join(planned(tmp_path, text).stdout.split())
    assert "recovery time catch up 60 s" in said
    assert said.count("without bounds") == 1
    assert "without bounds completed, clean_exit" in said
    assert " ," not in said
    assert "no bounds given" not in said


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["run"], "error: Missing argument 'FILES...'; see `torchaos run --help`\n"),
        (["nosuch"], "error: there is no command 'nosuch'; see `torchaos --help`\n"),
        (["plan", "--nosuch", "x"], "error: there is no option '--nosuch'; see `torchaos plan --help`\n"),
    ],
)
def test_a_wrong_command_line_is_one_error(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture, words: list[str], says: str
) -> None:
    """It looks like every other error, and says where the right words are."""
    monkeypatch.setattr("sys.argv", ["torchaos", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert (ended.value.code, capsys.readouterr().err) == (3, says)


def test_a_misspelt_key_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """`asserts` is `assert` misspelt, and `assert` is not missing besides. Every line begins with `error:`."""
    (tmp_path / "kill.yaml").write_text(GOOD.replace("assert:", "asserts:").replace("rank: 1", "rank: one"))
    (tmp_path / "train.py").touch()
    monkeypatch.setattr("sys.argv", ["torchaos", "validate", str(tmp_path / "kill.yaml")])
    with pytest.raises(SystemExit):
        main()
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition("kill.yaml")[2][:5] for line in lines] == [":7:20", ":9:1:"]
    assert lines[1].endswith("unknown key 'asserts'; did you mean 'assert'?")
    assert all(line.startswith(f"error: {tmp_path}") for line in lines)


@pytest.mark.parametrize("word", ["cpu", "auto", "gpu"])
def test_ranks_are_counted_as_torchrun_counts_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    """By the job's own torch. What torchrun would refuse needs world_size, said at the place of the command."""
    monkeypatch.setattr(job_plan, "ranks_per_node", lambda python, word, env: {"cpu": 6, "auto": 4, "gpu": None}[word])
    text = GOOD.replace("--nproc-per-node 2", f"--nproc-per-node {word}")
    if word == "gpu":
        with pytest.raises(UsageError, match=r":3:12: how many ranks .* write job.world_size"):
            planned(tmp_path, text)
    else:
        assert json.loads(planned(tmp_path, text, "--json").stdout)["job"]["world_size"] == (6 if word == "cpu" else 4)


@pytest.mark.slow
def test_torch_itself_is_asked() -> None:
    """The number of processors, and nothing for a word that torchrun does not know."""
    env = frozenset(os.environ.items())
    assert (environment.ranks_per_node(sys.executable, "cpu", env) or 0) >= 1
    assert environment.ranks_per_node(sys.executable, "tpus", env) is None


@pytest.mark.parametrize(
    ("old", "new", "place"),
    [
        ("rank: 1", "rank: 5", ":7:13: fault process.kill: there is no rank 5; the job has 2"),
        ("{rank: 1}", "{node: 3}", ":7:13: fault process.kill: there is no node 3; the job has 1"),
    ],
)
def test_a_target_that_is_not_there(tmp_path: Path, old: str, new: str, place: str) -> None:
    """The message has the place of the target in the file."""
    with pytest.raises(UsageError, match=place):
        planned(tmp_path, GOOD.replace(old, new))


def test_a_copied_line_has_its_place(tmp_path: Path) -> None:
    """Both a line that can't work, and one that is probably not meant."""
    with pytest.raises(UsageError, match=r":3:12: no shell reads the command, so --nnodes is the text \$SLURM_NNODES"):
        planned(tmp_path, GOOD.replace("torchrun ", "torchrun --nnodes $SLURM_NNODES "))
    (warning,) = warned(tmp_path, GOOD.replace("--out {run}", "--out {run} --data $SCRATCH"))
    assert warning.startswith(":3:12: no shell reads the command, so the job gets the text $SCRATCH")


def test_a_local_rank_that_there_is_not_is_told_as_one(tmp_path: Path) -> None:
    """With its place, and not as the rank of another number."""
    (tmp_path / "train.py").touch()
    (tmp_path / "kill.yaml").write_text(GOOD.replace("{rank: 1}", "{local_rank: 4}"))
    with pytest.raises(UsageError, match=r"kill.yaml:\d+:\d+: .*there is no local rank 4; each node has 2"):
        CliRunner().invoke(cli, ["plan", str(tmp_path / "kill.yaml")], catch_exceptions=False)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("torchrun", "torchrunn", "3:12: torchrunn: no such program on the PATH"),
        ("  checkpoints:", "  cwd: no/such\n  checkpoints:", "4:8: job.cwd: .*no/such is no folder"),
        ("torchrun --nproc-per-node 2 --max-restarts 3 train.py --out {run}", "''", "3:12: .*empty"),
        (
            "  checkpoints:", "  resubmit: {times: 1, command: sbatchh again.sh}\n  checkpoints:",
            "4:33: sbatchh: no such program",
        ),
        ("  checkpoints:", "  replicas: 3\n  world_size: 7\n  checkpoints:", "5:15: job.world_size: 7 ranks can't be"),
        ('{path: "{run}/checkpoints"}', '{path: "{run}/c", size: 900TB}', "4:40: job.checkpoints.size: "),
        ('{path: "{run}/checkpoints"}', '{path: "{run}/c", local: "{run}/c/x"}', "4:41: job.checkpoints.local: "),
        ("assert:", "limits: {never: {ranks: [0]}, percent: 10}\nassert:", "9:9: the faults hit"),
    ],
)  # fmt: skip
def test_an_error_in_a_value_has_its_place(tmp_path: Path, old: str, new: str, said: str) -> None:
    """Also one that only the planner sees, because it depends on this machine."""
    with pytest.raises(UsageError, match=f"kill.yaml:{said}"):
        planned(tmp_path, GOOD.replace(old, new))


def test_a_machine_that_lacks_the_launcher_is_no_reason_to_be_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is probably not meant in the command is told beside what the machine lacks: it holds where the job runs."""
    monkeypatch.setattr(capabilities, "check", lambda name: Finding(name, name != "slurm", "no sbatch", "install it"))
    text = GOOD.replace("job:\n", "launcher: slurm\njob:\n  nodes: 2\n").replace(
        "2 --max", "2 --nnodes 2 --node_rank 0 --max"
    )
    (tmp_path / "train.py").touch()
    (tmp_path / "kill.yaml").write_text(text)
    with pytest.raises(UsageError) as told:
        cli.main(["plan", str(tmp_path / "kill.yaml")], standalone_mode=False)
    lacks, doubt = str(told.value).splitlines()
    assert "this machine lacks slurm (no sbatch); install it" in lacks
    assert doubt.startswith(f"{tmp_path / 'kill.yaml'}:5:")
    assert "every node gets the same --node-rank" in doubt
