"""Faults of the scheduler on a real Slurm: it ends the job, starts it again, and takes nodes out of service."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from clusters.runs import FROZEN, KILL, STEP, ClusterRun
from clusters.slurm import Slurm, SlurmRun
from waiting import wait_until

from torchaos.harness.protocol.wire import Kind
from torchaos.harness.record.result import Verdict

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

SOON = {"time": "5s"}
UP: dict[str, Any] = {"steady_state": ["ranks_up"]}  # so that there is a rank to hit, whatever the machine's load
BOTH = {"nodes": [0, 1]}
AGAIN = {"resubmit": {"times": 1}}
STOPPED = {"inject": "process.freeze", "target": {"rank": 1}, "when": STEP, "for": "300ms"}
BATCH = {**AGAIN, "slurm": {"submit": "batch"}}


def _is_again(run: SlurmRun, said: str) -> None:
    """The fault was proved, a second submission ran, and attempts are counted on."""
    assert [event.data["submission"] for event in run.events(Kind.JOB_STARTED)] == [0, 1], said
    attempts = [event.attempt for event in run.events(Kind.RANK_UP) if event.rank == 1]
    assert attempts == list(range(len(attempts))), said
    assert all(fault.proved for fault in run.result.faults), said
    assert run.result.verdict is Verdict.PASSED, said
    run.is_clean()


@pytest.mark.parametrize("signal", ["TERM", "KILL"])
def test_the_step_is_cancelled(slurm: Slurm, signal: str) -> None:
    """scancel of the step: the job is started again in the same allocation. SIGKILL ends agents and reapers too, and
    nothing is left. A fault that was applied before is not applied again."""
    fault = {"inject": "scheduler.cancel_step", "target": BOTH, "when": SOON, "with": {"signal": signal}}
    before = {**STOPPED, "when": {"time": "2s"}}
    run = SlurmRun(slurm, f"cancel-{signal.lower()}", before, fault, steps=8000, job=AGAIN, **UP)
    said = run.end()
    assert len([event for event in run.events(Kind.APPLYING) if event.data["fault"].startswith("process")]) == 1
    _is_again(run, said)


def test_a_node_goes_down(slurm: Slurm) -> None:
    """An administrator's torchaos takes the second node out of service: the job goes on in another allocation, and the
    node is in service again afterwards. What the node still holds is undone by the agent of the next run there."""
    fault = {"inject": "scheduler.node_down", "target": {"node": 1}, "when": SOON}
    run = SlurmRun(slurm, "down", fault, steps=8000, job=AGAIN, **UP, user="in")
    said = run.end()
    # No verdict: the ranks of the stand-in do not wait for each other, so the first goes on to its end.
    assert [event.data["submission"] for event in run.events(Kind.JOB_STARTED)] == [0, 1], said
    assert all(fault.proved for fault in run.result.faults), said
    ClusterRun.is_clean(run)  # Slurm has killed the agent and its reaper on the node, so their undo log is there
    wait_until(lambda: slurm.state("n2"), lambda state: state == "idle|none")
    after = SlurmRun(slurm, "after", KILL, user="in")
    said = after.end()
    assert run.name in after.seen(Kind.NOTE, "left on this node is undone").data["text"], said
    run.is_clean()


def test_the_epilog_of_the_site(slurm: Slurm) -> None:
    """Nobody is left who could undo anything: torchaos, its reaper, and everything on the nodes are killed. The Epilog,
    which Slurm runs as root on each node, undoes what is left there, with the rights of the user."""
    run = SlurmRun(slurm, "epilog", {**FROZEN, "for": "90s"}, steps=8000)
    run.stopped()
    epilog = slurm.base / "site-epilog"
    epilog.write_text(f'#!/bin/sh\n{sys.executable} -m torchaos.harness recover --job "$SLURM_JOB_ID"\n')
    epilog.chmod(0o755)
    try:
        run.kill_controller(reaper=True)
        lines = slurm.as_root("head", "squeue", "--noheader", "--steps", "--format=%i|%j").splitlines()
        steps = [line.split("|")[0].strip() for line in lines if run.name in line]
        slurm.as_user("scancel", "--signal=KILL", *steps)  # of a whole job, Slurm would take it for a usual scancel
        slurm.as_user("scancel", steps[0].split(".")[0])
        run.is_clean()
        log = slurm.base / "epilog.log"
        wait_until(log.read_text, lambda said: said.count(": undone") == 2)
    finally:
        epilog.unlink()
        code, said = slurm.as_user("torchaos", "recover")
        assert code == 0, said


def test_a_batch_job_is_requeued(slurm: Slurm) -> None:
    """scontrol requeue by the user: Slurm starts the job again, its attempts are counted on, and a fault that has
    fired does not fire again."""
    run = SlurmRun(slurm, "requeue", STOPPED, {"inject": "scheduler.requeue", "target": BOTH, "when": SOON},
                   steps=8000, job=BATCH, **UP)  # fmt: skip
    said = run.end()
    assert len([event for event in run.events(Kind.APPLYING) if event.data["fault"].startswith("process")]) == 1
    _is_again(run, said)


def test_a_batch_job_is_cancelled_while_it_is_requeued(slurm: Slurm) -> None:
    """torchaos is killed right after the requeue: its reaper cancels the job, which would start again otherwise."""
    run = SlurmRun(slurm, "requeue-death", {"inject": "scheduler.requeue", "target": BOTH, "when": SOON},
                   steps=8000, job=BATCH, **UP)  # fmt: skip
    run.seen(Kind.APPLIED)
    run.kill_controller()
    run.is_clean()


def test_another_job_takes_the_place(slurm: Slurm) -> None:
    """A job of a partition with a higher priority preempts the allocation, with a time of grace; the run waits in the
    queue, and goes on when the other job has ended."""
    fault = {"inject": "scheduler.preempt", "target": BOTH, "when": SOON, "with": {"partition": "high", "time": "5s"}}
    run = SlurmRun(slurm, "preempt", fault, steps=8000, job=AGAIN, **UP, env=["SALLOC_PARTITION=low"])
    _is_again(run, run.end())


def test_a_node_is_drained(slurm: Slurm) -> None:
    """What runs on a node that is drained goes on; the node is in service again when the time of the fault is over."""
    fault = {"inject": "scheduler.drain", "target": {"node": 1}, "when": SOON, "for": "3s"}
    run = SlurmRun(slurm, "drain", fault, steps=8000, user="in")
    said = run.end()
    assert run.result.verdict is Verdict.PASSED, said
    assert [event.data["verified"] for event in run.events(Kind.ROLLED_BACK)] == [True]
    assert not slurm.state("n2").startswith("dr")
    run.is_clean()


@pytest.mark.parametrize("reaper", [False, True], ids=["controller", "controller-and-reaper"])
def test_the_controller_dies_while_a_node_is_out(slurm: Slurm, reaper: bool) -> None:
    """The node is put back by the reaper of torchaos or, if that is dead too, by `torchaos recover`."""
    fault = {"inject": "scheduler.drain", "target": {"node": 1}, "when": SOON, "for": "90s"}
    run = SlurmRun(slurm, f"out-{reaper}".lower(), fault, steps=8000, user="in")
    run.seen(Kind.EFFECT)
    assert slurm.state("n2").startswith("draining|torchaos:")
    run.kill_controller(reaper)
    if reaper:
        recover = slurm.popen("torchaos", "recover", user="in")
        said = recover.communicate(timeout=170)[0]
        assert recover.returncode == 0, said
    wait_until(lambda: slurm.state("n2"), lambda state: state.endswith("|none"), 60)
    run.is_clean()


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"inject": "scheduler.node_down", "target": {"node": 1}}, "Slurm's own user, and its operators"),
        ({"inject": "scheduler.requeue", "target": BOTH}, "write job.slurm: {submit: batch}"),
        ({"inject": "scheduler.cancel_step", "target": {"node": 1}}, "write target: {nodes: [0, 1]}"),
    ],
)
def test_what_is_refused(slurm: Slurm, fault: dict[str, Any], words: str) -> None:
    """The plan says which right or which key is missing, and nothing starts."""
    run = SlurmRun(slurm, "refused", {**fault, "when": SOON})
    said = run.end()
    assert run.process.returncode == 3, said
    assert words in said
    assert not list((slurm.shared / "runs").glob("refused-*"))
