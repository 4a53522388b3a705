"""The observers on real jobs: under a scenario, and by themselves in the campaign of stalls."""

from __future__ import annotations

import importlib.util
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from chaos import REPOSITORY, trainer

pytestmark = pytest.mark.job
FREEZE_S = 5.0


def _campaign() -> Any:
    spec = importlib.util.spec_from_file_location("torchaos_stalls", REPOSITORY / "lab" / "campaigns" / "stalls.py")
    assert spec
    assert spec.loader
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    vars(module)["GIVE_UP_S"] = 120.0  # a busy machine may need longer than the campaign allows
    return module


def test_a_few_stalls_of_each_kind() -> None:
    """Stopped, asleep, at a lock, in a read: each is noticed and the right rank blamed, without the agent; taken back,
    the job goes on."""
    found = _campaign().stalls(4, random.Random(3), [(2, False)])
    assert [one["kind"] for one in found] == ["sigstop", "sleep", "lock", "read"]
    assert [one["culprits"] for one in found] == [[one["victim"]] for one in found]
    assert all(one["went_on"] for one in found)
    assert all(one["declared_s"] is not None for one in found)


@pytest.mark.needs("links", "nft", "ss")
def test_a_partition_without_py_spy() -> None:
    """Two nodes are cut apart: it is noticed also where the ranks spin while they wait, and nobody is to blame."""
    stalls = _campaign().partitions(1)
    assert [one["kind"] for one in stalls] == ["cut, ranks sleep", "cut, ranks spin"]
    assert all(one["declared_s"] is not None for one in stalls)
    assert [one["culprits"] for one in stalls] == [[], []]


def test_a_scenario_end_to_end(tmp_path: Path) -> None:
    """A frozen rank in a DDP job under `torchaos run`: noticed by our observers, the right rank blamed, no false alarm
    before; judged again offline, and diagnosed again from the run directory, it is the same."""
    scenario = {
        "scenario": "who-hangs",
        "job": {
            "command": f"torchrun --nproc-per-node 2 {trainer('plain_ddp.py')} --steps 400 --save-every 99 "
            "--dir {run}",
            "env": {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}, "timeout": "3m",
        },
        "faults": [{"inject": "process.freeze", "target": {"rank": 1}, "when": {"step": 200}, "for": f"{FREEZE_S:g}s"}],
        "assert": [{"hang_detected": {"by": "observers", "within": f"{FREEZE_S:g}s"}}, "culprit_identified"],
    }  # fmt: skip
    path = tmp_path / "scenario.yaml"
    path.write_text(yaml.safe_dump(scenario, sort_keys=False))
    out, report = tmp_path / "out", tmp_path / "report.json"
    done = _torchaos("run", path, "--out", out, "--json", report)
    cases = {case["name"]: case for case in json.loads(report.read_text())["results"][0]["cases"]}
    assert done.returncode == 0, done.stdout + done.stderr
    assert cases["hang_detected"]["measured"]["false_alarms"] == 0
    assert cases["culprit_identified"]["measured"]["blamed"] == [[1]]
    (folder,) = out.iterdir()
    assert _torchaos("judge", folder).returncode == 0
    again = _torchaos("diagnose", folder, "--json")
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["culprits"] == [], "the job went on and came to its end"


def _torchaos(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torchaos.harness", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
