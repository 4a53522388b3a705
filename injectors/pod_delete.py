"""pod.delete: the pod of a node is deleted, as by a user, a controller or the descheduler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchaos.plugin import Seconds
from torchaos.plugin.families.clusters import PodDeath


@dataclass(frozen=True)
class Delete(PodDeath):
    """The API server deletes the pods of the target nodes. `grace`: the time between SIGTERM and SIGKILL; by default,
    the time that the pod's own specification gives. With 0, the pod is killed at once."""

    grace: Seconds | None = None

    name = "pod.delete"
    rights = (("delete", "pods"),)

    def end(self, pod: Any) -> None:
        pod.delete(None if self.grace is None else round(self.grace))
