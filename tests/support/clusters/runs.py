"""One call of `torchaos run` on a cluster of these tests, with a job on two of its nodes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from dying.families import STAND_IN
from waiting import wait_until

from torchaos.harness import registry
from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.record.events.journal import read_events
from torchaos.harness.record.record import Record
from torchaos.harness.record.result import Result
from torchaos.harness.record.rundir import RunDir

STEP = {"step": 8, "phase": "backward"}
KILL = {"inject": "process.kill", "target": {"rank": 1}, "when": STEP}
FROZEN = {"inject": "node.freeze", "target": {"node": 1}, "when": STEP}
# Who is killed at once in the tests of deaths, by words of its command lines.
DEATHS: Mapping[str, Sequence[tuple[str, ...]]] = {
    "agent": [("exec --run",)],
    "reaper": [("rollback.reaper",)],
    "agent-and-reaper": [("rollback.reaper",), ("exec --run",)],
}
_PID = (1 << 22) - 1


class ClusterRun:
    """`nodes`: the nodes where torchaos runs, and where nodes 0 and 1 of the job are, first. The job is a stand-in for
    torchrun that imports no torch, if `job` has no other command. `patience_s`: how long to wait for what must come."""

    launcher = ""
    controller = "torchaos run"  # words of its command line
    nodes: Sequence[str] = ()
    python = "{python}"
    patience_s = 60.0

    def __init__(
        self, cluster: Any, name: str, *faults: Mapping[str, Any], steps: int = 60,
        job: Mapping[str, Any] | None = None, **more: Any,
    ) -> None:  # fmt: skip
        self.cluster, self.name = cluster, name
        stand_in = f"{self.python} {STAND_IN}/torchrun --nproc-per-node 1 --max-restarts 1 {STAND_IN}/train.py {steps}"
        usual = {
            "command": stand_in + " --save {run}/checkpoints", "nodes": 2, "world_size": 2, "timeout": "200s",
            "checkpoints": {"path": "{run}/checkpoints"}, **self.of_job(),
        }  # fmt: skip
        scenario = {
            "scenario": name, "launcher": self.launcher, "faults": list(faults), "twin": "none",
            "assert": [{"completed": {"steps": steps}}], **more, "job": {**usual, **(job or {})},
        }  # fmt: skip
        self.file = cluster.shared / f"{name}.yaml"
        self.file.write_text(json.dumps(scenario))
        self.process: subprocess.Popen[str] = self.begin()

    def of_job(self) -> Mapping[str, Any]:
        """More of the scenario's job."""
        return {}

    def begin(self) -> subprocess.Popen[str]:
        started: subprocess.Popen[str] = self.cluster.popen("torchaos", "run", str(self.file), "--out", "runs")
        return started

    def end(self) -> str:
        """Its output, when it has ended."""
        return self.process.communicate(timeout=400)[0]

    @property
    def folder(self) -> RunDir:
        (found,) = wait_until(lambda: list((self.cluster.shared / "runs").glob(f"{self.name}-s0-*")))
        return RunDir(found)

    def events(self, *kinds: Kind) -> list[Event]:
        return [event for event in read_events(self.folder.events) if event.kind in kinds]

    def happened(self) -> list[Event]:
        """The journal, as far as it is written; empty if there is no run directory yet."""
        folders = list((self.cluster.shared / "runs").glob(f"{self.name}-s0-*"))
        return list(read_events(RunDir(folders[0]).events)) if folders else []

    def seen(self, kind: Kind, text: str = "") -> Event:
        found = wait_until(
            lambda: [one for one in self.events(kind) if text in str(one.data.get("text", ""))],
            timeout_s=2 * self.patience_s, state=lambda: f"no {kind} in {self.folder.root}",
        )  # fmt: skip
        return found[0]  # type: ignore[no-any-return]

    @property
    def result(self) -> Result:
        return Result.from_json(json.loads(self.folder.result.read_text()))

    def proofs(self) -> list[set[Kind]]:
        """For each fault, the kinds of the events that prove it."""
        return [{event.kind for event in proof} for proof in self.evidence()]

    def evidence(self) -> list[list[Event]]:
        """For each fault, the events that prove it."""
        record = Record.load(self.folder)
        events = {(event.source, event.seq): event for event in record.events}
        proofs = [registry.injector_of(fault).felt(record, fault.id) for fault in record.plan.faults]
        return [[events[at] for at in (proof.events if proof else ())] for proof in proofs]

    def stopped(self) -> list[int]:
        """The processes of node 1, by their pids on their machine, as soon as the node is stopped."""
        pids = [int(pid) & _PID for pid in self.seen(Kind.EFFECT).data["pids"]]
        self.seen(Kind.APPLIED)
        return self.of_machine(pids)

    def of_machine(self, pids: Sequence[int]) -> list[int]:
        """The pids on the machine of processes of node 1, given by their pids as their agent sees them."""
        return list(pids)

    def runs_again(self, pids: Sequence[int]) -> None:
        """Waits until none of these processes is stopped."""
        wait_until(
            partial(self.cluster.states, self.nodes[2], pids),
            lambda states: not any(state.startswith("T") for state in states.values()), self.patience_s,
        )  # fmt: skip

    def kill(self, *groups: Sequence[str], node: str = "") -> None:
        """Kills these processes at once, on the machine of node 1 or on another: see `Machines.kill`."""
        self.cluster.kill(node or self.nodes[2], *groups)

    def kill_controller(self, reaper: bool = False) -> None:
        """Kills `torchaos run`, and its reaper at the same time if `reaper` is true."""
        self.kill((self.name, self.controller), *([("rollback.reaper",)] if reaper else []), node=self.nodes[0])
        self.process.wait(timeout=300)

    def is_clean(self) -> None:
        """No process of the run is on any node, and the cluster has none of its work."""
        for node in self.nodes:
            wait_until(
                partial(self.cluster.pids, node, f"{self.name}-s0"), lambda left: not left, self.patience_s
            )  # fmt: skip
        wait_until(self.cluster.work, lambda left: self.name not in left, 2 * self.patience_s)
