"""Faults land on exactly their rank, step and phase, and the healthy reference job passes every time."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from chaos import REPOSITORY
from click.testing import CliRunner

from torchaos.harness.cli import cli

RUNS = 30


@pytest.fixture(scope="module")
def exactness() -> Iterator[ModuleType]:
    """The benchmark that prints the same runs as a table."""
    spec = importlib.util.spec_from_file_location("exactness", REPOSITORY / "lab" / "bench" / "exactness.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all runs, since the working directory is part of what a twin is known by."""
    return tmp_path_factory.mktemp("exactness")


@pytest.mark.job
@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", range(RUNS))
def test_a_fault_lands_where_it_was_planned(exactness: ModuleType, folder: Path, cache: Path, number: int) -> None:
    """Torchelastic, the kernel, the job's log, the stack and the disk agree with the plan, and the run passes."""
    found = exactness.one_run(number, folder, {**os.environ, "XDG_CACHE_HOME": str(cache)})
    assert not found.wrong, f"{found.row()}\n{found.folder}"


def test_every_fault_comes_in_every_phase(exactness: ModuleType) -> None:
    """The runs leave out no pair of a fault and a phase."""
    faults = [exactness.scenario_of(number)["faults"][0] for number in range(RUNS)]
    pairs = {(fault["inject"], fault["when"]["phase"]) for fault in faults}
    assert len(pairs) == len(exactness.CODES) * len(exactness.PHASES)


@pytest.mark.slow
def test_one_seed_makes_one_plan(exactness: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two plans of one seed, made by two processes, are equal byte for byte; other seeds draw other ranks and steps."""
    file = tmp_path / "exactness.yaml"
    file.write_text(yaml.safe_dump(exactness.scenario_of(0), sort_keys=False))

    def plan(seed: int) -> str:
        return CliRunner().invoke(cli, ["plan", "--json", "--seed", str(seed), str(file)]).stdout

    monkeypatch.chdir(tmp_path)
    command = [sys.executable, "-m", "torchaos.harness", "plan", "--json", "--seed", "3", str(file)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == plan(3)
    drawn = {plan(seed).replace(f'"seed": {seed}', "") for seed in range(4)}
    assert len(drawn) == 4, drawn
