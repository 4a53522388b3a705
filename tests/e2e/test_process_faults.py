"""Every ready scenario of the families process and saves, run for real against the reference job."""

from __future__ import annotations

from pathlib import Path

import pytest
from chaos import REPOSITORY, RunScenario, cut_short, left_over
from needs import need

SCENARIOS = sorted(
    path for family in ("process", "saves") for path in (REPOSITORY / "scenarios" / family).glob("*.yaml")
)

# How often the job was started in all: what is frozen goes on, what dies comes back, and twice if it dies twice.
ATTEMPTS = {
    "after-failures": 3, "crash-loop": 3, "freeze-rank": 1, "hold-gil": 1, "in-process-restart": 1,
    "kill-during-recovery": 3, "kill-twice": 3,
}  # fmt: skip

# The one of each test run does without a twin, and makes these assertions, which need none. The others have tests of
# their own, or are kin of scenarios that tests/teeth runs.
ALONE = {
    "kill-agent": "recovery_time, checkpoint_integrity, loss_continuity, sample_accounting, no_lost_work, "
    "{completed: {steps: 40}}, clean_exit",
}

pytestmark = pytest.mark.job


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=path.stem, marks=[pytest.mark.long] * (path.stem not in ALONE)) for path in SCENARIOS],
)
def test_the_reference_job_survives_it(torchaos: RunScenario, path: Path) -> None:
    """The fault lands as planned, is felt, and the healthy reference job loses nothing by it; nothing is left."""
    if path.stem == "rising-errors":
        pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed, by which the health agent watches")
        need("nvml_overlay")
    if path.stem == "in-process-restart":
        pytest.importorskip("nvidia_resiliency_ext", reason="nvidia-resiliency-ext is not installed, which restarts it")
    alone: list[str] = []
    if path.stem in ALONE:
        alone = ["--set", "twin=none", "--set", f"assert=[{ALONE[path.stem]}]", *cut_short(path, 40)]
    run = torchaos(path, *alone)
    assert run.exit_code == 0, run
    assert all(fault["evidence"] for fault in run.result["faults"]), run
    assert run.result["attempts"] == ATTEMPTS.get(path.stem, 2), run
    assert run.case("rollback")["verdict"] == "passed", run
    assert left_over(run.folder) == []
