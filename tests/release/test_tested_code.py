"""A run says nothing about code of the job that was changed since: without --commit, the gate compares the sources."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from torchaos.harness.record.rundir import RunDir
from torchaos.harness.running.twin_key import Inputs

from .conftest import Release, change_json

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def run_of(release: Release) -> RunDir:
    (found,) = release.runs.iterdir()
    return RunDir(found)


def in_artifact(name: str, **values: Any) -> Callable[[Release], None]:
    return lambda release: change_json(run_of(release).artifacts / f"{name}.json", lambda one: one.update(values))


def write(name: str, text: str) -> Callable[[Release], Any]:
    return lambda release: (release.script.parent / name).write_text(text)


def remove(name: str) -> Callable[[Release], None]:
    return lambda release: (release.script.parent / name).unlink()


def reason(release: Release, commit: str = "") -> str:
    judged = release.judged(commit=commit)
    assert judged.exit_code == 1
    return judged.results[0].reason


CHANGED: dict[str, tuple[Callable[[Release], Any], str]] = {
    "its script": (write("train.py", "import model  # without load_state_dict"), "train.py has changed"),
    "an import": (write("model.py", "HEADS = 8"), "model.py has changed"),
    "one that is gone": (remove("model.py"), "model.py is gone"),
    "one that is new": (write("model/__init__.py", ""), "model/__init__.py is new"),
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_run_of_other_sources_does_not_count(release: Release, name: str) -> None:
    """The reason names the file, and a fresh run opens the gate again. A note beside the script changes nothing."""
    change, said = CHANGED[name]
    write("notes.py", "")(release)
    assert release.judged().exit_code == 0
    release.script.with_name("model").mkdir()
    change(release)
    assert f"the newest was made with other code of the job: {said}; run it again" in reason(release)
    assert [one.name for one in release.judged().missing] == ["kill"]
    release.run("kill", hours=0.1)
    assert release.judged().exit_code == 0


def test_with_a_commit_the_sources_need_no_check(release: Release) -> None:
    """The run was made at the commit that is released, whatever lies in this folder."""
    in_artifact("environment", commit=COMMIT)(release)
    write("train.py", "import model  # of another branch")(release)
    assert release.judged(commit=COMMIT).exit_code == 0
    assert "train.py has changed" in reason(release)


def test_a_run_of_another_checkout_is_compared_by_contents(release: Release, tmp_path: Path) -> None:
    """As in CI, where the runs come from another machine with other paths."""
    moved = Release(tmp_path / "checkout")
    shutil.copytree(release.home, moved.home, dirs_exist_ok=True)
    shutil.rmtree(release.home)
    assert moved.judged().exit_code == 0
    write("model.py", "HEADS = 8")(moved)
    assert "model.py has changed" in reason(moved)


def no_sources(release: Release) -> None:
    for source in release.script.parent.glob("*.py"):
        source.unlink()


UNKNOWN: dict[str, tuple[Callable[[Release], Any], str]] = {
    "an old run": (lambda release: (run_of(release).artifacts / "sources.json").unlink(), "the run did not record it"),
    "damaged": (in_artifact("sources", files=3), "the run did not record it"),
    "on other machines": (in_artifact("sources", files={}, unknown="the job runs on other machines"), "other machines"),
    "sources gone": (no_sources, "none of its files"),
    "a library elsewhere": (
        in_artifact("sources", files={"../../no/lib.py": "", "train.py": ""}),
        "lib.py is not here",
    ),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_cannot_be_compared_closes_the_gate(release: Release, name: str) -> None:
    """It says why the code is not known to be the same, and what to do. With --commit, it is open."""
    in_artifact("environment", commit=COMMIT)(release)
    change, why = UNKNOWN[name]
    change(release)
    said = reason(release)
    assert "the job's code is not known to be that of the run: " in said
    assert why in said
    assert said.endswith("; let job.cwd of kill.yaml be the job's folder, or give --commit")
    assert release.judged(commit=COMMIT).exit_code == 0


def test_a_configuration_that_the_job_read_counts_too(release: Release) -> None:
    """The command does not name it, but the twin's job has read it."""
    config = release.script.with_name("model.toml")
    config.write_text("heads = 4")
    run = run_of(release)
    run.reads.mkdir(parents=True, exist_ok=True)
    (run.reads / "rank0").write_bytes(b"r" + bytes(config) + b"\0")
    (run.twins / "0").mkdir(parents=True, exist_ok=True)
    (run.twins / "0" / "made.json").write_text(Inputs.of(run, config.stat().st_mtime + 60).to_json())
    assert release.judged().exit_code == 0
    config.write_text("heads = 8")
    assert "model.toml has changed" in reason(release)


def test_an_exploration_of_other_sources_does_not_count(release: Release) -> None:
    """Its sources are those of the run that it recorded."""
    run, home = run_of(release), release.runs / "explored"
    shutil.copytree(run.root, home / "recorded")
    (home / "recording").mkdir()
    for path in (run.plan, run.scenario):
        shutil.copy(path, home)
    result = run.result.read_text()
    (home / "explored.json").write_text(f'{{"schema": 1, "result": {result}}}')
    change_json(home / "explored.json", lambda one: one["result"].update(reproduce="torchaos explore kill.yaml"))
    release.gate["explored"] = ["scenarios/kill.yaml"]
    assert release.judged().exit_code == 0
    write("model.py", "HEADS = 8")(release)
    assert "model.py has changed" in release.judged().results[1].reason
