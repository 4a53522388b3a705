"""launcher: kubernetes attached to pods that somebody else made, on a real cluster, with the rights of the Role in
docs/kubernetes.md. The jobs are stand-ins for torchrun that import no torch."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import yaml
from clusters.kubernetes import Kubernetes, KubernetesRun
from dying.families import BARE_PYTHON, STAND_IN
from waiting import wait_until

from torchaos.harness.protocol.wire import Kind
from torchaos.harness.record.result import Verdict

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

KILL = {"inject": "process.kill", "target": {"rank": 1}, "when": {"time": "10s"}}
FROZEN = {"inject": "node.freeze", "target": {"node": 1}, "when": {"time": "1s"}}
AGENT = "sidecar"
LOG = {"regex": r"step (?P<step>\d+) loss (?P<loss>\S+)"}


class RunningPods(KubernetesRun):
    """A run that is attached to pods of its name. `container`: the one in which torchaos is."""

    def __init__(
        self, cluster: Kubernetes, name: str, *faults: Any, steps: int, container: str = "trainer", **more: Any
    ):
        self._container, self._python = container, more.pop("python", sys.executable)
        super().__init__(cluster, name, *faults, steps=steps, job={"checkpoints": None, "log": LOG}, **more)

    def of_job(self) -> Mapping[str, Any]:
        return {"pods": {"attach": f"app={self.name}", "container": self._container, "python": self._python}}


def start_job(cluster: Kubernetes, name: str, steps: int, *, with_sidecar: bool = False) -> None:
    """Pods that run a job without torchaos, as the first process of their container."""
    torchrun = [*BARE_PYTHON.split(), f"{STAND_IN}/torchrun", "--nproc-per-node", "1", "--max-restarts", "1"]
    more: dict[str, Any] = {"restartPolicy": "Never"}
    if with_sidecar:
        more |= {"shareProcessNamespace": True, "containers": [{"name": AGENT}]}
    pods = cluster.pods(name, more=more)
    for number, pod in enumerate(pods):
        trainer, *others = pod["spec"]["containers"]
        for other in others:
            other |= {**trainer, "name": AGENT, "command": ["sleep", "10000"]}
        trainer["command"] = [*torchrun, f"{STAND_IN}/plain.py", str(steps)]
        trainer["env"] += [{"name": "PET_NNODES", "value": "2"}, {"name": "PET_NODE_RANK", "value": str(number)}]
        pod["metadata"]["labels"] = {"app": name}
    cluster.kubectl("create", "--filename=-", given=yaml.safe_dump_all(pods))
    wait_until(lambda: phases(cluster, name), lambda found: found == ["Running", "Running"], 120)


def phases(cluster: Kubernetes, name: str) -> list[str]:
    return [pod["status"]["phase"] for pod in cluster.objects("pods", f"--selector=app={name}")]


def of_torchaos(cluster: Kubernetes, name: str) -> Sequence[str]:
    """What torchaos left in the pods: its folders and its processes. The pattern matches no command line with it."""
    look = ["sh", "-c", "ls -d /tmp/torchaos-*; grep -l torchaos[.]harness /proc/[0-9]*/cmdline"]
    container = {one["name"] for one in cluster.objects("pods", f"--selector=app={name}")[0]["spec"]["containers"]}
    where = AGENT if AGENT in container else "trainer"
    said = [cluster.kubectl("exec", f"{name}-{number}", f"--container={where}", "--", *look) for number in (0, 1)]
    return [line for text in said for line in text.split() if "/self/" not in line]


def remove(cluster: Kubernetes, name: str) -> None:
    cluster.kubectl("delete", "pods", f"--selector=app={name}", "--grace-period=1")


def test_a_rank_of_a_running_job_is_killed(kubernetes: Kubernetes) -> None:
    """The job is the first process of its container, so the agent ends with it. The kernel's word of the death is the
    evidence, and the API server's word of the exit codes ends the run. The pods stay."""
    start_job(kubernetes, "attached", 3000)
    run = RunningPods(kubernetes, "attached", KILL, steps=3000)
    said = run.end()
    (death,) = [event for event in run.events(Kind.RANK_EXITED) if event.data["exit_code"] == -9]
    assert death.source == "node1", said
    assert run.evidence() == [[death]], said
    assert {event.data["exit_code"] for event in run.events(Kind.NODE_EXITED)} == {0}, said
    assert run.result.verdict is Verdict.PASSED, said
    assert phases(kubernetes, "attached") == ["Succeeded", "Succeeded"]
    remove(kubernetes, "attached")


def test_a_first_process_can_not_be_stopped(kubernetes: Kubernetes) -> None:
    """The kernel shields the first process of a container: the fault does not land, and the reason says what to do."""
    start_job(kubernetes, "shielded", 2000)
    run = RunningPods(kubernetes, "shielded", {**FROZEN, "for": "1s"}, steps=2000)
    said = " ".join(run.end().split())
    assert run.result.verdict is Verdict.INCONCLUSIVE, said
    assert "torchrun is the first process of its container" in said
    remove(kubernetes, "shielded")


@pytest.mark.parametrize("who", ["nobody", "controller", "controller-and-reaper", "agent-and-reaper"])
def test_a_node_of_a_running_job_stops(kubernetes: Kubernetes, who: str) -> None:
    """A sidecar has torchaos, and the container of the job has not. Whoever dies while all processes of a pod are
    stopped, they run again, the job goes on, and nothing of torchaos is left in the pod."""
    name = f"frozen-{who}"
    start_job(kubernetes, name, 50_000, with_sidecar=True)
    fault = {**FROZEN, "for": "3s" if who == "nobody" else "90s"}
    run = RunningPods(kubernetes, name, fault, steps=1, container=AGENT)
    pids = run.stopped()
    if who.startswith("controller"):
        run.kill_controller(reaper=who.endswith("reaper"))
    elif who.startswith("agent"):
        run.kill((run.name, "rollback.reaper"), (run.name, "node --attach"))
    run.runs_again(pids)
    if who == "controller-and-reaper":
        code, said = kubernetes.as_user("torchaos", "recover")
        assert code == 0, said
    if who in ("nobody", "agent-and-reaper"):
        if who == "nobody":
            run.seen(Kind.ROLLED_BACK)
            (pid,) = kubernetes.pids("cp", name, "torchaos run")[-1:]
            kubernetes.as_root("cp", "kill", "-INT", str(pid))
        said = run.end()
        assert run.process.returncode == 2, said
        assert {event.data["verified"] for event in run.events(Kind.ROLLED_BACK)} == {True}, said
    wait_until(lambda: of_torchaos(kubernetes, name), lambda left: not left, 60)
    assert phases(kubernetes, name) == ["Running", "Running"]
    remove(kubernetes, name)


def test_a_pod_without_torchaos(kubernetes: Kubernetes) -> None:
    """A container without torchaos is refused, with what to do; nothing is started, and nothing has to be repaired."""
    start_job(kubernetes, "bare", 2000)
    run = RunningPods(kubernetes, "bare", KILL, steps=1, python="/usr/bin/python3-without")
    said = " ".join(run.end().split())
    assert run.process.returncode == 3, said
    assert "has no torchaos there" in said
    assert "repair" not in said
    remove(kubernetes, "bare")
