"""launcher: slurm on a real Slurm, as a user without rights, on nodes with pids and clocks of their own.

Most jobs are stand-ins for torchrun that import no torch. The wrapper, the agents, the reapers, Slurm and its cgroups
are real."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from clusters.runs import DEATHS, FROZEN, KILL, STEP
from clusters.slurm import Slurm, SlurmRun

from torchaos.harness.protocol.wire import Kind
from torchaos.harness.record.result import Verdict
from torchaos.harness.running.launchers.node_channel import LEASE_S

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


def test_the_nodes_are_machines(slurm: Slurm) -> None:
    """Each node has a name, a boot and a clock of its own, and Slurm starts tasks on them as the user."""
    code, said = slurm.as_user(
        "srun", "-N2", "-n2", "sh", "-c", "echo $(hostname) $(cat /proc/sys/kernel/random/boot_id) $(id -u)"
    )
    lines = [line.split() for line in said.splitlines() if line.startswith("n")]
    assert code == 0, said
    assert sorted((line[0], line[2]) for line in lines) == [("n1", "2000"), ("n2", "2000")]
    assert lines[0][1] != lines[1][1]


@pytest.mark.job
def test_torchrun_in_an_allocation_of_the_run(slurm: Slurm) -> None:
    """torchrun on two nodes, rank 1 killed in the backward of step 15: the verdict that the same scenario gets on one
    machine, with the loss bitwise as in the twin, and clocks measured that are 1,000,000 s apart."""
    job = {
        "command": "torchrun --nnodes 2 --nproc-per-node 1 --max-restarts 3 {jobs}/gpt_ddp.py --steps 30 "
        "--checkpoint-dir {run}/checkpoints --step-timeout 20",
        "env": {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}, "timeout": "5m",
    }  # fmt: skip
    kill = {"inject": "process.kill", "target": {"rank": 1}, "when": {"step": 15, "phase": "backward"}}
    more: Mapping[str, Any] = {"assert": ["completed", "recovery_time", "no_lost_work", "loss_continuity"]}
    run = SlurmRun(slurm, "torchrun", kill, job=job, twin={"runs": 1}, **more)
    said = run.end()
    assert run.process.returncode == 0, said
    assert run.result.verdict is Verdict.PASSED
    offsets = {event.data["node"]: event.data["offset_s"] for event in run.events(Kind.CLOCK)}
    assert [round(offsets[node], 0) for node in (0, 1)] == [-1_000_000, -2_000_000]
    run.is_clean()


def test_the_clocks_of_the_nodes(slurm: Slurm) -> None:
    """The clocks of the nodes are 1,000,000 s apart, exactly. Each measured offset is right within the error that
    torchaos states for it."""
    run = SlurmRun(slurm, "clocks", {**FROZEN, "for": "1s"})
    said = run.end()
    assert run.process.returncode == 0, said
    clocks = [event.data for event in run.events(Kind.CLOCK)]
    assert {data["node"] for data in clocks} == {0, 1}
    for data in clocks:
        assert abs(data["offset_s"] + 1_000_000 * (data["node"] + 1)) <= data["error_s"] + 1e-6, data


@pytest.mark.job
def test_the_job_goes_on_with_one_node(slurm: Slurm) -> None:
    """An elastic torchrun loses its second node, and goes on with the first: the last attempt has one rank."""
    job = {
        "command": "torchrun --nnodes 1:2 --nproc-per-node 1 --max-restarts 3 {jobs}/gpt_ddp.py --steps 30 "
        "--checkpoint-dir {run}/checkpoints --step-timeout 20",
        "env": {
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "PET_RDZV_CONF": "last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=2",
        },
        "timeout": "5m",
    }  # fmt: skip
    kill = {"inject": "node.kill", "target": {"node": 1}, "when": {**STEP, "step": 15}}
    more: Mapping[str, Any] = {"assert": [{"completed": {"steps": 30}}]}
    run = SlurmRun(slurm, "elastic", kill, job=job, **more)
    said = run.end()
    assert run.process.returncode == 0, said
    ups = run.events(Kind.RANK_UP)
    assert [event.data["world_size"] for event in ups if event.attempt == ups[-1].attempt] == [1], said
    run.is_clean()


def test_an_allocation_without_anything_free(slurm: Slurm) -> None:
    """The job's step has all processors and all GPUs of its nodes: the agents can be reached all the same."""
    run = SlurmRun(slurm, "full", {**FROZEN, "for": "1s"})
    assert run.end()
    code, said = slurm.as_user(
        "salloc", "-N2", "--exclusive", "--gres=gpu:2", "torchaos", "run", str(run.file), "--out", "full"
    )  # fmt: skip
    assert code == 0, said


def test_equal_pids_on_both_nodes(slurm: Slurm) -> None:
    """The ranks have equal pids on their nodes, and the evidence is the death on the node that was hit."""
    for node in ("n1", "n2"):
        slurm.as_root(node, "sh", "-c", "echo 20000 >/proc/sys/kernel/ns_last_pid")
    run = SlurmRun(slurm, "equal", KILL)
    said = run.end()
    assert run.process.returncode in (0, 2), said
    (hit,) = run.events(Kind.APPLYING)
    deaths = [event for event in run.events(Kind.RANK_EXITED) if event.data["exit_code"] == -9]
    assert [(one.source, one.data["pid"]) for one in deaths] == [("node1", hit.data["pid"])]
    run.is_clean()


def test_a_node_that_is_cut_off(slurm: Slurm) -> None:
    """The network of the node is down while its processes are stopped: they run again when the fault's time is over, by
    the node's own clock, and the controller says that it lost the node for longer than the lease."""
    run = SlurmRun(slurm, "cut", {**FROZEN, "for": "4s"}, steps=8000)
    pids = run.stopped()
    with slurm.cut_off("n2"):
        run.runs_again(pids)
        took = run.seen(Kind.ROLLED_BACK)
        run.seen(Kind.NOTE, "node 1: the controller said nothing")
    said = run.end()
    applied = run.events(Kind.APPLIED)[0]
    assert took.source == applied.source == "node1"
    assert 3.9 < took.mono_s - applied.mono_s < LEASE_S
    assert run.process.returncode == 2, said
    assert "undid everything by itself" in said
    run.is_clean()


@pytest.mark.parametrize("who", sorted(DEATHS))
def test_a_death_on_the_node(slurm: Slurm, who: str) -> None:
    """Whichever of them is killed while the node is stopped, its processes do not stay stopped, and nothing is left."""
    run = SlurmRun(slurm, f"death-{who}", {**FROZEN, "for": "6s"}, steps=4000)
    pids = run.stopped()
    run.kill(*DEATHS[who])
    run.runs_again(pids)
    said = run.end()
    assert run.process.returncode in ((0, 2, 4) if who == "reaper" else (2,)), said
    run.is_clean()


def test_srun_dies(slurm: Slurm) -> None:
    """The pipes are made again, to the same agents; the fault ends at its own time and the run goes on."""
    run = SlurmRun(slurm, "srun", {**FROZEN, "for": "4s"}, steps=2000)
    pids = run.stopped()
    run.kill(("srun", "node --join"), node="head")
    run.runs_again(pids)
    said = run.end()
    assert run.events(Kind.ROLLED_BACK)[0].data["verified"], said
    run.is_clean()


@pytest.mark.parametrize("reaper", [False, True], ids=["controller", "controller-and-reaper"])
def test_the_controller_dies(slurm: Slurm, reaper: bool) -> None:
    """Its reaper cancels the allocation, and the agents take everything back. If that is dead too, the agents do it at
    the end of the lease, and `torchaos recover` on the login node ends the allocation."""
    run = SlurmRun(slurm, "controller-and-reaper" if reaper else "controller", {**FROZEN, "for": "90s"}, steps=8000)
    pids = run.stopped()
    run.kill_controller(reaper)
    run.runs_again(pids)
    if reaper:
        run.seen(Kind.NOTE, "the controller said nothing")
        code, said = slurm.as_user("torchaos", "recover")
        assert code == 0, said
    run.is_clean()


def test_the_scheduler_cancels_the_job(slurm: Slurm) -> None:
    """scancel while a node is stopped: the agents take everything back before Slurm kills what is left."""
    run = SlurmRun(slurm, "cancelled", {**FROZEN, "for": "90s"}, steps=8000)
    run.stopped()
    job = slurm.as_root("head", "squeue", "--noheader", "--format=%i").split()[0]
    slurm.as_user("scancel", job)
    note = run.seen(Kind.NOTE, "node 1: the scheduler ends the job")
    run.end()
    assert run.events(Kind.ROLLED_BACK)[0].mono_s <= note.mono_s + 1.0
    run.is_clean()


def test_slurmctld_restarts(slurm: Slurm) -> None:
    """A controller of Slurm that is away for a while does not change a run that is going."""
    run = SlurmRun(slurm, "ctld", {**FROZEN, "for": "3s"}, steps=2000)
    run.stopped()
    run.kill(("slurmctld",), node="head")
    slurm.as_root("head", "sh", "-c", "exec slurmctld -L /var/log/slurmctld.log >/dev/null 2>&1 </dev/null")
    said = run.end()
    assert run.process.returncode == 0, said
    assert run.result.verdict is Verdict.PASSED
    run.is_clean()


def test_inside_an_allocation_of_the_user(slurm: Slurm) -> None:
    """The job is a step of the allocation, which is still there afterwards."""
    run = SlurmRun(slurm, "inside", {**FROZEN, "for": "1s"})
    assert run.end()
    code, said = slurm.as_user("salloc", "-N2", "torchaos", "run", str(run.file), "--out", "inside")
    assert code == 0, said
    assert "Relinquishing job allocation" in said
    run.is_clean()


def test_what_needs_rights_is_refused(slurm: Slurm) -> None:
    """A network fault needs a right that the user of a cluster does not have; the plan names it, and nothing starts."""
    fault = {"inject": "network.partition", "target": {"node": 1}, "when": {"step": 8}, "for": "1s"}
    run = SlurmRun(slurm, "partition", fault)
    said = run.end()
    assert run.process.returncode == 3
    assert "CAP_NET_ADMIN" in said
    assert not list((slurm.shared / "runs").glob("partition-*"))
