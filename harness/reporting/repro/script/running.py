"""One run of the job's command, with the kills."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CASE: dict[str, Any] = {}  # the finding, and how it was made
ENDS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)  # signals that end the script and the job
MARK = "REPRO_MARK"  # marks all processes that are started here in their environment, so that all can be ended
LATE_S = 0.5  # seconds after the kill in which a rank that was not hit may still print a step


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
        """Starts torchrun. A signal that ends this script is blocked until the new process is known, so that the
        process is ended too."""
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
        """Yields (pid, rank) of all ranks among the descendants of the torchrun that was started here. A data-loader
        worker, which has its parent's RANK, is left out."""
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
