"""torchaos accepts the YAML of README and guides."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from torchaos.harness import registry
from torchaos.harness.gameday.fault_schedule import cut, draw, mix_of, scenario_of
from torchaos.harness.gameday.fault_schedule import load as load_day
from torchaos.harness.running import capabilities
from torchaos.harness.running.planner import make_plan
from torchaos.harness.scenario.grammar import Scenario
from torchaos.harness.scenario.loader import load

from .conftest import REPOSITORY, Block, Torchaos, blocks

DAYS = [block for block in blocks("yaml") if block.text.startswith("gameday:")]
GATES = [block for block in blocks("yaml") if block.text.startswith("gate:")]
MANIFESTS = [block for block in blocks("yaml") if block.text.startswith("apiVersion:")]
OTHERS = [
    block for block in blocks("yaml") if block.text.lstrip().startswith(("- uses:", "repos:"))
]  # GitHub, pre-commit
YAML = [block for block in blocks("yaml") if block not in DAYS + GATES + MANIFESTS + OTHERS]
GUIDE = REPOSITORY / "docs" / "write-a-scenario.md"


@pytest.fixture(autouse=True, scope="module")
def installed(plugins: Path) -> Iterator[None]:
    """The packages of the guides can be found in this process too, for the time of these tests."""
    before, packages = set(sys.modules), {path.name for path in plugins.iterdir()}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(plugins))
        patch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
        for name in ("gpu", "nccl", "slurm", "slurm_admin"):
            there = replace(capabilities.known()[name], find=lambda: "as if it were there")
            patch.setitem(capabilities.known(), name, there)
        registry.forget()
        yield
    registry.forget()
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in packages:
            del sys.modules[name]
    importlib.invalidate_caches()


def whole(block: Block) -> dict[str, Any]:
    """A part of a scenario is read in the place of that part of the one with which the guide begins."""
    part: dict[str, Any] = yaml.safe_load(block.text)
    if "scenario" in part:
        return part
    first: dict[str, Any] = yaml.safe_load(blocks("yaml", [GUIDE])[0].text)
    return {**first, **part}


@pytest.mark.parametrize("block", YAML, ids=[block.where for block in YAML])
def test_every_scenario_can_be_planned(block: Block, tmp_path: Path) -> None:
    """Each is well-formed, as it stands where it is whole, and can be resolved on this machine."""
    path = tmp_path / "scenario.yaml"
    (tmp_path / "job.yaml").write_text(MANIFESTS[0].text)
    path.write_text(block.text if "scenario:" in block.text else yaml.safe_dump(whole(block), sort_keys=False))
    scenario = load(path)
    plan = make_plan(scenario, path, seed=scenario.seed)
    assert plan.job.world_size == 2
    assert len(plan.faults) == len(scenario.faults)


@pytest.mark.parametrize("block", DAYS, ids=[block.where for block in DAYS])
def test_every_game_day_can_be_drawn(block: Block, tmp_path: Path) -> None:
    """Each is well-formed, and every round of it can be planned."""
    path = tmp_path / "day.yaml"
    path.write_text(block.text)
    day = load_day(path)
    drawn = cut(day, draw(day, mix_of(day).risks, day.seed))
    for one in drawn:
        again = tmp_path / f"{one.number}.yaml"
        again.write_text(yaml.safe_dump(scenario_of(day, one, tmp_path, tmp_path)))
        assert len(make_plan(load(again), again, day.seed).faults) == len(one.faults)
    assert sum(len(one.faults) for one in drawn) > 20


def test_the_gate_is_that_of_the_templates() -> None:
    """What the guide shows is the file that the tests of the gate run."""
    (block,) = GATES
    assert (REPOSITORY / "ci" / "templates" / "release-gate" / "gate.yaml").read_text().endswith(block.text)


def test_the_guide_shows_every_part_of_the_grammar() -> None:
    """Whatever a scenario may hold at the top or in its job is in one of the guide's examples."""
    parts = [whole(block) for block in blocks("yaml", [GUIDE])]
    shown = {key for part in parts for key in part} | {f"job.{key}" for part in parts for key in part["job"]}
    wanted = {field.alias or name for name, field in Scenario.model_fields.items()}
    job = Scenario.model_fields["job"].annotation
    assert job is not None
    wanted |= {f"job.{name}" for name in job.model_fields}
    undocumented = wanted - shown - {"launcher", "job.nodes"}  # there is but one launcher, and it has one node
    assert not undocumented


@pytest.mark.parametrize("group", ["injectors", "assertions", "conditions"])
def test_the_guide_names_everything_that_is_there(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each injector, assertion and condition of ours stands in the guide."""
    text = GUIDE.read_text()
    ours = [name for name in registry.names(group) if registry.find(group, name).__module__.startswith("torchaos.")]
    assert ours
    assert [name for name in ours if name not in text] == []


def test_plan_shows_the_smallest_scenario(torchaos: Torchaos, tmp_path: Path) -> None:
    """The scenario of the README is planned by the command that the README gives for it."""
    (block,) = blocks("yaml", [REPOSITORY / "README.md"])
    (tmp_path / "kill-rank.yaml").write_text(block.text)
    (tmp_path / "train.py").touch()
    done = torchaos("plan", "kill-rank.yaml")
    assert done.returncode == 0, done.stderr
    assert "step 18, backward" in done.stdout
    assert "nothing has been changed" in done.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"kill-rank.yaml", "train.py"}


@pytest.mark.job
@pytest.mark.long  # `make demo` runs its like
def test_the_smallest_scenario_runs(torchaos: Torchaos, tmp_path: Path) -> None:
    """The scenario of the README, with a plain DDP loop for the reader's train.py, is run as it stands, and passes."""
    (block,) = blocks("yaml", [REPOSITORY / "README.md"])
    (tmp_path / "kill-rank.yaml").write_text(block.text)
    shutil.copy(REPOSITORY / "tests" / "trainers" / "plain_ddp.py", tmp_path / "train.py")
    done = torchaos("run", "-v", "kill-rank.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the losses of all 30 steps on 2 ranks are bitwise equal" in " ".join(done.stdout.split())
