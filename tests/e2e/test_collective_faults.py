"""Every ready scenario of the collective family, run for real, and the witnesses that saw the rank being held."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from chaos import REPOSITORY, RunScenario, left_over, trainer

from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.record.events.journal import read_events

SCENARIOS = sorted((REPOSITORY / "scenarios" / "collective").glob("*.yaml"))
BROKEN = {"drop-all-reduce", "reorder-all-reduces"}  # to be survived by a restart only
NEEDS = {"straggler-quota": "root", "uninterruptible-rank": "freezer"}

ENV = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

pytestmark = pytest.mark.job


def _marks(name: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.needs(NEEDS[name])] if name in NEEDS else []


@pytest.mark.long
@pytest.mark.parametrize("path", [pytest.param(path, id=path.stem, marks=_marks(path.stem)) for path in SCENARIOS])
def test_the_reference_job_bears_it(torchaos: RunScenario, path: Path) -> None:
    """The fault lands as planned, others than its target show that it was felt, the loss is bitwise the twin's, and
    nothing is left. Of two collectives that do not match, gloo refuses the sizes, and the job starts again."""
    run = torchaos(path)
    assert left_over(run.folder) == []
    assert run.case("rollback")["verdict"] == "passed", run
    assert run.exit_code == 0, run
    if path.stem in BROKEN:
        assert run.result["attempts"] == 2, run
    assert all(fault["evidence"] for fault in run.result["faults"]), run


def test_calls_of_a_real_nccl(torchaos: RunScenario) -> None:
    """Without a GPU: three calls of NVIDIA's own NCCL, chosen by name, size and number, stall a job that makes them.
    Each stall is reported by the library in the rank, felt by the other rank, and taken back."""
    if find_spec("nvidia") is None:
        pytest.skip("libnccl.so.2 is missing: pip install nvidia-nccl-cu12")
    calls = [
        {"call": "ncclAllGather", "min_bytes": 100_000},
        {"call": "ncclReduceScatter", "nth": 3},
        {"call": "ncclSend", "max_bytes": 4_000},
    ]
    command = "torchrun --nproc-per-node 2 scenarios/jobs/gpt_nccl.py --steps 20 --checkpoint-dir {run}/checkpoints"
    run = torchaos({
        "scenario": "nccl-calls",
        "description": "A rank stops in three calls of NCCL.",
        "job": {"command": command, "env": ENV, "timeout": "4m", "cwd": str(REPOSITORY)},
        "twin": "none",
        "faults": [
            {"inject": "collective.stall_nccl", "id": f"stall-{step}", "target": {"rank": 1}, "when": {"step": step},
             "with": call, "for": "2s"}
            for step, call in zip((5, 10, 15), calls, strict=True)
        ],
        "assert": [{"completed": {"steps": 20}}, {"restarts": {"max": 0}}],
    })  # fmt: skip
    assert run.exit_code == 0, run
    notes = [event.data for event in read_events(run.folder / "events") if event.kind is Kind.NOTE]
    held = [note["text"].partition(" was held")[0] for note in notes if "held_s" in note]
    assert held == [call["call"] for call in calls], run


@dataclass(frozen=True)
class Look:
    """What is seen from outside while the fault is on."""

    applying: Event
    stacks: dict[int, str]  # by rank: what py-spy says of its threads
    sleeping: dict[int, float]  # by rank: seconds of CPU in one second


def _look(folder: Path, seen: list[Look]) -> None:
    """Wait until the fault is applied in the run that is made in `folder`, and look once."""
    end = time.monotonic() + 300
    while time.monotonic() < end:
        events = [
            Event.from_line(line)
            for path in folder.glob("out*/*/events/*.jsonl")
            for line in path.read_bytes().split(b"\n")[:-1]
        ]
        applying = next((event for event in events if event.kind is Kind.APPLYING), None)
        if applying is not None:
            pids = {event.rank or 0: int(event.data["pid"]) for event in events if event.kind is Kind.AGENT_STARTED}
            _wait_until_at_rest([pid for rank, pid in pids.items() if rank != applying.rank], end)
            used = {rank: _cpu_s(pid) for rank, pid in pids.items()}
            time.sleep(1.0)
            used = {rank: _cpu_s(pid) - used[rank] for rank, pid in pids.items()}
            seen.append(Look(applying, {rank: _stack(pid) for rank, pid in pids.items()}, used))
            return
        time.sleep(0.2)


def _wait_until_at_rest(pids: list[int], end: float) -> None:
    """The other ranks have come to where they wait: their stacks stay as they are."""
    before: list[str] = []
    while (now := [_stack(pid) for pid in pids]) != before and time.monotonic() < end:
        before = now
        time.sleep(0.2)


def _stack(pid: int) -> str:
    program = Path(sys.executable).parent / "py-spy"
    return subprocess.run([program, "dump", "--pid", str(pid)], capture_output=True, text=True, check=True).stdout


def _cpu_s(pid: int) -> float:
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


STALL = [
    pytest.param("gpt_ddp.py", "all_reduce", 8, 1, id="ddp-all_reduce"),
    pytest.param("gpt_fsdp2.py", "all_gather", 8, 3, id="fsdp2-all_gather"),
    pytest.param("gpt_fsdp2.py", "reduce_scatter", 8, 2, id="fsdp2-reduce_scatter"),
    pytest.param("hf_trainer.py", "all_reduce", 8, 1, id="hf-all_reduce"),
    pytest.param("lightning_trainer.py", "all_reduce", 8, 1, id="lightning-all_reduce"),
    pytest.param("lightning_trainer.py", "barrier", 11, 1, id="lightning-barrier"),  # of the save after step 10
]


def job_of(script: str) -> dict[str, Any]:
    known = (REPOSITORY / "scenarios" / "jobs" / script).exists()
    path = f"{{jobs}}/{script} --steps 30" if known else trainer(script)
    extra = "--checkpoint-dir {run}/checkpoints" if known else "--dir {run}/checkpoints"
    return {
        "command": f"torchrun --nproc-per-node 2 {path} {extra}",
        "checkpoints": {"path": "{run}/checkpoints"}, "timeout": "4m", "cwd": str(REPOSITORY),
        "env": {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
    }  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(("script", "operation", "step", "nth"), STALL)
def test_the_stall_lies_on_the_named_rank_step_and_call(
    torchaos: RunScenario, tmp_path: Path, script: str, operation: str, step: int, nth: int
) -> None:
    """While one rank is stalled, py-spy finds it in the agent's wait below a call of torch and the other rank waiting
    inside that same collective (by number in the group); then all goes on, with the twin's losses bit by bit."""
    if shutil.which("py-spy", path=str(Path(sys.executable).parent)) is None:
        pytest.skip("py-spy is missing: pip install py-spy")
    seen: list[Look] = []
    watcher = threading.Thread(target=_look, args=(tmp_path, seen), daemon=True)
    watcher.start()
    when = {"step": step, "operation": operation, "nth": nth}
    run = torchaos({
        "scenario": "stall", "job": job_of(script),
        "faults": [{"inject": "collective.stall", "target": {"rank": 1}, "when": when, "for": "4s"}],
        "assert": ["loss_continuity", {"restarts": {"max": 0}}, "completed"],
    })  # fmt: skip
    watcher.join(1)
    assert run.exit_code == 0, run
    (fault,) = run.result["faults"]
    assert fault["evidence"], run
    assert seen, "nobody looked while the rank was stalled"
    (look,) = seen
    assert "lasting.py" in look.stacks[1], look.stacks[1]
    assert "lasting.py" not in look.stacks[0], look.stacks[0]
    assert look.applying.step == step - 1  # are over in this attempt
    assert look.applying.data["collective"]["operation"] == operation
    assert look.sleeping[1] < 0.2, "the rank that is stalled used the CPU"
