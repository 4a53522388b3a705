"""Kills the parts of runs on a real Kubernetes cluster, and counts what is left: it must be nothing.

    python lab/campaigns/pod_deaths.py --table FILE [--count N] [--jobs N] [--minutes M] [--only WHO]

The cluster has two nodes, which are namespaces of this machine; the job is a stand-in for torchrun in two pods, whose
processes usually have equal pids. These die, when the journal has an event for the first time: torchaos, its reaper,
both; the agent of a pod, its reaper, both; the pipes to the agents; a kubelet; the API server. The last two serve all
runs, so a run in which they die is alone on the cluster. A call goes on where the table ends. Exit code 1 if anything
was left, or was wrong.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

from clusters.kubernetes import Kubernetes, KubernetesRun, await_ready, cluster, missing
from clusters.runs import FROZEN, KILL

from torchaos.harness.protocol.wire import Kind
from torchaos.harness.running.launchers.node_channel import LEASE_S

BOUND_S = LEASE_S + 5.0  # seconds after a death, in which everything must be undone
EVENTS = (Kind.JOB_STARTED, Kind.RANK_UP, Kind.STEP, Kind.APPLYING, Kind.APPLIED, Kind.EFFECT, Kind.ROLLED_BACK)
# Deaths after which the fault ends by its own time or at the end of the run, and not because of the death.
_MILD = ("nobody", "reaper of the agent", "pipe", "kubelet", "API server", "reaper")
_OF_ALL = ("kubelet", "API server")  # these serve all runs
_KILLED = (-9, 137)  # exit codes of a torchaos that was killed
_PID = (1 << 22) - 1
_LOOK_S, _END_S, _GIVE_UP_S = 0.2, 240.0, 90.0

Strike = Callable[["Dying"], None]


class Dying(KubernetesRun):
    """A run in which something dies. The node is stopped for a time that is over only after the death is dealt with."""

    def __init__(self, kubernetes: Kubernetes, name: str, who: str) -> None:
        frozen = {**FROZEN, "for": "3s" if who in _MILD else "60s"}
        kill = {**KILL, "when": {"step": 60, "phase": "backward"}}
        super().__init__(kubernetes, name, frozen, kill, steps=1000)

    def processes(self) -> dict[int, str]:
        """The living processes of the run on any node, by their pids here: state and command line."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                line = (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
                if f"{self.name}-s0".encode() in line and state != "Z":
                    found[int(folder.name)] = f"{state} {line[:150].decode(errors='replace')}"
        return found

    def left(self) -> list[str]:
        """What is left of the run: processes, pods, entries in the registry of runs. A deleted pod without a process of
        the run is not left, although the cluster shows it for a while."""
        pods = [pod for pod in self.cluster.objects("pods") if self.name in pod["metadata"]["name"]]
        pods = [f"pod {pod['metadata']['name']}" for pod in pods if "deletionTimestamp" not in pod["metadata"]]
        registry = (self.cluster.base / "home").glob(f".local/state/torchaos/runs/*{self.name}*")
        return [*self.processes().values(), *pods, *map(str, registry)]


def _agent(run: Dying) -> None:
    run.kill((run.name, "exec --run"))


def _api_server(run: Dying) -> None:
    run.cluster.restart("kube-apiserver", "cp")


def _kubelet(run: Dying) -> None:
    run.cluster.restart("kubelet", "w2")


STRIKES: Mapping[str, Strike] = {
    "nobody": lambda run: None,
    "torchaos": lambda run: run.kill((run.name, "torchaos run"), node="cp"),
    "reaper": lambda run: run.kill((run.name, "rollback.reaper"), node="cp"),
    "torchaos and its reaper": lambda run: run.kill(
        (run.name, "torchaos run"), (run.name, "rollback.reaper"), node="cp"
    ),
    "agent": _agent,
    "reaper of the agent": lambda run: run.kill((run.name, "rollback.reaper")),
    "agent and its reaper": lambda run: run.kill((run.name, "rollback.reaper"), (run.name, "exec --run")),
    "pipe": lambda run: run.kill(("kubectl", "node --join", run.name), node="cp"),
    "kubelet": _kubelet,
    "API server": _api_server,
}  # fmt: skip


@dataclass(frozen=True)
class Death:
    who: str
    after: Kind


def deaths(count: int) -> list[Death]:
    """Each death once after each event, and then all again."""
    every = [Death(who, after) for after in EVENTS for who in STRIKES]
    return [every[number % len(every)] for number in range(count)]


def play(kubernetes: Kubernetes, number: int, death: Death) -> dict[str, Any]:
    run, begun = Dying(kubernetes, f"death{number:03}x", death.who), time.monotonic()
    died_s, wrong = 0.0, ""
    since: dict[int, float] = {}  # when a stopped process was seen first, or when something died
    while run.process.poll() is None:
        now = time.monotonic()
        if not died_s and any(event.kind is death.after for event in run.happened()):
            STRIKES[death.who](run)
            died_s = now = time.monotonic()
        wrong = wrong or _stopped_too_long(run, since, now)
        if now > begun + _END_S:
            run.kill_controller(reaper=True)
            wrong = wrong or f"torchaos did not end within {_END_S:g} s"
        time.sleep(_LOOK_S)
    said = run.process.stdout.read() if run.process.stdout else ""
    ended = time.monotonic()
    code = run.process.returncode
    if code in _KILLED and "reaper" in death.who:
        while any(line[0] == "T" for line in run.processes().values()) and time.monotonic() < ended + BOUND_S:
            time.sleep(_LOOK_S)
        wrong = wrong or _stopped_too_long(run, since, math.inf)
        recovered, told = kubernetes.as_user("torchaos", "recover")
        wrong = wrong or (f"recover: {told[-300:]}" if recovered else "")
    while (left := run.left()) and time.monotonic() < ended + _GIVE_UP_S:
        wrong = wrong or _stopped_too_long(run, since, time.monotonic())
        time.sleep(_LOOK_S)
    row = {"died": bool(died_s), "exit_code": code, "seconds": round(time.monotonic() - ended, 1), **_record(run)}
    row["wrong"] = wrong or "; ".join(left)[:400] or row["wrong"] or _bad_end(code, said)
    return row


def _stopped_too_long(run: Dying, since: dict[int, float], now: float) -> str:
    stopped = {pid: line for pid, line in run.processes().items() if line[0] == "T"}
    for pid in since.keys() - stopped.keys():
        del since[pid]
    for pid, line in stopped.items():
        if now > since.setdefault(pid, now) + BOUND_S:
            return f"stopped for too long: {line}"
    return ""


def _bad_end(code: int, said: str) -> str:
    return f"exit code {code}: {said[-300:]}" if code not in (0, 1, 2, *_KILLED) or "Traceback" in said else ""


def _record(run: Dying) -> dict[str, Any]:
    """Whether the ranks had equal pids, how many events prove the faults, and a proof that is of another node."""
    events = run.happened()
    ups = [event for event in events if event.kind is Kind.RANK_UP]
    pids = [{event.data["pid"] & _PID for event in ups if event.rank == rank} for rank in (0, 1)]
    row: dict[str, Any] = {"equal": bool(pids[0] & pids[1]), "proved": 0, "wrong": ""}
    if not events or not run.folder.result.exists():
        return row
    if run.result.exit_code == 4:
        row["wrong"] = f"rollback: {run.result.reason}"
    proof = [event for found in run.evidence() for event in found]
    others = {event.source.partition(".")[0] for event in proof} - {"node1"}
    row["proved"] = len(proof)
    row["wrong"] = row["wrong"] or (f"evidence of {', '.join(sorted(others))}" if others else "")
    return row


def main() -> int:
    options, begun = parsed(), time.monotonic()
    if lacks := missing():
        print(lacks)
        return 3
    table: Path = options.table
    lines = [json.loads(line) for line in table.read_text().splitlines()] if table.exists() else []
    rows = {line["number"]: line for line in lines}
    lock, end_s = threading.Lock(), begun + 60 * options.minutes

    def work(number: int, death: Death) -> None:
        if time.monotonic() > end_s:
            return
        try:
            row = play(kubernetes, number, death)
        except Exception as error:  # a bug of the campaign must not pass for a clean death
            row = {
                "died": False,
                "equal": False,
                "proved": 0,
                "seconds": 0.0,
                "wrong": f"{type(error).__name__}: {error}",
            }
        with lock, table.open("a") as file:
            rows[number] = {"number": number, "who": death.who, "after": death.after.value, **row}
            file.write(json.dumps(rows[number]) + "\n")
            print(json.dumps(rows[number]), flush=True)

    wanted = options.only or STRIKES
    every = [(number, death) for number, death in enumerate(deaths(options.count)) if death.who in wanted]
    chosen = [(number, death) for number, death in every if number not in rows]
    if chosen:
        with cluster() as kubernetes:
            with ThreadPoolExecutor(options.jobs) as pool:
                for _ in pool.map(lambda each: work(*each), [each for each in chosen if each[1].who not in _OF_ALL]):
                    pass
            for each in [each for each in chosen if each[1].who in _OF_ALL]:
                await_ready(kubernetes)
                work(*each)
    return show(list(rows.values()), len(every))


def show(rows: Sequence[Mapping[str, Any]], count: int) -> int:
    kinds = defaultdict(list)
    for row in rows:
        kinds[row["who"]].append(row)
    for who, mine in sorted(kinds.items()):
        worst = max(row["seconds"] for row in mine)
        print(f"{who:<24} {sum(row['died'] for row in mine):>3} deaths; nothing was left {worst:.1f} s after the end")
    bad = [row for row in rows if row["wrong"]]
    died = sum(row["died"] and row["who"] != "nobody" for row in rows)
    proved = sum(row["equal"] and row["proved"] > 0 for row in rows)
    equal = sum(row["equal"] for row in rows)
    print(
        f"{died} deaths in {len(rows)} runs, {len(bad)} bad; {equal} runs with equal pids, evidence in {proved} of them"
    )
    for row in bad:
        print(f"BAD {row}")
    return 1 if bad or len(rows) < count else 0


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=120, help="runs")
    parser.add_argument("--jobs", type=int, default=3, help="how many runs at a time")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no run after so long")
    parser.add_argument(
        "--only", action="append", default=[], choices=STRIKES, metavar="WHO", help="leave out the others"
    )
    parser.add_argument("--table", type=Path, required=True, help="what came of each run, a JSON object a line")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
