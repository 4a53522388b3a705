"""launcher: slurm on a real Slurm, as a user without rights, on nodes with pids and clocks of their own.

Most jobs are stand-ins for torchrun that import no torch. The wrapper, the agents, the reapers, Slurm and its cgroups
are real."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from dying.families import STAND_IN
from waiting import wait_until

from torchaos.harness.agent.wire import Event, Kind
from torchaos.harness.record.events.journal import read_events
from torchaos.harness.record.result import Result, Verdict
from torchaos.harness.record.rundir import RunDir

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

STEP = {"step": 8, "phase": "backward"}
FROZEN = {"inject": "node.freeze", "target": {"node": 1}, "when": STEP}
_PID = (1 << 22) - 1


class Run:
    """One call of `torchaos run` on the head node, with a job on n1 and n2."""

    def __init__(self, cluster: Any, name: str, *faults: Mapping[str, Any], steps: int = 60, **more: Any) -> None:
        self.cluster, self.name = cluster, name
        job = {
            "command": f"{{python}} {STAND_IN}/torchrun --nproc-per-node 1 --max-restarts 1 "
            f"{STAND_IN}/train.py {steps} --save {{run}}/checkpoints",
            "nodes": 2, "world_size": 2, "timeout": "100s", "checkpoints": {"path": "{run}/checkpoints"},
        }  # fmt: skip
        scenario = {
            "scenario": name, "launcher": "slurm", "faults": list(faults), "twin": "none",
            "assert": [{"completed": {"steps": steps}}], **more, "job": {**job, **more.get("job", {})},
        }  # fmt: skip
        file = cluster.shared / f"{name}.yaml"
        file.write_text(json.dumps(scenario))
        self.process: subprocess.Popen[str] = cluster.popen("head", "torchaos", "run", str(file), "--out", "runs")

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
        found = wait_until(lambda: [one for one in self.events(kind) if text in str(one.data.get("text", ""))])
        return found[0]  # type: ignore[no-any-return]

    @property
    def result(self) -> Result:
        return Result.from_json(json.loads(self.folder.result.read_text()))

    def stopped(self) -> list[int]:
        """The processes on n2, by their pids there, as soon as the node is stopped."""
        pids = [int(pid) & _PID for pid in self.seen(Kind.EFFECT).data["pids"]]
        self.seen(Kind.APPLIED)
        return pids

    def is_clean(self) -> None:
        """No process of the run is on any node, Slurm has none of its work, and no node keeps an undo log."""
        for node in ("head", "n1", "n2"):
            wait_until(partial(self.cluster.pids, node, f"{self.name}-s0"), lambda left: not left, timeout_s=60)
            assert not self.cluster.as_root(
                node, "sh", "-c", f"ls -d /tmp/torchaos-2000/*{self.name}-s0*/undo 2>/dev/null"
            ), node
        wait_until(lambda: self.cluster.as_root("head", "squeue", "--noheader"), lambda left: not left, timeout_s=60)


def _runs_again(run: Run, pids: Sequence[int]) -> None:
    wait_until(lambda: [p for p in pids if run.cluster.state("n2", p).startswith("T")], lambda left: not left)


def test_the_nodes_are_machines(cluster: Any) -> None:
    """Each node has a name, a boot and a clock of its own, and Slurm starts tasks on them as the user."""
    code, said = cluster.as_user(
        "srun", "-N2", "-n2", "sh", "-c", "echo $(hostname) $(cat /proc/sys/kernel/random/boot_id) $(id -u)"
    )
    lines = [line.split() for line in said.splitlines() if line.startswith("n")]
    assert code == 0, said
    assert sorted((line[0], line[2]) for line in lines) == [("n1", "2000"), ("n2", "2000")]
    assert lines[0][1] != lines[1][1]


@pytest.mark.job
def test_torchrun_in_an_allocation_of_the_run(cluster: Any) -> None:
    """torchrun on two nodes, rank 1 killed in the backward of step 15: the verdict that the same scenario gets on one
    machine, with the loss bitwise as in the twin, and clocks measured that are 1,000,000 s apart."""
    job = {
        "command": "torchrun --nnodes 2 --nproc-per-node 1 --max-restarts 3 {jobs}/gpt_ddp.py --steps 30 "
        "--checkpoint-dir {run}/checkpoints --step-timeout 20",
        "env": {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}, "timeout": "5m",
    }  # fmt: skip
    kill = {"inject": "process.kill", "target": {"rank": 1}, "when": {"step": 15, "phase": "backward"}}
    more: Mapping[str, Any] = {"assert": ["completed", "recovery_time", "no_lost_work", "loss_continuity"]}
    run = Run(cluster, "torchrun", kill, job=job, twin={"runs": 1}, **more)
    said = run.end()
    assert run.process.returncode == 0, said
    assert run.result.verdict is Verdict.PASSED
    offsets = {event.data["node"]: event.data["offset_s"] for event in run.events(Kind.CLOCK)}
    assert [round(offsets[node], 0) for node in (0, 1)] == [-1_000_000, -2_000_000]
    run.is_clean()


def test_equal_pids_on_both_nodes(cluster: Any) -> None:
    """The ranks have equal pids on their nodes, and the evidence is the death on the node that was hit."""
    for node in ("n1", "n2"):
        cluster.as_root(node, "sh", "-c", "echo 20000 >/proc/sys/kernel/ns_last_pid")
    run = Run(cluster, "equal", {"inject": "process.kill", "target": {"rank": 1}, "when": STEP})
    said = run.end()
    assert run.process.returncode in (0, 2), said
    (hit,) = run.events(Kind.APPLYING)
    deaths = [event for event in run.events(Kind.RANK_EXITED) if event.data["exit_code"] == -9]
    assert [(one.source, one.data["pid"]) for one in deaths] == [("node1", hit.data["pid"])]
    run.is_clean()


def test_a_node_that_is_cut_off(cluster: Any) -> None:
    """The network of the node is down while its processes are stopped: they run again when the fault's time is over, by
    the node's own clock, and the controller says that it lost the node for longer than the lease."""
    run = Run(cluster, "cut", {**FROZEN, "for": "4s"}, steps=8000)
    pids = run.stopped()
    subprocess.run(cluster.argv("plug", "n2", "down"), check=True)
    try:
        _runs_again(run, pids)
        took = run.seen(Kind.ROLLED_BACK)
        run.seen(Kind.NOTE, "node 1: the controller said nothing")
    finally:
        subprocess.run(cluster.argv("plug", "n2", "up"), check=True)
    said = run.end()
    applied = run.events(Kind.APPLIED)[0]
    assert took.source == applied.source == "node1"
    assert 3.9 < took.mono_s - applied.mono_s < 6.0
    assert run.process.returncode == 2, said
    assert "undid everything by itself" in said
    run.is_clean()


def _kill(run: Run, *words: str, node: str = "n2", signal: str = "KILL") -> None:
    for pid in run.cluster.pids(node, *words):
        run.cluster.as_root(node, "kill", f"-{signal}", str(pid))


DEATHS: Mapping[str, Sequence[tuple[str, ...]]] = {
    "agent": [("exec --run",)],
    "reaper": [("undo.reaper",)],
    "agent-and-reaper": [("undo.reaper",), ("exec --run",)],
}


@pytest.mark.parametrize("who", sorted(DEATHS))
def test_a_death_on_the_node(cluster: Any, who: str) -> None:
    """Whichever of them is killed while the node is stopped, its processes do not stay stopped, and nothing is left."""
    run = Run(cluster, f"death-{who}", {**FROZEN, "for": "6s"}, steps=4000)
    pids = run.stopped()
    for words in DEATHS[who]:
        _kill(run, *words)
    _runs_again(run, pids)
    said = run.end()
    assert run.process.returncode in ((0, 2, 4) if who == "reaper" else (2,)), said
    run.is_clean()


def test_srun_dies(cluster: Any) -> None:
    """The pipes are made again, to the same agents; the fault ends at its own time and the run goes on."""
    run = Run(cluster, "srun", {**FROZEN, "for": "4s"}, steps=2000)
    pids = run.stopped()
    _kill(run, "srun", "node --join", node="head")
    _runs_again(run, pids)
    said = run.end()
    assert run.events(Kind.ROLLED_BACK)[0].data["verified"], said
    run.is_clean()


@pytest.mark.parametrize("reaper", [False, True], ids=["controller", "controller-and-reaper"])
def test_the_controller_dies(cluster: Any, reaper: bool) -> None:
    """Its reaper cancels the allocation, and the agents take everything back. If that is dead too, the agents do it at
    the end of the lease, and `torchaos recover` on the login node ends the allocation."""
    run = Run(cluster, "controller-and-reaper" if reaper else "controller", {**FROZEN, "for": "90s"}, steps=8000)
    pids = run.stopped()
    if reaper:
        _kill(run, "undo.reaper", node="head")
    _kill(run, "torchaos run", node="head")
    run.process.wait(timeout=60)
    _runs_again(run, pids)
    if reaper:
        run.seen(Kind.NOTE, "the controller said nothing")
        code, said = cluster.as_user("torchaos", "recover")
        assert code == 0, said
    run.is_clean()


def test_the_scheduler_cancels_the_job(cluster: Any) -> None:
    """scancel while a node is stopped: the agents take everything back before Slurm kills what is left."""
    run = Run(cluster, "cancelled", {**FROZEN, "for": "90s"}, steps=8000)
    run.stopped()
    job = cluster.as_root("head", "squeue", "--noheader", "--format=%i").split()[0]
    cluster.as_user("scancel", job)
    note = run.seen(Kind.NOTE, "node 1: the scheduler ends the job")
    run.end()
    assert run.events(Kind.ROLLED_BACK)[0].mono_s <= note.mono_s + 1.0
    run.is_clean()


def test_slurmctld_restarts(cluster: Any) -> None:
    """A controller of Slurm that is away for a while does not change a run that is going."""
    run = Run(cluster, "ctld", {**FROZEN, "for": "3s"}, steps=2000)
    run.stopped()
    _kill(run, "slurmctld", node="head")
    cluster.as_root("head", "sh", "-c", "exec slurmctld -L /var/log/slurmctld.log >/dev/null 2>&1 </dev/null")
    said = run.end()
    assert run.process.returncode == 0, said
    assert run.result.verdict is Verdict.PASSED
    run.is_clean()


def test_inside_an_allocation_of_the_user(cluster: Any) -> None:
    """The job is a step of the allocation, which is still there afterwards."""
    file = cluster.shared / "inside.yaml"
    run = Run(cluster, "inside", {**FROZEN, "for": "1s"})
    assert run.end()
    code, said = cluster.as_user("salloc", "-N2", "torchaos", "run", str(file), "--out", "inside")
    assert code == 0, said
    assert "Relinquishing job allocation" in said
    run.is_clean()


def test_what_needs_rights_is_refused(cluster: Any) -> None:
    """A network fault needs a right that the user of a cluster does not have; the plan names it, and nothing starts."""
    fault = {"inject": "network.partition", "target": {"node": 1}, "when": {"step": 8}, "for": "1s"}
    run = Run(cluster, "partition", fault)
    said = run.end()
    assert run.process.returncode == 3
    assert "CAP_NET_ADMIN" in said
    assert not Path(cluster.shared / "runs").exists() or not list((cluster.shared / "runs").glob("partition-*"))
