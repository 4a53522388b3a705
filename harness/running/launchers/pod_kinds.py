"""The kinds of Kubernetes objects whose pods can be the nodes of a job; and for each kind, its pods and their
number."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any


def apart(tree: Any) -> Any:
    """A copy in which no two places share an object. Places with the same YAML anchor share one, and a change of one
    pod would change the other pod, too."""
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
_CANNOT = {
    **dict.fromkeys(("DaemonSet", "Deployment", "ReplicaSet", "ReplicationController", "StatefulSet"), _AGAIN),
    "LeaderWorkerSet": _AGAIN,
    **dict.fromkeys(("RayCluster", "RayJob", "RayService"), _RAY),
    "MPIJob": "its launcher starts the ranks in its workers over ssh; write a Job or a PyTorchJob, and torchrun as "
    "job.command",
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
    """How many pods of this object run at the same time. None if not known."""
    count, spec = _COUNTED.get(_key(object_)), object_.get("spec")
    try:
        return count(spec) if count and isinstance(spec, dict) else None
    except (AttributeError, TypeError):  # a value of a wrong type, which the API server refuses
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
