"""Checks that a fault lands on exactly its rank, step and phase: many runs of the main job, each with another seed.

A rank of the reference job dies (SIGKILL, a segmentation fault, an abort) in each phase in turn; the seed determines
rank and step. Each run must pass, and the plan is compared with witnesses other than torchaos's agent:

- torchelastic: the exit code, and the rank that it had started with the pid that failed. If two ranks were gone when
  torchelastic looked, it names only one of them, so the kernel (a pidfd held by the harness) is asked as well.
- the job's own log: the last printed step is the step before the planned step. (A rank that dies in its optimizer has
  completed the collectives of the step, so rank 0 may still print it.)
- Python's faulthandler: the line of the trainer in which a segfault or an abort happened (SIGKILL leaves no stack).
- the disk: the job resumes from the newest checkpoint that was complete when it started again.
- the plan: the plan of the run is byte for byte the plan that `torchaos plan --json` had printed for the same seed.

Usage: python lab/bench/exactness.py [--runs 30] [--first 0] [--out DIR]    (a run takes 12 s on a quiet machine)
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchaos.harness.scenario.yaml_source import dumped

STEPS, EVERY, RUNS = 60, 10, 30
# By phase, the lines of the trainer that may be under way. DDP's first collective of a step is inside the backward.
PHASES = {
    "data": "next(batches)",
    "forward": "self.model(text)",
    "backward": "loss.backward()",
    "optimizer": "self.optimizer.step()",
    "collective": "loss.backward()",
    "checkpoint_write": "checkpoints.save(",
}
CODES = {"process.kill": -9, "process.segfault": -11, "process.abort": -6}
_TRAINER = re.compile(r'File "[^"]*/(gpt\.py)", line (\d+) in (step|train)\b')


@dataclass
class Found:
    """One run: the plan, the reports of the witnesses, and all contradictions (`wrong`; empty: there are none)."""

    number: int
    inject: str
    rank: int
    step: int
    phase: str
    verdict: str = ""
    witness: str = ""  # which witness reported the exit code and the pid
    last_line: int | None = None  # the last step in the job's log before the death
    resumed: int | None = None
    line: str = ""  # the line of the trainer in the stack
    seconds: float = 0.0
    folder: Path = Path()
    wrong: list[str] = field(default_factory=list)

    def expect(self, what: str, found: object, *wanted: object) -> None:
        if found not in wanted:
            self.wrong.append(f"{what} is {found}, not {' or '.join(map(str, wanted))}")

    def row(self) -> str:
        line = self.line or "-"
        return (
            f"{self.number:4}  {self.inject[8:]:8}  {self.rank:4}  {self.step:4}  {self.phase:16}  {self.verdict:8}  "
            f"{self.witness:22}  {self.last_line!s:>4}  {self.resumed!s:>4}  {line:21}  {self.seconds:5.1f}  "
            + ("; ".join(self.wrong) or "as planned")
        )


HEAD = (
    f"{'seed':>4}  {'fault':8}  {'rank':>4}  {'step':>4}  {'phase':16}  {'verdict':8}  {'exit, pid, by':22}  "
    f"{'last':>4}  {'from':>4}  {'line of the trainer':21}  {'s':>5}"
)


def scenario_of(number: int) -> dict[str, Any]:
    """The scenario of the main job with a fault. 18 successive numbers give each fault in each phase."""
    phase = list(PHASES)[number % len(PHASES)]
    inject = list(CODES)[(number + number // len(PHASES)) % len(CODES)]
    step: int | dict[str, list[int]] = {"between": [5, 55]}
    if phase == "checkpoint_write":  # a checkpoint is written after its step, hence during the next step
        step = random.Random(number).randrange(EVERY, 55, EVERY) + 1
    script = (
        f"{{jobs}}/gpt_ddp.py --steps {STEPS} --checkpoint-every {EVERY} --keep 9 --checkpoint-dir {{run}}/checkpoints"
    )
    return {
        "scenario": "exactness",
        "seed": number,
        "job": {
            "command": f"torchrun --nproc-per-node 2 --max-restarts 3 {script}",
            "env": {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "PYTHONFAULTHANDLER": "1"},
            "checkpoints": {"path": "{run}/checkpoints"},
            "timeout": "3m",
        },
        "faults": [{"inject": inject, "target": {"rank": "any"}, "when": {"step": step, "phase": phase}}],
        "assert": [
            "recovery_time", "checkpoint_integrity", "loss_continuity", "sample_accounting", {"restarts": {"max": 1}},
            {"completed": {"steps": STEPS}},
        ],
    }  # fmt: skip


def one_run(number: int, folder: Path, env: Mapping[str, str]) -> Found:
    """Plans and runs one scenario, and asks the witnesses. All scenario files are in `folder` itself, because a job's
    working directory is part of the key of its twin. `env`: the complete environment; XDG_CACHE_HOME in it is where
    twins are kept."""
    file = folder / f"exactness-{number}.yaml"
    file.write_text(dumped(scenario_of(number)))
    planned = _torchaos(env, "plan", "--json", str(file)).stdout
    fault = json.loads(planned)["faults"][0]
    when = fault["trigger"]
    found = Found(number, fault["inject"], fault["target"]["ranks"][0], when["step"], when["phase"])
    out, report, begun = folder / f"out-{number}", folder / f"result-{number}.json", time.monotonic()
    done = _torchaos(env, "run", str(file), "--out", str(out), "--json", str(report))
    found.seconds = time.monotonic() - begun
    folders = list(out.iterdir()) if out.exists() else []
    if not folders:
        found.wrong.append(f"there was no run: {done.stdout}{done.stderr}")
        return found
    found.folder = folders[0]
    result = json.loads(report.read_text())["results"][0]
    found.verdict = result["verdict"]
    found.expect("the exit code", done.returncode, 0)
    if found.verdict != "passed":
        found.wrong.append(str(result["reason"]))
    found.expect("the plan that was run", (found.folder / "plan.json").read_text() == planned, True)
    log = (found.folder / "logs" / "job-0.log").read_text(errors="replace")
    _ask_for_the_death(found, log)
    _ask_the_job(found, log)
    _ask_faulthandler(found, log)
    return found


def _torchaos(env: Mapping[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torchaos.harness", *words]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=600)


def _ask_for_the_death(found: Found, log: str) -> None:
    """Checks the pid by torchelastic's start event, and its end by torchelastic's log line and by the kernel."""
    starts = [json.loads(line)["metadata"] for line in log.splitlines() if '"torchelastic.worker.status.START"' in line]
    pids = {start["global_rank"]: int(start["worker_id"]) for start in starts if start["agent_restarts"] == 0}
    pid, code = pids.get(found.rank), CODES[found.inject]
    exits = [event for event in _harness_events(found.folder, "rank.exited") if event["data"]["pid"] == pid]
    found.expect("the exit code that the kernel tells", exits[0]["data"]["exit_code"] if exits else None, code)
    failure = re.search(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+) \(pid: (\d+)\)", log)
    reported = tuple(map(int, failure.groups())) if failure else ()
    by = "torchelastic" if reported == (code, found.rank, pid) else "kernel"
    if by == "kernel" and not (reported and reported[2] in pids.values()):
        found.wrong.append(f"torchelastic reports (exit code, local rank, pid) {reported}, no rank that it started")
    found.witness = f"{code}, {pid}, {by}"


def _ask_the_job(found: Found, log: str) -> None:
    """Checks the last step that the job printed before the death, the step from which it says that it resumed, and the
    checkpoints on the disk at that time."""
    first, _, second = re.sub(r"^\d+ ranks on \w+, 0 of", "began, 0 of", log, count=1, flags=re.M).partition(
        " ranks on "
    )
    printed = re.findall(r"^step (\d+) loss", first, re.M)
    resumed = re.match(r"\w+, (\d+) of", second)
    found.last_line = int(printed[-1]) if printed else 0
    found.resumed = int(resumed[1]) if resumed else None
    agreed = (found.step,) if found.phase == "optimizer" and found.rank != 0 else ()
    found.expect("the last step in the job's log", found.last_line, found.step - 1, *agreed)
    again = min((e["wall_s"] for e in _harness_events(found.folder, "rank.up") if e["attempt"] == 1), default=0.0)
    manifests = (found.folder / "job" / "checkpoints").glob("step-*/manifest.json")
    whole = [int(path.parent.name[5:]) for path in manifests if path.stat().st_mtime < again]
    found.expect("the step that it went on from", found.resumed, max(whole, default=0))
    # The newest checkpoint, written in the background, may be lost with the rank; the checkpoint before it may not.
    newest = (found.step - 1) // EVERY * EVERY
    torn = newest - EVERY if newest else 0
    found.expect(
        "the newest checkpoint", found.resumed, torn, *(() if found.phase == "checkpoint_write" else (newest,))
    )


def _ask_faulthandler(found: Found, log: str) -> None:
    """Checks the innermost line of the trainer in the stack of the thread with the `Fatal Python error`."""
    if found.inject == "process.kill":
        return
    stack = log.partition("Fatal Python error")[2].partition("Current thread")[2].partition("\n\n")[0]
    lines = [_source_line(int(number)) for _file, number, _function in _TRAINER.findall(stack)]
    wanted = PHASES[found.phase]
    found.line = wanted if any(wanted in line for line in lines[:1]) else (lines[0].strip() if lines else "no stack")
    found.expect("the line of the trainer", found.line, wanted)


def _source_line(number: int) -> str:
    from importlib.resources import files

    source = (files("torchaos.scenarios") / "jobs" / "gpt.py").read_text()
    return source.splitlines()[number - 1]


def _harness_events(folder: Path, kind: str) -> list[dict[str, Any]]:
    """The events of a kind in the harness's own file, which holds nothing from the agent."""
    lines = (folder / "events" / "harness.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--out", type=Path, help="where run directories go and stay (default: a temporary folder)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = given.out or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        env = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
        print(HEAD, flush=True)
        runs = []
        for number in range(given.first, given.first + given.runs):
            runs.append(one_run(number, folder, env))
            print(runs[-1].row(), flush=True)
    right = sum(not run.wrong for run in runs)
    print(f"{right} of {len(runs)} landed on their rank, step and phase by every witness, and passed")
    return 0 if right == len(runs) else 1


if __name__ == "__main__":
    sys.exit(main())
