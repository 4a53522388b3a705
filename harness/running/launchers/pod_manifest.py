"""A Kubernetes manifest, changed so that its pods run the job under the agent of torchaos."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from torchaos.harness.contracts import UsageError
from torchaos.harness.running.launchers import train_job
from torchaos.harness.running.launchers.pod_change import PodChange
from torchaos.harness.running.launchers.pod_templates import apart, pods_in, with_policy

HOST_NETWORK = (
    "hostNetwork: the pods share the network of their machines, so a network fault would hit everything there; leave "
    "hostNetwork out"
)
_ALWAYS = ("DaemonSet", "Deployment", "ReplicaSet", "ReplicationController", "StatefulSet")  # restartPolicy: Always
_RUNTIMES = ("TrainingRuntime", "ClusterTrainingRuntime")  # of Kubeflow


@dataclass
class Manifest:
    """The objects of a manifest file. `kinds`: how kubectl names their kinds, such as `job.batch`."""

    file: Path
    objects: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def read(cls, file: Path) -> Manifest:
        """The manifest in a file. Raises UsageError if the file can't be read, or has no pod."""
        try:
            found = [apart(document) for document in yaml.safe_load_all(file.read_text()) if document is not None]
        except OSError as error:
            raise UsageError(f"{file}: {error.strerror}; correct job.pods.manifest") from error
        except RecursionError as error:
            raise UsageError(f"{file}: a YAML anchor contains itself, or the file is nested too deeply") from error
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            mark = getattr(error, "problem_mark", None)
            where = f"{file}:{mark.line + 1}:{mark.column + 1}" if mark else str(file)
            raise UsageError(f"{where}: it is no YAML: {getattr(error, 'problem', error)}") from error
        objects = [part for document in found for part in _parts(document)]
        for object_ in objects:
            if not all(isinstance(object_.get(key), str) for key in ("apiVersion", "kind")):
                raise UsageError(f"{file}: an object has no apiVersion or no kind; write a manifest of Kubernetes")
            if object_["kind"] in _ALWAYS:
                problem = (
                    f"Kubernetes itself starts the containers of a {object_['kind']} again, and takes no other policy"
                )
                raise UsageError(f"{file}: {problem}; write a Job, an object of an operator, or pods")
            if object_["kind"] in _RUNTIMES:
                raise UsageError(f"{file}: leave the {object_['kind']} out: its pods are not those of this job alone")
        manifest = cls(file, objects)
        if not manifest.pods and not any(map(train_job.is_train_job, objects)):
            raise UsageError(f"{file}: there is no pod in it, which is an object whose spec has containers")
        return manifest

    @property
    def pods(self) -> list[dict[str, Any]]:
        """Every pod and every template of pods, in objects of any kind."""
        return list(_pods(self.objects))

    @property
    def count(self) -> int | None:
        """How many pods run at the same time. None if that is not known, as for the object of an operator."""
        counts = [_count(object_) for object_ in self.objects if any(pods_in(object_))]
        known = [count for count in counts if count is not None]
        return sum(known) if len(known) == len(counts) and counts else None

    @property
    def kinds(self) -> str:
        names = (f"{object_['kind'].lower()}.{_group(object_)}".rstrip(".") for object_ in self.objects)
        return ",".join(dict.fromkeys(names))

    @property
    def default_container(self) -> str:
        """The container that runs the job if the scenario names none. Empty: the first of each pod."""
        return train_job.NODE if any(map(train_job.is_train_job, self.objects)) else ""

    def changed(self, change: PodChange) -> str:
        """The manifest with the change, as a YAML text. Raises UsageError if a pod has no container of that name."""
        objects = copy.deepcopy(self.objects)
        for object_ in objects:
            change.mark(object_)
            if train_job.is_train_job(object_):
                train_job.adapt(object_, change, self.file)
        for pod in _pods(objects):
            change.mark(pod)
            self._change(pod["spec"], change)
        for owner in with_policy(objects):
            owner["restartPolicy"] = "Never"
        return yaml.safe_dump_all(objects, sort_keys=False)

    def check_network(self, container: str) -> None:
        """Raises UsageError if a network fault would hit more than the pods, or if the container of that name (empty:
        the first) of a pod does not ask for the right to change the network."""
        for pod in self.pods:
            if shares_network(pod):
                raise UsageError(f"{self.file}: {HOST_NETWORK}")
            about = self._container(pod["spec"], container)
            security = about.get("securityContext") or {}
            added = (security.get("capabilities") or {}).get("add") or ()
            if not security.get("privileged") and not {"NET_ADMIN", "ALL"} & set(added):
                raise UsageError(
                    f"{self.file}: a network fault needs NET_ADMIN; write securityContext: "
                    f"{{capabilities: {{add: [NET_ADMIN]}}}} in container {about.get('name')}"
                )

    def _container(self, spec: Mapping[str, Any], name: str) -> dict[str, Any]:
        """The container of that name; empty: the first. Raises UsageError if there is none."""
        containers: Sequence[dict[str, Any]] = spec["containers"]
        names = [one.get("name") for one in containers]
        if name and name not in names:
            raise UsageError(f"{self.file}: no container {name} among {', '.join(map(str, names))}")
        return containers[names.index(name) if name else 0]

    def _change(self, spec: dict[str, Any], change: PodChange) -> None:
        container = self._container(spec, change.container)
        change.run_in(container)
        spec["restartPolicy"] = "Never"  # torchrun restarts the ranks; a second agent would begin another run
        change.limit(spec)
        change.mount_in(container, spec)


def shares_network(pod: Mapping[str, Any]) -> bool:
    """Whether the pod has the network of its machine."""
    return bool(pod["spec"].get("hostNetwork"))


def _count(object_: Mapping[str, Any]) -> int | None:
    """The number of pods that an object of the manifest makes, of which all run at the same time; None: not known."""
    if object_["kind"] == "Pod":
        return 1
    if object_["kind"] != "Job" or _group(object_) != "batch":
        return None
    at_once, in_all = (object_["spec"].get(key) for key in ("parallelism", "completions"))
    at_once = 1 if at_once is None else at_once
    in_all = at_once if in_all is None else in_all
    return min(at_once, in_all) if isinstance(at_once, int) and isinstance(in_all, int) else None


def _pods(objects: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    return pods_in([one for one in objects if not train_job.is_train_job(one)])


def _parts(found: Any) -> list[dict[str, Any]]:
    """The objects of a document. A `List` contains several."""
    if isinstance(found, dict) and isinstance(found.get("items"), list):
        return [item for item in found["items"] if isinstance(item, dict)]
    return [found if isinstance(found, dict) else {}]


def _group(found: Mapping[str, Any]) -> str:
    """The group of an API version: `batch` for `batch/v1`, empty for `v1`."""
    return str(found["apiVersion"]).rpartition("/")[0]
