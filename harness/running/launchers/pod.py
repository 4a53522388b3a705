"""Pods of a Kubernetes cluster: the kinds of objects whose pods can be the nodes of a job, with the number of their
pods; and a node that is a pod (`Pod`). The run makes the pod, or the job runs in it already. Then `kubectl exec` starts
an agent beside the job; the agent ends with the run, and the pods and the job go on."""

from __future__ import annotations

import json
import re
import select
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torchaos.harness.host.cluster_tools import Kubectl
from torchaos.harness.interfaces import ChaosError, Handle, JobSpec, UsageError
from torchaos.harness.protocol.wire import ENV_RUN_ID
from torchaos.harness.record.plan import counted
from torchaos.harness.rollback.cluster_handles import OVER, KubernetesAgent, status_of
from torchaos.harness.rollback.handles import JobProcesses
from torchaos.harness.running.launchers.node_channel import mark_of, packed


def apart(tree: Any) -> Any:
    """A copy in which no two places share an object. Places with the same YAML anchor share an object, so a change of
    one pod would change another pod, too."""
    if isinstance(tree, dict):
        return {key: apart(child) for key, child in tree.items()}
    return [apart(child) for child in tree] if isinstance(tree, list) else tree


def pods_in(tree: Any) -> Iterator[dict[str, Any]]:
    """Yields every pod and every template of pods in the tree."""
    if _is_pod(tree):
        yield tree
        return
    for child in _children(tree):
        yield from pods_in(child)


def _is_pod(tree: Any) -> bool:
    spec = tree.get("spec") if isinstance(tree, dict) else None
    containers = spec.get("containers") if isinstance(spec, dict) else None
    return isinstance(containers, list) and bool(containers) and all(isinstance(each, dict) for each in containers)


def _children(tree: Any) -> Iterable[Any]:
    return tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()


def with_policy(tree: Any) -> Iterator[dict[str, Any]]:
    """Yields every mapping that has a restartPolicy beside a template of pods, as in a PyTorchJob. Kubeflow's operator
    copies that policy over the policy in the template."""
    if isinstance(tree, dict) and "restartPolicy" in tree and _is_pod(tree.get("template")):
        yield tree
    for child in () if _is_pod(tree) else _children(tree):
        yield from with_policy(child)


_AGAIN = "Kubernetes itself starts its containers again, and takes no other policy; write a Job"
_RAY = "the commands of its pods are Ray's, which starts the ranks itself; write a Job of the same image"
_STEPS = "a controller runs its steps; write the Job that one of its steps is"
_CANNOT = {
    **dict.fromkeys(("DaemonSet", "Deployment", "ReplicaSet", "ReplicationController", "StatefulSet"), _AGAIN),
    "LeaderWorkerSet": _AGAIN,
    **dict.fromkeys(("RayCluster", "RayJob", "RayService"), _RAY),
    "MPIJob": "its launcher starts the ranks in its workers over ssh; write a Job or a PyTorchJob, and torchrun as "
    "job.command",
    **dict.fromkeys(("Workflow", "WorkflowTemplate", "CronWorkflow"), _STEPS),
    "CronJob": "it makes its Job at a time of its own; write the Job of its jobTemplate",
}


def group_of(object_: Mapping[str, Any]) -> str:
    """The group in the API version of an object: `batch` for `batch/v1`, empty for `v1`."""
    return str(object_["apiVersion"]).rpartition("/")[0]


def name_of(object_: Mapping[str, Any]) -> str:
    about = object_.get("metadata")
    names = about if isinstance(about, dict) else {}
    return f"{object_['kind']}/{names.get('name') or names.get('generateName') or ''}"


def has_nodes(object_: Mapping[str, Any]) -> bool:
    """Whether the pods of an object of this kind can be nodes."""
    return _key(object_) in _COUNTED


def why_not(object_: Mapping[str, Any]) -> str:
    """Why the pods of this object can't be nodes, and what to write instead."""
    kinds = ", ".join(kind if group in _GROUPS else f"{kind} of {group}" for kind, group in _COUNTED)
    unknown = f"torchaos does not know how it runs its pods; write one of {kinds}, or name it in job.pods.objects"
    return f"the pods of kind {object_['kind']} can't be the nodes: {refused(object_) or unknown}"


def refused(object_: Mapping[str, Any]) -> str:
    """The reason if this kind is known not to work. Otherwise empty."""
    return _CANNOT.get(str(object_["kind"]), "")


def count_of(object_: Mapping[str, Any]) -> int | None:
    """How many pods of this object run at the same time. None if not known. Raises UsageError for a text that is no
    number, as in a template."""
    count, spec = _COUNTED.get(_key(object_)), object_.get("spec")
    try:
        return count(spec) if count and isinstance(spec, dict) else None
    except ValueError as error:
        text = str(error).rpartition(": ")[2]
        raise UsageError(f"{object_['kind']}: {text} is no number of pods; fill in the template first") from None
    except (AttributeError, KeyError, TypeError):  # a value of a wrong type, which the API server refuses
        return None


def _key(object_: Mapping[str, Any]) -> tuple[str, str]:
    return str(object_["kind"]), group_of(object_)


def _of_job(spec: Mapping[str, Any]) -> int:
    at_once, in_all = (spec.get(key) for key in ("parallelism", "completions"))
    at_once = 1 if at_once is None else int(at_once)
    return at_once if in_all is None else min(at_once, int(in_all))


def _of_job_set(spec: Mapping[str, Any]) -> int:
    return sum(_times(one) * _of_job(one["template"]["spec"]) for one in spec.get("replicatedJobs") or ())


def _of_pytorch_job(spec: Mapping[str, Any]) -> int:
    return _sum(spec.get("pytorchReplicaSpecs", {}).values())


def _of_volcano(spec: Mapping[str, Any]) -> int:
    return _sum(spec.get("tasks") or ())


def _of_train_job(spec: Mapping[str, Any]) -> int | None:
    count = (spec.get("trainer") or {}).get("numNodes")
    return None if count is None else int(count)


def _sum(replicated: Iterable[Mapping[str, Any]]) -> int:
    return sum(_times(one) for one in replicated if any(pods_in(one)))


def _times(one: Mapping[str, Any]) -> int:
    return int(one.get("replicas", 1))


_COUNTED: dict[tuple[str, str], Callable[[Mapping[str, Any]], int | None]] = {
    ("Pod", ""): lambda spec: 1,
    ("Job", "batch"): _of_job,
    ("JobSet", "jobset.x-k8s.io"): _of_job_set,
    ("PyTorchJob", "kubeflow.org"): _of_pytorch_job,
    ("TrainJob", "trainer.kubeflow.org"): _of_train_job,
    ("Job", "batch.volcano.sh"): _of_volcano,
}
_GROUPS = (
    "",
    "batch",
    "jobset.x-k8s.io",
    "kubeflow.org",
    "trainer.kubeflow.org",
)  # kinds of these groups are shown without the name of their group


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
    """A node that is a container of a pod. `id`: the id of the container, which changes when the container restarts.
    `machine`: the cluster node on which the pod runs. `python`: the interpreter in the container that has torchaos."""

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
        """Whether the container has ended, or its pod was deleted. Then nothing that was in the container is left;
        other containers of the pod may still run. False if the cluster does not answer."""
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
