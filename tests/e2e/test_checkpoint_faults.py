"""Damage to checkpoints and their storage in real jobs: a job uses an older checkpoint, trains on the damage, or gives
up."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from chaos import REPOSITORY, RunScenario, kill_rank, left_over, trainer

from torchaos.harness.fault_drivers.checkpoint_damage import survey
from torchaos.harness.protocol.wire import Kind
from torchaos.harness.record.record import Record
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.rollback.file_handles import mounts

pytestmark = pytest.mark.job

DAMAGE = sorted((REPOSITORY / "scenarios" / "checkpoint").glob("*.yaml"))
FULL = REPOSITORY / "scenarios" / "storage" / "really-full.yaml"
STORAGE = sorted({*(REPOSITORY / "scenarios" / "storage").glob("*.yaml")} - {FULL})


def _of(paths: list[Path]) -> list[Any]:
    return [pytest.param(path, id=path.stem) for path in paths]


@pytest.mark.long
@pytest.mark.parametrize("path", _of(DAMAGE))
def test_the_reference_job_falls_back(torchaos: RunScenario, path: Path) -> None:
    """Its newest checkpoint is damaged after the death and before the first line of the new attempt; it goes back to
    the newest whole one, ends as its twin, and every damaged byte is put back."""
    run = torchaos(path)
    assert run.exit_code == 0, run
    record = Record.load(RunDir(run.folder))
    done = next(record.of_fault("damage", Kind.APPLIED))
    first = min(event.mono_s for event in record.of_kind(Kind.LOAD_BEGIN, Kind.STEP) if event.attempt == 1)
    died = next(event for event in record.of_kind(Kind.RANK_EXITED) if event.data["exit_code"] == -9)
    assert died.mono_s < done.mono_s < first
    behind = 20 if path.stem == "two-newest-damaged" else 10
    base = record.history.attempts[1].base
    assert base is not None
    damaged = [event.data["step"] for event in record.of_kind(Kind.EFFECT) if event.data.get("what") == "damaged"]
    assert base == max(damaged) - behind
    assert left_over(run.folder) == []


@pytest.mark.long
@pytest.mark.needs("fuse")
@pytest.mark.parametrize("path", _of(STORAGE))
def test_the_reference_job_bears_bad_storage(torchaos: RunScenario, path: Path) -> None:
    """The file system of its checkpoints fails, crawls or hangs during a save, and is healed; nothing is lost."""
    run = torchaos(path)
    assert run.exit_code == 0, run
    assert "was given" in run.result["faults"][0]["evidence"], run
    assert run.case("rollback")["verdict"] == "passed", run
    assert left_over(run.folder) == []


@pytest.mark.long
@pytest.mark.needs("mount")
def test_the_reference_job_bears_a_full_file_system(torchaos: RunScenario) -> None:
    """Its checkpoints lie on a tmpfs that is full during a save: that save fails, later ones do not, nothing is lost;
    afterwards the mount is gone, and the checkpoints that were in it lie in the run's folder, whole."""
    run = torchaos(FULL)
    assert run.exit_code == 0, run
    assert "could not save step-30.partial" in run.result["faults"][0]["evidence"], run
    record = Record.load(RunDir(run.folder))
    assert not any(mount.target.startswith(str(run.folder.resolve())) for mount in mounts())
    folder = RunDir(run.folder).job / "checkpoints"
    assert [path.name for path in folder.parent.iterdir()] == ["checkpoints"]
    assert [Path(one.path).name for one in survey(folder)] == ["step-120", "step-110", "step-100"]
    assert not [text for text in map(str, record.of_kind(Kind.NOTE)) if "gone" in text]
    assert run.case("rollback")["verdict"] == "passed", run
    assert left_over(run.folder) == []


# The script, the package that it needs, the damage, the assertion that fails, and words of its reason.
UNGUARDED = [
    ("unguarded/plain_dcp.py", None, "stale_shard", {}, "resumed from damaged data: attempt 1 loaded step-15"),
    ("plain_ddp.py", None, "flip_bits", {}, "resumed from damaged data: attempt 1 loaded checkpoint.pt"),
    ("hf_trainer.py", "transformers", "truncate", {"keep": 0.5}, "the job did not resume: in checkpoint-15"),
    ("lightning_trainer.py", "lightning", "torn_write", {}, "the job did not resume: in last.ckpt"),
]


@pytest.mark.parametrize(
    ("script", "package", "damage", "params", "words"),
    [
        pytest.param(*row, id=Path(row[0]).stem, marks=[pytest.mark.long] * (row[0] != "plain_ddp.py"))
        for row in UNGUARDED
    ],
)
def test_who_does_not_look_is_failed(
    torchaos: RunScenario, script: str, package: str | None, damage: str, params: dict[str, Any], words: str
) -> None:
    """A job that trusts what it loads, or can't go back, is failed by checkpoint_integrity in words that say so."""
    if package and not find_spec(package):
        pytest.skip(f"the package {package} is not installed")
    command = f"torchrun --nproc-per-node 2 --max-restarts 3 {trainer(script)} --steps 30 --dir {{run}}/out"
    scenario = kill_rank(
        {"command": command, "checkpoints": {"path": "{run}/out"}}, when={"step": 18, "phase": "backward"}, twin="none"
    )
    scenario["faults"].append(
        {"inject": f"checkpoint.{damage}", "when": {"attempt": 1, "phase": "start"}, "with": {**params, "seed": 4}}
    )
    run = torchaos(scenario)
    assert run.exit_code == 1, run
    found = run.case("checkpoint_integrity")
    assert (found["verdict"], words in found["reason"]) == ("failed", True), run
    assert all(fault["evidence"] for fault in run.result["faults"]), run
    assert run.case("rollback")["verdict"] == "passed", run
    assert left_over(run.folder) == []


@pytest.mark.long
def test_damage_of_what_is_being_saved(torchaos: RunScenario) -> None:
    """A bit flips in the file that a save has written, before the job gives it its final name; the rank dies, and
    resumes from that file: the damage is followed to its new name, and the job is failed for it."""
    command = f"torchrun --nproc-per-node 1 --max-restarts 3 {trainer('plain_ddp.py')} --steps 24 --dir {{run}}/out"
    scenario = kill_rank(
        {"command": command, "checkpoints": {"path": "{run}/out"}}, rank=0, when={"step": 18, "phase": "backward"}
    )
    moment = {"step": 16, "phase": "checkpoint_written"}
    scenario["faults"].append({"id": "damage", "inject": "checkpoint.flip_bits", "when": moment, "with": {"seed": 4}})
    scenario["assert"] = ["checkpoint_integrity"]
    run = torchaos(scenario)
    assert run.exit_code == 1, run
    found = run.case("checkpoint_integrity")
    assert "resumed from damaged data: attempt 1 loaded checkpoint.pt (step 15)" in found["reason"], run
    record = Record.load(RunDir(run.folder))
    (moved,) = [event for event in record.of_fault("damage", Kind.EFFECT) if event.data.get("what") == "renamed"]
    assert Path(moved.data["to"]).name == "checkpoint.pt"
    assert all(fault["evidence"] for fault in run.result["faults"]), run
    assert run.case("rollback")["verdict"] == "passed", run
    assert left_over(run.folder) == []
