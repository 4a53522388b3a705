"""Results in the form that a run leaves, with fixed figures."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from ideal import trainer
from paper import Paper

from torchaos.harness.record.result import Case, ExitCode, FaultResult, Recovery, Result, Verdict

__all__ = ["trainer"]  # the ideal trainer: a whole journal in a few lines

KILL = FaultResult(
    id="kill",
    inject="process.kill",
    target="rank 1",
    planned="step 25, backward",
    applied="step 25, backward, pid 4711, attempt 0",
    evidence="pid 4711 ended with exit code -9, torchelastic says",
    rollback="not possible: a dead process can't be brought back; restarting it is the job's affair",
    verdict=Verdict.PASSED,
    reason="landed where and when it was planned, and was felt",
)
RESTART = Recovery(
    "kill",
    {
        "felt": 0.004, "detected": 0.108, "torn_down": 0.331, "rendezvous": 1.317, "workers_up": 4.102,
        "imported": 4.402, "prepared": 4.611, "joined": 4.683, "set_up": 4.87,
        "restored": 4.913, "first_step": 5.266, "caught_up": 6.841,
    },
    5,
)  # fmt: skip
PASSED = Result(
    scenario="kill-rank",
    description="One rank dies without warning; the job must come back and lose only the steps since its checkpoint.",
    seed=7,
    verdict=Verdict.PASSED,
    exit_code=ExitCode.PASSED,
    reason="every fault was felt and outlived, and every assertion holds",
    run_dir="/home/ada/torchaos-runs/kill-rank-s7-20261120-204945-4242",
    started="2026-11-20T20:49:45+00:00",
    duration_s=31.42,
    faults=(KILL,),
    recoveries=(RESTART,),
    cases=(
        Case("faults", "faults", Verdict.PASSED, "1 of 1 landed as planned, was felt and outlived"),
        Case(
            "recovery_time", "assertion", Verdict.PASSED, "caught up 6.84 s after the fault, with 5 steps done again",
            {"catch_up": 6.841, "lost_steps": 5}, {"catch_up": 60.0},
        ),
        Case(
            "checkpoint_integrity", "assertion", Verdict.PASSED,
            "6 of 6 checkpoints are whole, and those that the twin has too have its contents",
        ),
        Case(
            "loss_continuity", "assertion", Verdict.PASSED, "60 steps on 2 ranks are bitwise those of the twin",
            {"largest": 0.0}, {"tolerance": 0.0, "basis": "two twins agree bitwise"},
        ),
        Case(
            "sample_accounting", "assertion", Verdict.PASSED, "each of 960 samples was consumed exactly as in the twin",
        ),
        Case("rollback", "rollback", Verdict.PASSED, "every change was undone, and every undo was verified"),
    ),
    steps=60,
    attempts=2,
    twin="1 fault-free twin",
    reproduce="torchaos run scenarios/process/kill-rank.yaml --seed 7",
    versions={"torchaos": "0.1.0", "torch": "2.13.0+cpu", "python": "3.11.9"},
)  # fmt: skip
FAILED = replace(
    PASSED,
    verdict=Verdict.FAILED,
    exit_code=ExitCode.FAILED,
    reason="loss_continuity: at step 21 rank 0 had loss 3.41296, in the twin 2.87713: the first step after the resume. "
    "The optimizer's step counter began again at 1, so its state was not restored",
    decided_by="loss_continuity",
    cases=(
        *PASSED.cases[:3],
        Case(
            "loss_continuity", "assertion", Verdict.FAILED,
            "at step 21 rank 0 had loss 3.41296, in the twin 2.87713: the first step after the resume. The optimizer's "
            "step counter began again at 1, so its state was not restored",
            {"step": 21, "rank": 0, "run": 3.41296, "twin": 2.87713},
            {"tolerance": 0.0, "basis": "two twins agree bitwise"},
        ),
        *PASSED.cases[4:],
    ),
    notes=("the agent's hook collective failed: no module named torch._C._distributed_c10d",),
)  # fmt: skip
INCONCLUSIVE = replace(
    PASSED,
    scenario="kill-late",
    verdict=Verdict.INCONCLUSIVE,
    exit_code=ExitCode.INCONCLUSIVE,
    reason="faults: kill: it never landed: the run ended before its trigger",
    decided_by="faults",
    faults=(
        replace(
            KILL, applied=None, evidence=None, rollback="not needed", planned="step 900, backward",
            verdict=Verdict.INCONCLUSIVE, reason="it never landed: the run ended before its trigger was reached",
            proved=False,
        ),
    ),
    recoveries=(),
    cases=(
        Case("faults", "faults", Verdict.INCONCLUSIVE, "kill: it never landed: the run ended before its trigger"),
        Case(
            "recovery_time", "assertion", Verdict.INCONCLUSIVE, "no fault landed, so there was nothing to recover from",
            {}, {"catch_up": 60.0},
        ),
        *PASSED.cases[4:],
    ),
    attempts=1,
)  # fmt: skip
SEVERAL = replace(
    PASSED,
    scenario="freeze-then-kill",
    description="",
    verdict=Verdict.FAILED,
    exit_code=ExitCode.ROLLBACK,
    reason="recovery_time: kill: the job never caught up: it came back, and never got past step 24, the highest before",
    decided_by="recovery_time",
    faults=(
        replace(
            KILL, id="freeze", inject="process.freeze", planned="step 12, forward",
            applied="step 12, forward, pid 4711, attempt 0",
            evidence="the kernel showed pid 4711 as stopped", rollback="INCOMPLETE: pid 4711 is still stopped",
        ),
        replace(KILL, verdict=Verdict.FAILED, reason="the job never got past step 24, the highest before the fault"),
    ),
    recoveries=(
        Recovery("freeze", {**dict.fromkeys(RESTART.parts), "felt": 0.02, "caught_up": 3.12}, 0),
        Recovery("kill", {**RESTART.parts, "restored": None, "caught_up": None}, None),
    ),
    cases=(
        Case("faults", "faults", Verdict.FAILED, "kill: the job never got past step 24, the highest before the fault"),
        Case(
            "recovery_time", "assertion", Verdict.FAILED,
            "kill: the job never caught up: it came back, and never got past step 24, the highest before",
            {"catch_up": None, "interruptions": 2}, {"catch_up": 60.0},
        ),
        Case("rollback", "rollback", Verdict.ERROR, "freeze could not be undone: pid 4711 is still stopped"),
    ),
    steps=24,
)  # fmt: skip


@pytest.fixture
def results() -> dict[str, Result]:
    return {"passed": PASSED, "failed": FAILED, "inconclusive": INCONCLUSIVE, "several": SEVERAL}


@pytest.fixture
def paper(monkeypatch: pytest.MonkeyPatch) -> type[Paper]:
    for name in ("CI", "COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR", "TERM", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    return Paper


@pytest.fixture
def golden() -> Callable[[str, str], None]:
    """Compares a text with a file; UPDATE_GOLDEN=1 writes it anew, to be looked at in the diff."""

    def check(name: str, text: str) -> None:
        path = Path(__file__).parent / "golden" / f"{name}.txt"
        if os.environ.get("UPDATE_GOLDEN"):
            path.write_text(text, encoding="utf-8")
        assert text == path.read_text(encoding="utf-8")

    return check
