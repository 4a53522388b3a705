"""Runs of a stand-in job on two nodes that are reached by a stand-in for ssh, which starts the command on this machine.
The wrapper, the agent, the pipe, the reaper and the faults are the real parts."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from dying.families import BARE_PYTHON, stand_in
from needs import need
from waiting import wait_until

from torchaos.harness.host import processes
from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.record.events.journal import read_events
from torchaos.harness.record.result import Result
from torchaos.harness.record.rundir import RunDir

_SSH = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do case $1 in -o) shift 2 ;; *) shift ;; esac; done
shift
exec sh -c "$*"
"""


@dataclass
class Nodes:
    """Two nodes, a and b. `started`: the controllers of runs."""

    folder: Path
    started: list[subprocess.Popen[str]] = field(default_factory=list)
    more: dict[str, Any] = field(default_factory=dict)  # of the job

    launcher = "ssh"

    def where(self) -> dict[str, Any]:
        """The part of the job that says what its nodes are."""
        return {"hosts": ["a", "b"]}

    @property
    def tag(self) -> str:
        return str(self.folder)

    @property
    def env(self) -> dict[str, str]:
        homes = {name: str(self.folder / "home") for name in ("HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME")}
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        return {**os.environ, **homes, "PATH": path, "TMPDIR": str(self.folder / "tmp"), "FAR_TAG": self.tag}

    def run(self, *faults: Mapping[str, Any], steps: int = 60, **more: Any) -> subprocess.Popen[str]:
        """Starts `torchaos run`."""
        command = f"{stand_in('torchrun')} --nproc-per-node 1 --max-restarts 1 "
        job = {
            "command": f"{command} {stand_in('train.py')} {steps} --save {{run}}/checkpoints", "world_size": 2,
            "timeout": "100s", "checkpoints": {"path": "{run}/checkpoints"}, **self.where(), **self.more,
        }  # fmt: skip
        scenario = {
            "scenario": "far", "launcher": self.launcher, "job": job, "faults": list(faults),
            "assert": [{"completed": {"steps": steps}}], "twin": "none", **more,
        }  # fmt: skip
        file = self.folder / "far.yaml"
        file.write_text(json.dumps(scenario))
        argv = [sys.executable, "-m", "torchaos.harness", "run", str(file), "--out", str(self.folder / "out")]
        process = subprocess.Popen(
            argv, env=self.env, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        self.started.append(process)
        return process

    def torchaos(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "torchaos.harness", *arguments]
        return subprocess.run(argv, env=self.env, capture_output=True, text=True, check=False, timeout=300)

    @property
    def record(self) -> RunDir:
        (folder,) = wait_until(lambda: list((self.folder / "out").glob("far-*")))
        return RunDir(folder)

    def events(self, *kinds: Kind) -> list[Event]:
        return [event for event in read_events(self.record.events) if event.kind in kinds]

    def seen(self, kind: Kind, fits: Callable[[Event], object] = lambda event: True) -> Event:
        """The first such event, as soon as it is there."""
        found = wait_until(lambda: [event for event in self.events(kind) if fits(event)], timeout_s=150.0)
        return found[0]  # type: ignore[no-any-return]

    def result(self) -> Result:
        return Result.from_json(json.loads(self.record.result.read_text()))

    def processes(self) -> dict[int, str]:
        """Everything that came of the runs: command lines by pid."""
        mine = f"FAR_TAG={self.tag}".encode()
        found = {}
        for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
            line, environ = processes.image(pid) or (b"", b"")
            if mine in environ.split(b"\0") and processes.is_alive(pid, processes.ticks_of(pid)):
                found[pid] = line.replace(b"\0", b" ").decode(errors="replace")
        return found

    def pid(self, *words: str) -> int:
        """The process whose command line has all these words."""
        (found,) = [pid for pid, line in self.processes().items() if all(word in line for word in words)]
        return found

    def agent(self, node: int) -> int:
        """The wrapper of a node, and not the shell around it."""
        words = (f"--node {node} ", "exec --run")
        return next(
            pid for pid, line in self.processes().items()
            if all(word in line for word in words) and not line.startswith(("sh ", "ssh ", "env "))
        )  # fmt: skip

    def reaper(self, node: int) -> int:
        return self.pid("rollback.reaper", f".node{node}")


class Pods(Nodes):
    """Two pods of an Indexed Job. Their processes and their run directory are in namespaces of their own. `sidecars`:
    more containers of each pod, which never end. `pod`: more of the spec of each pod."""

    launcher = "kubernetes"
    sidecars: Sequence[Mapping[str, Any]] = ()
    pod: Mapping[str, Any] = MappingProxyType({})

    def where(self) -> dict[str, Any]:
        container = {"name": "trainer", "image": "none", "command": ["sleep", "infinity"]}
        job = {
            "apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "llm"},
            "spec": {
                "completions": 2, "parallelism": 2, "completionMode": "Indexed",
                "template": {"spec": {**self.pod, "containers": [container, *self.sidecars]}},
            },
        }  # fmt: skip
        (self.folder / "job.yaml").write_text(json.dumps(job))
        return {"pods": {"manifest": "job.yaml", "python": sys.executable}, "nodes": 2}

    def start_job(self, steps: int) -> None:
        """Makes two pods that run a job without torchaos, and attaches all runs that follow to them."""
        self.where()
        job = json.loads((self.folder / "job.yaml").read_text())
        torchrun = f"{stand_in('torchrun')} --nproc-per-node 1 --max-restarts 1 {stand_in('plain.py')} {steps}"
        line = f"PET_NNODES=2 PET_NODE_RANK=$JOB_COMPLETION_INDEX {torchrun}; exit $?"
        template = job["spec"]["template"]
        template["metadata"] = {"labels": {"app": "llm"}}
        template["spec"]["containers"][0] |= {"command": ["sh", "-c", line]}
        create = [str(self.folder / "bin" / "kubectl"), "create", "--filename=-"]
        subprocess.run(create, input=json.dumps(job), text=True, env=self.env, check=True)
        log = {"regex": r"step (?P<step>\d+) loss (?P<loss>\S+)"}
        self.more = {"pods": {"attach": "app=llm", "python": sys.executable}, "checkpoints": None, "log": log}

    def kill_pod(self, node: int) -> None:
        """Kills process 1 of the pod, and with it all processes there."""
        outer = (self.folder / "cluster" / f"llm-{node}" / "pid").read_text()
        first = Path(f"/proc/{outer}/task/{outer}/children").read_text().split()[0]
        os.kill(int(first), signal.SIGKILL)


@pytest.fixture
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    yield from _stand_in(Nodes(tmp_path_factory.mktemp("far", numbered=True)), "ssh", _SSH)


@pytest.fixture
def pods(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    need("root")  # pods are stood in for by namespaces
    one = Pods(tmp_path_factory.mktemp("pods", numbered=True))
    words = [BARE_PYTHON, "-I", "-S", str(Path(__file__).with_name("kubectl.py")), f"{one.folder}/cluster"]
    yield from _stand_in(one, "kubectl", f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')


def _stand_in(one: Nodes, program: str, script: str) -> Iterator[Nodes]:
    for name in ("bin", "tmp", "home"):
        (one.folder / name).mkdir(mode=0o700)
    path = one.folder / "bin" / program
    path.write_text(script)
    path.chmod(0o755)
    yield one
    for pid in one.processes():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for process in one.started:
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
