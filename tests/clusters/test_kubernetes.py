"""launcher: kubernetes on a real cluster, with the rights of the Role in docs/kubernetes.md.

Most jobs are stand-ins for torchrun that import no torch. The API server, the kubelets, the containers, the wrapper,
the agents and the reapers are real."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from clusters.kubernetes import USER, Kubernetes, KubernetesRun
from clusters.runs import DEATHS, FROZEN, KILL
from waiting import wait_until

from torchaos.harness.protocol.wire import Kind
from torchaos.harness.record.result import Verdict
from torchaos.harness.running.launchers.node_channel import LEASE_S

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


def test_a_rank_in_a_pod_is_killed(kubernetes: Kubernetes) -> None:
    """Pods without a shared folder, each with its own numbers of processes: the death of the rank in the second pod is
    the evidence. What the pods recorded comes back, and the pods are deleted."""
    run = KubernetesRun(kubernetes, "kill", KILL)
    said = run.end()
    assert run.process.returncode in (0, 2), said  # the stand-in's other node does not wait for the first
    (hit,) = run.events(Kind.APPLYING)
    deaths = [event for event in run.events(Kind.RANK_EXITED) if event.data["exit_code"] == -9]
    assert [(one.source, one.data["pid"]) for one in deaths] == [("node1", hit.data["pid"])]
    assert {event.rank for event in run.events(Kind.STEP)} == {0, 1}
    run.is_clean()


def test_a_node_stops_for_its_time(kubernetes: Kubernetes) -> None:
    """All processes of a pod are stopped, and run again after the fault's time, by the clock of the pod's agent."""
    run = KubernetesRun(kubernetes, "freeze", {**FROZEN, "for": "700ms"}, steps=2000)
    said = run.end()
    assert run.process.returncode == 0, said
    assert run.result.verdict is Verdict.PASSED
    applied, back = run.events(Kind.APPLIED)[0], run.events(Kind.ROLLED_BACK)[0]
    assert applied.source == back.source == "node1"
    assert back.data["verified"]
    run.is_clean()


_GPT = {
    "command": "torchrun --nnodes 2 --nproc-per-node 1 --max-restarts 3 {jobs}/gpt_ddp.py --steps 30 "
    "--checkpoint-dir {run}/checkpoints --step-timeout 20",
    "env": {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}, "timeout": "5m",
}  # fmt: skip


@pytest.mark.job
@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("real-kill", {"inject": "process.kill", "target": {"rank": 1}, "when": {"step": 15, "phase": "backward"}}),
        ("real-stall", {"inject": "collective.stall", "target": {"rank": 1}, "when": {"step": 15}, "for": "3s"}),
    ],
)
def test_torchrun_in_pods(kubernetes: Kubernetes, name: str, fault: Mapping[str, Any]) -> None:
    """torchrun over two pods that share the folder of runs: the verdict of the same scenario on one machine, with
    the loss bitwise as in the twin."""
    runs = kubernetes.shared / "runs"
    runs.mkdir(exist_ok=True)
    more: Mapping[str, Any] = {"assert": ["completed", "recovery_time", "no_lost_work", "loss_continuity"]}
    run = KubernetesRun(kubernetes, name, fault, job=_GPT, pods={"share": [runs]}, twin={"runs": 1}, **more)
    said = run.end()
    assert run.process.returncode == 0, said
    assert run.result.verdict is Verdict.PASSED
    run.is_clean()


@pytest.mark.job
@pytest.mark.parametrize(
    ("fault", "counter"),
    [
        ({"inject": "network.partition"}, "dropped"),
        ({"inject": "network.delay", "with": {"delay": "50ms"}}, "rtt_ms"),
    ],
    ids=["partition", "delay"],
)
def test_the_network_of_a_pod(kubernetes: Kubernetes, fault: Mapping[str, Any], counter: str) -> None:
    """The agent of the second pod, which has NET_ADMIN, cuts its pod off for three seconds, or delays what it sends.
    The kernel of that pod counts what the job felt, the job goes on, and the undo is verified."""
    fault = {**fault, "target": {"node": 1}, "when": {"step": 15, "phase": "backward"}, "for": "3s"}
    asked: Mapping[str, Any] = {"assert": ["completed"]}
    name = f"net-{counter.replace('_', '-')}"
    run = KubernetesRun(kubernetes, name, fault, job=_GPT, pods={"adds": ["NET_ADMIN"]}, **asked)
    said = run.end()
    assert run.process.returncode in (0, 2), said
    (proof,) = run.evidence()
    assert [(event.source.partition(".")[0], event.kind) for event in proof] == [("node1", Kind.NETWORK)]
    assert proof[0].data["counts"][counter] >= 1
    (back,) = run.events(Kind.ROLLED_BACK)
    assert back.data["verified"]
    run.is_clean()


def test_a_node_that_is_cut_off(kubernetes: Kubernetes) -> None:
    """The network of the node is down while its processes are stopped: they run again when the fault's time is over, by
    the node's own clock."""
    run = KubernetesRun(kubernetes, "cut", {**FROZEN, "for": "4s"}, steps=8000)
    pids = run.stopped()
    with kubernetes.cut_off("w2"):
        run.runs_again(pids)
    said = run.end()
    applied, took = run.events(Kind.APPLIED)[0], run.events(Kind.ROLLED_BACK)[0]
    assert took.source == applied.source == "node1"
    assert 3.9 < took.mono_s - applied.mono_s < LEASE_S
    assert run.process.returncode in (0, 2), said  # 2: the cut was longer than the lease
    run.is_clean()


@pytest.mark.parametrize("who", sorted(DEATHS))
def test_a_death_in_a_pod(kubernetes: Kubernetes, who: str) -> None:
    """Whichever of them is killed while the node is stopped, its processes do not stay stopped, and nothing is left.
    The agent is the first process of its container, so everything there ends with it."""
    run = KubernetesRun(kubernetes, f"death-{who}", {**FROZEN, "for": "6s"}, steps=4000)
    pids = run.stopped()
    run.kill(*((run.name, *words) for words in DEATHS[who]))
    run.runs_again(pids)
    said = run.end()
    assert run.process.returncode in ((0, 2, 4) if who == "reaper" else (2,)), said
    run.is_clean()


def test_kubectl_dies(kubernetes: Kubernetes) -> None:
    """The pipes are made again, to the same agents; the fault ends at its own time and the run goes on."""
    run = KubernetesRun(kubernetes, "kubectl", {**FROZEN, "for": "4s"}, steps=2000)
    pids = run.stopped()
    run.kill(("kubectl", "node --join"), node="cp")
    run.runs_again(pids)
    said = run.end()
    assert run.events(Kind.ROLLED_BACK)[0].data["verified"], said
    run.is_clean()


@pytest.mark.parametrize("reaper", [False, True], ids=["controller", "controller-and-reaper"])
def test_the_controller_dies(kubernetes: Kubernetes, reaper: bool) -> None:
    """Its reaper deletes the pods, and the agents take everything back. If that is dead too, the agents do it at the
    end of the lease, and `torchaos recover` deletes the pods."""
    run = KubernetesRun(
        kubernetes, "controller-and-reaper" if reaper else "controller", {**FROZEN, "for": "90s"}, steps=8000
    )
    pids = run.stopped()
    run.kill_controller(reaper)
    run.runs_again(pids)
    if reaper:
        code, said = kubernetes.as_user("torchaos", "recover")
        assert code == 0, said
    run.is_clean()


def test_a_pod_is_deleted(kubernetes: Kubernetes) -> None:
    """kubectl delete while a node is stopped: the agent takes everything back before the kubelet kills what is left,
    and the run judges nothing."""
    run = KubernetesRun(kubernetes, "deleted", {**FROZEN, "for": "90s"}, steps=8000)
    run.stopped()
    kubernetes.kubectl("delete", "pod", "deleted-1", "--wait=false")
    said = run.end()
    assert run.process.returncode == 2, said
    # The controller may say so too, if the pod was gone before its agent had sent everything.
    assert {event.data["verified"] for event in run.events(Kind.ROLLED_BACK)} == {True}, said
    run.is_clean()


@pytest.mark.parametrize("fault", ["pod.delete", "pod.evict"])
def test_a_fault_ends_a_pod(kubernetes: Kubernetes, fault: str) -> None:
    """The API server says that the container is gone, and new pods run the next submission, whose attempts are counted
    on."""
    name = fault.replace(".", "-")
    ends = {"inject": fault, "target": {"node": 1}, "when": {"time": "5s"}}
    run = KubernetesRun(kubernetes, name, ends, steps=4000, job={"resubmit": {"times": 1}})
    said = run.end()
    (seen,) = run.events(Kind.EFFECT)
    assert seen.data["node"] == 1
    assert [event.data["submission"] for event in run.events(Kind.JOB_STARTED)] == [0, 1], said
    assert {event.attempt for event in run.events(Kind.RANK_UP) if event.rank == 1} == {0, 1}
    run.is_clean()


CORDON = {"inject": "node.cordon", "target": {"node": 1}, "when": {"time": "4s"}}


def _is_open(kubernetes: Kubernetes) -> bool:
    (found,) = [one for one in kubernetes.objects("nodes") if one["metadata"]["name"] == "w2"]
    return not found["spec"].get("unschedulable") and "torchaos.run" not in found["metadata"].get("annotations", {})


@pytest.fixture
def administrator(kubernetes: Kubernetes) -> Iterator[Kubernetes]:
    """A cluster whose user may change its machines."""
    kubernetes.kubectl("create", "clusterrole", "machines", "--verb=get,patch", "--resource=nodes")
    kubernetes.kubectl("create", "clusterrolebinding", "machines", "--clusterrole=machines", f"--user={USER}")
    yield kubernetes
    kubernetes.kubectl("delete", "clusterrolebinding,clusterrole", "machines")


def test_a_machine_is_closed(administrator: Kubernetes) -> None:
    """The machine of the second pod takes no new pods, and what runs there goes on; at the end it is open again."""
    run = KubernetesRun(administrator, "cordon", {**CORDON, "for": "3s"}, steps=4000)
    said = run.end()
    assert run.result.verdict is Verdict.PASSED, said
    assert [event.data["verified"] for event in run.events(Kind.ROLLED_BACK)] == [True]
    assert _is_open(administrator)
    run.is_clean()


@pytest.mark.parametrize("reaper", [False, True], ids=["controller", "controller-and-reaper"])
def test_the_controller_dies_while_a_machine_is_closed(administrator: Kubernetes, reaper: bool) -> None:
    """The reaper of torchaos opens it or, if that is dead too, `torchaos recover`."""
    run = KubernetesRun(administrator, f"closed-{reaper}".lower(), {**CORDON, "for": "90s"}, steps=8000)
    run.seen(Kind.EFFECT)
    assert not _is_open(administrator)
    run.kill_controller(reaper)
    if reaper:
        code, said = administrator.as_user("torchaos", "recover")
        assert code == 0, said
    wait_until(lambda: _is_open(administrator), timeout_s=120)
    run.is_clean()


def test_a_machine_needs_rights(kubernetes: Kubernetes) -> None:
    """The Role of a namespace does not allow it: the missing rights are named, and nothing is made."""
    run = KubernetesRun(kubernetes, "no-cordon", CORDON)
    said = run.end()
    assert run.process.returncode == 3, said
    assert "this user may not get nodes, patch nodes" in said


def test_a_sidecar_outlives_the_job(kubernetes: Kubernetes) -> None:
    """The container of the job is killed, and another container of its pod runs on. Nothing is left of what the fault
    changed, and the run says so."""
    sidecar = {"name": "metrics", "image": "local/tiny:1", "imagePullPolicy": "Never", "command": ["sleep", "1000"]}
    run = KubernetesRun(
        kubernetes, "sidecar", {**FROZEN, "for": "90s"}, steps=8000, pods={"more": {"containers": [sidecar]}}
    )  # fmt: skip
    run.stopped()
    run.kill((run.name, "exec --run"))
    said = run.end()
    assert run.process.returncode == 2, said
    # The controller may say so too, if the pod was gone before its agent had sent everything.
    assert {event.data["verified"] for event in run.events(Kind.ROLLED_BACK)} == {True}, said
    run.is_clean()


def test_what_the_user_may_not_do(kubernetes: Kubernetes) -> None:
    """In a namespace without the Role, all missing rights are named, and nothing is made."""
    run = KubernetesRun(
        kubernetes, "forbidden", KILL, job={"pods": {"namespace": "kube-public", "manifest": "forbidden.pods.yaml"}}
    )
    said = run.end()
    assert run.process.returncode == 3, said
    assert "this user may not create pods, delete pods, list pods" in said
    assert "create pods/exec" in said
    assert kubernetes.objects("pods", "--all-namespaces") == []


def test_network_faults_are_refused(kubernetes: Kubernetes) -> None:
    """The container of the job does not ask for NET_ADMIN: a network fault is refused, and no pod is made."""
    fault = {"inject": "network.partition", "target": {"node": 1}, "when": {"step": 8}, "for": "1s"}
    run = KubernetesRun(kubernetes, "partition", fault)
    said = run.end()
    assert run.process.returncode == 3, said
    assert "a network fault needs NET_ADMIN" in " ".join(said.split())
    assert kubernetes.objects("pods", "--all-namespaces") == []
