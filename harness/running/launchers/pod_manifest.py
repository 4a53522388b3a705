"""A Kubernetes manifest, changed so that its pods run the job under the agent of torchaos."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from torchaos.harness.contracts import UsageError
from torchaos.harness.running.launchers import train_job
from torchaos.harness.running.launchers.kubectl_yaml import documents
from torchaos.harness.running.launchers.pod_change import PodChange
from torchaos.harness.running.launchers.pod_kinds import count_of, group_of, has_nodes, name_of, refused, why_not
from torchaos.harness.running.launchers.pod_templates import apart, pods_in, with_policy

HOST_NETWORK = (
    "hostNetwork: the pods share the network of their machines, so a network fault would hit everything there; leave "
    "hostNetwork out"
)
_RUNTIMES = ("TrainingRuntime", "ClusterTrainingRuntime")  # of Kubeflow


@dataclass
class Manifest:
    """The objects of a manifest file. `nodes`: the objects whose pods are the nodes of the job, as KIND/NAME. All other
    objects are made beside them."""

    file: Path
    objects: list[dict[str, Any]] = field(default_factory=list)
    nodes: Sequence[str] = ()

    @classmethod
    def read(cls, file: Path, named: Sequence[str] = ()) -> Manifest:
        """The manifest in a file. `named`: the objects with the nodes, if the user names them. Raises UsageError if the
        file can't be read, or if its objects can't run a job."""
        try:
            found = [apart(document) for document in documents(file.read_text())]
        except OSError as error:
            raise UsageError(f"{file}: {error.strerror}; correct job.pods.manifest") from error
        except RecursionError as error:
            raise UsageError(f"{file}: a YAML anchor contains itself, or the file is nested too deeply") from error
        except (yaml.YAMLError, ValueError) as error:
            mark = getattr(error, "problem_mark", None)
            where = f"{file}:{mark.line + 1}:{mark.column + 1}" if mark else str(file)
            raise UsageError(
                f"{where}: it is no YAML: {getattr(error, 'problem', error)}; render a template first"
            ) from error
        objects = [part for document in found for part in _parts(document)]
        for object_ in objects:
            if not all(isinstance(object_.get(key), str) for key in ("apiVersion", "kind")):
                raise UsageError(f"{file}: an object has no apiVersion or no kind; write a manifest of Kubernetes")
            if object_["kind"] in _RUNTIMES:
                raise UsageError(f"{file}: leave the {object_['kind']} out: its pods are not those of this job alone")
        return cls(file, objects, [name_of(one) for one in _with_nodes(file, objects, named)])

    @property
    def pods(self) -> list[dict[str, Any]]:
        """The pods and templates of pods that are nodes. None for a TrainJob, whose pods are not in it."""
        return list(_pods(filter(self._is_node, self.objects)))

    @property
    def count(self) -> int | None:
        """How many nodes run at the same time. None if that is not known."""
        counts = [count_of(object_) for object_ in filter(self._is_node, self.objects)]
        known = [count for count in counts if count is not None]
        return sum(known) if len(known) == len(counts) else None

    @property
    def kinds(self) -> str:
        """How kubectl names the kinds of the objects, such as `job.batch`, with commas between them."""
        names = (f"{object_['kind'].lower()}.{group_of(object_)}".rstrip(".") for object_ in self.objects)
        return ",".join(dict.fromkeys(names))

    @property
    def default_container(self) -> str:
        """The container that runs the job if the scenario names none. Empty: the first of each pod."""
        if any(map(train_job.is_train_job, filter(self._is_node, self.objects))):
            return train_job.NODE
        named = [{one.get("name") for one in pod["spec"]["containers"]} for pod in self.pods]
        ours = any(name.startswith("PyTorchJob/") for name in self.nodes) and all("pytorch" in names for names in named)
        return "pytorch" if ours else ""  # the operator's own rule

    def check(self, nodes: int, container: str) -> None:
        """Raises UsageError if the manifest makes another number of nodes, or a pod has no container of that name, or a
        variable of it is no text."""
        if self.count not in (None, nodes):
            raise UsageError(
                f"{self.file}: {', '.join(self.nodes)} makes {self.count} pods for {nodes} nodes; correct job.nodes, "
                "or name the objects with the nodes in job.pods.objects"
            )
        for job in filter(train_job.is_train_job, filter(self._is_node, self.objects)):
            train_job.check(job, container, self.file)
        for pod in self.pods:
            about = self._container(pod["spec"], container or self.default_container)
            for one in filter(lambda one: isinstance(one, dict), about.get("env") or ()):
                if not isinstance(one.get("value", ""), str):
                    raise UsageError(
                        f"{self.file}: env {one.get('name')}: kubectl reads {json.dumps(one['value'])}, and no text; "
                        "write quotes"
                    )

    def changed(self, change: PodChange) -> str:
        """The manifest with the change, as JSON, which has no two readings as YAML has. Raises UsageError if a pod has
        no container of that name."""
        objects = copy.deepcopy(self.objects)
        nodes = [object_ for object_ in objects if self._is_node(object_)]
        for object_ in objects:
            change.mark(object_)
            for pod in pods_in(object_):
                change.mark(pod)
        for object_ in filter(train_job.is_train_job, nodes):
            train_job.adapt(object_, change)
        for pod in _pods(nodes):
            change.mark_node(pod)
            self._change(pod["spec"], change)
        for owner in with_policy(nodes):
            owner["restartPolicy"] = "Never"
        return json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})

    def check_network(self, container: str) -> None:
        """Raises UsageError if a network fault would hit more than the pods, or if the container of that name (empty:
        the default one) of a pod does not ask for the right to change the network."""
        for pod in self.pods:
            if shares_network(pod):
                raise UsageError(f"{self.file}: {HOST_NETWORK}")
            about = self._container(pod["spec"], container or self.default_container)
            security = about.get("securityContext") or {}
            added = (security.get("capabilities") or {}).get("add") or ()
            if not security.get("privileged") and not {"NET_ADMIN", "ALL"} & set(added):
                raise UsageError(
                    f"{self.file}: a network fault needs NET_ADMIN; write securityContext: "
                    f"{{capabilities: {{add: [NET_ADMIN]}}}} in container {about.get('name')}"
                )

    def _is_node(self, object_: Mapping[str, Any]) -> bool:
        return name_of(object_) in self.nodes

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
        if change.cwd:
            container["workingDir"] = change.cwd
        spec["restartPolicy"] = "Never"  # torchrun restarts the ranks; a second agent would begin another run
        change.limit(spec)
        change.mount_in(container, spec)


def shares_network(pod: Mapping[str, Any]) -> bool:
    """Whether the pod has the network of its machine."""
    return bool(pod["spec"].get("hostNetwork"))


def _with_nodes(file: Path, objects: Sequence[dict[str, Any]], named: Sequence[str]) -> list[dict[str, Any]]:
    """The objects whose pods are the nodes: those that the user names, or those of the only kind that can be meant.
    Single pods beside such an object are helpers. Raises UsageError if there is none, or if several kinds remain."""
    holders = [one for one in objects if any(pods_in(one)) or train_job.is_train_job(one)]
    if not holders:
        raise UsageError(f"{file}: there is no pod in it, which is an object whose spec has containers")
    names = [name_of(one) for one in holders]
    if unknown := [name for name in named if name not in names]:
        raise UsageError(f"{file}: no object {unknown[0]} has pods; job.pods.objects may name {', '.join(names)}")
    if named:
        chosen = [one for one in holders if name_of(one) in named]
        if wrong := next(filter(refused, chosen), None):
            raise UsageError(f"{file}: {why_not(wrong)}")
        return chosen
    able = [one for one in holders if has_nodes(one)]
    if not able:
        raise UsageError(f"{file}: {why_not(holders[0])}")
    able = [one for one in able if one["kind"] != "Pod"] or able
    if len({(one["kind"], group_of(one)) for one in able}) > 1:
        several = ", ".join(map(name_of, able))
        raise UsageError(f"{file}: the nodes may be the pods of {several}; say which, in job.pods.objects")
    return able


def _pods(objects: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    return pods_in([one for one in objects if not train_job.is_train_job(one)])


def _parts(found: Any) -> list[dict[str, Any]]:
    """The objects of a document. A `List` contains several."""
    if isinstance(found, dict) and isinstance(found.get("items"), list):
        return [item for item in found["items"] if isinstance(item, dict)]
    return [found if isinstance(found, dict) else {}]
