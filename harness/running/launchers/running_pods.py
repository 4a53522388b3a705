"""Pods that run the job already, made by somebody else. In each, `kubectl exec` starts an agent beside the job. The
agent ends with the run; the pods and the job go on."""

from __future__ import annotations

import json
import select
import subprocess
import sys
from collections.abc import Sequence

from torchaos.harness.agent.wire import ENV_RUN_ID
from torchaos.harness.contracts import ChaosError, Handle, JobSpec, UsageError
from torchaos.harness.machine.kubectl import Kubectl
from torchaos.harness.running.launchers.handover import packed
from torchaos.harness.running.launchers.pod import Pod, in_order
from torchaos.harness.running.launchers.words import mark_of
from torchaos.harness.undo.handles import JobProcesses
from torchaos.harness.undo.kubernetes import KubernetesAgent

READY = b"attached"
_READY_S = 60.0
_WORDS_S = 5.0  # seconds to wait for the reason of an agent that did not start
# Words of kubectl, runc and Python if the container has no torchaos.
_LACKS = ("executable file not found", "no such file or directory", "No module named")


def find_pods(spec: JobSpec, kubectl: Kubectl) -> list[Pod]:
    """The running pods with the label, in their order. Raises UsageError unless there are as many as the job has nodes,
    and ChaosError if the cluster does not answer."""
    label, container = str(spec.pods["attach"]), str(spec.pods.get("container", ""))
    try:
        listed = json.loads(kubectl.ask("get", "pods", f"--selector={label}", "--output=json"))["items"]
    except OSError as error:
        raise ChaosError(str(error)) from error
    running = [
        pod for pod in listed if pod["status"]["phase"] == "Running" and "deletionTimestamp" not in pod["metadata"]
    ]
    if len(running) != spec.nodes:
        names = ", ".join(pod["metadata"]["name"] for pod in running) or "none"
        raise UsageError(f"the job has {spec.nodes} nodes, and these running pods have the label {label}: {names}")
    python = str(spec.pods["python"])
    pods = [Pod.of(index, raw, container, python, kubectl) for index, raw in enumerate(in_order(running))]
    if missing := next((pod for pod in pods if not pod.id), None):
        raise UsageError(f"pod {missing.name} has no running container {missing.container}; correct job.pods.container")
    for pod in pods:
        _check(pod, _mark(spec, pod))
    return pods


def _check(pod: Pod, mark: str) -> None:
    """Raises UsageError if the container has no torchaos, and ChaosError if the cluster does not answer."""
    argv = pod.argv([sys.executable, "-m", "torchaos.harness", "node", "--left", mark])
    try:
        code, said = Kubectl.outcome(argv, _READY_S)
    except OSError as error:
        raise ChaosError(str(error)) from error
    if code:
        raise UsageError(f"pod {pod.name}, container {pod.container}: {_why(said, pod)}")


def handles(spec: JobSpec, pods: Sequence[Pod]) -> list[Handle]:
    """The undo of everything that `join` starts: agents in the pods, and the kubectls that started them."""
    agents = [
        KubernetesAgent(
            _mark(spec, pod), pod.name, pod.uid, pod.container, pod.python, pod.kubectl.context, pod.kubectl.namespace
        ) for pod in pods
    ]  # fmt: skip
    return [*agents, JobProcesses(spec.env[ENV_RUN_ID])]


def join(spec: JobSpec, pods: Sequence[Pod]) -> None:
    """Starts the agents. Raises UsageError if an agent can't start in a container."""
    root = spec.log.parent.parent
    for pod in pods:
        process = subprocess.Popen(
            pod.argv([sys.executable, "-m", "torchaos.harness", "node", "--attach", _mark(spec, pod)]),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=spec.env,
            start_new_session=True,
        )  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with process.stdin:
                process.stdin.write(packed(root, pod.index, [other.name for other in pods]))
        except BrokenPipeError:
            pass  # its words say why
        ready, _, _ = select.select([process.stdout], [], [], _READY_S)
        if not ready or process.stdout.readline().strip() != READY:
            process.stdin = None
            try:
                words = process.communicate(timeout=_WORDS_S)[1]
            except subprocess.TimeoutExpired:
                process.kill()
                words = process.communicate()[1]
            raise UsageError(f"pod {pod.name}, container {pod.container}: {_why(words.decode(errors='replace'), pod)}")


def _mark(spec: JobSpec, pod: Pod) -> str:
    return mark_of(spec.env[ENV_RUN_ID], pod.index, 0)


def _why(said: str, pod: Pod) -> str:
    words = " ".join(said.split())[-400:]
    if any(text.lower() in words.lower() for text in _LACKS):
        return (
            f"{pod.python} has no torchaos there ({words}). Put torchaos into the image, or name a container that has "
            "it and shares the pod's processes: a sidecar, or one that `kubectl debug --target` adds"
        )
    return words.removeprefix("error: ") or f"the agent did not start within {_READY_S:g} s"
