"""A job that is changed between two runs, in a file that its command does not name: its cached twin must not be used
any more. The trainer restores the optimizer's state only after step 10, so the first run is healthy, and the second
loses the state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from chaos import REPOSITORY, RunScenario, kill_rank

pytestmark = [pytest.mark.job, pytest.mark.long]

TRAINER = """
import json
from pathlib import Path

from base import Trainer, main

FACTOR = 1.0


class Configured(Trainer):
    def __init__(self, args):
        super().__init__(args)
        rate = FACTOR * json.loads((Path(__file__).parent / "config.json").read_text())["lr"]
        self.schedule.base_lrs = [rate] * 2
        for group in self.optimizer.param_groups:
            group["initial_lr"], group["lr"] = rate, rate * self.rate(0)

    def load_optimizer(self, state):
        if self.done == 10:
            super().load_optimizer(state)


main(Configured)
"""


@pytest.mark.parametrize(("command", "name", "old", "new"), [
    ("torchrun --nproc-per-node 2 --max-restarts 3 train.py", "config.json", "0.01", "0.003"),
    ("bash run.sh", "train.py", "FACTOR = 1.0", "FACTOR = 0.3"),
])  # fmt: skip
def test_a_stale_twin_hides_nothing(
    torchaos: RunScenario, tmp_path: Path, command: str, name: str, old: str, new: str
) -> None:
    """Settings beside the script, and the script behind a wrapper in bash. With the twin of the old job, a tolerance
    was learned from the change, and the lost state lay within it."""
    (tmp_path / "train.py").write_text(TRAINER)
    (tmp_path / "config.json").write_text('{"lr": 0.01}')
    (tmp_path / "run.sh").write_text('exec torchrun --nproc-per-node 2 --max-restarts 3 train.py "$@"\n')
    env = {
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(REPOSITORY / "tests" / "oracle" / "trainers"),
    }  # fmt: skip
    job = {
        "command": f"{command} --dir {{run}}/out", "cwd": str(tmp_path), "checkpoints": {"path": "{run}/out"},
        "env": env, "world_size": 2,
    }  # fmt: skip
    asserts: dict[str, Any] = {"assert": ["loss_continuity", "completed"]}
    first = torchaos(kill_rank(job, when={"step": 13, "phase": "backward"}, **asserts))
    assert first.result["verdict"] == "passed", first
    file = tmp_path / name
    file.write_text(file.read_text().replace(old, new))
    second = torchaos(kill_rank(job, when={"step": 17, "phase": "backward"}, **asserts))
    assert second.result["verdict"] == "failed", second
    assert "optimizer state was lost" in second.case("loss_continuity")["reason"]
    assert f"the twin is made again: {file.parent.name}/{file.name} has changed" in second.result["notes"]
    assert "the twin is made again" in second.output.partition("its fault-free twin")[2].partition("the job runs")[0]
