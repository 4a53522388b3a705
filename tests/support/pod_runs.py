"""Runs of `torchaos run` on the cluster of these tests."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import yaml
from dying.families import BARE_PYTHON, STAND_IN
from waiting import wait_until

from torchaos.harness.agent.wire import Event, Kind
from torchaos.harness.record.events.journal import read_events
from torchaos.harness.record.result import Result
from torchaos.harness.record.rundir import RunDir

_PID = (1 << 22) - 1


class Run:
    """One call of `torchaos run` beside the API server. Node 0 is a pod on w1, node 1 a pod on w2. The job is a
    stand-in for torchrun that imports no torch, if `job` has no other command. `pods`: what the pods have, see
    `Cluster.pods`."""

    def __init__(
        self, cluster: Any, name: str, *faults: Mapping[str, Any], steps: int = 60,
        pods: Mapping[str, Any] | None = None, job: Mapping[str, Any] | None = None, **more: Any,
    ) -> None:  # fmt: skip
        self.cluster, self.name = cluster, name
        manifest = cluster.shared / f"{name}.pods.yaml"
        manifest.write_text(yaml.safe_dump_all(cluster.pods(name, **(pods or {}))))
        command = f"{BARE_PYTHON} {STAND_IN}/torchrun --nproc-per-node 1 --max-restarts 1 {STAND_IN}/train.py {steps} "
        usual = {
            "command": command + "--save {run}/checkpoints", "nodes": 2, "world_size": 2, "timeout": "200s",
            "checkpoints": {"path": "{run}/checkpoints"}, "pods": {"manifest": str(manifest), "python": sys.executable},
        }  # fmt: skip
        scenario = {
            "scenario": name, "launcher": "kubernetes", "faults": list(faults), "twin": "none",
            "assert": [{"completed": {"steps": steps}}], **more, "job": {**usual, **(job or {})},
        }  # fmt: skip
        file = cluster.shared / f"{name}.yaml"
        file.write_text(json.dumps(scenario))
        self.process: subprocess.Popen[str] = cluster.popen("torchaos", "run", str(file), "--out", "runs")

    def end(self) -> str:
        """Its output, when it has ended."""
        return self.process.communicate(timeout=400)[0]

    @property
    def folder(self) -> RunDir:
        (found,) = wait_until(lambda: list((self.cluster.shared / "runs").glob(f"{self.name}-s0-*")))
        return RunDir(found)

    def events(self, *kinds: Kind) -> list[Event]:
        return [event for event in read_events(self.folder.events) if event.kind in kinds]

    def seen(self, kind: Kind, text: str = "") -> Event:
        found = wait_until(
            lambda: [one for one in self.events(kind) if text in str(one.data.get("text", ""))], timeout_s=120
        )
        return found[0]  # type: ignore[no-any-return]

    @property
    def result(self) -> Result:
        return Result.from_json(json.loads(self.folder.result.read_text()))

    def stopped(self) -> list[int]:
        """The processes on w2, by their pids there, as soon as node 1 is stopped."""
        pids = [int(pid) & _PID for pid in self.seen(Kind.EFFECT).data["pids"]]
        self.seen(Kind.APPLIED)
        return self.cluster.outer_pids("w2", self.name, pids)  # type: ignore[no-any-return]

    def runs_again(self, pids: Sequence[int]) -> None:
        """Waits until none of these processes of w2 is stopped."""
        wait_until(lambda: [p for p in pids if self.cluster.state("w2", p).startswith("T")], lambda left: not left, 60)

    def kill(self, *words: str, node: str = "w2", signal: str = "KILL") -> None:
        for pid in self.cluster.pids(node, *words):
            self.cluster.as_root(node, "kill", f"-{signal}", str(pid))

    def is_clean(self) -> None:
        """No process of the run is on any node, and the cluster has none of its objects."""
        wait_until(
            lambda: self.cluster.kubectl("get", "pods", "--output=name"), lambda left: self.name not in left, 120
        )
        for node in ("cp", "w1", "w2"):
            wait_until(partial(self.cluster.pids, node, f"{self.name}-s0"), lambda left: not left, 60)
