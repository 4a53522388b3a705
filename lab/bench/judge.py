"""Measures what it costs to judge a run of many ranks: processor seconds, microseconds per event, and peak memory.

A small recorded run (a rank is killed, all ranks resume from a checkpoint) is enlarged to the given number of ranks and
steps, with a twin of the same size. Each stage is timed in its own process, which reads the run directory as `torchaos
judge` does: reading the journal, placing the steps, judging.

Usage: python lab/bench/judge.py [--ranks 16,256] [--steps 100,1000] [--samples 8] [--no-twin] [--keep FOLDER]
    [--profile]"""

from __future__ import annotations

import argparse
import cProfile
import hashlib
import json
import pstats
import resource
import shutil
import sys
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from torchaos.harness.analysis.verdict import records_of, verdict_of
from torchaos.harness.protocol import packed_lines
from torchaos.harness.protocol.wire import FIELDS, Kind
from torchaos.harness.record.result import Verdict
from torchaos.harness.record.rundir import RunDir

RECORDED = Path(__file__).parents[2] / "tests" / "fuzz" / "corpus" / "run"
STEP_S, RESTART_S = 0.25, 10.0
PHASES = {"data": 0.019, "forward": 0.08, "backward": 0.12, "optimizer": 0.02}
ASSERTIONS = {
    "recovery_time": {"catch_up": 60.0}, "restarts": {"max": 1}, "loss_continuity": {}, "lr_continuity": {},
    "sample_accounting": {}, "completed": {},
}  # fmt: skip


class Grown:
    """A run directory of `ranks` ranks and `steps` steps. Rank 1 is killed after three fifths of the steps, and attempt
    1 resumes from the last checkpoint before that. The twin has one attempt."""

    def __init__(self, root: Path, ranks: int, steps: int, samples: int, twin: bool = True) -> None:
        self.ranks, self.steps, self.samples = ranks, steps, samples
        self.killed = steps * 3 // 5
        self.every = max(2, steps // 10)
        self.resumed = (self.killed - 1) // self.every * self.every
        shutil.copytree(RECORDED, root)
        self.run = RunDir(root)
        for events in (root / "events", root / "twins" / "0" / "events"):
            shutil.rmtree(events)
            events.mkdir()
        plan = json.loads(self.run.plan.read_text())
        kill = {**plan["faults"][0], "duration_s": None, "injector": "Kill"}
        kill["trigger"] = {**kill["trigger"], "step": self.killed}
        plan["faults"] = [kill]
        plan["job"]["world_size"] = ranks
        plan["asserts"] = [{"name": name, "params": params} for name, params in ASSERTIONS.items()]
        self.run.plan.write_text(json.dumps(plan))
        self.count = self._write(root / "events", [(0, 0, self.killed - 1), (1, self.resumed, steps)])
        if twin:
            self.count += self._write(root / "twins" / "0" / "events", [(0, 0, steps)])
        else:
            shutil.rmtree(root / "twins")

    def _write(self, folder: Path, attempts: list[tuple[int, int, int]]) -> int:
        """Writes the events. `attempts`: (number, the step from which it resumes, its last step)."""
        own = Writer(folder, "harness")
        own.add(Kind.JOB_STARTED, 1.0, attempt=0, submission=0, pid=9)
        written, at_s = 0, 2.0
        for attempt, first, last in attempts:
            killed = attempt + 1 < len(attempts)
            end_s = at_s + (last - first + 1) * STEP_S
            for rank in range(self.ranks):
                written += self._rank(folder, rank, attempt, first, last, at_s, killed)
                who: dict[str, Any] = {"rank": rank, "attempt": attempt, "pid": _pid(rank, attempt), "start_ticks": 7}
                own.add(Kind.RANK_UP, at_s, **who, local_rank=rank, world_size=self.ranks, node=0)
                code = (-9 if rank == 1 else -15) if killed else 0
                own.add(Kind.RANK_EXITED, end_s + (rank != 1), **who, exit_code=code)
            at_s = end_s + RESTART_S
        own.add(Kind.JOB_EXITED, at_s, submission=0, pid=9, exit_code=0)
        own.close()
        return written + own.number

    def _rank(self, folder: Path, rank: int, attempt: int, first: int, last: int, at_s: float, killed: bool) -> int:
        file = Writer(folder, f"rank{rank}-a{attempt}-p{_pid(rank, attempt)}", (rank, attempt))
        who: dict[str, Any] = {"rank": rank, "attempt": attempt}
        start = dict.fromkeys(FIELDS[Kind.AGENT_STARTED]) | {
            "pid": _pid(rank, attempt), "start_ticks": 7, "local_rank": rank, "world_size": self.ranks,
            "python": "3.11", "torch": "2.13.0", "hooks": ["checkpoints", "loss", "lr", "samples", "steps"],
        }  # fmt: skip
        file.add(Kind.AGENT_STARTED, at_s, **who, step=0, **start)
        if first:
            for kind, more in ((Kind.LOAD_BEGIN, {}), (Kind.LOAD_END, {"ok": True, "numbers": {"step": first}})):
                file.add(kind, at_s, **who, step=0, path=f"/job/step-{first}.pt", format="torch", **more)
        for step in range(first + 1, last + 1):
            at_s += STEP_S
            # Ranks never end a step at exactly the same time.
            file.step(at_s + rank * 1e-6, step - first, **self._step(rank, step))
            if rank == 0 and step % self.every == 0:
                for kind, more in ((Kind.SAVE_BEGIN, {}), (Kind.SAVE_END, {"ok": True, "blocked_s": 0.01})):
                    path = f"/job/step-{step}.pt"
                    file.add(kind, at_s, **who, step=step - first, path=path, format="torch", **more)
        if killed and rank == 1:
            hit = {"fault": "process.kill", "phase": "backward", "global_step": self.killed}
            file.add(Kind.APPLYING, at_s + 0.1, **who, step=last - first + 1, pid=_pid(rank, attempt), **hit)
        file.close()
        return file.number

    def _step(self, rank: int, step: int) -> dict[str, Any]:
        size = self.samples * packed_lines.ROW
        rows = hashlib.shake_128(f"{rank}/{step}".encode()).digest(size)
        indices = [(step * self.ranks + rank) * self.samples + row for row in range(self.samples)]
        return {"losses": [5.0 / step + rank * 1e-3], "samples": rows, "indices": indices, "lr": [3e-4 / step],
                "opt_step": step, "sched_step": step - 1, "phases": PHASES, "skipped": False}  # fmt: skip


class Writer:
    """One file of events, with times that the caller gives."""

    def __init__(self, folder: Path, source: str, process: tuple[int, int] = (0, 0)) -> None:
        """`process`: rank and attempt of the packed lines."""
        self._file = open(folder / f"{source}.jsonl", "wb")  # noqa: SIM115  # until `close`
        self._source, self.number = source, 0
        self._packer = packed_lines.Packer(source, *process)

    def step(self, at_s: float, step: int, **values: Any) -> None:
        self._file.write(self._packer.line(self.number, 1.8e9 + at_s, at_s, step, **values))
        self.number += 1

    def add(
        self, kind: Kind, at_s: float, *, rank: int | None = None, attempt: int | None = None, step: int | None = None,
        **data: Any,
    ) -> None:  # fmt: skip
        event = {"kind": kind.value, "source": self._source, "seq": self.number, "wall_s": 1.8e9 + at_s, "mono_s": at_s,
                 "rank": rank, "attempt": attempt, "step": step, "data": data}  # fmt: skip
        self._file.write(json.dumps(event, separators=(",", ":")).encode() + b"\n")
        self.number += 1

    def close(self) -> None:
        self._file.close()


def _pid(rank: int, attempt: int) -> int:
    return 1000 + rank * 10 + attempt


def _timed(work: Any, *arguments: Any) -> tuple[float, Any]:
    start = time.process_time()
    found = work(*arguments)
    return time.process_time() - start, found


def _measure(root: str, profile: bool) -> dict[str, float]:
    folder = RunDir(Path(root))
    profiler = cProfile.Profile()
    if profile:
        profiler.enable()
    seconds = {}
    seconds["read"], records = _timed(records_of, folder)
    seconds["place"] = _timed(lambda: [record.history for record in (records[0], *records[1])])[0]
    seconds["judge"], result = _timed(verdict_of, *records, root)
    if profile:
        profiler.disable()
        pstats.Stats(profiler).sort_stats("tottime").print_stats(30)
    told = [f"{case.name}: {case.verdict.value}" for case in result.cases if case.verdict is not Verdict.PASSED]
    seconds["memory"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print("  ".join([f"-> {result.verdict.value}", *told]))
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="64", help="one number or several")
    parser.add_argument("--steps", default="500")
    parser.add_argument("--samples", type=int, default=8, help="in the batch of one rank")
    parser.add_argument("--no-twin", action="store_true", help="judge the run alone")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the run directories, such as FOLDER/64x500")
    parser.add_argument("--profile", action="store_true", help="print where the time is spent")
    options = parser.parse_args()
    for ranks in map(int, options.ranks.split(",")):
        for steps in map(int, options.steps.split(",")):
            _one(ranks, steps, options)
    return 0


def _one(ranks: int, steps: int, options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as place:
        grown = Grown(Path(place) / "run", ranks, steps, options.samples, twin=not options.no_twin)
        size = sum(path.stat().st_size for path in grown.run.root.glob("**/events/*.jsonl"))
        with get_context("spawn").Pool(1) as pool:
            seconds = pool.apply(_measure, (str(grown.run.root), options.profile))
        if options.keep:
            shutil.move(grown.run.root, options.keep / f"{ranks}x{steps}")
    memory, count = seconds.pop("memory"), grown.count
    stages = ", ".join(f"{stage} {took:.2f}" for stage, took in seconds.items())
    whole = sum(seconds.values())
    told = (
        f"{ranks} ranks, {steps} steps: {count} events, {size / 2**20:.0f} MiB on disk; {whole:.2f} s ({stages}), "
        f"{whole / count * 1e6:.1f} us per event; {memory:.0f} MiB, {memory * 2**20 / count:.0f} bytes per event"
    )
    print(told)


if __name__ == "__main__":
    sys.exit(main())
