"""One run of the reference job with faults of four families, of which none needs a privilege: what is quick to show."""

from __future__ import annotations

from typing import Any

import pytest
from chaos import RunScenario, kill_rank, left_over

from torchaos.harness.record.record import Record
from torchaos.harness.record.rundir import RunDir

pytestmark = pytest.mark.job


@pytest.mark.smoke
def test_each_fault_lands_and_nothing_is_lost(torchaos: RunScenario, reference: dict[str, Any]) -> None:
    """A rank does not enter an all-reduce; later its gradient is NaN, which the job notices; in its third epoch it is
    killed, and a bit of its newest checkpoint flips before the restart. The job goes back to the one before, which is
    that of an epoch's last step, and ends as its twin."""
    job = {**reference, "command": reference["command"].replace("--steps 60", "--steps 44 --samples 480")}
    scenario = kill_rank(job, when={"step": 33, "phase": "backward"})
    stall = {"inject": "collective.stall", "when": {"step": 5, "operation": "all_reduce"}, "for": "2s"}
    nan = {"inject": "numeric.gradient", "when": {"step": 15}, "with": {"change": "nan"}}
    flip = {"inject": "checkpoint.flip_bits", "when": {"attempt": 2, "phase": "start"}, "with": {"bits": 1}}
    scenario["faults"] = [{**stall, "target": {"rank": 1}}, {**nan, "target": {"rank": 1}}, *scenario["faults"], flip]
    scenario["assert"] += [{"sdc_detected": {"within": 3, "by": "job"}}, "lr_continuity", "state_restored"]
    run = torchaos(scenario)
    assert run.exit_code == 0, run
    assert all(fault["evidence"] for fault in run.result["faults"]), run
    history = Record.load(RunDir(run.folder)).history
    assert [attempt.base for attempt in history.attempts] == [0, 10, 20], run
    assert run.case("rollback")["verdict"] == "passed", run
    assert left_over(run.folder) == []
