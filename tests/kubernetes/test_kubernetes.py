"""launcher: kubernetes on a real cluster, with the rights of the Role in docs/kubernetes.md.

Most jobs are stand-ins for torchrun that import no torch. The API server, the kubelets, the containers, the wrapper,
the agents and the reapers are real."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from pod_runs import Run

from torchaos.harness.agent.wire import Kind
from torchaos.harness.record.result import Verdict

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

STEP = {"step": 8, "phase": "backward"}
KILL = {"inject": "process.kill", "target": {"rank": 1}, "when": STEP}
FROZEN = {"inject": "node.freeze", "target": {"node": 1}, "when": STEP}


def test_a_rank_in_a_pod_is_killed(cluster: Any) -> None:
    """Pods without a shared folder, each with its own numbers of processes: the death of the rank in the second pod is
    the evidence. What the pods recorded comes back, and the pods are deleted."""
    run = Run(cluster, "kill", KILL)
    said = run.end()
    assert run.process.returncode in (0, 2), said  # the stand-in's other node does not wait for the first
    (hit,) = run.events(Kind.APPLYING)
    deaths = [event for event in run.events(Kind.RANK_EXITED) if event.data["exit_code"] == -9]
    assert [(one.source, one.data["pid"]) for one in deaths] == [("node1", hit.data["pid"])]
    assert {event.rank for event in run.events(Kind.STEP)} == {0, 1}
    run.is_clean()


def test_a_node_stops_for_its_time(cluster: Any) -> None:
    """All processes of a pod are stopped, and run again after the fault's time, by the clock of the pod's agent."""
    run = Run(cluster, "freeze", {**FROZEN, "for": "700ms"})
    said = run.end()
    assert run.process.returncode == 0, said
    assert run.result.verdict is Verdict.PASSED
    applied, back = run.events(Kind.APPLIED)[0], run.events(Kind.ROLLED_BACK)[0]
    assert applied.source == back.source == "node1"
    assert back.data["verified"]
    run.is_clean()


@pytest.mark.job
@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("real-kill", {"inject": "process.kill", "target": {"rank": 1}, "when": {"step": 15, "phase": "backward"}}),
        ("real-stall", {"inject": "collective.stall", "target": {"rank": 1}, "when": {"step": 15}, "for": "3s"}),
    ],
)
def test_torchrun_in_pods(cluster: Any, name: str, fault: Mapping[str, Any]) -> None:
    """torchrun over two pods that share the folder of runs: the verdict of the same scenario on one machine, with
    the loss bitwise as in the twin."""
    runs = cluster.shared / "runs"
    runs.mkdir(exist_ok=True)
    job = {
        "command": "torchrun --nnodes 2 --nproc-per-node 1 --max-restarts 3 {jobs}/gpt_ddp.py --steps 30 "
        "--checkpoint-dir {run}/checkpoints --step-timeout 20",
        "env": {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}, "timeout": "5m",
    }  # fmt: skip
    more: Mapping[str, Any] = {"assert": ["completed", "recovery_time", "no_lost_work", "loss_continuity"]}
    run = Run(cluster, name, fault, job=job, pods={"share": [runs]}, twin={"runs": 1}, **more)
    said = run.end()
    assert run.process.returncode == 0, said
    assert run.result.verdict is Verdict.PASSED
    run.is_clean()


def test_a_node_that_is_cut_off(cluster: Any) -> None:
    """The network of the node is down while its processes are stopped: they run again when the fault's time is over, by
    the node's own clock."""
    run = Run(cluster, "cut", {**FROZEN, "for": "4s"}, steps=8000)
    pids = run.stopped()
    subprocess.run(cluster.argv("plug", "w2", "down"), check=True)
    try:
        run.runs_again(pids)
    finally:
        subprocess.run(cluster.argv("plug", "w2", "up"), check=True)
    said = run.end()
    applied, took = run.events(Kind.APPLIED)[0], run.events(Kind.ROLLED_BACK)[0]
    assert took.source == applied.source == "node1"
    assert 3.9 < took.mono_s - applied.mono_s < 6.0
    assert run.process.returncode in (0, 2), said  # 2: the cut was longer than the lease
    run.is_clean()


DEATHS: Mapping[str, Sequence[tuple[str, ...]]] = {
    "agent": [("exec --run",)],
    "reaper": [("undo.reaper",)],
    "agent-and-reaper": [("undo.reaper",), ("exec --run",)],
}


@pytest.mark.parametrize("who", sorted(DEATHS))
def test_a_death_in_a_pod(cluster: Any, who: str) -> None:
    """Whichever of them is killed while the node is stopped, its processes do not stay stopped, and nothing is left.
    The agent is the first process of its container, so everything there ends with it."""
    run = Run(cluster, f"death-{who}", {**FROZEN, "for": "6s"}, steps=4000)
    pids = run.stopped()
    for words in DEATHS[who]:
        run.kill(run.name, *words)
    run.runs_again(pids)
    said = run.end()
    assert run.process.returncode in ((0, 2, 4) if who == "reaper" else (2,)), said
    run.is_clean()


def test_kubectl_dies(cluster: Any) -> None:
    """The pipes are made again, to the same agents; the fault ends at its own time and the run goes on."""
    run = Run(cluster, "kubectl", {**FROZEN, "for": "4s"}, steps=2000)
    pids = run.stopped()
    run.kill("kubectl", "node --join", node="cp")
    run.runs_again(pids)
    said = run.end()
    assert run.events(Kind.ROLLED_BACK)[0].data["verified"], said
    run.is_clean()


@pytest.mark.parametrize("reaper", [False, True], ids=["controller", "controller-and-reaper"])
def test_the_controller_dies(cluster: Any, reaper: bool) -> None:
    """Its reaper deletes the pods, and the agents take everything back. If that is dead too, the agents do it at the
    end of the lease, and `torchaos recover` deletes the pods."""
    run = Run(cluster, "controller-and-reaper" if reaper else "controller", {**FROZEN, "for": "90s"}, steps=8000)
    pids = run.stopped()
    if reaper:
        run.kill("undo.reaper", node="cp")
    run.kill("torchaos run", node="cp")
    run.process.wait(timeout=60)
    run.runs_again(pids)
    if reaper:
        code, said = cluster.as_user("torchaos", "recover")
        assert code == 0, said
    run.is_clean()


def test_a_pod_is_deleted(cluster: Any) -> None:
    """kubectl delete while a node is stopped: the agent takes everything back before the kubelet kills what is left,
    and the run judges nothing."""
    run = Run(cluster, "deleted", {**FROZEN, "for": "90s"}, steps=8000)
    run.stopped()
    cluster.kubectl("delete", "pod", "deleted-1", "--wait=false")
    said = run.end()
    assert run.process.returncode == 2, said
    assert [event.data["verified"] for event in run.events(Kind.ROLLED_BACK)] == [True], said
    run.is_clean()


@pytest.mark.parametrize("fault", ["pod.delete", "pod.evict"])
def test_a_fault_ends_a_pod(cluster: Any, fault: str) -> None:
    """The API server says that the container is gone, and new pods run the next submission, whose attempts are counted
    on."""
    name = fault.replace(".", "-")
    ends = {"inject": fault, "target": {"node": 1}, "when": {"time": "5s"}}
    run = Run(cluster, name, ends, steps=4000, job={"resubmit": {"times": 1}})
    said = run.end()
    (seen,) = run.events(Kind.CONTAINER)
    assert (seen.data["node"], seen.data["action"]) == (1, "ended")
    assert [event.data["submission"] for event in run.events(Kind.JOB_STARTED)] == [0, 1], said
    assert {event.attempt for event in run.events(Kind.RANK_UP) if event.rank == 1} == {0, 1}
    run.is_clean()


def test_a_sidecar_outlives_the_job(cluster: Any) -> None:
    """The container of the job is killed, and another container of its pod runs on. Nothing is left of what the fault
    changed, and the run says so."""
    sidecar = {"name": "metrics", "image": "local/tiny:1", "imagePullPolicy": "Never", "command": ["sleep", "1000"]}
    run = Run(
        cluster, "sidecar", {**FROZEN, "for": "90s"}, steps=8000, pods={"more": {"containers": [sidecar]}}
    )  # fmt: skip
    run.stopped()
    run.kill(run.name, "exec --run")
    said = run.end()
    assert run.process.returncode == 2, said
    assert [event.data["verified"] for event in run.events(Kind.ROLLED_BACK)] == [True], said
    run.is_clean()


def test_what_the_user_may_not_do(cluster: Any) -> None:
    """In a namespace without the Role, all missing rights are named, and nothing is made."""
    run = Run(cluster, "forbidden", KILL, job={"pods": {"namespace": "kube-public", "manifest": "forbidden.pods.yaml"}})
    said = run.end()
    assert run.process.returncode == 3, said
    assert "this user may not create pod, delete pod, list pod" in said
    assert "create pods/exec" in said
    assert cluster.objects("pods", "--all-namespaces") == []


def test_network_faults_are_refused(cluster: Any) -> None:
    """The network of a pod is not touched; the plan says so, and nothing starts."""
    fault = {"inject": "network.partition", "target": {"node": 1}, "when": {"step": 8}, "for": "1s"}
    run = Run(cluster, "partition", fault)
    said = run.end()
    assert run.process.returncode == 3, said
    assert "the network of a pod is not touched" in said
