"""The control, the runs with the kill, and the signs of the finding."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from torchaos.harness.reporting.repro.script.running import CASE, ENDS, Run

SUMMARY = ""  # the code that reads a checkpoint; the job's own Python runs it
CLOCK = re.compile(r"time|date|clock|elapsed|duration|seconds|uuid|host", re.IGNORECASE)


class CantTell(Exception):
    """The runs neither show the finding nor refute it. The message has the reason."""


class Control:
    """The job without a kill. `noisy`: entries of its final checkpoint that differ between two controls."""

    def __init__(self, command: list[str], folder: Path) -> None:
        runs = [started(command, [], folder, f"control-{number + 1}") for number in range(CASE["controls"])]
        for run in runs:
            last = max(run.losses, default=0)
            steps = f"{last} step{'' if last == 1 else 's'} in the log"
            tell("control", f"{steps}, exit code {run.code}, {run.took_s:.1f} s")
            if run.code != 0:
                raise CantTell("the control, without any kill, did not end well")
        summaries = [summary_of(run) for run in runs]
        self.losses, self.summary = runs[0].losses, summaries[0]
        self.noisy = {name for name in self.summary for summary in summaries if summary.get(name) != self.summary[name]}


def signs_of(run: Run, control: Control) -> dict[str, str]:
    """The differences from the control, by kind of sign. Raises CantTell if the control can't be compared."""
    if run.killed_s is None:
        raise CantTell("the job ended before the moment for the kill: give it more steps")
    for step, loss in sorted(run.before_kill.items()):
        if control.losses.get(step, loss) != loss:
            raise CantTell(f"already before the kill, the losses differ from the control's, in step {step}")
    found = {"end": _end(run, control), "losses": _losses(run, control)}
    found["time"] = _time(run) if control.losses else ""  # without a step in the log, nobody knows when it went on
    found["checkpoint"] = "" if found["end"] else _checkpoint(run, control)
    return {kind: words for kind, words in found.items() if words}


def _end(run: Run, control: Control) -> str:
    due, last = max(control.losses, default=0), max(run.losses, default=0)
    if run.code != 0:
        return "it did not end in time" if run.code is None else f"it ended with exit code {run.code}"
    return f"it ended with step {last}, the control with {due}" if last < due else ""


def _losses(run: Run, control: Control) -> str:
    for step, mine in sorted(run.losses.items()):
        theirs = control.losses.get(step, mine)
        if mine != theirs:
            return f"losses differ from step {step} on: {mine} instead of {theirs}"
    return ""


def _checkpoint(run: Run, control: Control) -> str:
    names = [name for name in control.summary if name not in control.noisy and not CLOCK.search(name)]
    mine = summary_of(run) if names else {}
    differ = [name for name in names if mine.get(name) != control.summary[name]]
    if mine and differ:
        return f"the final checkpoint differs in {len(differ)} of {len(names)} entries, first in {differ[0]}"
    return "there is no checkpoint at the end" if names and not mine else ""


def _time(run: Run) -> str:
    bound, took = CASE["bound_s"], run.caught_up_s
    if bound is None or (took is not None and took <= bound):
        return ""
    return (
        f"{'it never got further' if took is None else f'{took:.1f} s until it got further'}, {bound:g} s are allowed"
    )


def _back(first: int | None, logged: dict[int, str | None]) -> str:
    """Where the job went on, in the words of the verdict. `first`: the first step in its log after the kill."""
    if first is None:
        return ""
    each = first - 1 in logged or first == 1  # the log has a line for each step
    return f"; it went on after step {first - 1}" if each else f"; it went on, and its log then began with step {first}"


def summary_of(run: Run) -> dict[str, str]:
    """Digests of the newest readable checkpoint that the run left. Empty if there is none."""
    if CASE["checkpoints"] is None:
        return {}
    root = str(CASE["checkpoints"]).replace("{run}", str(run.folder))
    done = subprocess.run([CASE["python"], "-c", SUMMARY, root], capture_output=True, text=True, check=False)
    return dict(json.loads(done.stdout)) if done.returncode == 0 else {}


def started(command: list[str], kills: list[dict[str, Any]], folder: Path, name: str) -> Run:
    (folder / name).mkdir(parents=True)
    return Run(command, kills, folder / name)()


def tell(label: str, text: str) -> None:
    print(f"{label:<10} {text}", flush=True)


def versions() -> str:
    asked = ("-c", "import torch; print('torch', torch.__version__)"), ("--version",)
    outputs = [
        subprocess.run([CASE["python"], *one], capture_output=True, text=True, check=False).stdout for one in asked
    ]
    host = f"{platform.system()} {platform.release()}, {os.cpu_count()} CPUs"
    return f"{', '.join(text.strip() for text in outputs)}, {host}; in the run: {CASE['versions']}"


def show(command: list[str], folder: Path, times: int) -> int:
    control = Control(command, folder)
    if not control.losses and CASE["kills"][0]["step"] is not None:
        raise CantTell("the job's log has no line with a step")
    seen: list[set[str]] = []
    for number in range(times):
        run = started(command, CASE["kills"], folder, f"run-{number + 1}")
        found = signs_of(run, control)
        back = _back(run.resumed, control.losses)
        told = "; ".join(found.values()) or "nothing differs from the control"
        tell(f"run {number + 1}", f"{'; '.join(run.done)}{back}; exit code {run.code}; {told}")
        seen.append(found.keys() & set(CASE["signs"]))
    common = sorted(set.intersection(*seen))
    if not common and any(seen):
        raise CantTell(f"{sum(map(bool, seen))} of {times} runs show it, but not all by the same sign")
    print(f"REPRODUCED in {times} of {times} runs: {', '.join(common)}" if common else f"NOT REPRODUCED, {times} tried")
    return 0 if common else 1


def leave(number: int, _frame: object) -> None:
    """Raises an exception, only once, so that the job's processes are ended."""
    for ending in ENDS:
        signal.signal(ending, signal.SIG_IGN)
    sys.exit(128 + number)


def main() -> int:
    for number in ENDS:
        if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            signal.signal(number, leave)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="how often with the kill (default 3)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep logs and checkpoints in this new folder")
    parser.add_argument("command", nargs="*", help="another command for the job, after --; {run}: a folder of its own")
    args = parser.parse_args()
    command = args.command or CASE["command"]
    tell("finding", CASE["finding"] or "none: the run passed, so nothing should be reproduced")
    if CASE["promise"]:
        tell("promise", CASE["promise"])
    tell("job", shlex.join(command))
    tell("versions", versions())
    missing = [name for name in CASE["secrets"] if name not in os.environ]
    try:
        if missing:
            raise CantTell(f"the job had secrets in its environment, and they were not kept; set {', '.join(missing)}")
        with tempfile.TemporaryDirectory(prefix="repro-") as folder:
            return show(command, (args.keep or Path(folder)).absolute(), max(1, args.runs))
    except (CantTell, OSError) as why:
        print(f"CAN'T DECIDE: {why}")
        return 2


if __name__ == "__main__":
    sys.exit(main())
