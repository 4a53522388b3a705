"""Every ready scenario of the process family, run for real against the reference job."""

from __future__ import annotations

from pathlib import Path

import pytest
from chaos import REPOSITORY, RunScenario, left_over

SCENARIOS = sorted((REPOSITORY / "scenarios" / "process").glob("*.yaml"))

# How often the job was started in all: what is frozen goes on, what dies comes back, and twice if it dies twice.
ATTEMPTS = {"crash-loop": 3, "freeze-rank": 1, "hold-gil": 1, "kill-during-recovery": 3, "kill-twice": 3}

# What a short run leaves to the long one: kin of those that stay, and the one that has a test of its own.
LONG = {
    "abort-rank", "crash-loop", "exception-in-rank", "freeze-rank", "hold-gil", "kill-during-recovery",
    "kill-during-save", "kill-rank", "kill-twice", "segfault-rank", "silent-exit", "spot-preemption",
}  # fmt: skip

pytestmark = pytest.mark.job


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=path.stem, marks=[pytest.mark.long] * (path.stem in LONG)) for path in SCENARIOS],
)
def test_the_reference_job_survives_it(torchaos: RunScenario, path: Path) -> None:
    """The fault lands as planned, is felt, and the healthy reference job loses nothing by it; nothing is left."""
    run = torchaos(path)
    assert run.exit_code == 0, run
    assert all(fault["evidence"] for fault in run.result["faults"]), run
    assert run.result["attempts"] == ATTEMPTS.get(path.stem, 2), run
    assert run.case("rollback")["verdict"] == "passed", run
    assert left_over(run.folder) == []
