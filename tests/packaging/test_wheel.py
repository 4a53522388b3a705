"""What is in the wheel, and what is not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

FOLDERS = ("plugin", "harness", "injectors", "assertions", "scenarios")


@pytest.fixture(scope="session")
def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


def test_the_wheel_holds_every_file_of_our_folders(names: set[str], checkout: Path) -> None:
    """A folder missing from `packages` in pyproject.toml, or a kind of file from `package-data`, shows here."""
    files = [path for folder in FOLDERS for path in (checkout / folder).rglob("*") if path.is_file()]
    ours = {f"torchaos/{path.relative_to(checkout)}" for path in files if path.parent.name != "__pycache__"}
    held = {name for name in names if name.startswith("torchaos/")}
    assert ours - held == set(), "not in the wheel: add the folder to packages, or the suffix to package-data"
    built = {name for name in held if name.endswith(".so")}
    assert held - ours - built == set(), "in the wheel, but not in the repository"


def test_the_wheel_holds_nothing_but_torchaos(names: set[str]) -> None:
    """Neither ci nor tests, nor a top-level harness, lands in the user's site-packages."""
    tops = {name.partition("/")[0] for name in names}
    metadata = {top for top in tops if top.startswith("torchaos-") and top.endswith(".dist-info")}
    assert len(metadata) == 1
    assert tops - metadata == {"torchaos"}


def test_the_wheel_holds_what_is_no_module(names: set[str]) -> None:
    """Scenarios, the trainers that they run, and the agent's bootstrap are there, and torchaos stays a namespace."""
    assert "torchaos/harness/agent/bootstrap/sitecustomize.py" in names
    assert "torchaos/scenarios/process/kill-rank.yaml" in names
    assert "torchaos/scenarios/jobs/gpt_ddp.py" in names
    assert "torchaos/__init__.py" not in names, "a package of a third party could no longer add to torchaos"


def test_the_wheel_says_that_it_is_typed(names: set[str]) -> None:
    """Each package has its mark of PEP 561, since torchaos itself is a namespace."""
    assert {f"torchaos/{folder}/py.typed" for folder in FOLDERS} <= names


def test_the_wheel_carries_the_licence(names: set[str]) -> None:
    """The text of the licence goes where the code goes."""
    assert [name for name in names if name.endswith("LICENSE")]


def test_a_wheel_needs_no_compiler(checkout: Path, tmp_path: Path) -> None:
    """Where the C parts can't be compiled the wheel is built all the same, with their sources alone."""
    source = shutil.copytree(checkout, tmp_path / "source", ignore=shutil.ignore_patterns("build", "*.egg-info"))
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    broken = {**os.environ, "CC": "/bin/false"}
    command += ["-w", str(tmp_path), str(source)]
    done = subprocess.run(command, env=broken, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as archive:
        native = [name for name in archive.namelist() if "/native/nvtx/" in name]
    assert native == ["torchaos/injectors/native/nvtx/stall.c"]
