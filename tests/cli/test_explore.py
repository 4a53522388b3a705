"""`torchaos explore`: what it refuses before anything is run, and the directory in which it continues."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from torchaos.harness.cli import cli
from torchaos.harness.crash_explorer.exploration import read_outcomes
from torchaos.harness.interfaces import UsageError
from torchaos.harness.running import capabilities
from torchaos.harness.running.capabilities import Finding


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with FUSE."""
    monkeypatch.setattr(capabilities, "check", lambda name: Finding(name, True, "", ""))


def _scenario(folder: Path, **more: Any) -> str:
    job = {"command": "torchrun --nproc-per-node 2 train.py", "checkpoints": {"path": "{run}/saved"}}
    whole = {"scenario": "small", "job": {**job, **more.pop("job", {})}, "assert": ["no_lost_work"], **more}
    (folder / "train.py").write_text("")
    (folder / "small.yaml").write_text(yaml.safe_dump(whole))
    return str(folder / "small.yaml")


@pytest.mark.usefixtures("there")
@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"job": {"checkpoints": None}}, "write job.checkpoints.path"),
        ({"job": {"checkpoints": {"path": "/data/saved"}}}, "a folder below {run}"),
        ({"assert": ["completed"]}, "no assertion judges what a resume computes"),
        ({"job": {"replicas": 2}}, "leave job.replicas out"),
    ],
)
def test_what_cant_be_explored_is_refused_before_anything_is_made(
    tmp_path: Path, more: dict[str, Any], says: str
) -> None:
    """The reason says what to write, and no directory is left."""
    file = _scenario(tmp_path, **more)
    with pytest.raises(UsageError, match=says):
        cli.main(["explore", file, "--out", str(tmp_path / "out")], standalone_mode=False)
    assert not (tmp_path / "out").exists()


def test_a_machine_without_fuse_is_told_what_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the remedy that `torchaos doctor` shows."""
    lacks = Finding("fuse", False, "no /dev/fuse", "install it")
    found = capabilities.check
    monkeypatch.setattr(capabilities, "check", lambda name: lacks if name == "fuse" else found(name))
    with pytest.raises(UsageError, match=r"no /dev/fuse.*install it"):
        cli.main(["explore", _scenario(tmp_path), "--out", str(tmp_path / "out")], standalone_mode=False)


@pytest.mark.usefixtures("there")
def test_another_scenario_is_not_gone_on_with(tmp_path: Path) -> None:
    """A directory that is no exploration, or that of another seed, is refused."""
    file = _scenario(tmp_path)
    with pytest.raises(UsageError, match="there is no exploration in it"):
        cli.main(["explore", file, "--resume", str(tmp_path)], standalone_mode=False)
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(UsageError, match="another scenario, seed or job"):
        cli.main(["explore", file, "--resume", str(tmp_path)], standalone_mode=False)


def test_a_torn_last_outcome_is_tried_again(tmp_path: Path) -> None:
    """An exploration that was killed while it wrote an outcome goes on with that state."""
    whole = {
        "state": "a", "digest": "d", "model": "process death", "died_at_step": 3, "kind": "hangs", "reason": "",
        "moments": [[0.0, 1.0]], "files": [],
    }  # fmt: skip
    (tmp_path / "outcomes.jsonl").write_text(json.dumps(whole) + "\n" + json.dumps(whole)[:40])
    assert list(read_outcomes(tmp_path)) == [("d", "process death")]


@pytest.mark.usefixtures("there")
def test_a_second_death_needs_a_state_of_an_exploration(tmp_path: Path) -> None:
    """`--after` without the directory of an exploration, or with one in which nothing was recorded yet, is refused, and
    nothing is made."""
    file = _scenario(tmp_path)
    with pytest.raises(UsageError, match="name its directory with --resume"):
        cli.main(["explore", file, "--after", "process-death-1"], standalone_mode=False)
    with pytest.raises(UsageError, match="nothing was explored in it yet"):
        cli.main(["explore", file, "--after", "process-death-1", "--resume", str(tmp_path)], standalone_mode=False)
    assert not (tmp_path / "again").exists()


@pytest.mark.usefixtures("there")
def test_progress_is_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it tells on the way goes to the error output, as that of a run does; results alone go to the other."""

    class Told:
        left = ()

        def __init__(self, _plan: Any, _home: Any, _limits: Any, _again: Any, tell: Any, *_others: Any) -> None:
            self.tell = tell

        def __call__(self) -> None:
            self.tell("recording the job")

        def stop(self, reason: str) -> None:
            """As of an exploration."""

    monkeypatch.setattr("torchaos.harness.cli.explore.Exploration", Told)
    with pytest.raises(SystemExit):
        cli.main(["explore", _scenario(tmp_path), "--out", str(tmp_path / "out")], standalone_mode=False)
    said = capsys.readouterr()
    assert "recording the job" in said.err
    assert "recording the job" not in said.out
    assert said.out.startswith("Nothing was explored")
