"""A TrainJob of Kubeflow Trainer. Its pods are not in it, but in a runtime of the cluster. So the command and the
environment go to the TrainJob's trainer, and everything else into a patch of the runtime (trainjob_types.go in
pkg/apis/trainer/v1alpha1 of kubeflow/trainer; patches came with version 2.2)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torchaos.harness.contracts import UsageError
from torchaos.harness.running.launchers.pod_change import PodChange, below
from torchaos.harness.running.launchers.pod_templates import pods_in

NODE = "node"  # the replicated job, and the container in it, for which the trainer's command is (pkg/constants)
_MANAGER = "torchaos/run"  # whose patch it is; the webhook wants a name with a slash
_PLACE = ("trainingRuntimeSpec", "template", "spec", "replicatedJobs")


def is_train_job(object_: Mapping[str, Any]) -> bool:
    return object_["kind"] == "TrainJob" and str(object_["apiVersion"]).startswith("trainer.kubeflow.org/")


def check(job: Mapping[str, Any], container: str, file: Path) -> None:
    """Raises UsageError if the job is to run in another container than that of the trainer, or if the TrainJob is of a
    version without patches of the runtime."""
    if container not in ("", NODE):
        raise UsageError(
            f"{file}: a TrainJob runs its command in the container {NODE}; write it as job.pods.container, not "
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
    container: dict[str, Any] = {"name": NODE, "volumeMounts": list(_mounts(spec))}
    pod: dict[str, Any] = {}
    change.mark_node(pod)
    change.mount_in(container, below(pod, "spec"))
    if pod["spec"]:
        pod["spec"]["containers"] = [{**container, "volumeMounts": container["volumeMounts"][-1:]}]
    patch: Any = [{"name": NODE, "template": {"spec": {"template": pod}}}]
    for key in reversed(_PLACE):
        patch = {key: patch}
    spec["runtimePatches"] = [*(spec.get("runtimePatches") or []), {"manager": _MANAGER, **patch}]


def _mounts(spec: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The mounts of the trainer's container in the patches of the TrainJob itself."""
    replicated: Any = spec.get("runtimePatches") or []
    for key in _PLACE:
        replicated = [each.get(key) for each in replicated if isinstance(each, dict)]
    flat = [each for jobs in replicated if isinstance(jobs, list) for each in jobs if isinstance(each, dict)]
    for pod in pods_in([each for each in flat if each.get("name") == NODE]):
        for container in pod["spec"]["containers"]:
            if container.get("name") == NODE:
                yield from container.get("volumeMounts") or []
