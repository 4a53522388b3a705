"""A node that is a pod of a Kubernetes cluster. The run makes the pod, or the job runs in it already. Then `kubectl
exec` starts an agent beside the job; the agent ends with the run, and the pods and the job go on."""

from __future__ import annotations

import json
import re
import select
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torchaos.harness.host.cluster_tools import Kubectl
from torchaos.harness.interfaces import ChaosError, Handle, JobSpec, UsageError
from torchaos.harness.protocol.wire import ENV_RUN_ID
from torchaos.harness.record.plan import counted
from torchaos.harness.rollback.cluster_handles import OVER, KubernetesAgent, status_of
from torchaos.harness.rollback.handles import JobProcesses
from torchaos.harness.running.launchers.node_channel import mark_of, packed

_JOB = "jobset.sigs.k8s.io/job-global-index"
_INDEX = "batch.kubernetes.io/job-completion-index"
# Prints the output of a container until the container with that id does not run any more. A broken connection is made
# again, because proxies close connections on which nothing was sent for some minutes.
_UNTIL_OVER = """pod=$1 container=$2 id=$3
shift 3
while
    "$@" logs --follow --tail=0 "$pod" --container="$container"
    running=$("$@" get pod "$pod" --ignore-not-found \
        --output=jsonpath='{.status.containerStatuses[?(@.state.running)].containerID}') || running=$id
    [ "${running#*"$id"}" != "$running" ]
do sleep 1; done
"""


@dataclass(frozen=True)
class Pod:
    """A node that is a container of a pod. `id`: the id of the container, which changes if the container restarts.
    `machine`: the node of the cluster on which the pod runs. `python`: the interpreter in the container that has
    torchaos."""

    index: int
    name: str
    container: str
    python: str
    kubectl: Kubectl
    uid: str = ""
    id: str = ""
    namespace: str = "default"
    machine: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    link: ClassVar[None] = None

    @classmethod
    def of(cls, index: int, raw: Mapping[str, Any], container: str, python: str, kubectl: Kubectl) -> Pod:
        """The pod that the API server describes as `raw`. `container`: the name of the container; empty: the first
        container."""
        name = container or raw["spec"]["containers"][0]["name"]
        about = raw["metadata"]
        id_ = status_of(raw, name).get("containerID", "")
        namespace = about.get("namespace", "default")
        return cls(
            index, about["name"], name, python, kubectl, about["uid"], id_, namespace, raw["spec"].get("nodeName", "")
        )

    def argv(self, command: Sequence[str]) -> list[str]:
        words = [self.python if word == sys.executable else word for word in command]
        return self.kubectl.argv("exec", "--stdin", self.name, f"--container={self.container}", "--", *words)

    def until_over(self) -> list[str]:
        """A command that ends when the container has ended."""
        return ["sh", "-c", _UNTIL_OVER, "sh", self.name, self.container, self.id, *self.kubectl.argv()]

    def host_pid(self, pid: int) -> int | None:
        return None

    def delete(self, grace_s: int | None) -> None:
        """Asks for the deletion of the pod. `grace_s`: seconds from SIGTERM to SIGKILL; None: as the pod's
        specification says. Raises OSError if the pod is gone already or the API server refuses."""
        self._check()
        grace = [] if grace_s is None else [f"--grace-period={grace_s}", *(["--force"] if grace_s == 0 else [])]
        self.kubectl.ask("delete", "pod", self.name, "--wait=false", *grace)

    def evict(self) -> None:
        """Asks for the eviction of the pod. Raises OSError if the pod is gone already or the API server refuses."""
        self._check()
        versions = self.kubectl.ask("api-versions").split()
        version = "policy/v1" if "policy/v1" in versions else "policy/v1beta1"  # before Kubernetes 1.22
        eviction = {
            "apiVersion": version, "kind": "Eviction", "metadata": {"name": self.name, "namespace": self.namespace},
        }  # fmt: skip
        path = f"/api/v1/namespaces/{self.namespace}/pods/{self.name}/eviction"
        self.kubectl.ask("create", f"--raw={path}", "--filename=-", given=json.dumps(eviction).encode())

    def _check(self) -> None:
        if self.gone():
            raise OSError(f"the container of node {self.index} had ended before the fault could hit it")

    def gone(self) -> bool:
        """Whether the container has ended or its pod was deleted. Then nothing is left of what was in it, but other
        containers of the pod may still run. False if the cluster does not answer."""
        try:
            now = self._now()
        except OSError:
            return False
        status = status_of(now, self.container) if now else {}
        return (
            not now
            or now["status"]["phase"] in OVER
            or "terminated" in status.get("state", {})
            or status.get("containerID", self.id) != self.id
        )

    def exit_code(self) -> int | None:
        """The exit code of the container, if it ended by itself. None if it runs, if the code is not known, or if its
        pod is being deleted."""
        try:
            now = self._now()
        except OSError:
            return None
        if not now or "deletionTimestamp" in now["metadata"]:
            return None
        status = status_of(now, self.container)
        ends = [status.get(state, {}).get("terminated", {}) for state in ("state", "lastState")]
        return next((one["exitCode"] for one in ends if one.get("containerID", self.id) == self.id and one), None)

    def _now(self) -> Mapping[str, Any]:
        """The present description of the pod by the API server. Empty if the pod is gone. Raises OSError if the server
        does not answer."""
        said = self.kubectl.ask("get", "pod", self.name, "--ignore-not-found", "--output=json")
        found: Mapping[str, Any] = json.loads(said) if said.strip() else {}
        return found if found and found["metadata"]["uid"] == self.uid else {}


def in_order(pods: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The pods (as the API server describes them) in the order of the nodes."""
    return sorted(pods, key=_order)


def _order(raw: Mapping[str, Any]) -> tuple[int, int, list[int | str]]:
    """The sort key of a pod: the number of its Job in a JobSet, then its number in an Indexed Job, then its name.
    Numbers in a name are compared as numbers."""
    metadata = raw["metadata"]
    given = {**metadata.get("labels", {}), **metadata.get("annotations", {})}
    name = re.split(r"(\d+)", metadata["name"])
    return (
        int(given.get(_JOB, 0)), int(given.get(_INDEX, 0)), [int(part) if part.isdigit() else part for part in name]
    )  # fmt: skip


READY = b"attached"
_READY_S = 60.0
_WORDS_S = 5.0  # seconds to wait for the reason of an agent that did not start
# What kubectl, runc and Python print if the container has no torchaos.
_LACKS = ("executable file not found", "no such file or directory", "No module named")


def find_pods(spec: JobSpec, kubectl: Kubectl, label: str, container: str, python: str) -> list[Pod]:
    """The running pods with the label, in the order of the nodes. `container` and `python`: see `Pod`. Raises
    UsageError unless there are as many pods as the job has nodes, and ChaosError if the cluster does not answer."""
    try:
        listed = json.loads(kubectl.ask("get", "pods", f"--selector={label}", "--output=json"))["items"]
    except OSError as error:
        raise ChaosError(str(error)) from error
    running = [
        pod for pod in listed if pod["status"]["phase"] == "Running" and "deletionTimestamp" not in pod["metadata"]
    ]
    if len(running) != spec.nodes:
        names = ", ".join(pod["metadata"]["name"] for pod in running) or "none"
        raise UsageError(
            f"the job has {counted(spec.nodes, 'node')}, and these running pods have the label {label}: {names}"
        )
    pods = [Pod.of(index, raw, container, python, kubectl) for index, raw in enumerate(in_order(running))]
    if missing := next((pod for pod in pods if not pod.id), None):
        raise UsageError(f"pod {missing.name} has no running container {missing.container}; correct job.pods.container")
    for pod in pods:
        _check(pod, _mark(spec, pod))
    return pods


def _check(pod: Pod, mark: str) -> None:
    """Raises UsageError if the container has no torchaos, and ChaosError if the cluster does not answer."""
    argv = pod.argv([sys.executable, "-m", "torchaos.harness", "node", "--left", mark])
    try:
        code, said = Kubectl.outcome(argv, _READY_S)
    except OSError as error:
        raise ChaosError(str(error)) from error
    if code:
        raise UsageError(f"pod {pod.name}, container {pod.container}: {_why(said, pod)}")


def handles(spec: JobSpec, pods: Sequence[Pod]) -> list[Handle]:
    """The undo of everything that `join` starts: the agents in the pods, and the kubectl processes that start them."""
    agents = [
        KubernetesAgent(
            _mark(spec, pod), pod.name, pod.uid, pod.container, pod.python, pod.kubectl.context, pod.kubectl.namespace
        ) for pod in pods
    ]  # fmt: skip
    return [*agents, JobProcesses(spec.env[ENV_RUN_ID])]


def join(spec: JobSpec, pods: Sequence[Pod]) -> None:
    """Starts the agents. Raises UsageError if an agent can't start in a container."""
    root = spec.log.parent.parent
    for pod in pods:
        process = subprocess.Popen(
            pod.argv([sys.executable, "-m", "torchaos.harness", "node", "--attach", _mark(spec, pod)]),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=spec.env,
            start_new_session=True,
        )  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with process.stdin:
                process.stdin.write(packed(root, pod.index, [other.name for other in pods]))
        except BrokenPipeError:
            pass  # the error output of the agent says why
        ready, _, _ = select.select([process.stdout], [], [], _READY_S)
        if not ready or process.stdout.readline().strip() != READY:
            process.stdin = None
            try:
                words = process.communicate(timeout=_WORDS_S)[1]
            except subprocess.TimeoutExpired:
                process.kill()
                words = process.communicate()[1]
            raise UsageError(f"pod {pod.name}, container {pod.container}: {_why(words.decode(errors='replace'), pod)}")


def _mark(spec: JobSpec, pod: Pod) -> str:
    return mark_of(spec.env[ENV_RUN_ID], pod.index, 0)


def _why(said: str, pod: Pod) -> str:
    words = " ".join(said.split())[-400:]
    if any(text.lower() in words.lower() for text in _LACKS):
        return (
            f"{pod.python} has no torchaos there ({words}). Put torchaos into the image, or name a container that has "
            "it and shares the pod's processes: a sidecar, or one that `kubectl debug --target` adds"
        )
    return words.removeprefix("error: ") or f"the agent did not start within {_READY_S:g} s"
