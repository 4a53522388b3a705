"""Ordinary trainers that know nothing of torchaos, as their libraries' users write them."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from chaos import RunScenario, kill_rank, trainer

from torchaos.harness.record.record import Record
from torchaos.harness.record.rundir import RunDir

pytestmark = pytest.mark.job

# The script, the package that it needs, and what its restart really loses (docs/measured/what-trainers-lose.md).
WITH: list[tuple[str, str | None, set[str]]] = [
    ("plain_ddp.py", None, set()),
    ("hf_trainer.py", "transformers", set()),
    ("lightning_trainer.py", "lightning", {"loss_continuity", "sample_accounting", "checkpoint_integrity"}),
    ("accelerate_trainer.py", "accelerate", {"loss_continuity", "checkpoint_integrity"}),
]
SHORT = {"transformers"}


@pytest.mark.parametrize(
    ("script", "package", "lost"),
    [
        pytest.param(*row, id=row[0].removesuffix(".py"), marks=[pytest.mark.long] * (row[1] not in SHORT))
        for row in WITH
    ],
)
def test_an_unmodified_trainer_is_seen_whole(
    torchaos: RunScenario, script: str, package: str | None, lost: set[str]
) -> None:
    """The agent sees every step, loss and sample of it on both ranks, the kill lands exactly, and it is judged."""
    if package and not find_spec(package):
        pytest.skip(f"the package {package} is not installed")
    command = f"torchrun --nproc-per-node 2 --max-restarts 3 {trainer(script)} --steps 30 --dir {{run}}/out"
    job = {"command": command, "checkpoints": {"path": "{run}/out"}}
    run = torchaos(kill_rank(job, when={"step": 18, "phase": "backward"}))
    assert run.result["faults"][0]["verdict"] == "passed", run
    verdicts = {case["name"]: case["verdict"] for case in run.result["cases"] if case["kind"] == "assertion"}
    assert verdicts == {name: "failed" if name in lost else "passed" for name in verdicts}, run
    record = Record.load(RunDir(run.folder))
    done = {(one.rank, one.global_step) for one in record.history.executions if one.loss_seen and one.samples_seen}
    # A rank that aborts on its way out, which is torch's doing, may be made to train one step more.
    assert {(rank, step) for rank in range(2) for step in range(1, 31)} <= done, run
