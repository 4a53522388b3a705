"""The handle of objects that a run made in a Kubernetes cluster."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from torchaos.harness.machine.kubectl import Kubectl
from torchaos.harness.undo.touches import Touches

LABEL = "torchaos.run"
_PODS = "pods"
_DELETE_S = 120.0  # seconds; pods have 30 s to end by themselves, unless their manifest gives them more


@dataclass(frozen=True)
class KubernetesObjects:
    """All objects of these kinds (`job.batch`) that carry the label of this run, and its pods. Undo deletes them: first
    the agents in the pods get SIGTERM, and undo everything there."""

    kind: ClassVar[str] = "kubernetes_objects"
    run_id: str
    kinds: str  # with commas between them
    context: str = ""
    namespace: str = ""

    def __post_init__(self) -> None:
        if not self.run_id or not re.fullmatch(r"[a-z][a-z0-9.-]*(,[a-z][a-z0-9.-]*)*", self.kinds):
            raise ValueError("objects of Kubernetes can't be found without the id of their run, or by such kinds")

    def touches(self) -> Touches:
        return Touches(run_id=self.run_id)

    def restore(self) -> None:
        if self.restored():
            return
        self._kubectl.ask(
            "delete", self._all, *self._ours, "--ignore-not-found", "--wait", f"--timeout={_DELETE_S:.0f}s",
            timeout_s=_DELETE_S + 30,
        )  # fmt: skip

    def restored(self) -> bool:
        return not self._kubectl.ask("get", self._all, *self._ours, "--ignore-not-found", "--output=name").strip()

    @property
    def _kubectl(self) -> Kubectl:
        return Kubectl(self.context, self.namespace)

    @property
    def _all(self) -> str:
        return ",".join(dict.fromkeys([*self.kinds.split(","), _PODS]))

    @property
    def _ours(self) -> tuple[str, ...]:
        return (f"--selector={LABEL}={label_of(self.run_id)}",)


def label_of(run_id: str) -> str:
    """The value of the label of a run: at most 63 characters, which begin with a letter or digit. The last characters
    of a run's id are random, so they tell runs apart."""
    return re.sub(r"^[^A-Za-z0-9]+", "", run_id[-63:])
