"""One run on the Slurm cluster in which something dies, and what it leaves on any node."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dying.scene import At

from clusters.runs import FROZEN, KILL
from clusters.slurm import Slurm, SlurmRun
from torchaos.harness.protocol.wire import Kind
from torchaos.harness.running.launchers.node_channel import LEASE_S

BOUND_S = LEASE_S + 5.0  # seconds after a death, in which everything must be undone
WHERE = {"head": "head run", "n1": "n1 exec", "n2": "n2 exec"}  # the part of a run that dies at a point of its own
NOBODY = "nobody"
_MORTAL = Path(__file__).with_name("mortal")
_GATE = Path(__file__).with_name("at_once.py")
_FAULTS = ({**FROZEN, "for": "1s"}, {**KILL, "when": {"step": 30, "phase": "backward"}})
_FIRST_PID = 20_000
_PIDS = 400  # process ids that one run may use on a node
_PID = (1 << 22) - 1
_LOOK_S = 0.4
_GATE_S, _END_S, _GIVE_UP_S = 20.0, 200.0, 90.0
_GONE = (-9, 137)  # exit codes of a torchaos that was killed


@dataclass(frozen=True)
class Death:
    """`where`: a part of the run that dies at a point; or what is killed from outside, when the journal has the event
    `after` for the first time."""

    where: str
    at: tuple[At, ...] = ()
    after: Kind | None = None

    @property
    def kind(self) -> str:
        return f"{self.where}: {'+'.join(name for _, _, who in self.at for name in who)}" if self.at else self.where


# Agents and reapers die too, at once or after Slurm's KillWait. A controller that has died may not know a job any more,
# and ends it.
KILLS_ALL = ("step", "allocation", "node", "slurmctld")
FROM_OUTSIDE = tuple(
    Death(who, (), kind)
    for who in ("pipe", "srun", "step", "allocation", "slurmctld", "node")
    for kind in (Kind.JOB_STARTED, Kind.RANK_UP, Kind.STEP, Kind.APPLYING, Kind.APPLIED, Kind.EFFECT, Kind.ROLLED_BACK)
)


@dataclass
class Outcome:
    """`seconds`: from the death, or from the end of torchaos if that is later, until nothing was left. `equal`: the
    ranks had equal process ids on their nodes. `proved`: how many events prove the faults. `recovered`: Slurm killed
    everything of the run on a node, so the undo log was left there for `torchaos recover`, which undid it."""

    died: bool = False
    wrong: str = ""
    seconds: float = 0.0
    equal: bool = False
    proved: int = 0
    recovered: bool = False
    exit_code: int | None = None
    trace: Sequence[str] = field(default=(), repr=False)

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "trace"}


class _Here:
    """The processes of this machine. Several runs at a time share a look at them, because a look is costly."""

    def __init__(self) -> None:
        self._lock, self._seen_s, self._found = threading.Lock(), -math.inf, dict[int, str]()

    def look(self) -> dict[int, str]:
        """State and command line of each process, by its pid here. At most `_LOOK_S` old."""
        with self._lock:
            if time.monotonic() > self._seen_s + _LOOK_S:
                self._seen_s, self._found = time.monotonic(), dict(self._all())
            return self._found

    @staticmethod
    def _all() -> Iterator[tuple[int, str]]:
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if line := (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"):
                    state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
                    yield int(folder.name), f"{state} {line}"


_HERE = _Here()


class MortalRun(SlurmRun):
    """A run whose processes are started as modules, by which `mortal` knows them."""

    controller = "torchaos.harness run"
    nodes = ("head", "n1", "n2")
    torchaos = (sys.executable, "-m", "torchaos.harness")

    def __init__(self, cluster: Slurm, number: int, death: Death) -> None:
        self.number, self.death = number, death
        self.trace = cluster.shared / f"death{number:04}x.trace"
        at = json.dumps({"trace": str(self.trace), "at": death.at})
        env = [
            f"PYTHONPATH={_MORTAL}", f"DYING_WHERE={WHERE.get(death.where, 'nowhere -')}", f"DYING_AT={at}",
        ]  # fmt: skip
        super().__init__(cluster, f"death{number:04}x", *_FAULTS, env=env, steps=60)

    def of_job(self) -> Mapping[str, Any]:
        return {"timeout": "100s"}

    def begin(self) -> subprocess.Popen[str]:
        scenario = json.loads(self.file.read_text())
        scenario["job"]["command"] = f"{{python}} {_GATE} {self._gate} {scenario['job']['command']}"
        self.file.write_text(json.dumps(scenario))
        command = [*self.torchaos, "run", str(self.file), "--out", "runs"]
        started: subprocess.Popen[str] = self.cluster.popen("env", *self.env, *command)
        return started

    @property
    def _gate(self) -> Path:
        shared: Path = self.cluster.shared
        return shared / f"{self.name}.gate"

    def open_gate(self) -> None:
        """Lets the job begin, with equal next process ids on both nodes."""
        first = _FIRST_PID + _PIDS * (self.number % 10)
        for node in self.nodes[1:3]:
            self.cluster.as_root(node, "sh", "-c", f"echo {first} >/proc/sys/kernel/ns_last_pid")
        with suppress(FileNotFoundError):
            (self._gate / "go").touch()

    def at_gate(self) -> bool:
        return len(list(self._gate.glob("ready-*"))) == 2

    def processes(self) -> dict[int, str]:
        """The living processes of the run on any node, by their pids here: state and command line."""
        return {
            pid: line[:200] for pid, line in _HERE.look().items()
            if self.name in line and line[0] != "Z" and pid != self.process.pid
        }  # fmt: skip

    def left(self) -> list[str]:
        """What is left of the run: processes, work in Slurm, undo logs on nodes, entries in the registry of runs."""
        left = list(self.processes().values())
        if not left:
            left += [f"job {line}" for line in self.cluster.work().splitlines() if self.name in line]
        for node in self.nodes:
            tmp = Path("/proc", (self.cluster.base / node / "pid").read_text().strip(), "root/tmp")
            left += [f"{node}: {path}" for path in tmp.glob(f"torchaos-*/*{self.name}*/undo")]
        left += [
            f"registry: {path}"
            for path in (self.cluster.base / "home").glob(f".local/state/torchaos/runs/*{self.name}*")
        ]
        return left


def play(slurm: Slurm, number: int, death: Death) -> Outcome:
    run, begun = MortalRun(slurm, number, death), time.monotonic()
    one, died_s, opened, stuck = Outcome(), 0.0, False, ""
    since: dict[int, float] = {}  # when a stopped process was seen first
    while run.process.poll() is None:
        now = time.monotonic()
        if not opened and (run.at_gate() or died_s or now > begun + _GATE_S):
            opened = True
            run.open_gate()
        if not died_s and _dies(run):
            died_s = time.monotonic()
        stopped = {pid: line for pid, line in run.processes().items() if line[0] == "T"}
        since = {pid: since.get(pid, now) for pid in stopped}
        for pid, line in stopped.items():
            if now > since[pid] + BOUND_S:
                stuck = stuck or f"stopped for too long: {line}"
        if now > begun + _END_S:
            run.kill_controller(reaper=True)
            stuck = stuck or f"torchaos did not end within {_END_S:g} s"
        time.sleep(_LOOK_S)
    said = run.process.stdout.read() if run.process.stdout else ""
    one.exit_code, one.trace = run.process.returncode, run.trace.read_text().splitlines() if run.trace.exists() else []
    one.died = bool(died_s) or any(line.startswith("died ") for line in one.trace)
    ended_s = max(died_s, time.monotonic())
    if one.died and death.where == "node":
        stuck = stuck or _come_back(run)
        ended_s = time.monotonic()
    if one.exit_code in _GONE and any(line.startswith("died ") and "reaper" in line for line in one.trace):
        stuck = stuck or _recover(run, died_s or ended_s)
    wait = time.monotonic()
    while (left := run.left()) and time.monotonic() < wait + _GIVE_UP_S:
        if death.where in KILLS_ALL and time.monotonic() > wait + BOUND_S and not one.recovered:
            one.recovered = True
            # A node that starts again has another namespace of processes here, so it counts as another machine.
            other = ["--any-host"] if death.where == "node" else []
            for node in run.nodes[1:]:
                run.cluster.popen(*run.torchaos, "recover", *other, node=node).communicate(timeout=300)
        time.sleep(_LOOK_S)
    one.seconds = round(time.monotonic() - ended_s, 1)
    one.wrong = stuck or ("; ".join(left)[:500] if left else "") or _wrong(run, one, said)
    return one


def _dies(run: MortalRun) -> bool:
    """Whether the death has happened; a death from outside is done here, when its event is there."""
    if run.death.at:
        return run.trace.exists() and "\ndied " in run.trace.read_text()
    if run.death.after is None or not any(event.kind is run.death.after for event in run.happened()):
        return False
    _strike(run, run.death.where)
    return True


def _strike(run: MortalRun, who: str) -> None:
    slurm = run.cluster
    if who == "pipe":
        run.kill(("srun", "node --join", run.name), node="head")
    elif who == "srun":
        run.kill(("srun", "--kill-on-bad-exit", run.name), node="head")
    elif who == "node":
        slurm.crash(run.nodes[2])
    elif who == "slurmctld":
        run.kill(("slurmctld",), node="head")
        slurm.as_root("head", "sh", "-c", "exec slurmctld -L /var/log/slurmctld.log >/dev/null 2>&1 </dev/null")
    else:
        steps = ["--steps"] if who == "step" else []
        lines = slurm.as_root("head", "squeue", "--noheader", *steps, "--format=%i %j").splitlines()
        for found in [line.split()[0] for line in lines if run.name in line]:
            slurm.as_user("scancel", *(["--signal=KILL"] if steps else []), found)


def _come_back(run: MortalRun) -> str:
    """Starts the node again that died. Then `torchaos recover` can verify what it could not while the node was away.
    Returns what went wrong."""
    run.cluster.boot(run.nodes[2])
    code, said = run.cluster.as_user("torchaos", "recover")
    return "" if code == 0 else f"recover, when the node was back: {said[-300:]}"


def _recover(run: MortalRun, died_s: float) -> str:
    """What a user does after the death of torchaos and its reaper. Before that, the agents must undo their faults by
    themselves. Returns what went wrong."""
    while any(line[0] == "T" for line in run.processes().values()):
        if time.monotonic() > died_s + BOUND_S:
            return f"stopped for too long: {run.processes()}"
        time.sleep(_LOOK_S)
    code, said = run.cluster.as_user("torchaos", "recover")
    return "" if code == 0 else f"recover: {said[-300:]}"


def _wrong(run: MortalRun, one: Outcome, said: str) -> str:
    """What is wrong in the record: events that prove a fault on another node, or a bad exit code. Notes the pids."""
    if one.exit_code not in (0, 1, 2, 4, 5, *_GONE) or "Traceback" in said:
        return f"exit code {one.exit_code}: {said[-300:]}"
    events = run.happened()
    pids = [
        {event.data["pid"] & _PID for event in events if event.kind is Kind.RANK_UP and event.rank == rank}
        for rank in (0, 1)
    ]
    one.equal = bool(pids[0] & pids[1])
    if not events or not run.folder.result.exists():
        return ""
    if run.result.exit_code == 4 and "reaper" not in run.death.kind and run.death.where != "node":
        return f"rollback: {run.result.reason}"
    proof = [event for found in run.evidence() for event in found]
    one.proved = len(proof)
    sources = {event.source.partition(".")[0] for event in proof} - {"node1"}
    return f"evidence of {', '.join(sorted(sources))}" if sources else ""
