"""The handles that undo what a run changes in a Kubernetes or a Slurm cluster: objects, jobs and steps that the run
made, agents in pods, and the states of machines."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torchaos.harness.host.cluster_tools import Kubectl, about_node, ask
from torchaos.harness.rollback.file_handles import Touches

LABEL = "torchaos.run"
OVER = ("Succeeded", "Failed")  # phases of a pod
_PODS = "pods"
_LOOK_S = 0.5
_LEFT = 4  # exit code of `torchaos node`: something is left to undo
_GRACE_S = 10  # seconds from SIGTERM to SIGKILL; the agents in the pods need less to undo everything
_DELETE_S = 35.0  # seconds; a handle has 45 s for its undo


@dataclass(frozen=True)
class KubernetesObjects:
    """All objects of these kinds (such as `job.batch`) that have the label of this run, and its pods. Undo deletes
    them. Before they end, the agents in the pods get SIGTERM, and undo everything there."""

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

    def undo(self) -> None:
        if self.is_undone():
            return
        self._kubectl.ask(
            "delete", self._all, *self._ours, "--ignore-not-found", "--wait=false", f"--grace-period={_GRACE_S}"
        )  # fmt: skip
        # Not by `kubectl delete --wait`, which does not wait if the user has no right to watch.
        self._await(self.is_undone)

    def remove(self) -> None:
        """Deletes the objects, and waits until their names can be used again."""
        self.undo()
        self._await(self._gone)

    def is_undone(self) -> bool:
        """Whether nothing of the run is still running. A deleted pod whose containers have ended counts as gone,
        although the cluster still cleans up after it."""
        if self._gone():
            return True
        found = self._get("json")  # empty if the last object has just disappeared
        return all(map(_has_ended, json.loads(found)["items"] if found.strip() else []))

    def _gone(self) -> bool:
        return not self._get("name").strip()

    def _get(self, output: str) -> str:
        return self._kubectl.ask("get", self._all, *self._ours, "--ignore-not-found", f"--output={output}")

    def _await(self, over: Callable[[], bool]) -> None:
        end = time.monotonic() + _DELETE_S
        while not over():
            if time.monotonic() > end:
                raise TimeoutError(f"the cluster has not deleted everything after {_DELETE_S:g} s")
            time.sleep(_LOOK_S)

    @property
    def _kubectl(self) -> Kubectl:
        return Kubectl(self.context, self.namespace)

    @property
    def _all(self) -> str:
        return ",".join(dict.fromkeys([*self.kinds.split(","), _PODS]))

    @property
    def _ours(self) -> tuple[str, ...]:
        return (f"--selector={LABEL}={label_of(self.run_id)}",)


@dataclass(frozen=True)
class KubernetesAgent:
    """The agent of a node, with the name `mark`, in a pod that torchaos did not make. Undo waits until the agent and
    its reaper have ended, and undoes what they left. `uid`: the uid of the pod. If the pod is gone, or another pod has
    its name, undo does nothing."""

    kind: ClassVar[str] = "kubernetes_agent"
    mark: str
    pod: str
    uid: str
    container: str
    python: str
    context: str = ""
    namespace: str = ""

    def __post_init__(self) -> None:
        if not (self.mark and self.pod and self.uid):
            raise ValueError("an agent in a pod can't be found without its name, its pod and the uid of the pod")

    def touches(self) -> Touches:
        return Touches(run_id=self.mark)

    def undo(self) -> None:
        if not self._is_gone() and self._in_pod("--recover"):
            raise OSError(f"in pod {self.pod}, not everything could be undone")

    def is_undone(self) -> bool:
        return self._is_gone() or not self._in_pod("--left")

    def _in_pod(self, option: str) -> int:
        """The exit code of a command in the pod. Raises OSError if the pod does not answer."""
        command = [self.python, "-m", "torchaos.harness", "node", option, self.mark]
        argv = self._kubectl.argv("exec", self.pod, f"--container={self.container}", "--", *command)
        code, said = self._kubectl.outcome(argv, _DELETE_S)
        if code not in (0, _LEFT):
            raise OSError(f"pod {self.pod}: {said[-300:]}")
        return code

    def _is_gone(self) -> bool:
        """Whether the pod or its container has ended. Then nothing that was in it is left."""
        said = self._kubectl.ask("get", "pod", self.pod, "--ignore-not-found", "--output=json")
        found = json.loads(said) if said.strip() else {}
        return (
            not found
            or found["metadata"]["uid"] != self.uid
            or "running" not in status_of(found, self.container).get("state", {})
        )

    @property
    def _kubectl(self) -> Kubectl:
        return Kubectl(self.context, self.namespace)


@dataclass(frozen=True)
class KubernetesNode:
    """A machine of the cluster that a fault closed for new pods, with an annotation that names the run. Undo opens the
    machine again, unless it has another annotation by now."""

    kind: ClassVar[str] = "kubernetes_node"
    name: str
    run_id: str
    context: str = ""

    def __post_init__(self) -> None:
        if not self.run_id or not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", self.name):
            raise ValueError("a machine of Kubernetes can't be opened again without its name and the id of the run")

    def touches(self) -> Touches:
        return Touches(run_id=self.run_id)

    def close(self) -> None:
        """Closes the machine for new pods. Raises OSError if it is closed already: then torchaos must not open it."""
        if not self.is_open():
            raise OSError(f"machine {self.name} takes no pods already")
        self._patch(label_of(self.run_id), True)

    def is_open(self) -> bool:
        return not self._now().get("spec", {}).get("unschedulable", False)

    def undo(self) -> None:
        if not self.is_undone():
            self._patch(None, None)

    def is_undone(self) -> bool:
        annotations: Mapping[str, str] = self._now()["metadata"].get("annotations") or {}
        return annotations.get(LABEL) != label_of(self.run_id)

    def _now(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = json.loads(Kubectl(self.context).ask("get", "node", self.name, "--output=json"))
        return found

    def _patch(self, annotation: str | None, closed: bool | None) -> None:
        change = {"metadata": {"annotations": {LABEL: annotation}}, "spec": {"unschedulable": closed}}
        Kubectl(self.context).ask("patch", "node", self.name, "--type=merge", f"--patch={json.dumps(change)}")


def status_of(pod: Mapping[str, Any], container: str) -> Mapping[str, Any]:
    """The status of a container of a pod. Empty if it has none yet."""
    status = pod["status"]
    found = [*(status.get("containerStatuses") or []), *(status.get("ephemeralContainerStatuses") or [])]
    return next((one for one in found if one["name"] == container), {})


def _has_ended(found: Mapping[str, Any]) -> bool:
    """Whether an object is a pod that was deleted and has no container that may still run. After a kubelet has removed
    a container, it may report that the container waits, as before its start; then the phase of the pod decides."""
    status = found.get("status", {})
    states = [container["state"] for container in status.get("containerStatuses") or []]
    if "deletionTimestamp" not in found["metadata"] or any("running" in state for state in states):
        return False
    return status.get("phase") in OVER or (bool(states) and all("terminated" in state for state in states))


def label_of(run_id: str) -> str:
    """The value of the label of a run: at most 63 characters, the first a letter or digit. It is made from the end of
    the run's id, which is random, so that runs have different labels."""
    return re.sub(r"^[^A-Za-z0-9]+", "", run_id[-63:])


_END_S, _KILL_S = 15.0, 25.0  # seconds to wait after SIGTERM, and after SIGKILL; Slurm's KillWait is usually 30 s
_SLURM_LOOK_S = 0.2


@dataclass(frozen=True)
class SlurmWork:
    """The jobs with this name or, if `job` is given, the steps with this name in that job. Undo cancels them: first
    with SIGTERM, after which the agents of the nodes undo everything."""

    kind: ClassVar[str] = "slurm_work"
    name: str
    job: str = ""

    def __post_init__(self) -> None:
        if not self.name or not (self.job.isdigit() or not self.job):
            raise ValueError("work of Slurm can't be found without its name, or with such a job")

    def touches(self) -> Touches:
        return Touches(run_id=self.name)

    def undo(self) -> None:
        for signal, wait_s in ((["--signal=TERM"] if self.job else [], _END_S), ([], _KILL_S)):
            end = time.monotonic() + wait_s
            # A completing job is cancelled, too: it may have been requeued, and would start again.
            if ids := self._ids(completing=True):
                ask(["scancel", "--quiet", *signal, *ids])
            while self._ids() and time.monotonic() < end:
                time.sleep(_SLURM_LOOK_S)
        if left := self._ids():
            raise TimeoutError(f"Slurm has not ended {', '.join(left)} yet")

    def is_undone(self) -> bool:
        return not self._ids()

    def _ids(self, completing: bool = False) -> list[str]:
        """The ids of the jobs or steps that are left. `completing`: include jobs that have ended but are still cleaned
        up by Slurm; the Epilog of a site may take minutes. Steps are included in any case. Raises OSError if Slurm does
        not answer."""
        which = ["--steps", "--jobs", self.job] if self.job else ["--me", "--name", self.name]
        columns = "%i|%j" if self.job else "%i|%j|%T"
        lines = ask(["squeue", "--noheader", f"--format={columns}", *which]).splitlines()
        found = [(*line.strip().split("|"), "")[:3] for line in lines]
        return [id_ for id_, name, state in found if name == self.name and (completing or state != "COMPLETING")]


@dataclass(frozen=True)
class SlurmNodeState:
    """A node that a fault takes out of service, with a reason that names the run. Undo puts the node back into service,
    unless it has another reason by now. Needs the right to administer the cluster."""

    kind: ClassVar[str] = "slurm_node"
    host: str
    run_id: str

    def __post_init__(self) -> None:
        if not self.run_id or not self.host or self.host.startswith("-"):
            raise ValueError("a node of Slurm can't be put back without its name and the id of the run")

    @property
    def reason(self) -> str:
        return f"torchaos:{self.run_id}"

    def touches(self) -> Touches:
        return Touches(run_id=self.run_id)

    def undo(self) -> None:
        if not self.is_undone():
            ask(["scontrol", "update", f"nodename={self.host}", "state=resume"])

    def is_undone(self) -> bool:
        return about_node(self.host)[1] != self.reason
