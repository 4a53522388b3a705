"""On which GPU a fault was shown: said from the records of lab/gpu-check, and from nothing else."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml

from torchaos.harness import registry
from torchaos.harness.analysis.fault_results import faults_case, synthetic
from torchaos.harness.record.result import FaultResult, Verdict
from torchaos.harness.reporting.terminal import plan_preview

PROGRAM = Path(__file__).parents[2] / "lab" / "gpu-check"
KEYS = ("injector", "row", "tier", "card", "driver", "nccl", "torch", "date", "commit")
MACHINE = dict(zip(KEYS[3:], ("NVIDIA H100", "580.1", "2.28.9", "2.11.0", "2026-11-26", "abc1234"), strict=True))


def injectors() -> list[Any]:
    return [registry.find("injectors", name) for name in registry.names("injectors")]


def test_each_record_is_whole_and_names_an_injector_and_a_row() -> None:
    """A record that names none, or lacks a version, is no evidence."""
    rows = runpy.run_path(str(PROGRAM))["ROWS"]
    for record in plan_preview.records():
        assert tuple(record) == KEYS
        assert all(record.values())
        assert record["injector"] in registry.names("injectors")
        assert record["row"] in rows
        assert record["tier"] == plan_preview.tier_of(registry.find("injectors", record["injector"]))


def test_no_replay_is_claimed_without_a_record() -> None:
    """What a real machine said must have been recorded, with its versions."""
    recorded = {record["injector"] for record in plan_preview.records() if record["tier"] == "replayed"}
    assert {injector.name for injector in injectors() if injector.replays} <= recorded


def test_the_table_of_all_tiers_is_up_to_date() -> None:
    """Each injector and each ready scenario that needs a GPU or is not real has a row, as the records say today."""
    made = (PROGRAM.parent / "results" / "shown.md").read_text()
    assert made == runpy.run_path(str(PROGRAM))["table_of_tiers"](), "run lab/gpu-check --record"


def test_a_scenario_is_as_real_as_its_least_real_fault() -> None:
    """A scenario of a GPU's report is synthetic, one of a kill is real; a GPU is claimed by a record of it alone."""
    kill, xid = registry.find("injectors", "process.kill"), registry.find("injectors", "gpu.xid")
    assert plan_preview.scenario_in_words("a/kill", [kill], []) == "effect: real"
    assert plan_preview.scenario_in_words("a/both", [kill, xid], []) == "effect: synthetic; not shown on a GPU yet"
    known = [{"injector": "gpu.xid", "row": "a/both", "tier": "synthetic", **MACHINE}]
    words = plan_preview.scenario_in_words("a/both", [kill, xid], known)
    assert words.startswith("effect: synthetic; shown on NVIDIA H100 (driver 580.1, ")
    assert "not shown" in plan_preview.scenario_in_words("another/one", [xid], known)


def test_no_fault_of_gpus_is_called_real_without_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without records each says that it was not shown; with one it names the card, driver, NCCL, torch and commit."""
    monkeypatch.setattr(plan_preview, "records", lambda: ())
    for injector in filter(plan_preview.needs_a_gpu, injectors()):
        words = plan_preview.shown_in_words(injector)
        assert "not shown on a GPU yet" in words
        assert "real" not in words
        assert ("synthetic" in words) == bool(injector.imitates)
    monkeypatch.setattr(
        plan_preview, "records", lambda: ({"injector": "nccl.stall", "row": "nccl_net", "tier": "real", **MACHINE},)
    )
    words = "(driver 580.1, NCCL 2.28.9, torch 2.11.0; 2026-11-26, commit abc1234)"
    told = plan_preview.shown_in_words(registry.find("injectors", "nccl.stall"))
    assert told == f"effect: real; shown on NVIDIA H100 {words}"


def test_faults_of_gpu_health_are_synthetic() -> None:
    """Every fault that changes what NVML, DCGM or the kernel's log says imitates it; a kill does not imitate."""
    imitating = {injector.name for injector in injectors() if injector.imitates}
    assert {name for name in registry.names("injectors") if name.startswith("gpu.")} <= imitating
    assert {"cuda.error", "cuda.abort"} <= imitating
    assert not imitating & {"process.kill", "nccl.stall", "numeric.gradient", "cuda.out_of_memory"}


def test_a_verdict_says_what_was_imitated() -> None:
    """Whose report it is, once for each kind of fault; nothing is added for faults that really happened."""
    one = FaultResult("f", "gpu.xid", "rank 0", "", "", "seen", "", Verdict.PASSED, "", imitates="the driver's reports")
    real = FaultResult("g", "process.kill", "rank 0", "", "", "seen", "", Verdict.PASSED, "")
    words = "; gpu.xid is synthetic: it imitates the driver's reports"
    assert synthetic([one, one, real]) == words
    assert synthetic([real]) == ""
    again = FaultResult("h", "gpu.log", "rank 0", "", "", "seen", "", Verdict.PASSED, "", replays="an H100")
    assert synthetic([again, real]) == "; gpu.log is replayed: it says again what an H100 said"
    assert faults_case([one, real], set()).reason.endswith(f"were felt and outlived{words}")


def test_rows_that_passed_are_recorded(tmp_path: Path) -> None:
    """For each injector of a row that passed on a GPU, once; not for rows that failed, nor for a rehearsal."""
    check = runpy.run_path(str(PROGRAM))
    file = tmp_path / "injectors" / "shown.yaml"
    for folder in (file.parent, tmp_path / "lab" / "results"):
        folder.mkdir(parents=True)
    file.write_text("# a comment\n[]\n")
    rows = {"gpu/xid-79": {"result": "pass"}, "nccl_stall": {"result": "pass"}, "gpu_memory": {"result": "fail"}}
    assert check["record"](rows, file) == 1
    assert check["record"]({**rows, "versions": MACHINE}, file) == 0
    assert check["record"]({**rows, "versions": MACHINE}, file) == 0
    assert file.read_text().startswith("# a comment\n")
    found = yaml.safe_load(file.read_text())
    assert [(one["injector"], one["row"]) for one in found] == [
        ("collective.stall_nccl", "nccl_stall"), ("gpu.xid", "gpu/xid-79"),
    ]  # fmt: skip
    assert all(tuple(one) == KEYS for one in found)
    assert [one["tier"] for one in found] == ["real", "synthetic"]
    made = (tmp_path / "lab" / "results" / "shown.md").read_text()
    assert "| `gpu/xid-79` | synthetic: " not in made
    assert "| `gpu/xid-79` | synthetic; shown on NVIDIA H100 (driver 580.1, NCCL 2.28.9, torch 2.11.0; " in made
    assert json.loads(json.dumps(found)) == found


def test_the_programs_name_injectors_that_exist() -> None:
    """A wrong name would be recorded for nothing."""
    named = {name for used in runpy.run_path(str(PROGRAM))["PROGRAMS"].values() for name in used}
    assert named <= set(registry.names("injectors"))
