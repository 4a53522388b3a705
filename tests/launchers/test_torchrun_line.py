"""The number of ranks that a torchrun command line requests."""

from __future__ import annotations

import shlex

import pytest

from torchaos.harness.running.launchers.torchrun_line import world_of


@pytest.mark.parametrize(
    ("line", "world"),
    [
        ("torchrun train.py", (1, 1)),
        ("torchrun --nproc-per-node 2 train.py", (2, 1)),
        ("/opt/bin/torchrun --nproc_per_node=4 --nnodes 2:3 train.py", (4, 2)),
        ("python -m torch.distributed.run --nnodes 2 --nproc-per-node 8 -m trainer", (8, 2)),
        ("torchrun --nn 2 train.py", (1, 2)),
        ("torchrun --standalone --nproc-per-node gpu train.py", (None, 1)),
        ("torchrun --no-python --nproc-per-node 2 ./run_rank.sh --nnodes 9", (2, 1)),
        ("torchrun -m --nproc_per_node=2 trainer.main", (2, 1)),
        ("torchrun --standalone --run-path --tee 3 -r 1:3 --nproc-per-node 2 my.trainer", (2, 1)),
        ("torchrun --switch-of-later --nproc-per-node 2 train.py", (2, 1)),
        ("torchrun --nproc-per-node 2 --switch-of-later train.py --nnodes 9", (2, 1)),
        ("torchrun --nproc-per-node 2 $SCRIPT --nnodes 9", (2, 1)),
        ("python train.py --nnodes 2", (None, None)),
        ("python health_agent.py torchrun --nproc-per-node 2 train.py", (2, 1)),
        ("python watch.py --every 5 -v other.py torchrun --nproc-per-node 2 --nnodes 3 train.py", (2, 3)),
        ("python train.py --a 1 --b 2 --tags torchrun ddp", (None, None)),
    ],
)
def test_options_are_torchruns(line: str, world: tuple[int | None, int | None]) -> None:
    """Both spellings, a range of nodes, an abbreviation, a module; words for a number tell nothing. A program in Python
    may start torchrun."""
    assert world_of(shlex.split(line), {}) == world


@pytest.mark.parametrize("options", ["--n 100", "--np 3", "--nnodes 9", "-- --nproc-per-node 9", "--nproc 7"])
@pytest.mark.parametrize("script", ["train.py", "-m trainer.main", "--no-python ./train"])
def test_the_trainers_own_options_are_not_torchruns(script: str, options: str) -> None:
    """Whatever a trainer calls its options, they say nothing of ranks, and are no error."""
    assert world_of(shlex.split(f"torchrun --nproc-per-node 2 {script} {options}"), {}) == (2, 1)


def test_the_environment_says_what_the_line_does_not() -> None:
    """Torchrun takes its options from PET_*, too; the line goes first."""
    env = {"PET_NPROC_PER_NODE": "4", "PET_NNODES": "2"}
    assert world_of(["torchrun", "train.py"], env) == (4, 2)
    assert world_of(["torchrun", "--nnodes", "3", "train.py"], env) == (4, 3)


@pytest.mark.parametrize("line", ["torchrun --nnodes", "torchrun --nproc-per-node", "torchrun --n 2"])
def test_a_line_that_torchrun_would_refuse_tells_nothing(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An option without its value, or one that could be two: no number, and not a word on the terminal."""
    assert world_of(line.split(), {}) == (None, None)
    assert capsys.readouterr() == ("", "")
