"""The script: runs the job's command with the kills and without them, and looks for the signs of the finding."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import select
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CASE: dict[str, Any] = {}  # the finding, and how it was made
ENDS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)  # signals that end the script and the job
MARK = "REPRO_MARK"  # in the environment of all processes that are started here, so that all can be found and ended
LATE_S = 0.5  # seconds after the kill in which the other ranks may still print a step


class Run:
    def __init__(self, command: list[str], kills: list[dict[str, Any]], folder: Path) -> None:
        self.folder, self.kills = folder, list(kills)
        self.done: list[str] = []  # the kills that were carried out, in words
        self.steps: list[tuple[float, int, str | None]] = []  # time of a line, its step, its loss as printed
        self.killed_s: float | None = None
        self.code: int | None = None  # None: it took too long
        self._command = [word.replace("{run}", str(folder)) for word in command]
        self._mark = uuid.uuid4().hex
        self._victims: dict[int, int] = {}  # pidfd by pid, for the processes that the next kill hits
        self._due: list[tuple[float, int, dict[int, int]]] = []  # signals that have not been sent yet
        self._started_s = time.monotonic()

    def __call__(self) -> Run:
        times, delay_s = CASE["resubmit"]
        try:
            with open(f"{self.folder}.log", "wb") as log:
                for submission in range(1 + times):
                    time.sleep(delay_s if submission else 0)
                    self._once(log)
                    if self.code in (0, None):
                        break
        finally:
            self._end_all()
        return self

    @property
    def took_s(self) -> float:
        return time.monotonic() - self._started_s

    def _once(self, log: Any) -> None:
        self._start()
        assert self._torchrun.stdout is not None
        pipe, rest = self._torchrun.stdout.fileno(), b""
        while self.took_s < CASE["timeout_s"]:
            ready, _, _ = select.select([pipe], [], [], 0.002 if self.kills or self._due else 0.1)
            chunk = os.read(pipe, 1 << 16) if ready else b""
            log.write(chunk)
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                self._read(line.decode(errors="replace"))
            self._act()
            if not chunk and self._torchrun.poll() is not None:
                self.code = self._torchrun.returncode
                return
        self.code = None

    def _start(self) -> None:
        """Starts torchrun. Blocks the signals that end this script until the new process is known, because it must be
        ended too."""
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)
        try:
            self._torchrun = subprocess.Popen(
                self._command, cwd=CASE["cwd"].replace("{run}", str(self.folder)), env=self._env(), bufsize=0,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
                preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, mask),
            )  # fmt: skip
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _env(self) -> dict[str, str]:
        env = {name: value for name, value in os.environ.items() if not name.startswith("TORCHAOS")}
        added = {name: value.replace("{run}", str(self.folder)) for name, value in CASE["env"].items()}
        return {**env, "PYTHONUNBUFFERED": "1", **added, MARK: self._mark}

    def _read(self, line: str) -> None:
        found = step_of(line)
        if found is not None:
            self.steps.append((time.monotonic(), *found))
            if self.kills and not self._victims:
                self._find_victims()  # found now, because the search may take longer than a step
            self._act()

    def _act(self) -> None:
        """Sends the signals that are due, and prepares the next kill when its moment has come."""
        now = time.monotonic()
        for signal_due in [signal_due for signal_due in self._due if signal_due[0] <= now]:
            self._due.remove(signal_due)
            send(signal_due[1], signal_due[2])
        if not (self.kills and self._has_come(self.kills[0]) and (self._hold_living() or self._find_victims())):
            return
        kill, victims, self._victims = self.kills.pop(0), self._victims, {}
        self.killed_s = now if self.killed_s is None else self.killed_s
        for after_s, number in kill["signals"]:
            if after_s:
                self._due.append((now + after_s, number, victims))
            else:
                send(number, victims)
        self.done.append(self._in_words(kill, victims))

    def _in_words(self, kill: dict[str, Any], victims: dict[int, int]) -> str:
        names = " and ".join(signal.Signals(number).name for _, number in kill["signals"])
        who = "torchrun" if kill["ranks"] is None else f"rank {', '.join(map(str, kill['ranks']))}"
        at_step = f" after step {self.steps[-1][1]}" if self.steps else ""
        return f"{names} to {who} (pid {', '.join(map(str, victims))}){at_step}"

    def _has_come(self, kill: dict[str, Any]) -> bool:
        if kill["step"] is not None:
            return any(step >= kill["step"] for _, step, _ in self.steps)
        return bool((self.folder / kill["path"]).exists())

    def _hold_living(self) -> bool:
        """Whether the held processes are still alive. A restart replaces them."""
        if any(select.select([fd], [], [], 0)[0] for fd in self._victims.values()):
            self._victims = {}
        return bool(self._victims)

    def _find_victims(self) -> bool:
        ranks = self.kills[0]["ranks"]
        pids = [self._torchrun.pid] if ranks is None else [pid for pid, rank in self._ranks() if rank in ranks]
        if not pids or (ranks is not None and len(pids) != len(ranks)):
            return False
        try:
            self._victims = {pid: os.pidfd_open(pid) for pid in pids}
        except ProcessLookupError:
            return False
        return True

    def _ranks(self) -> Iterator[tuple[int, int]]:
        """Yields (pid, rank) of all ranks below the torchrun that was started here. Data-loader workers are left out,
        although they have the RANK of their parent."""
        parents = dict(processes())
        for pid in parents:
            ancestor = pid
            while ancestor in parents and ancestor != self._torchrun.pid:
                ancestor = parents[ancestor]
            if ancestor != self._torchrun.pid or pid == ancestor:
                continue
            rank = environ(pid).get("RANK")
            if rank is not None and "RANK" not in environ(parents[pid]):
                yield pid, int(rank)

    def _end_all(self) -> None:
        """Ends every process that has the mark, whatever its parent is now."""
        for number, patience_s in ((signal.SIGCONT, 0.0), (signal.SIGTERM, 5.0), (signal.SIGKILL, 10.0)):
            left = self._marked()
            for pid in left:
                try:
                    send(number, {pid: os.pidfd_open(pid)})
                except ProcessLookupError:
                    continue
            end_s = time.monotonic() + patience_s
            while left and patience_s and time.monotonic() < end_s:
                self._torchrun.poll()  # a process that has ended disappears when it is waited for
                time.sleep(0.05)
                left = self._marked()

    def _marked(self) -> set[int]:
        return {pid for pid, _ in processes() if environ(pid).get(MARK) == self._mark}

    @property
    def losses(self) -> dict[int, str | None]:
        """For each step, the loss that was printed last."""
        return {step: loss for _, step, loss in self.steps}

    @property
    def before_kill(self) -> dict[int, str | None]:
        return {step: loss for at, step, loss in self.steps if self.killed_s is None or at <= self.killed_s}

    @property
    def resumed(self) -> int | None:
        """The first step that was printed again after the kill. None if there was none."""
        reached, killed_s = max(self.before_kill, default=0), self.killed_s
        return next((step for at, step, _ in self.steps if killed_s and at > killed_s and step <= reached), None)

    @property
    def caught_up_s(self) -> float | None:
        """The seconds from the kill to the first step that is higher than all earlier steps. None if there was none."""
        if self.killed_s is None:
            return None
        over = self.killed_s + LATE_S
        reached = max((step for at, step, _ in self.steps if at <= over), default=0)
        return next((at - self.killed_s for at, step, _ in self.steps if at > over and step > reached), None)


def send(number: int, victims: dict[int, int]) -> None:
    for fd in victims.values():
        try:
            signal.pidfd_send_signal(fd, number)
        except ProcessLookupError:
            continue


def processes() -> Iterator[tuple[int, int]]:
    """Yields (pid, parent's pid) of all processes."""
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                stat = Path("/proc", entry, "stat").read_text(errors="replace")
                yield int(entry), int(stat.rpartition(")")[2].split()[1])
            except (OSError, ValueError, IndexError):
                continue


def environ(pid: int) -> dict[str, str]:
    try:
        raw = Path("/proc", str(pid), "environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in raw.split("\0") if "=" in entry)


def step_of(line: str) -> tuple[int, str | None] | None:
    """The step and the loss in a line of the job's log. The step is counted as in the run's verdict."""
    line, groups = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line), dict[str, str]()
    for number, pattern in enumerate(CASE["log"]):
        found = re.search(pattern, line)
        if not found and not number:
            return None
        groups.update({name: text for name, text in (found.groupdict() if found else {}).items() if text is not None})
    return (int(groups["step"].replace(",", "")) - CASE["lead"], groups.get("loss")) if "step" in groups else None


SUMMARY = ""  # the code that reads a checkpoint; the job's own Python runs it
CLOCK = re.compile(r"time|date|clock|elapsed|duration|seconds|uuid|host", re.IGNORECASE)


class CantTell(Exception):
    """The runs neither show the finding nor refute it. The message has the reason."""


class Control:
    """The runs of the job without a kill. `noisy`: the entries of the final checkpoint that differ between two of
    them."""

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
    """The differences from the control, by kind of sign. Raises CantTell if the control proves nothing."""
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
    """Where the job continued, in the words of the verdict. `first`: the first step in its log after the kill."""
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
    asked = ("-c", "from importlib.metadata import version; print('torch', version('torch'))"), ("--version",)
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
    """Raises an exception, at the first signal only, so that the job's processes are ended in order."""
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
