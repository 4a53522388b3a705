"""pod.evict: the pod of a node is evicted, as when its machine is drained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchaos.plugin.families.clusters import PodDeath


@dataclass(frozen=True)
class Evict(PodDeath):
    """The API server evicts the pods of the target nodes. If a disruption budget forbids that, it refuses, and the
    fault does not land."""

    name = "pod.evict"
    rights = (("create", "pods/eviction"),)

    def end(self, pod: Any) -> None:
        pod.evict()
