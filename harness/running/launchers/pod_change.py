"""The changes to the pods of a manifest, so that they run the job under the agent of torchaos."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

NODE = "torchaos.node"  # the label of the pods that are nodes: a manifest may make others beside them
_VOLUME = "torchaos-run"
_SAYS_MORE = {("LOGLEVEL", "INFO"): ("DEBUG", "NOTSET")}  # a level that torchaos needs, and those that print it too


@dataclass(frozen=True)
class PodChange:
    """`container`: the name of the container that runs the job; empty: the first. `folder`: the parent of the run
    directory; an empty volume is mounted there, unless a volume of the container contains it. `limit_s`: the pod is
    ended after this many seconds. `cwd`: the working directory of the job; empty: that of the image or manifest. Values
    of a wrong type in a manifest are left as they are: the API server refuses them."""

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
        its place, because Kubernetes expands $(NAME) only in the variables after it."""
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
    """The mapping below this key, which is made if it is missing."""
    if not isinstance(found.get(key), dict):
        found[key] = {}
    there: dict[str, Any] = found[key]
    return there
