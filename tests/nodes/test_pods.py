"""Runs whose nodes are pods that share no folder with this machine."""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import pytest

from torchaos.harness.protocol.wire import Kind
from torchaos.harness.record.events.journal import read_events

pytestmark = pytest.mark.timeout(600)  # each call of the stand-in for kubectl starts an interpreter

STEP = {"step": 8, "phase": "backward"}
FREEZE = {"inject": "node.freeze", "target": {"node": 1}, "when": STEP}


def test_a_rank_in_a_pod_is_killed(pods: Any) -> None:
    """The plan reaches the pods through the pipe, and what they record comes back through it: the death of the rank in
    the second pod, the steps of both ranks, and the output of the job. In the end the pods are deleted. `job.cwd` is a
    directory of the image, which this machine does not have: the container is asked to run the job there, and the
    commands on this machine run elsewhere. The stand-in runs its containers where it is."""
    pods.more = {"cwd": "/workspace-of-the-image"}
    run = pods.run({"inject": "process.kill", "target": {"rank": 1}, "when": STEP})
    said = run.communicate(timeout=200)[0]
    assert run.returncode in (0, 2), said  # the stand-in's other node does not wait for the first
    (hit,) = pods.events(Kind.APPLYING)
    deaths = [event for event in pods.events(Kind.RANK_EXITED) if event.data["exit_code"] == -signal.SIGKILL]
    assert [(one.source, one.data["pid"]) for one in deaths] == [("node1", hit.data["pid"])]
    assert {event.rank for event in pods.events(Kind.STEP)} == {0, 1}
    asked = json.loads((pods.folder / "cluster" / "asked.json").read_text())
    assert asked["containers"][0]["workingDir"] == "/workspace-of-the-image"
    assert (pods.record.logs / "job-0.log").stat().st_size
    assert not list((pods.folder / "cluster").glob("*/pod.json"))
    assert pods.processes() == {}


def test_rights_that_are_missing(pods: Any) -> None:
    """All missing rights are named, and nothing is made. There is nothing to undo, so a user who may not even list
    objects is asked to repair nothing."""
    (pods.folder / "cluster").mkdir()
    (pods.folder / "cluster" / "forbidden").write_text("create pods/exec\ndelete job.batch\nlist job.batch\n")
    run = pods.run({"inject": "process.kill", "target": {"rank": 1}, "when": STEP})
    said = run.communicate(timeout=200)[0]
    assert run.returncode == 3, said
    assert "this user may not delete job.batch, list job.batch, create pods/exec" in said
    assert "repair" not in said
    assert not list((pods.folder / "cluster").glob("*/pod.json"))


def test_more_nodes_than_pods(pods: Any) -> None:
    """The manifest makes two pods, and the job has three nodes: nothing would ever come. It is refused at once."""
    pods.more = {"nodes": 3}
    run = pods.run({"inject": "process.kill", "target": {"rank": 1}, "when": STEP})
    said = run.communicate(timeout=200)[0]
    assert run.returncode == 3, said
    assert "job.yaml: Job/llm makes 2 pods for 3 nodes; correct job.nodes" in " ".join(said.split())
    assert not list((pods.folder / "cluster").glob("*/pod.json"))


def test_rights_of_a_fault_are_asked_before_the_twin(pods: Any) -> None:
    """A fault needs a right that the user lacks: the twin, which may take hours, is not made first."""
    (pods.folder / "cluster").mkdir()
    (pods.folder / "cluster" / "forbidden").write_text("create pods/eviction\n")
    run = pods.run({"inject": "pod.evict", "target": {"node": 1}, "when": {"time": "1s"}}, twin={"runs": 1})
    said = run.communicate(timeout=200)[0]
    assert run.returncode == 3, said
    assert "this user may not create pods/eviction" in said
    assert "its fault-free twin" not in said
    assert not list((pods.folder / "cluster").glob("*/pod.json"))


PARTITION = {"inject": "network.partition", "target": {"node": 1}, "when": {"time": "1s"}, "for": "1s"}


@pytest.mark.parametrize(
    ("pod", "words"),
    [
        ({"hostNetwork": True}, "job.yaml: hostNetwork: the pods share the network of their machines"),
        ({}, "write securityContext: {capabilities: {add: [NET_ADMIN]}} in container trainer"),
    ],
)
def test_the_network_is_left_alone(pods: Any, pod: dict[str, Any], words: str) -> None:
    """A network fault is refused before a pod is made, if it would hit the machine of a pod, or if the manifest does
    not ask for the right that the fault needs."""
    pods.pod = pod
    run = pods.run(PARTITION)
    said = run.communicate(timeout=200)[0]
    assert run.returncode == 3, said
    assert words in " ".join(said.split())
    assert "Traceback" not in said
    assert not list((pods.folder / "cluster").glob("*/pod.json"))


def test_the_network_of_pods_of_others_is_left_alone(pods: Any) -> None:
    """If torchaos dies with everything in a pod that it has not made, a cut would stay: it is refused in the plan."""
    pods.more = {"pods": {"attach": "app=llm", "python": sys.executable}, "checkpoints": None}
    run = pods.run(PARTITION)
    said = run.communicate(timeout=200)[0]
    assert run.returncode == 3, said
    assert "only of pods that it has made; write job.pods.manifest" in said


def test_a_pod_that_ends_before_it_gets_the_run(pods: Any) -> None:
    """The interpreter of an image has no torchaos, so the pods end at once. The error has their last words, and the
    pods are deleted."""
    program = pods.folder / "bin" / "python-of-the-image"
    program.write_text("#!/bin/sh\necho No module named torchaos\nexit 1\n")
    program.chmod(0o755)
    pods.more = {"pods": {"manifest": "job.yaml", "python": str(program)}}
    run = pods.run({"inject": "process.kill", "target": {"rank": 1}, "when": STEP})
    said = " ".join(run.communicate(timeout=200)[0].split())
    assert run.returncode == 5, said
    assert "its last words: No module named torchaos" in said
    assert not list((pods.folder / "cluster").glob("*/pod.json"))


def test_a_pod_that_ends_under_the_run(pods: Any) -> None:
    """A pod that is killed as a whole is no rollback that failed, because nothing of it is left. The run says that the
    node was lost, and judges nothing."""
    run = pods.run({**FREEZE, "for": "60s"}, steps=600)
    pods.seen(Kind.APPLIED)
    pods.kill_pod(1)
    said = run.communicate(timeout=200)[0]
    assert run.returncode == 2, said
    assert "node 1 was lost" in said
    assert pods.processes() == {}


def test_the_output_of_a_pod_is_cut_off(pods: Any) -> None:
    """A connection to the output of a container that ends is made again, and is no end of the job."""
    run = pods.run({**FREEZE, "for": "1s"}, steps=600)
    pods.seen(Kind.APPLIED)
    followers = {pid for pid, line in pods.processes().items() if " logs --follow" in line and "sh -c" not in line}
    for pid in followers:
        os.kill(pid, signal.SIGKILL)
    said = run.communicate(timeout=200)[0]
    assert followers
    assert run.returncode == 0, said
    assert pods.processes() == {}


def test_a_sidecar_outlives_the_container_of_the_job(pods: Any) -> None:
    """If the container of the job is killed as a whole, nothing is left of it although its pod still runs. The rollback
    is verified."""
    pods.sidecars = [{"name": "metrics", "image": "none"}]
    run = pods.run({**FREEZE, "for": "60s"}, steps=600)
    pods.seen(Kind.APPLIED)
    pods.kill_pod(1)
    said = run.communicate(timeout=200)[0]
    assert run.returncode == 2, said
    assert "node 1 was lost" in said
    assert [event.data["verified"] for event in pods.events(Kind.ROLLED_BACK)] == [True], said
    assert pods.processes() == {}


@pytest.mark.parametrize("fault", ["pod.delete", "pod.evict"])
def test_a_pod_is_ended_by_a_fault(pods: Any, fault: str) -> None:
    """The API server ends the pod of a node, and what it says is the evidence. The loss of that node is what the fault
    is for, so nobody ends the run because of it."""
    run = pods.run({"inject": fault, "target": {"node": 1}, "when": {"time": "2s"}}, steps=8000)
    ended = pods.seen(Kind.EFFECT)
    pods.seen(Kind.STEP, lambda event: event.rank == 0 and event.mono_s > ended.mono_s + 2.0)
    run.send_signal(signal.SIGINT)
    said = run.communicate(timeout=400)[0]
    assert "was lost" not in said
    assert "by itself" not in said.partition("Verdicts")[0], said
    (seen,) = pods.events(Kind.EFFECT)
    assert seen.data["node"] == 1
    (result,) = pods.result().faults
    assert result.evidence == "the API server says: the container of node 1 does not run any more"
    assert pods.processes() == {}


def test_a_pod_is_ended_at_no_step(pods: Any) -> None:
    """No rank can wait until the cluster has ended a pod, so such a fault has no step; the plan says so."""
    run = pods.run({"inject": "pod.delete", "target": {"node": 1}, "when": STEP})
    said = run.communicate(timeout=200)[0]
    assert run.returncode == 3, said
    assert "no rank waits for that; write time or after" in " ".join(said.split())


def test_a_job_in_pods_is_submitted_again(pods: Any) -> None:
    """The objects of the first submission are deleted before those of the second, which have the same names. The pods
    of the second see nothing of the first, and yet attempts are counted on, and each event has its own number."""
    kills = [
        {"id": f"kill-{n}", "inject": "process.kill", "target": {"rank": 1}, "when": {**STEP, "attempt": n}}
        for n in (0, 1)
    ]
    pods.more = {"resubmit": {"times": 1}}
    run = pods.run(*kills)
    said = run.communicate(timeout=300)[0]
    assert [event.data["submission"] for event in pods.events(Kind.JOB_STARTED)] == [0, 1], said
    attempts = [event.attempt for event in pods.events(Kind.RANK_UP) if event.rank == 1]
    assert attempts == sorted(set(attempts)), attempts
    events = list(read_events(pods.record.events))
    assert len({(event.source, event.seq) for event in events}) == len(events)
    assert pods.processes() == {}


FROM_OUTSIDE = {"inject": "node.freeze", "target": {"node": 1}, "when": {"time": "1s"}, "for": "1s"}


def test_pods_that_run_already(pods: Any) -> None:
    """torchaos attaches to pods that it did not make: a fault stops the processes of the second pod for its time, and a
    rank there is killed, with the kernel's word as evidence. At the end of the job its exit code is known, and the pods
    are still the user's."""
    pods.start_job(steps=1600)
    kill = {"inject": "process.kill", "target": {"rank": 1}, "when": {"time": "4s"}}
    run = pods.run(FROM_OUTSIDE, kill, steps=1600)
    said = run.communicate(timeout=200)[0]
    assert run.returncode == 0, said
    frozen, killed = pods.result().faults
    assert "stopped" in frozen.evidence
    assert "exit code -9" in killed.evidence
    (death,) = [event for event in pods.events(Kind.RANK_EXITED) if event.data["exit_code"] == -signal.SIGKILL]
    assert death.source == "node1"
    assert {event.data["exit_code"] for event in pods.events(Kind.NODE_EXITED)} == {0}, said
    assert len(list((pods.folder / "cluster").glob("*/pod.json"))) == 2


def test_the_job_goes_on_after_the_run(pods: Any) -> None:
    """A run that ends before the job leaves the pods, the ranks and torchrun as they were, and nothing of its own."""
    pods.start_job(steps=100_000)
    run = pods.run({**FROM_OUTSIDE, "for": "90s"})
    pods.seen(Kind.APPLIED)
    run.send_signal(signal.SIGINT)
    said = run.communicate(timeout=200)[0]
    assert [event.data["verified"] for event in pods.events(Kind.ROLLED_BACK)] == [True], said
    lines = [line for line in pods.processes().values() if "kubectl.py" not in line]
    assert sorted("plain.py" in line for line in lines) == [True] * len(lines), lines
    assert not any("torchaos" in line for line in lines)
    assert list((pods.folder / "tmp").iterdir()) == []


def test_pods_without_torchaos(pods: Any) -> None:
    """Nothing can be attached to a container without torchaos; the reason says what is missing, and the job goes on."""
    pods.start_job(steps=100_000)
    pods.more["pods"]["python"] = "/usr/bin/no-such-python"
    run = pods.run(FROM_OUTSIDE)
    said = " ".join(run.communicate(timeout=200)[0].split())
    assert run.returncode == 3, said
    assert "has no torchaos there" in said
    assert len(list((pods.folder / "cluster").glob("*/exit"))) == 0


def test_there_are_other_pods_than_expected(pods: Any) -> None:
    """If the pods with the label are not as many as the job's nodes, they are named, and nothing starts."""
    pods.start_job(steps=100_000)
    pods.more["nodes"] = 3
    run = pods.run(FROM_OUTSIDE)
    said = " ".join(run.communicate(timeout=200)[0].split())
    assert run.returncode == 3, said
    assert "the job has 3 nodes, and these running pods have the label app=llm: llm-0, llm-1" in said
