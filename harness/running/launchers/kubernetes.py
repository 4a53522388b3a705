"""Nodes that are pods of a Kubernetes cluster. The run makes the objects of a manifest, and deletes them at its end. It
uses kubectl, with the rights of the user."""

from __future__ import annotations

import json
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, ClassVar

import xxhash
from pydantic import Field, model_validator

from torchaos.harness import registry
from torchaos.harness.base_classes import DRAWN
from torchaos.harness.host.cluster_tools import Kubectl
from torchaos.harness.interfaces import Capability, ChaosError, Handle, JobSpec, Node, RemoteLauncher, UsageError
from torchaos.harness.protocol.wire import ENV_ATTEMPT_BASE, ENV_PLAN, ENV_RUN_ID
from torchaos.harness.record.plan import Plan, counted
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.rollback.cluster_handles import LABEL, OVER, KubernetesObjects, label_of
from torchaos.harness.rollback.handles import JobProcesses
from torchaos.harness.running.launchers.node_channel import packed
from torchaos.harness.running.launchers.pod import Pod, find_pods, handles, in_order, join
from torchaos.harness.running.launchers.pod_manifest import HOST_NETWORK, NODE, Manifest, PodChange, shares_network
from torchaos.harness.scenario.field_types import Strict

_SPARE_S = 300.0  # seconds after the job's time-out; then Kubernetes ends the pods
_READY_S = 600.0  # seconds for the pods to get machines and pull images
_LOOK_S = 0.5
_ATTACH = (("get", "pods"), ("list", "pods"), ("create", "pods/exec"), ("get", "pods/log"))  # verbs and resources
_OF_THE_AGENT = frozenset({ENV_PLAN, ENV_RUN_ID, ENV_ATTEMPT_BASE, "PYTHONPATH"})


class Pods(Strict):
    """The pods of the launcher kubernetes: each node is a pod."""

    manifest: Annotated[
        str, Field(description="A file with the objects to make, relative to this file. In their pods, job.command "
                   "takes the place of the container's command.")
    ] = ""  # fmt: skip
    objects: Annotated[
        list[Annotated[str, Field(pattern=r"^[A-Za-z]+/.+$")]],
        Field(description="The objects of the manifest whose pods are the nodes, as KIND/NAME, such as Job/llm; needed "
              "only if it has several kinds with pods."),
    ] = Field(default_factory=list)  # fmt: skip
    attach: Annotated[
        str, Field(description="Instead of a manifest: the label of pods that run the job already, such as app=llm. "
                   "job.command is not started.")
    ] = ""  # fmt: skip
    container: Annotated[
        str, Field(description="The container that runs the job; by default the first of each pod.")
    ] = ""  # fmt: skip
    python: Annotated[str, Field(description="The Python in that container that has torchaos.")] = "python3"
    context: Annotated[str, Field(description="The context of kubectl; by default the current one.")] = ""
    namespace: Annotated[str, Field(description="The namespace; by default the one of the context.")] = ""

    @model_validator(mode="after")
    def _one_of_both(self) -> Pods:
        if bool(self.manifest) == bool(self.attach):
            raise ValueError("write manifest, for pods that torchaos makes, or attach, for pods that run already")
        return self


@dataclass
class Kubernetes(RemoteLauncher):
    """Starts the pods of the manifest that `job.pods` names. In the pods, the job's command replaces the container's
    command."""

    pods: Annotated[Pods | None, Field(description="For launcher: kubernetes.")] = None
    digest: str = field(default="", metadata={DRAWN: True})  # of the manifest; a twin belongs to one version of it
    cwd: str = field(default="", metadata={DRAWN: True})  # in the pods; empty: as in the image or manifest

    name: ClassVar[str] = "kubernetes"
    needs: ClassVar[frozenset[str]] = frozenset({"kubectl"})
    checks: ClassVar[Mapping[str, Capability]] = {
        "kubectl": Capability(
            "nodes that are pods of a Kubernetes cluster",
            lambda: shutil.which("kubectl"),
            "put kubectl on the PATH (https://kubernetes.io/docs/tasks/tools)",
        ),
    }
    makes: ClassVar[Mapping[str, str]] = {"kubectl": "hits pods"}
    offers: ClassVar[frozenset[str]] = frozenset({"links"})
    sets_rendezvous: ClassVar[bool] = True
    own_folders: ClassVar[bool] = True
    cannot: ClassVar[Mapping[str, str]] = {
        "network.link_down": "the pod's routes would be gone with its link; write network.partition",
        **dict.fromkeys(
            ("network.duplicate", "network.reorder", "network.corrupt"),
            "only the pods that receive the packets could prove it; write network.delay or network.loss",
        ),
        "network.dns": "the names are those of the cluster; write launcher: netns",
        "docker": "the nodes are pods; write launcher: docker",
        "endpoints": "the pods do not reach a proxy of the harness's; write launcher: local or netns",
        "node.reboot": "the command of a pod is started only once; write node.freeze or node.kill",
    }

    def __post_init__(self) -> None:
        self._given_up = threading.Event()
        self._found: Sequence[Pod] = ()  # of a job that was running before
        self._changes_network = False  # whether a fault changes the network of pods

    @staticmethod
    def settle(settings: dict[str, Any], absolute: Callable[[str], str]) -> None:
        if manifest := (settings.get("pods") or {}).get("manifest"):
            settings["pods"]["manifest"] = absolute(manifest)

    @property
    def host_programs(self) -> bool:
        return False

    @property
    def attached(self) -> str:
        return f"the pods with the label {self.pods.attach}" if self.pods and self.pods.attach else ""

    def plan(self, nodes: int, cwd: str) -> Kubernetes:
        if self.pods is None or self.pods.attach:
            return self
        self._manifest.check(nodes, self.pods.container)
        return replace(self, digest=xxhash.xxh3_128_hexdigest(Path(self.pods.manifest).read_bytes()), cwd=cwd)

    def refuses(self, injector: Any) -> str:
        if "links" not in injector.needs or self.pods is None:
            return ""
        if self.pods.attach:
            return "torchaos changes the network only of pods that it has made; write job.pods.manifest"
        self._manifest.check_network(self.pods.container)
        return ""

    @property
    def _given(self) -> Pods:
        if self.pods is None:
            raise UsageError("launcher: kubernetes needs job.pods, with the manifest of the pods")
        return self.pods

    @property
    def _manifest(self) -> Manifest:
        return Manifest.read(Path(self._given.manifest), self._given.objects)

    @property
    def _kubectl(self) -> Kubectl:
        return Kubectl(self._given.context, self._given.namespace)

    @property
    def _container(self) -> str:
        return self._given.container or self._manifest.default_container

    def _objects(self, spec: JobSpec) -> KubernetesObjects:
        where = self._kubectl
        return KubernetesObjects(spec.env[ENV_RUN_ID], self._manifest.kinds, where.context, where.namespace)

    def give_up(self) -> None:
        self._given_up.set()

    def resources(self, spec: JobSpec) -> Sequence[Handle]:
        """The handles of the objects that the run makes, or of the agents in pods that run already. Raises UsageError
        if the cluster does not answer, or if the user lacks a right; some rights are needed for the undo."""
        plan, kubectl = Plan.read(RunDir(spec.log.parent.parent).plan), self._kubectl
        self._changes_network = "links" in plan.needs
        if self._given.attach:
            _check_rights(kubectl, [*_ATTACH, *_rights_of(plan)])
            self._found = find_pods(spec, kubectl, self._given.attach, self._given.container, self._given.python)
            return handles(spec, self._found)
        manifest = self._manifest
        resources = ["pods" if kind == "pod" else kind for kind in manifest.kinds.split(",")]
        made = [(verb, resource) for resource in resources for verb in ("create", "delete", "list")]
        _check_rights(kubectl, [*made, ("delete", "pods"), *_ATTACH, *_rights_of(plan)])
        return (self._objects(spec), JobProcesses(spec.env[ENV_RUN_ID]))

    def create(self, spec: JobSpec) -> Sequence[Pod]:
        """Makes the objects, waits until the pods run, and gives them the run directory. If the pods run already, only
        starts the agents in them. Raises ChaosError if the pods do not come up."""
        if self._given.attach:
            join(spec, self._found)
            self.shares_folder = False
            return self._found
        kubectl, manifest, python, container = self._kubectl, self._manifest, self._given.python, self._container
        run_dir = spec.log.parent.parent
        env = {name: value for name, value in spec.own_env.items() if name not in _OF_THE_AGENT}
        wrapper = (
            python, "-m", "torchaos.harness", "exec", "--run", str(run_dir),
            "--served", str(spec.submission), "--", *spec.argv,
        )  # fmt: skip
        label = (LABEL, label_of(spec.env[ENV_RUN_ID]))
        change = PodChange(
            label, wrapper, env, PurePosixPath(run_dir.parent), round(spec.timeout_s + _SPARE_S), container, self.cwd,
        )  # fmt: skip
        try:
            self._objects(spec).remove()  # those of an earlier submission have the same names
            kubectl.ask("create", "--filename=-", given=manifest.changed(change).encode(), timeout_s=60.0)
            found = in_order(self._await_pods(kubectl, (NODE, label[1]), spec.nodes))
            if self._changes_network and any(map(shares_network, found)):
                raise ChaosError(f"the cluster has changed the pods: {HOST_NETWORK}")
            pods = [Pod.of(index, raw, container, python, kubectl) for index, raw in enumerate(found)]
            addresses = [str(raw["status"]["podIP"]) for raw in found]
            shared = [_hand_over(pod, run_dir, addresses, spec) for pod in pods]
            self.shares_folder = all(shared)
        except OSError as error:
            raise ChaosError(str(error)) from error
        return pods

    def _await_pods(self, kubectl: Kubectl, label: tuple[str, str], count: int) -> list[dict[str, Any]]:
        """The running pods. Raises ChaosError if a pod ends, if there are fewer than `count` after _READY_S seconds, or
        if the run ends."""
        end = time.monotonic() + _READY_S
        while True:
            listed = json.loads(kubectl.ask("get", "pods", f"--selector={'='.join(label)}", "--output=json"))["items"]
            states = [_state(pod) for pod in listed]
            over = next((pod for pod in listed if pod["status"]["phase"] in OVER), None)
            if over:
                raise ChaosError(f"{_state(over)}, before the others were up{_last_words(kubectl, over)}")
            if len(listed) >= count and all(pod["status"]["phase"] == "Running" for pod in listed):
                return list(listed)
            if time.monotonic() > end:
                raise ChaosError(
                    f"{counted(count, 'pod', 'is/are')} not running after {_READY_S:g} s: "
                    f"{'; '.join(states) or 'there is none'}"
                )
            if self._given_up.wait(_LOOK_S):
                raise ChaosError(
                    f"the run ended while it waited for {counted(count, 'pod')}: {'; '.join(states) or 'there is none'}"
                )

    def commands(self, spec: JobSpec, nodes: Sequence[Node], wrapper: Sequence[str]) -> Sequence[Sequence[str]]:
        """Commands that end when the containers end. The pods run the job without another command."""
        return [node.until_over() for node in nodes if isinstance(node, Pod)]

    def gone(self, node: Node) -> bool:
        assert isinstance(node, Pod)
        return node.gone()

    def exit_code(self, node: Node) -> int | None:
        assert isinstance(node, Pod)
        return node.exit_code()


def _rights_of(plan: Plan) -> list[tuple[str, str]]:
    """The rights that the faults need: pairs of verb and resource."""
    found = (registry.find("injectors", fault.inject) for fault in plan.faults)
    return [right for injector in found for right in getattr(injector, "rights", ())]


def _check_rights(kubectl: Kubectl, wanted: Sequence[tuple[str, str]]) -> None:
    """Raises UsageError with all missing rights, or if the cluster does not answer."""
    try:
        missing = [f"{verb} {what}" for verb, what in dict.fromkeys(wanted) if not kubectl.may(verb, what)]
    except OSError as error:
        raise UsageError(
            f"the cluster does not answer ({error}); correct job.pods.context or the kubeconfig"
        ) from error
    if missing:
        where = f" in the namespace {kubectl.namespace}" if kubectl.namespace else ""
        raise UsageError(
            f"this user may not {', '.join(missing)}{where}; the documentation has a Role, in 'On Kubernetes', 'Rights'"
        )


def _state(pod: Mapping[str, Any]) -> str:
    """The state of a pod as a clause, with the reason why it waits or has ended."""
    status = pod["status"]
    states = [container["state"] for container in status.get("containerStatuses") or []]
    waits = [state[word] for word in ("waiting", "terminated") for state in states if word in state]
    waits += [condition for condition in status.get("conditions") or [] if condition.get("status") == "False"]
    why = next((f" ({wait.get('reason')}: {wait.get('message', '')})" for wait in waits if wait.get("reason")), "")
    return f"pod {pod['metadata']['name']} is {status['phase']}{why}"


def _last_words(kubectl: Kubectl, pod: Mapping[str, Any]) -> str:
    """The last lines that the pod's containers printed, as an addition to a sentence. Empty if they printed nothing, or
    if the cluster does not answer."""
    with suppress(OSError):
        said = kubectl.ask("logs", pod["metadata"]["name"], "--all-containers", "--tail=3").split()
        return f"; its last words: {' '.join(said)[-300:]}" if said else ""
    return ""


def _hand_over(pod: Pod, run_dir: Path, addresses: Sequence[str], spec: JobSpec) -> bool:
    """Gives a pod the run directory, unless the pod sees the same folder as this machine. Returns whether it does."""
    argv = pod.argv([sys.executable, "-m", "torchaos.harness", "node", "--receive", str(run_dir)])
    given = packed(run_dir, pod.index, addresses, spec.submission, int(spec.env[ENV_ATTEMPT_BASE]))
    try:
        return "shared" in Kubectl.said(argv, given, 60.0)
    except OSError as error:
        if not pod.gone():
            raise
        words = _last_words(pod.kubectl, {"metadata": {"name": pod.name}})
        raise OSError(f"pod {pod.name} has ended before it got the run{words or f' ({error})'}") from error
