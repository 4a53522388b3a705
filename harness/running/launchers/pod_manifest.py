"""Reads a Kubernetes manifest as kubectl does, and changes it so that its pods run the job under the agent of torchaos.

kubectl's reader (go-yaml 2, resolve.go) has other types than PyYAML: `1e3`, `08` and `0o17` are numbers, `y` and `n`
are booleans, `10:30` is text, and every key is text.

A TrainJob of Kubeflow Trainer does not contain its pods; they are in a runtime of the cluster. So the command and the
environment are written into the TrainJob's trainer, and everything else into a patch of the runtime (trainjob_types.go
in pkg/apis/trainer/v1alpha1 of kubeflow/trainer; patches exist since version 2.2)."""

from __future__ import annotations

import base64
import copy
import json
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from torchaos.harness.interfaces import UsageError
from torchaos.harness.record.plan import counted
from torchaos.harness.running.launchers.pod import (
    apart,
    count_of,
    group_of,
    has_nodes,
    name_of,
    pods_in,
    refused,
    why_not,
    with_policy,
)

_WORDS = {
    **dict.fromkeys(("y", "Y", "yes", "Yes", "YES", "true", "True", "TRUE", "on", "On", "ON"), True),
    **dict.fromkeys(("n", "N", "no", "No", "NO", "false", "False", "FALSE", "off", "Off", "OFF"), False),
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
}
# Go's strconv.ParseInt with base 0, after go-yaml has removed all underscores.
_INTEGER = re.compile(r"[-+]?(?:0[xX][0-9a-fA-F]+|0[bB][01]+|0[oO]?[0-7]+|0|[1-9][0-9]*)")
_PLAIN, _MERGE = "!plain", "tag:yaml.org,2002:merge"
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")


class _Loader(yaml.SafeLoader):
    def resolve(self, kind: type[yaml.Node], value: Any, implicit: Any) -> Any:
        if kind is yaml.ScalarNode and implicit[0]:  # a scalar without quotes and without a tag
            return _MERGE if value == "<<" else _PLAIN
        return super().resolve(kind, value, implicit)  # type: ignore[no-untyped-call]

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        return {_key(key): value for key, value in super().construct_mapping(node, deep=deep).items()}


def _plain(text: str) -> Any:
    if text in _WORDS:
        return _WORDS[text]
    digits = text.replace("_", "") if text[0] in "-+0123456789" else text
    if _INTEGER.fullmatch(digits):
        sign, rest = (-1 if digits[0] == "-" else 1), digits.lstrip("-+").lower()
        base = {"0x": 16, "0b": 2, "0o": 8}.get(rest[:2], 8 if rest[0] == "0" else 10)
        value = sign * int(rest.removeprefix("0o"), base)
        return value if -(1 << 63) <= value < 1 << 64 else float(value)
    if _FLOAT.fullmatch(digits):
        value_ = float(digits)
        return int(value_) if value_.is_integer() and abs(value_) < 1e21 else value_  # as Go writes it to JSON
    return text


def _key(key: object) -> str:
    return key if isinstance(key, str) else json.dumps(key)


_Loader.add_constructor(_PLAIN, lambda loader, node: _plain(node.value))
_Loader.add_constructor(_MERGE, lambda loader, node: node.value)
_Loader.add_constructor("tag:yaml.org,2002:binary", lambda loader, node: base64.b64decode(node.value).decode())


def documents(text: str) -> list[Any]:
    """The documents of a file in YAML or JSON. Raises yaml.YAMLError if it is neither."""
    try:
        return [json.loads(text)]  # JSON may have tabs, which PyYAML does not take
    except ValueError:
        return [found for found in yaml.load_all(text, _Loader) if found is not None]


NODE = "torchaos.node"  # the label of the pods that are nodes; a manifest may also make other pods
_VOLUME = "torchaos-run"
_SAYS_MORE = {
    ("LOGLEVEL", "INFO"): ("DEBUG", "NOTSET")
}  # the level that torchaos needs, and levels that print even more


@dataclass(frozen=True)
class PodChange:
    """The change that makes the pods of a manifest run the job. `label`: for all objects. `command` and `env`: of the
    job. `folder`: the parent of the run directory; an empty volume is mounted there, unless a volume of the container
    contains it. `limit_s`: the pod is ended after this many seconds. `container`: the name of the container that runs
    the job; empty: the first. `cwd`: the working directory of the job; empty: as in the image or manifest. A value that
    has a wrong type in the manifest is not changed, because the API server refuses it anyway."""

    label: tuple[str, str]
    command: Sequence[str]
    env: Mapping[str, str]
    folder: PurePosixPath
    limit_s: int
    container: str = ""
    cwd: str = ""

    def mark(self, object_: dict[str, Any]) -> None:
        key, value = self.label
        below(below(object_, "metadata"), "labels")[key] = value

    def mark_node(self, pod: dict[str, Any]) -> None:
        self.mark(pod)
        pod["metadata"]["labels"][NODE] = self.label[1]

    def run_in(self, container: dict[str, Any]) -> None:
        """Makes the job the command of a container, or of the trainer of a TrainJob. A variable that is replaced keeps
        its place in the list, because Kubernetes expands $(NAME) only in the variables after NAME."""
        container["command"] = list(self.command)
        container.pop("args", None)
        given = [self._replaced(one) for one in container.get("env") or []]
        names = {one.get("name") for one in given if isinstance(one, dict)}
        new = ({"name": name, "value": value} for name, value in self.env.items() if name not in names)
        container["env"] = [*given, *new]

    def _replaced(self, one: Any) -> Any:
        name = str(one.get("name")) if isinstance(one, dict) else ""
        if name not in self.env or one.get("value") in _SAYS_MORE.get((name, self.env[name]), ()):
            return one
        return {"name": name, "value": self.env[name]}

    def limit(self, spec: dict[str, Any]) -> None:
        given = spec.get("activeDeadlineSeconds")
        spec["activeDeadlineSeconds"] = min(self.limit_s, given) if isinstance(given, int) else given or self.limit_s

    def mount_in(self, container: dict[str, Any], pod: dict[str, Any]) -> None:
        """Mounts the volume. `pod`: the spec of the container's pod."""
        mounts = container.get("volumeMounts") or []
        paths = (str(mount.get("mountPath")) for mount in mounts if isinstance(mount, dict))
        if not any(map(self.folder.is_relative_to, paths)):
            container["volumeMounts"] = [*mounts, {"name": _VOLUME, "mountPath": str(self.folder)}]
            pod["volumes"] = [*(pod.get("volumes") or []), {"name": _VOLUME, "emptyDir": {}}]


def below(found: dict[str, Any], key: str) -> dict[str, Any]:
    """The mapping at this key. If there is none, an empty mapping is put there."""
    if not isinstance(found.get(key), dict):
        found[key] = {}
    there: dict[str, Any] = found[key]
    return there


TRAINER_NODE = "node"  # the replicated job and the container in it that run the trainer's command (pkg/constants)
_MANAGER = "torchaos/run"  # the author of the patch; the webhook wants a name with a slash
_PLACE = ("trainingRuntimeSpec", "template", "spec", "replicatedJobs")


def is_train_job(object_: Mapping[str, Any]) -> bool:
    return object_["kind"] == "TrainJob" and str(object_["apiVersion"]).startswith("trainer.kubeflow.org/")


def check(job: Mapping[str, Any], container: str, file: Path) -> None:
    """Raises UsageError if the job is to run in another container than the trainer's, or if the TrainJob is of a
    version without patches of the runtime."""
    if container not in ("", TRAINER_NODE):
        raise UsageError(
            f"{file}: a TrainJob runs its command in the container {TRAINER_NODE}; write it as job.pods.container, not "
            f"{container}"
        )
    if "podTemplateOverrides" in (job.get("spec") or {}):
        raise UsageError(
            f"{file}: podTemplateOverrides are of Kubeflow Trainer before 2.2; write them as runtimePatches, which "
            "torchaos needs"
        )


def adapt(job: dict[str, Any], change: PodChange) -> None:
    """Changes a TrainJob that `check` accepts."""
    spec = below(job, "spec")
    trainer = below(spec, "trainer")
    change.run_in(trainer)
    if change.cwd:  # neither a trainer nor a patch of its container has a working directory
        trainer["command"] = ["sh", "-c", 'cd "$0" && exec "$@"', change.cwd, *trainer["command"]]
    change.limit(spec)
    container: dict[str, Any] = {"name": TRAINER_NODE, "volumeMounts": list(_mounts(spec))}
    pod: dict[str, Any] = {}
    change.mark_node(pod)
    change.mount_in(container, below(pod, "spec"))
    if pod["spec"]:
        pod["spec"]["containers"] = [{**container, "volumeMounts": container["volumeMounts"][-1:]}]
    patch: Any = [{"name": TRAINER_NODE, "template": {"spec": {"template": pod}}}]
    for key in reversed(_PLACE):
        patch = {key: patch}
    spec["runtimePatches"] = [*(spec.get("runtimePatches") or []), {"manager": _MANAGER, **patch}]


def _mounts(spec: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The mounts of the trainer's container that are in the TrainJob's own patches."""
    replicated: Any = spec.get("runtimePatches") or []
    for key in _PLACE:
        replicated = [each.get(key) for each in replicated if isinstance(each, dict)]
    flat = [each for jobs in replicated if isinstance(jobs, list) for each in jobs if isinstance(each, dict)]
    for pod in pods_in([each for each in flat if each.get("name") == TRAINER_NODE]):
        for container in pod["spec"]["containers"]:
            if container.get("name") == TRAINER_NODE:
                yield from container.get("volumeMounts") or []


HOST_NETWORK = (
    "hostNetwork: the pods share the network of their machines, so a network fault would hit everything there; leave "
    "hostNetwork out"
)
_RUNTIMES = ("TrainingRuntime", "ClusterTrainingRuntime")  # of Kubeflow


@dataclass
class Manifest:
    """The objects of a manifest file. `nodes`: the objects whose pods are the nodes of the job, as KIND/NAME. All other
    objects are also made."""

    file: Path
    objects: list[dict[str, Any]] = field(default_factory=list)
    nodes: Sequence[str] = ()

    @classmethod
    def read(cls, file: Path, named: Sequence[str] = ()) -> Manifest:
        """The manifest in a file. `named`: the objects whose pods are the nodes, if the user names them. Raises
        UsageError if the file can't be read, or if its objects can't run a job."""
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
            if not isinstance(object_.get("spec") or {}, dict):
                raise UsageError(f"{file}: the spec of {object_['kind']} is no mapping; write a manifest of Kubernetes")
            if object_["kind"] in _RUNTIMES:
                raise UsageError(f"{file}: leave the {object_['kind']} out: its pods are not those of this job alone")
        return cls(file, objects, [name_of(one) for one in _with_nodes(file, objects, named)])

    @property
    def pods(self) -> list[dict[str, Any]]:
        """The pods and templates of pods that are nodes. Empty for a TrainJob, which does not contain its pods."""
        return list(_pods(filter(self._is_node, self.objects)))

    @property
    def count(self) -> int | None:
        """How many nodes run at the same time. None if not known."""
        counts = [count_of(object_) for object_ in filter(self._is_node, self.objects)]
        known = [count for count in counts if count is not None]
        return sum(known) if len(known) == len(counts) else None

    @property
    def kinds(self) -> str:
        """The kinds of the objects as kubectl names them, such as `job.batch`, separated by commas."""
        names = (f"{object_['kind'].lower()}.{group_of(object_)}".rstrip(".") for object_ in self.objects)
        return ",".join(dict.fromkeys(names))

    @property
    def default_container(self) -> str:
        """The container that runs the job if the scenario names none. Empty: the first container of each pod."""
        if any(map(is_train_job, filter(self._is_node, self.objects))):
            return TRAINER_NODE
        named = [[one.get("name") for one in pod["spec"]["containers"]] for pod in self.pods]
        ours = any(name.startswith("PyTorchJob/") for name in self.nodes) and all("pytorch" in names for names in named)
        return "pytorch" if ours else ""  # the operator's own rule

    def check(self, nodes: int, container: str) -> None:
        """Raises UsageError if the manifest makes another number of nodes, if a pod has no container of that name, or
        if the value of a variable in the container is not text."""
        if self.count not in (None, nodes):
            raise UsageError(
                f"{self.file}: {', '.join(self.nodes)} makes {counted(self.count or 0, 'pod')} for "
                f"{counted(nodes, 'node')}; correct job.nodes, or name the objects with the nodes in job.pods.objects"
            )
        for job in filter(is_train_job, filter(self._is_node, self.objects)):
            check(job, container, self.file)
        for pod in self.pods:
            about = self._container(pod["spec"], container or self.default_container)
            variables = about.get("env") or []
            if not isinstance(variables, list):
                raise UsageError(f"{self.file}: env is no list; write the variables as - {{name: ..., value: ...}}")
            for one in filter(lambda one: isinstance(one, dict), variables):
                if not isinstance(one.get("value", ""), str):
                    raise UsageError(
                        f"{self.file}: env {one.get('name')}: kubectl reads {json.dumps(one['value'])}, and no text; "
                        "write quotes"
                    )

    def changed(self, change: PodChange) -> str:
        """The manifest with the change, as JSON, because all readers read JSON alike, and YAML not. Raises UsageError
        if a pod has no container of that name."""
        objects = copy.deepcopy(self.objects)
        nodes = [object_ for object_ in objects if self._is_node(object_)]
        for object_ in objects:
            change.mark(object_)
            for pod in pods_in(object_):
                change.mark(pod)
        for object_ in filter(is_train_job, nodes):
            adapt(object_, change)
        for pod in _pods(nodes):
            change.mark_node(pod)
            self._change(pod["spec"], change)
        for owner in with_policy(nodes):
            owner["restartPolicy"] = "Never"
        return json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})

    def check_network(self, container: str) -> None:
        """Raises UsageError if a network fault would hit more than the pods, or if the container (empty: the default
        container) of a pod does not ask for the right to change the network."""
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
        """The container with that name; empty: the first. Raises UsageError if there is none."""
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
        # torchrun restarts the ranks; a restarted container would start the job a second time.
        spec["restartPolicy"] = "Never"
        change.limit(spec)
        change.mount_in(container, spec)


def shares_network(pod: Mapping[str, Any]) -> bool:
    """Whether the pod uses the network of its machine."""
    return bool(pod["spec"].get("hostNetwork"))


def _with_nodes(file: Path, objects: Sequence[dict[str, Any]], named: Sequence[str]) -> list[dict[str, Any]]:
    """The objects whose pods are the nodes: those that the user names or, if none are named, all objects of the only
    kind that can have nodes (single pods count only if there is no other such kind). Raises UsageError if no object is
    left, or if there are several kinds."""
    holders = [one for one in objects if any(pods_in(one)) or is_train_job(one)]
    if not holders:
        if wrong := next(filter(refused, objects), None):
            raise UsageError(f"{file}: {why_not(wrong)}")
        kinds = ", ".join(sorted({str(one["kind"]) for one in objects})) or "empty"
        raise UsageError(f"{file}: there is no pod in it ({kinds}); a pod is an object whose spec has containers")
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
    return pods_in([one for one in objects if not is_train_job(one)])


def _parts(found: Any) -> list[dict[str, Any]]:
    """The objects in a document. A `List` contains several."""
    if isinstance(found, dict) and isinstance(found.get("items"), list):
        return [item for item in found["items"] if isinstance(item, dict)]
    return [found if isinstance(found, dict) else {}]
