"""Ordinary trainers that know nothing of torchaos, as their libraries' users write them."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from chaos import TRAINERS, RunScenario, kill_rank

pytestmark = pytest.mark.job

# The script, the package that it needs, and the assertions that its restart can't pass, with the reason.
WITH = [
    ("plain_ddp.py", None),
    ("hf_trainer.py", "transformers"),
    ("lightning_trainer.py", "lightning"),
    ("accelerate_trainer.py", "accelerate"),
]


@pytest.mark.parametrize(("script", "package"), WITH, ids=[script.removesuffix(".py") for script, _ in WITH])
def test_an_unmodified_trainer_is_seen_whole(torchaos: RunScenario, script: str, package: str | None) -> None:
    """The agent sees every step, loss and sample of it on both ranks, the kill lands exactly, and it is judged."""
    if package and not find_spec(package):
        pytest.skip(f"the package {package} is not installed")
    command = f"torchrun --nproc-per-node 2 --max-restarts 3 {TRAINERS / script} --steps 30 --dir {{run}}/out"
    job = {"command": command, "checkpoints": {"path": "{run}/out"}}
    run = torchaos(kill_rank(job, when={"step": 18, "phase": "backward"}))
    assert run.result["faults"][0]["verdict"] == "passed", run
    for seen in ("loss_continuity", "sample_accounting", "completed"):
        assert run.case(seen)["verdict"] == "passed", run
    assert run.result["steps"] == 30, run
    assert run.case("loss_continuity")["measured"]["steps"] == 30, run
