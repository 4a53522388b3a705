"""A stand-in for a trainer, without torch: it leads the agent that sitecustomize loaded through the phases that torch's
hooks would report. Triggers, holds and control pages are the agent's own.

train.py STEPS [--save FOLDER] [--step-s SECONDS]
"""

import argparse
import gc
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from checkpoint import checkpoint  # type: ignore[import-not-found]  # beside this file

STEP_S = 0.004


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("steps", type=int)
    parser.add_argument("--save", type=Path, default=Path("checkpoints"))
    parser.add_argument("--step-s", type=float, default=STEP_S)
    options = parser.parse_args()
    agent: Any = next((item for item in gc.get_objects() if type(item).__name__ == "Agent"), None)
    if agent is None:  # a job that was attached to
        time.sleep(600)
    from _torchaos.agent.collectives.collective_calls import Call  # type: ignore[import-not-found]
    from _torchaos.protocol.wire import Kind, Phase  # type: ignore[import-not-found]

    asked: list[int] = []  # SIGTERM came: end after the step, as a careful trainer does
    signal.signal(signal.SIGTERM, lambda number, _frame: asked.append(number))
    agent.started("none: a stand-in")
    agent.faults.load()
    agent.starts()
    meet(agent, options.save.parent)
    begun = load(agent, options.save, Kind, Phase)
    for step in range(begun + 1, options.steps + 1):
        for phase in (Phase.DATA, Phase.FORWARD, Phase.BACKWARD):
            agent.enter(phase)
        agent.enter(Phase.COLLECTIVE, Call("all_reduce", (), lambda: None, None))
        agent.enter(Phase.OPTIMIZER)
        time.sleep(options.step_s)
        agent.steps_over += 1
        data: dict[str, Any] = {"losses": [1 / step], "samples": None, "indices": None, "lr": [0.1], "opt_step": step,
                "sched_step": None, "phases": {}, "skipped": False}  # fmt: skip
        agent.emit(Kind.STEP, data, agent.steps_over)
        agent.faults.step_over()
        if step % 5 == 0 and agent.who.rank == 0:
            save(agent, options.save / f"step-{step}.safetensors", step, Kind, Phase)
        if asked:
            os._exit(143)
    agent.ended()
    sys.stdout.flush()
    os._exit(0)


def meet(agent: Any, folder: Path) -> None:
    """Let the ranks start together, as a process group does. A dead rank is waited for only a short time."""
    (folder / f".up-{agent.who.attempt}-{agent.who.rank}").touch()
    end = time.monotonic() + 3.0
    while len(list(folder.glob(f".up-{agent.who.attempt}-*"))) < agent.who.world_size and time.monotonic() < end:
        time.sleep(0.001)


def load(agent: Any, folder: Path, kind: Any, phase: Any) -> int:
    """The number of steps done before."""
    found = sorted(folder.glob("step-*.safetensors"), key=lambda path: int(path.stem[5:]))
    if not found:
        return 0
    about = {"path": str(found[-1]), "format": "safetensors"}
    agent.emit(kind.LOAD_BEGIN, about)
    agent.enter(phase.CHECKPOINT_LOAD)
    found[-1].read_bytes()  # a job that loads damaged files without an error
    step = int(found[-1].stem[5:])
    agent.emit(kind.LOAD_END, {**about, "ok": True, "numbers": {"step": step}})
    agent.faults.loaded()
    return step


def save(agent: Any, path: Path, step: int, kind: Any, phase: Any) -> None:
    about = {"path": str(path), "format": "safetensors"}
    path.parent.mkdir(exist_ok=True)
    agent.emit(kind.SAVE_BEGIN, about)
    agent.enter(phase.CHECKPOINT_WRITE)
    partial = path.with_suffix(".partial")
    partial.write_bytes(checkpoint(step))
    partial.rename(path)
    agent.emit(kind.SAVE_END, {**about, "ok": True, "blocked_s": 0.0})


main()
