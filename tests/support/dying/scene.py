"""One run that dies, in its own folder, and what it leaves when every process that could end has ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from dying import clean
from dying.families import BARE_PYTHON, FAMILIES, STAND_IN, Family
from torchaos.harness.host import processes

HERE = Path(__file__).parent
LOOK_S = 0.02
END_S, RECOVER_S = 120.0, 60.0  # seconds, on a busy machine; a quiet one needs one or two
LIVES_ON = {0, 1, 2, 4, 5}  # exit codes of a harness whose reaper or job died: not bad usage, not a signal
STORE = {"flipped": b"weights" * 100, "removed": b"optimizer", "replaced": b"rng" * 10}

At = tuple[str, int, tuple[str, ...]]  # point, nth time, who dies


@dataclass(frozen=True)
class Death:
    """`at`: one death; or two: the harness dies, and then the reaper while it heals."""

    family: str
    at: tuple[At, ...]

    @property
    def kind(self) -> str:
        return ", then ".join("+".join(who) for _point, _nth, who in self.at)

    def __str__(self) -> str:
        return f"{self.family}: " + "; ".join(f"{'+'.join(who)} at {point} #{nth}" for point, nth, who in self.at)


@dataclass
class Aftermath:
    """What a death left. `died`: all planned deaths happened. If not, the run is checked all the same."""

    died: bool
    leaks: list[str] = field(default_factory=list)
    trace: list[str] = field(default_factory=list)
    exit_code: int | None = None
    seconds: float = 0.0


class Scene:
    """`stage`: a new folder. `alone`: we have our own pid namespace. This process is a subreaper."""

    def __init__(self, stage: Path, alone: bool, recover: Callable[[Path, dict[str, str]], list[str]]) -> None:
        self._stage, self._alone, self._recover = stage, alone, recover
        self._tag = f"DYING_TAG={stage}"
        self._codes: dict[int, int] = {}
        self._before = {os.getpid(), os.getppid()} | set(clean.processes(None, set())) if alone else set()
        for name in ("store", "tmp", "home"):
            (stage / name).mkdir(parents=True)
        for name, content in STORE.items():
            (stage / "store" / name).write_bytes(content)

    def play(self, death: Death) -> Aftermath:
        begun, family = time.monotonic(), FAMILIES[death.family]
        machine, store = clean.Machine(self._stage / "tmp", self._alone), clean.tree(self._stage / "store")
        attached = self._start_attached() if family.attached else None
        spared = self._family_of(attached)
        harness = self._start(family, death, attached)
        aftermath = Aftermath(died=False)
        aftermath.leaks += self._wait_for_the_end(harness, spared)
        aftermath.exit_code = self._codes.get(harness)
        aftermath.trace = (self._stage / "trace").read_text().splitlines() if (self._stage / "trace").exists() else []
        aftermath.died = 0 < sum(line.startswith("died ") for line in aftermath.trace) == len(death.at)
        if attached:
            struck = any(line.startswith("died ") and "job" in line for line in aftermath.trace)
            aftermath.leaks += self._end_attached(spared, {attached} if struck else set())
        aftermath.leaks += machine.left()
        if aftermath.leaks:
            self._clear_away()
        aftermath.leaks += clean.differences(store, clean.tree(self._stage / "store"))
        kept = "size" not in (family.job.get("checkpoints") or {})
        for run_dir in self._run_dirs():
            aftermath.leaks += [*clean.undo_log(run_dir), *clean.journals(run_dir), *clean.checkpoints(run_dir, kept)]
        aftermath.leaks += [f"registry entry {path.name}" for path in self._stage.glob("home/torchaos/runs/*")]
        aftermath.leaks += self._console_problems(aftermath)
        aftermath.seconds = time.monotonic() - begun
        return aftermath

    def _start(self, family: Family, death: Death, attached: int | None) -> int:
        (self._stage / "scenario.yaml").write_text(json.dumps(family.scenario(self._stage), indent=1))
        command = [sys.executable, "-m", "torchaos.harness", "run", "scenario.yaml", "--out", "out"]
        command += ["--attach", str(attached)] if attached else []
        about = {"trace": str(self._stage / "trace"), "at": death.at}
        return self._spawn(command, {
            "PYTHONPATH": f"{HERE / 'mortal'}:{HERE / 'plugin'}:{os.environ.get('PYTHONPATH', '')}",
            "DYING_AT": json.dumps(about),
        })  # fmt: skip

    def _spawn(self, command: list[str], more: dict[str, str]) -> int:
        with open(self._stage / "console", "ab") as console:
            process = subprocess.Popen(command, cwd=self._stage, env=self.env(more), stdin=subprocess.DEVNULL,
                                       stdout=console, stderr=console, start_new_session=True)  # fmt: skip
        process.returncode = 0  # `_reap` waits for it
        return process.pid

    def env(self, more: dict[str, str]) -> dict[str, str]:
        tag, _, value = self._tag.partition("=")
        home = {name: str(self._stage / "home") for name in (
            "HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME", "XDG_DATA_HOME", "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME",
        )}  # fmt: skip
        python = {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
        return {"PATH": os.environ["PATH"], "TMPDIR": str(self._stage / "tmp"), "COLUMNS": "160", tag: value,
                **python, **home, **more}  # fmt: skip

    def _wait_for_the_end(self, harness: int, spared: set[int]) -> list[str]:
        """Wait until no process is left. If harness and reaper are both dead, run `torchaos recover` first."""
        deadline, recovered = time.monotonic() + END_S, False
        while (left := self._left(spared)) or harness not in self._codes:
            if not recovered and self._both_are_dead(harness, left):
                recovered, deadline = True, time.monotonic() + RECOVER_S
                if problems := self._recover(self._stage, self.env({})):
                    return problems
            if time.monotonic() > deadline:
                return list(left.values())
            time.sleep(LOOK_S)
        if not recovered and self._both_are_dead(harness, {}):
            return self._recover(self._stage, self.env({}))
        return []

    def _both_are_dead(self, harness: int, left: dict[int, str]) -> bool:
        return self._codes.get(harness) == -signal.SIGKILL and not any(
            "rollback.reaper" in line for line in left.values()
        )

    def _clear_away(self) -> None:
        """Remove what was left, and already reported, so that it does not disturb the next death."""
        for pid in self._left(set()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        clean.unmount_all(self._stage)

    def _left(self, spared: set[int]) -> dict[int, str]:
        self._reap()
        return clean.processes(None if self._alone else self._tag, self._before | spared)

    def _reap(self) -> None:
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                self._codes[ended[0]] = os.waitstatus_to_exitcode(ended[1])

    def _start_attached(self) -> int:
        """Start the job to attach to. It has no run id, so its processes are found by their parent."""
        command = [BARE_PYTHON, str(STAND_IN / "torchrun"), "--nproc-per-node", "2", str(STAND_IN / "train.py"), "1"]
        pid, deadline = self._spawn(command, {}), time.monotonic() + END_S
        while len(self._family_of(pid)) < 3:
            assert time.monotonic() < deadline, "the stand-in to attach to does not start"
            time.sleep(0.004)
        return pid

    def _family_of(self, top: int | None) -> set[int]:
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        below = {pid for pid in pids if (seen := processes.stat(pid)) and seen.parent == top}
        return {top, *below} if top else set()

    def _end_attached(self, family: set[int], struck: set[int]) -> list[str]:
        """End the attached job. Except for processes that we hit, all must be there, and none stopped."""
        states = {pid: seen.state if (seen := processes.stat(pid)) else "gone" for pid in family}
        for pid in family:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        while any((seen := processes.stat(pid)) and seen.state not in "ZX" for pid in family):
            time.sleep(0.002)
        self._reap()
        bad = {pid: state for pid, state in states.items() if state in ("gone", "T", "Z") and pid not in struck}
        return [f"attached process {pid}: state {state}" for pid, state in bad.items()]

    def _run_dirs(self) -> list[Path]:
        return [path.parent.parent for path in self._stage.rglob("undo/undo.jsonl")]

    def _console_problems(self, aftermath: Aftermath) -> list[str]:
        console = (self._stage / "console").read_text(errors="replace")
        problems = ["a traceback on the console"] if "Traceback" in console else []
        dead = any(line.startswith("died ") and "harness" in line for line in aftermath.trace)
        if not dead and aftermath.exit_code not in LIVES_ON:
            problems.append(f"the harness was not killed, and ended with exit code {aftermath.exit_code}")
        return problems
