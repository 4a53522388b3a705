"""The data that a node without a shared folder gets."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

from torchaos.harness.record.rundir import RunDir
from torchaos.harness.running.launchers import kubernetes
from torchaos.harness.running.launchers.node_channel import PATIENCE_S, base_file, packed, receive


def test_attempts_before_this_submission(tmp_path: Path) -> None:
    """A new pod knows nothing of the attempts of an earlier submission, so their number is handed over."""
    run = RunDir(tmp_path / "run")
    run.create()
    run.plan.write_text(json.dumps({"faults": []}))
    run.agent_plan.write_text("{}")
    given = packed(run.root, 1, ["a", "b"], submission=1, base=3)
    shutil.rmtree(run.root)
    assert not receive(run.root, io.BytesIO(given))
    assert base_file(run.root, 1).read_text() == "3"


def test_a_node_waits_for_the_others() -> None:
    """A pod that is up first waits longer than the controller waits for the last."""
    assert kubernetes._READY_S < PATIENCE_S
