"""The first scenario for a user's own job."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from torchaos.harness.cli import cli
from torchaos.harness.interfaces import UsageError
from torchaos.harness.running.planner import make_plan, warnings_of
from torchaos.harness.running.planner.fault_plans import OWN_STORE
from torchaos.harness.running.scaffold.job_draft import (
    CHECKPOINTS,
    EXAMPLE,
    Draft,
    draft_of,
    read_script,
    scenario_text,
)
from torchaos.harness.scenario.loader import load

PLAIN = Path(__file__).parents[1] / "trainers" / "plain_ddp.py"
TRAINERS = Path(__file__).parents[1] / "trainers"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").write_text(PLAIN.read_text())
    monkeypatch.chdir(tmp_path)
    return tmp_path


def init(*words: str) -> str:
    return CliRunner().invoke(cli, ["init", "--no-look", *words], catch_exceptions=False).stdout


def test_the_file_names_no_file_that_is_not_there(project: Path) -> None:
    """Such as a schema for editors, which nobody has written."""
    init("--", "torchrun", "--nproc-per-node", "2", "train.py")
    text = (project / "kill-rank.yaml").read_text()
    assert "schema" not in text
    named = [word.strip(",;") for word in text.split() if word.endswith((".json", ".yaml", ".py"))]
    assert "train.py" in named
    assert all((project / name).exists() for name in named), named


@pytest.mark.parametrize(
    ("words", "step", "says"),
    [
        ([], 18, "step 18 for the kill: it must lie between two checkpoints, before the job's end"),
        (["--save-every", "7"], 18, "between the checkpoints of 14 and 21, by --save-every 7; it must be before"),
        (["--save_steps=6"], 15, "between the checkpoints of 12 and 18, by --save_steps=6; it must be before"),
        (["--checkpoint-interval", "100"], 250, "between the checkpoints of 200 and 300, by --checkpoint-interval 100"),
    ],
)
def test_the_step_is_between_two_checkpoints(project: Path, words: list[str], step: int, says: str) -> None:
    """Without a look at the job, an option of the command may say how often it saves."""
    assert says in init("--", "torchrun", "--nproc-per-node", "2", "train.py", *words)
    plan = make_plan(load(project / "kill-rank.yaml"), project / "kill-rank.yaml", 0)
    assert getattr(plan.faults[0].trigger, "step", None) == step


def test_a_batch_script_of_one_node_may_run_here(project: Path) -> None:
    """Slurm is needed for several nodes; for one, the line that asks for it may be taken out."""
    (project / "x.sbatch").write_text("#SBATCH -N 1\nsrun torchrun --nproc-per-node 2 train.py\n")
    said = "without the line `launcher: slurm`, it is run on this machine"
    assert said in init("--", "sbatch", "x.sbatch")
    (project / "x.sbatch").write_text("#SBATCH -N 2\nsrun torchrun --nproc-per-node 2 train.py\n")
    assert said not in init("-o", "two.yaml", "--", "sbatch", "x.sbatch")


def test_a_bare_command_becomes_a_scenario_that_can_be_planned(project: Path) -> None:
    """Restarts and a folder of its own in each run are added, each is said, and nothing is left to warn of."""
    said = init("--", "torchrun", "--nproc-per-node", "2", "train.py", "--steps", "40")
    assert "assumed   torchrun starts the ranks again after a death: --max-restarts 3 was added" in said
    assert "train.py is a plain PyTorch loop" in said
    assert "checkpoints go to the folder of --dir (train.py:" in said
    scenario = load(project / "kill-rank.yaml")
    plan = make_plan(scenario, project / "kill-rank.yaml", 0)
    assert plan.job.command[1:] == (
        "--max-restarts", "3", "--nproc-per-node", "2", "train.py", "--steps", "40", "--dir", CHECKPOINTS
    )  # fmt: skip
    assert (plan.job.checkpoints, plan.job.env, plan.faults[0].target.ranks) == (CHECKPOINTS, {OWN_STORE: "1"}, (1,))
    assert warnings_of(plan, scenario, project / "kill-rank.yaml") == []


@pytest.mark.parametrize(("file", "name"), [("resnet.yaml", "resnet"), ("My Job.yaml", "kill-rank")])
def test_the_scenario_is_named_after_its_file(project: Path, file: str, name: str) -> None:
    """Scenarios of two jobs have two names, so that `history` keeps them apart; a name must still be a good one."""
    init("-o", file, "--", "torchrun", "train.py")
    assert load(project / file).scenario == name


def test_no_file_is_overwritten(project: Path) -> None:
    """Not even one of its own."""
    (project / "kill-rank.yaml").write_text("mine")
    with pytest.raises(UsageError, match=r"kill-rank.yaml: it exists, and is never overwritten; name another"):
        init("--", "torchrun", "train.py")
    assert (project / "kill-rank.yaml").read_text() == "mine"


def test_the_scenario_may_lie_in_another_folder(project: Path) -> None:
    """The command is started in the folder in which it was typed."""
    (project / "chaos").mkdir()
    init("-o", "chaos/kill.yaml", "--", "torchrun", "--nproc-per-node", "2", "train.py")
    plan = make_plan(load(Path("chaos/kill.yaml")), Path("chaos/kill.yaml"), 0)
    assert Path(plan.job.cwd).resolve() == project


def test_a_script_that_is_not_there(project: Path) -> None:
    """It is said, and no file is written."""
    with pytest.raises(UsageError, match=r"trian.py: there is no such file"):
        init("--", "torchrun", "trian.py")
    assert not (project / "kill-rank.yaml").exists()


def test_without_a_command_it_is_an_example(project: Path) -> None:
    """The file is well-formed, and the user is told to write the command."""
    assert "it has an example for a command" in init()
    assert load(project / "kill-rank.yaml").job.command == " ".join(EXAMPLE)


@pytest.mark.parametrize(
    ("command", "became"),
    [
        ("python train.py --dir out", "torchrun --max-restarts 3 --nproc-per-node 2 train.py --dir {run}/checkpoints"),
        ("accelerate launch --num_processes 2 train.py --dir=out",
         "torchrun --max-restarts 3 --nproc-per-node 2 train.py --dir={run}/checkpoints"),
        ("python -m torch.distributed.run --max-restarts 1 train.py --dir {run}/x",
         "python -m torch.distributed.run --max-restarts 1 train.py --dir {run}/x"),
        ("bash run.sh", "bash run.sh"),
        ("torchrun --max-restarts 1 train.py --out a --ckpt-dir b --log-dir c",
         "torchrun --max-restarts 1 train.py --out a --ckpt-dir {run}/checkpoints --log-dir c"),
    ],
)  # fmt: skip
def test_what_a_command_becomes(project: Path, command: str, became: str) -> None:
    """Launchers whose ranks can't be found give way to torchrun; what is good stays as it is."""
    draft = draft_of(command.split(), project, {})
    assert " ".join(draft.command) == became
    assert (draft.world_size is None) == ("bash" not in command)


@pytest.mark.parametrize(
    ("name", "framework"),
    [
        ("plain_ddp", "a plain PyTorch loop"),
        ("hf_trainer", "Hugging Face Trainer"),
        ("lightning_trainer", "Lightning"),
        ("accelerate_trainer", "Accelerate"),
    ],
)
def test_what_a_script_is(name: str, framework: str) -> None:
    """By its imports; its seed and its resume are found, with their lines."""
    script = read_script(TRAINERS / f"{name}.py")
    assert script.framework == framework
    assert script.loads
    assert f"({name}.py:" in script.loads[0]


@pytest.mark.parametrize(("line", "seeds"), [
    ("torch.manual_seed(1)", 1), ("torch.cuda.manual_seed_all(1)", 1), ("manual_seed(1)", 1), ("set_seed(1)", 1),
    ("L.seed_everything(1)", 1), ("np.random.seed(1)", 1), ("torch.Generator().manual_seed(1)", 0),
    ("g.manual_seed(1)", 0),
])  # fmt: skip
def test_what_fixes_the_seed(project: Path, line: str, seeds: int) -> None:
    """A generator of its own, as data sets have one, fixes neither weights nor dropout."""
    (project / "train.py").write_text(f"import torch\n{line}\n")
    assert len(read_script(project / "train.py").seeds) == seeds


@pytest.mark.parametrize(
    ("line", "seeds", "loads"),
    [
        ("model = DQN('MlpPolicy', env, seed=3)", 1, 0), ("model = DQN.load('last.zip')", 0, 1), ("fix_seed(3)", 1, 0),
        ("net.load_state_dict(state)", 0, 1), ("manager.restore_or_init()", 0, 1), ("json.load(file)", 0, 0),
        ("DQN('MlpPolicy', env, seed=None)", 0, 0), ("cfg = yaml.load(file)", 0, 0),
    ],
)  # fmt: skip
def test_what_only_a_run_can_show(project: Path, line: str, seeds: int, loads: int) -> None:
    """A call that may fix the seed or load a checkpoint is asked about, and not called none."""
    (project / "train.py").write_text(f"import torch\n{line}\n")
    script = read_script(project / "train.py")
    assert (len(script.perhaps_seeds), len(script.perhaps_loads)) == (seeds, loads)
    said = "\n".join(draft_of(["torchrun", "train.py"], project, {}).to_check)
    assert ("no seed was found" in said) is not bool(seeds)
    assert ("no load of a checkpoint was found" in said) is not bool(loads)


def test_a_trainer_seeds_too_late_for_its_model(project: Path) -> None:
    """Hugging Face's Trainer sets its seed when it is made, which is after the model."""
    (project / "train.py").write_text(
        "from transformers import Trainer\nTrainer(model).train(resume_from_checkpoint=1)\n"
    )
    said = "\n".join(draft_of(["torchrun", "train.py"], project, {}).to_check)
    assert "call set_seed first" in said


def test_what_must_be_checked(project: Path) -> None:
    """A script without a seed, a resume or a folder is not made better than it is."""
    (project / "train.py").write_text("import torch\nimport helpers\n")
    (project / "helpers.py").write_text("backend = 'nccl'\n")
    draft = draft_of(["torchrun", "train.py"], project, {})
    said = "\n".join(draft.to_check)
    for text in (
        "no seed was found",
        "no load of a checkpoint was found",
        "nothing shows where the job saves",
        "the job has one rank",
    ):
        assert text in said
    assert draft.env == {}  # its helper names NCCL
    (project / "train.py").write_text("def broken(:\n")
    assert "train.py can't be read" in "\n".join(draft_of(["torchrun", "train.py"], project, {}).to_check)


def test_what_only_a_run_can_show_is_left_out_and_said(project: Path) -> None:
    """Without a look, two assertions of the file are comments, and the file and the terminal say why."""
    said = init("--", "torchrun", "--nproc-per-node", "2", "train.py")
    why = "only a run shows whether the data can be seen"
    assert f"left out  lr_continuity and parameter_digest: comments in the file, as {why}" in said
    text = (project / "kill-rank.yaml").read_text()
    assert f"  # - lr_continuity # {why}\n  # - parameter_digest # {why}\n" in text
    seen = scenario_text("x", Draft(["torchrun", "train.py"]), 5, 600, {})
    assert "\n  - lr_continuity\n  - parameter_digest\n" in seen


@pytest.mark.parametrize("word", ["a: b", "it's", "#", "--x=[1,2]", "ü", "x" * 200, 'say "hi"'])
def test_any_word_is_read_back(project: Path, word: str) -> None:
    """Whatever a command line holds is quoted so that YAML gives it back."""
    draft = Draft(["torchrun", "train.py", word], env={"A": word})
    (project / "x.yaml").write_text(scenario_text("x", draft, 5, 600, {"loss_continuity": "losses were not seen"}))
    scenario = load(project / "x.yaml")
    command = scenario.job.command
    assert (shlex.split(command) if isinstance(command, str) else command) == ["torchrun", "train.py", word]
    assert scenario.job.env == {"A": word}
    assert "loss_continuity" not in [item.name for item in scenario.assert_]


@pytest.mark.job
def test_a_look_shows_what_the_agent_sees(project: Path) -> None:
    """The step of the kill comes from the job's own checkpoints, and the run needs no twin of its own any more."""
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = CliRunner(env=env).invoke(
        cli, ["init", "--", "torchrun", "--nproc-per-node", "2", "train.py", "--steps", "12"], catch_exceptions=False
    )
    assert done.exit_code == 0
    for said in ("seen      steps: 12 on 2 ranks, by the agent", "samples: in every step", "checkpoints: 2 saves"):
        assert said in done.stdout
    scenario = load(project / "kill-rank.yaml")
    assert scenario.faults[0].when.step == 11
