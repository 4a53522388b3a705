"""A stand-in trainer with a bug: when all events in NEEDS have happened, in any order, it never trains again. It
imports no torch; see tests/support/dying/stand_in/train.py.

shrink_job.py FOLDER NEEDS EVERY

NEEDS: such as killed0,frozen1,raised0,damaged: events, with the number of the rank; EVERY: steps between two
checkpoints.
"""

import contextlib
import gc
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from checkpoint import checkpoint  # type: ignore[import-not-found]  # of the stand-in, by PYTHONPATH

STEP_S, FROZEN_S = 0.005, 0.8


def main() -> None:
    folder, needs, every = Path(sys.argv[1]), set(sys.argv[2].split(",")), int(sys.argv[3])
    agent: Any = next(thing for thing in gc.get_objects() if type(thing).__name__ == "Agent")
    from _torchaos.protocol.wire import Kind, Phase  # type: ignore[import-not-found]

    folder.mkdir(parents=True, exist_ok=True)
    rank, alive = agent.who.rank, folder / f".alive{agent.who.rank}"
    if alive.exists():  # the rank's process of the attempt before did not end in order
        happened(folder, f"killed{rank}")
    signal.signal(signal.SIGTERM, lambda *_: (alive.unlink(missing_ok=True), os._exit(143)))
    alive.touch()
    agent.started("none: a stand-in")
    agent.faults.load()
    agent.starts()
    meet(agent, folder)
    begun = load(agent, folder, Kind)
    last = time.monotonic()
    for step in range(begun + 1, 1_000_000):
        if needs <= {path.name[1:] for path in folder.glob("+*")}:
            alive.unlink(missing_ok=True)
            sys.exit("the planted bug")
        try:
            for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER):
                agent.enter(phase)
        except RuntimeError:
            happened(folder, f"raised{rank}")
            alive.unlink(missing_ok=True)
            raise
        time.sleep(STEP_S)
        if time.monotonic() - last > FROZEN_S and step > begun + 1:
            happened(folder, f"frozen{rank}")
        last = time.monotonic()
        agent.steps_over += 1
        data: dict[str, Any] = {"losses": [1 / step], "samples": None, "indices": None, "lr": [0.1], "opt_step": step,
                "sched_step": None, "phases": {}, "skipped": False}  # fmt: skip
        agent.emit(Kind.STEP, data, agent.steps_over)
        agent.faults.step_over()
        if step % every == 0 and rank == 0:
            save(agent, folder / f"step-{step}.safetensors", step, Kind)
            last = time.monotonic()


def meet(agent: Any, folder: Path) -> None:
    """Waits until all ranks have started, as a process group does."""
    (folder / f".up-{agent.who.attempt}-{agent.who.rank}").touch()
    end = time.monotonic() + 20.0
    while len(list(folder.glob(f".up-{agent.who.attempt}-*"))) < agent.who.world_size and time.monotonic() < end:
        time.sleep(0.002)


def happened(folder: Path, what: str) -> None:
    (folder / f"+{what}").touch()


def load(agent: Any, folder: Path, kind: Any) -> int:
    """Loads the newest checkpoint that is intact, and returns its step. It reads all checkpoints, so it notices
    damage."""
    sound = []
    for path in sorted(folder.glob("step-*.safetensors"), key=lambda path: -int(path.stem[5:])):
        if path.read_bytes() == checkpoint(int(path.stem[5:])):
            sound.append(path)
        else:
            happened(folder, "damaged")
    for path in sound[:1]:
        step = int(path.stem[5:])
        about = {"path": str(path), "format": "safetensors"}
        agent.emit(kind.LOAD_BEGIN, about)
        agent.emit(kind.LOAD_END, {**about, "ok": True, "numbers": {"step": step}})
        agent.faults.loaded()
        return step
    return 0


def save(agent: Any, path: Path, step: int, kind: Any) -> None:
    about = {"path": str(path), "format": "safetensors"}
    agent.emit(kind.SAVE_BEGIN, about)
    partial = path.with_suffix(".partial")
    partial.write_bytes(checkpoint(step))
    partial.rename(path)
    agent.emit(kind.SAVE_END, {**about, "ok": True, "blocked_s": 0.0})
    old = sorted(path.parent.glob("step-*.safetensors"), key=lambda old_file: int(old_file.stem[5:]))[:-3]
    for old_file in old:
        with contextlib.suppress(OSError):
            old_file.unlink()


main()
