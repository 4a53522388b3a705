"""Whether a fault lands on exactly its rank, step and phase: many runs of the main job, each with another seed.

A rank of the reference job dies (SIGKILL, a segmentation fault, an abort) in each phase in turn; the seed draws rank
and step. Every run must pass, and what was planned is compared with witnesses that are not our agent:

- torchelastic: which rank it had started as the pid that failed, and with which exit code; where two ranks were gone by
  the time it looked it names one of them, so the kernel's word (a pidfd held by the harness) is asked as well;
- the job's own log: the last step that it printed is the one before the planned one (a rank that dies in its optimizer
  has agreed to the step with all others, so rank 0 may still print it);
- Python's faulthandler: the line of the trainer that a segfault or an abort happened in (SIGKILL leaves no stack);
- the disk: the job goes on from the newest checkpoint that was complete when it started again, and from no other;
- the plan: what was run is byte for byte what `torchaos plan --json` had printed for the same seed.

Usage: python ci/bench/exactness.py [--runs 30] [--first 0] [--out DIR]    (a run takes 12 s on a quiet machine)
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
    """One run: what was planned, what the witnesses say, and all that does not agree (`wrong`; empty: all does)."""

    number: int
    inject: str
    rank: int
    step: int
    phase: str
    verdict: str = ""
    witness: str = ""  # who told the exit code and the pid
    last_line: int | None = None
    resumed: int | None = None
    line: str = ""  # of the trainer, where the stack was left
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
    """The main job with another fault. 18 numbers in a row have each fault in each phase."""
    phase = list(PHASES)[number % len(PHASES)]
    inject = list(CODES)[(number + number // len(PHASES)) % len(CODES)]
    step: int | dict[str, list[int]] = {"between": [5, 55]}
    if phase == "checkpoint_write":  # a checkpoint is written once its step is over, hence during the next one
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
    """Plan, run, and ask the witnesses. Scenarios lie in `folder` itself: a job's working directory is part of what its
    twin is known by. `env` is the whole environment; its XDG_CACHE_HOME says where twins are kept."""
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
    """The pid by torchelastic's own event of the start; its end by torchelastic's log line and by the kernel."""
    starts = [json.loads(line)["metadata"] for line in log.splitlines() if '"torchelastic.worker.status.START"' in line]
    pids = {one["global_rank"]: int(one["worker_id"]) for one in starts if one["agent_restarts"] == 0}
    pid, code = pids.get(found.rank), CODES[found.inject]
    exits = [event for event in _harness_events(found.folder, "rank.exited") if event["data"]["pid"] == pid]
    found.expect("the exit code that the kernel tells", exits[0]["data"]["exit_code"] if exits else None, code)
    failure = re.search(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+) \(pid: (\d+)\)", log)
    told = tuple(map(int, failure.groups())) if failure else ()
    by = "torchelastic" if told == (code, found.rank, pid) else "kernel"
    if by == "kernel" and not (told and told[2] in pids.values()):
        found.wrong.append(f"torchelastic tells of (exit code, local rank, pid) {told}, of no rank that it started")
    found.witness = f"{code}, {pid}, {by}"


def _ask_the_job(found: Found, log: str) -> None:
    """What it printed before it died, where it says that it went on, and what lay on the disk by then."""
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
    # What is written in the background may be lost with the rank; the one before it may not.
    newest = (found.step - 1) // EVERY * EVERY
    torn = newest - EVERY if newest else 0
    found.expect(
        "the newest checkpoint", found.resumed, torn, *(() if found.phase == "checkpoint_write" else (newest,))
    )


def _ask_faulthandler(found: Found, log: str) -> None:
    """The innermost lines of the trainer under `Fatal Python error`, in the thread that it happened in."""
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
    """The harness's own file: nothing in it is the agent's."""
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
    right = sum(not one.wrong for one in runs)
    print(f"{right} of {len(runs)} landed on their rank, step and phase by every witness, and passed")
    return 0 if right == len(runs) else 1


if __name__ == "__main__":
    sys.exit(main())
