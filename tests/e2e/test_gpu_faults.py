"""Every ready scenario of the GPU and the numeric family, run for real against the reference job, without a GPU."""

from __future__ import annotations

import shutil
from pathlib import Path

import dcgmi_stand_in
import pytest
import yaml
from chaos import REPOSITORY, RunScenario, cut_short, left_over
from needs import need

from torchaos.harness.running import capabilities

SCENARIOS = sorted(path for family in ("gpu", "numeric") for path in (REPOSITORY / "scenarios" / family).glob("*.yaml"))

# What a short run keeps: one that goes through NVML, the health agent and a checkpoint, and one that the guard finds.
SHORT = {"xid-79"}
RANKS_OWN = {"ecc-in-rank", "watchdog-abort", "out-of-memory", "oom-killer"}  # nobody asks NVML
STAYS = {"thermal-slowdown", "single-bit-storm"}  # nobody has to leave for these

pytestmark = pytest.mark.job


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=pytest.mark.smoke if path.stem in SHORT else pytest.mark.long)
        for path in SCENARIOS
    ],
)
def test_the_reference_job_survives_it(
    torchaos: RunScenario, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault lands as planned, somebody other than its target shows it, and the healthy job loses nothing by it."""
    if path.stem == "oom-killer" and not capabilities.check("root").present:
        pytest.skip("needs root, to make a memory cgroup")
    if path.stem not in RANKS_OWN and path.parent.name == "gpu":
        pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed, by which the health agent watches")
        need("nvml_overlay")
    if path.stem == "kernel-log":
        need("root")
    if path.stem == "dcgm-xid" and not shutil.which("dcgmi"):
        dcgmi_stand_in.put_on_path(tmp_path, monkeypatch)
    consents = yaml.safe_load(path.read_text()).get("consent", ())
    shorter = cut_short(path, 40) if path.stem in SHORT else ()
    run = torchaos(path, *(word for consent in consents for word in ("--consent", consent)), *shorter)
    assert run.exit_code == 0, run
    assert all(fault["evidence"] for fault in run.result["faults"]), run
    assert run.result["attempts"] == (1 if path.stem in STAYS else 2), run
    assert left_over(run.folder) == []
    if path.stem == "xid-79":
        lines = (run.folder / "job" / "kernel.log").read_text().splitlines()
        assert lines[0].startswith("NVRM: Xid (PCI:"), lines
        assert "): 79, GPU has fallen off the bus." in lines[0]
        assert "GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)" in lines[2]
        assert not list((run.folder / "job").glob("*.nvml")), "the orders were not taken back"
