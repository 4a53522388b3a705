"""What `torchaos verify` says of the kinds of files that people have: never damaged of a healthy one, never whole of a
damaged one or of one that it does not read."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from kinds.files import FILES
from kinds.frameworks import FRAMEWORKS
from kinds.places import PLACES
from kinds.writers import Row
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict_saver import save

from torchaos.harness.checkpoints.verify.all_checks import Answer
from torchaos.harness.cli import cli

ROWS = [*FILES, *PLACES, *FRAMEWORKS]
CODES = {Answer.WHOLE: 0, Answer.DAMAGED: 1, Answer.INCOMPLETE: 1, Answer.UNKNOWN: 2, Answer.UNTOLD: 2}
DAMAGED = [(row, how) for row in ROWS for how in row.damages]


def verified(path: Path) -> tuple[int, str]:
    """The exit code, and what it prints."""
    done = CliRunner().invoke(cli, ["verify", str(path)])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.output
    return done.exit_code, done.output


def make(row: Row, tmp_path: Path) -> Path:
    path = tmp_path / "made" / row.path
    path.parent.mkdir(parents=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        row.write(path)
    return path


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.says)
def test_a_healthy_one(row: Row, tmp_path: Path) -> None:
    """Each kind gets its own answer, with the exit code that belongs to it."""
    code, output = verified(make(row, tmp_path))
    assert (code, output.startswith(f"{row.answer.value}: ")) == (CODES[row.answer], True), output


@pytest.mark.parametrize(("row", "how"), DAMAGED, ids=lambda one: one.says if isinstance(one, Row) else one)
def test_a_damaged_one(row: Row, how: str, tmp_path: Path) -> None:
    """Damage to it is found, or it is said that nothing can be told."""
    damage, answers = row.damages[how]
    path = make(row, tmp_path)
    damage(path)
    code, output = verified(path)
    said = output.splitlines()
    fits = any(line.startswith(f"{answer.value}: ") for answer in answers for line in said)
    assert (code in {CODES[answer] for answer in answers}, fits) == (True, True), output


def test_a_part_is_not_asked_for_what_other_files_hold(tmp_path: Path) -> None:
    """A file of generators lacks no optimizer: it is said that it is a part, and nothing that contradicts it."""
    torch.save({"cpu": torch.get_rng_state(), "step": 6}, tmp_path / "step-6.rng0")
    code, output = verified(tmp_path / "step-6.rng0")
    assert (code, "only states of an optimizer or of generators" in output, "not found in it" in output) == (
        2,
        True,
        False,
    )


def test_an_optimizer_of_safetensors_is_not_asked_for_an_optimizer(tmp_path: Path) -> None:
    """It is a part, whatever its format usually holds."""
    save_file({"exp_avg.0": torch.ones(3)}, tmp_path / "optimizer.safetensors")
    code, output = verified(tmp_path / "optimizer.safetensors")
    assert (code, "not found in it" in output) == (2, False), output


def test_a_missing_shard_is_one_problem(tmp_path: Path) -> None:
    """However many tensors were in it."""
    path = tmp_path / "step-10"
    save({f"layer{number}": torch.ones(3) for number in range(30)}, checkpoint_id=path, no_dist=True)
    (path / "__0_0.distcp").unlink()
    code, output = verified(path)
    assert (code, len(output.splitlines())) == (1, 2), output
    assert "torn: __0_0.distcp: missing; it held layer0, layer1, layer2 and 27 more" in output


@pytest.mark.parametrize("beside", ["trainer_state.json", "checkpoint_metadata.json"])
def test_a_folder_of_several_checkpoints_is_none_itself(tmp_path: Path, beside: str) -> None:
    """A file that other trainers keep inside of a checkpoint lies beside the folders of the steps: each is a checkpoint
    of its own, and the newest is told."""
    for step in (5, 10):
        (tmp_path / f"global_step_{step}").mkdir()
        state = {"model": {"w": torch.ones(3)}, "optimizer": {"state": {}}, "generator": torch.get_rng_state()}
        torch.save(state, tmp_path / f"global_step_{step}" / "rank_0.pt")
    (tmp_path / beside).write_text('{"global_step": 10}')
    _code, output = verified(tmp_path)
    assert "global_step_10 (" in output
    assert "global_step_5 (" not in output
    assert "random number generators" not in output
    (tmp_path / "global_step_5" / "rank_0.pt").write_bytes(b"PK")
    assert "global_step_10 (" in verified(tmp_path)[1]
