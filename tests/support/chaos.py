"""Helpers of the end-to-end tests: scenarios around a job, and the results of a run by the command line."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import yaml

REPOSITORY = Path(__file__).parents[2]
TRAINERS = REPOSITORY / "tests" / "trainers"


def trainer(script: str) -> str:
    """One of them as a word of a command line; its path may have a space."""
    return shlex.quote(str(TRAINERS / script))


@dataclass(frozen=True)
class Outcome:
    """One call of `torchaos run` with one scenario."""

    exit_code: int
    output: str
    result: dict[str, Any]
    folder: Path
    junit: Path

    def case(self, name: str) -> dict[str, Any]:
        return next(case for case in self.result["cases"] if case["name"] == name)

    def __str__(self) -> str:
        return f"exit code {self.exit_code}\n{self.output}"


class RunScenario(Protocol):
    def __call__(self, scenario: Path | dict[str, Any], *options: str) -> Outcome: ...


def kill_rank(job: dict[str, Any], *, rank: int | str = 1, when: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The main scenario, with another job."""
    return {
        "scenario": "kill-rank",
        "description": "One rank dies without warning.",
        # A twin's cache key contains the working directory, so with the same one, tests share their twins.
        "job": {"env": {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}, "timeout": "4m", "cwd": str(REPOSITORY), **job},
        "faults": [{"inject": "process.kill", "target": {"rank": rank}, "when": when}],
        "assert": ["recovery_time", "checkpoint_integrity", "loss_continuity", "sample_accounting", "completed"],
        **more,
    }


def cut_short(scenario: Path, steps: int) -> tuple[str, str]:
    """The option of `torchaos run` with which the job of a scenario of 60 steps ends sooner."""
    command = yaml.safe_load(scenario.read_text())["job"]["command"]
    assert "--steps 60" in command, command
    return "--set", f"job.command={command.replace('--steps 60', f'--steps {steps}')}"


def left_over(folder: Path) -> list[int]:
    """The pids of processes that still carry the mark of a run."""
    run_id = json.loads((folder / "agent" / "plan.json").read_text())["run_id"]
    mark, found = f"TORCHAOS_RUN_ID={run_id}".encode(), []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (process / "environ").read_bytes().split(b"\0"):
                found.append(int(process.name))
        except OSError:
            continue
    return found
