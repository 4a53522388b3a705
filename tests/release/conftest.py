"""A release: scenarios, recorded run directories, and a gate over them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import yaml
from webhooks import Server, listening

from torchaos.harness.record.plan import Plan
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.release.gate_file import load
from torchaos.harness.release.gate_runs import Terms, found_in
from torchaos.harness.release.gate_verdict import Judged, judge_gate
from torchaos.harness.running.twin_key import record_sources

RECORDED = Path(__file__).parents[1] / "data" / "runs"
NOW = datetime(2026, 11, 22, 12, tzinfo=timezone.utc)
ASSERTS = ["recovery_time", "checkpoint_integrity", "loss_continuity", "sample_accounting", "restarts", "completed"]


@dataclass
class Release:
    home: Path
    gate: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        (self.home / "scenarios").mkdir(parents=True)
        self.script.write_text("import model\n")
        self.script.with_name("model.py").write_text("")
        self.gate = {
            "gate": "release", "scenarios": ["scenarios"], "max_age": "1d", "environments": {"ci": {}}, "waivers": []
        }  # fmt: skip

    @property
    def runs(self) -> Path:
        return self.home / "runs"

    @property
    def script(self) -> Path:
        return self.home / "scenarios" / "train.py"

    @property
    def file(self) -> Path:
        path = self.home / "gate.yaml"
        path.write_text(yaml.safe_dump(self.gate, sort_keys=False))
        return path

    def scenario(self, name: str, **more: Any) -> Path:
        asserts = [one["name"] for one in json.loads((RECORDED / name / "plan.json").read_text())["asserts"]]
        fault = {"inject": "process.kill", "target": {"rank": 1}, "when": {"step": 7, "phase": "backward"}}
        path = self.home / "scenarios" / f"{name}.yaml"
        path.write_text(yaml.safe_dump({
            "scenario": name, "job": {"command": "torchrun --nproc-per-node 2 train.py"}, "faults": [fault],
            "assert": asserts, **more,
        }, sort_keys=False))  # fmt: skip
        return path

    def run(self, name: str, hours: float = 1.0, seed: int = 0, of: str = "", at: str = "") -> RunDir:
        """A run of the scenario `name` that began so long ago; the record is that of the recorded run `of`."""
        folder = RunDir(self.runs / at / f"{name}-{seed}-{len(list(self.home.rglob('plan.json')))}")
        shutil.copytree(RECORDED / (of or name), folder.root)
        folder.scenario.write_bytes((self.home / "scenarios" / f"{name}.yaml").read_bytes())
        began = (NOW - timedelta(hours=hours)).isoformat()
        change_json(folder.result, lambda result: result.update(scenario=name, started=began, seed=seed))
        job = {"command": ["torchrun", "--nproc-per-node", "2", "train.py"], "cwd": str(self.script.parent)}
        change_json(folder.plan, lambda plan: plan.update(scenario=name, seed=seed, job={**plan["job"], **job}))
        record_sources(Plan.read(folder.plan), folder)
        return folder

    def waive(self, scenario: str, assertion: str, expires: str = "2026-12-31", **more: Any) -> None:
        self.gate["waivers"].append({
            "scenario": scenario, "assertion": assertion, "reason": "it is known", "ticket": "TRAIN-1",
            "expires": expires, **more,
        })  # fmt: skip

    def judged(self, environment: str = "ci", commit: str = "", now: datetime = NOW) -> Judged:
        loaded = load(self.file)
        setting = loaded.gate.environments[environment]
        versions = {str(name): one for name, one in setting.versions.items()}
        age = timedelta(seconds=loaded.gate.max_age_s(environment))
        return judge_gate(loaded, environment, found_in([self.runs]), Terms(now, age, commit, versions, setting.set))


def change_json(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    found = json.loads(path.read_text())
    change(found)
    path.write_text(json.dumps(found))


@pytest.fixture
def release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Release:
    """One scenario with a run of an hour ago that passed: the gate is open."""
    monkeypatch.delenv("PYTHONPATH", raising=False)  # whatever lies there would be a source of the job, too
    found = Release(tmp_path / "release")
    found.scenario("kill")
    found.run("kill")
    return found


@pytest.fixture
def failing(tmp_path: Path) -> Release:
    """One scenario of whose assertions two fail: the trainer forgets its optimizer's state."""
    found = Release(tmp_path / "failing")
    found.scenario("forgets-optimizer")
    found.run("forgets-optimizer")
    return found


@pytest.fixture
def server() -> Iterator[Server]:
    with listening() as found:
        yield found
