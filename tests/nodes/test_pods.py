"""Runs whose nodes are pods that share no folder with this machine."""

from __future__ import annotations

import signal
from typing import Any

from torchaos.harness.agent.wire import Kind

STEP = {"step": 8, "phase": "backward"}


def test_a_rank_in_a_pod_is_killed(pods: Any) -> None:
    """The plan reaches the pods through the pipe, and what they record comes back through it: the death of the rank in
    the second pod, the steps of both ranks, and the output of the job. In the end the pods are deleted."""
    run = pods.run({"inject": "process.kill", "target": {"rank": 1}, "when": STEP})
    said = run.communicate(timeout=200)[0]
    assert run.returncode in (0, 2), said  # the stand-in's other node does not wait for the first
    (hit,) = pods.events(Kind.APPLYING)
    deaths = [event for event in pods.events(Kind.RANK_EXITED) if event.data["exit_code"] == -signal.SIGKILL]
    assert [(one.source, one.data["pid"]) for one in deaths] == [("node1", hit.data["pid"])]
    assert {event.rank for event in pods.events(Kind.STEP)} == {0, 1}
    assert (pods.record.logs / "job-0.log").stat().st_size
    assert not list((pods.folder / "cluster").glob("*/pod.json"))
    assert pods.processes() == {}


def test_rights_that_are_missing(pods: Any) -> None:
    """All missing rights are named, and nothing is made."""
    (pods.folder / "cluster").mkdir()
    (pods.folder / "cluster" / "forbidden").write_text("create pods/exec\ndelete job.batch\n")
    run = pods.run({"inject": "process.kill", "target": {"rank": 1}, "when": STEP})
    said = run.communicate(timeout=200)[0]
    assert run.returncode == 3, said
    assert "this user may not delete job.batch, create pods/exec" in said
    assert not list((pods.folder / "cluster").glob("*/pod.json"))


def test_a_pod_that_ends_under_the_run(pods: Any) -> None:
    """A pod that is killed as a whole is no rollback that failed, because nothing of it is left. The run says that the
    node was lost, and judges nothing."""
    fault = {"inject": "node.freeze", "target": {"node": 1}, "when": STEP, "for": "60s"}
    run = pods.run(fault, steps=3000)
    pods.seen(Kind.APPLIED)
    pods.kill_pod(1)
    said = run.communicate(timeout=200)[0]
    assert run.returncode == 2, said
    assert "node 1 was lost" in said
    assert pods.processes() == {}


def test_a_job_in_pods_is_submitted_again(pods: Any) -> None:
    """The objects of the first submission are deleted before those of the second, which have the same names."""
    kills = [
        {"id": f"kill-{n}", "inject": "process.kill", "target": {"rank": 1}, "when": {**STEP, "attempt": n}}
        for n in (0, 1)
    ]
    pods.more = {"resubmit": {"times": 1}}
    run = pods.run(*kills)
    said = run.communicate(timeout=300)[0]
    assert [event.data["submission"] for event in pods.events(Kind.JOB_STARTED)] == [0, 1], said
    assert pods.processes() == {}
