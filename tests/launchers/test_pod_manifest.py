"""How a Kubernetes manifest is changed for a run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml

from torchaos.harness.interfaces import ChaosError, UsageError
from torchaos.harness.running.launchers.kubernetes import Kubernetes
from torchaos.harness.running.launchers.pod import in_order
from torchaos.harness.running.launchers.pod_manifest import Manifest, PodChange

CHANGE = PodChange(
    ("torchaos.run", "run-1"), ["python3", "exec"], {"A": "1"}, PurePosixPath("/home/me/runs"), 900, "trainer"
)
POD = """
    metadata: {labels: {app: llm}}
    spec:
      restartPolicy: OnFailure
      containers:
      - {name: sidecar, image: proxy}
      - {name: trainer, image: train, command: [python], args: [train.py],
         env: [{name: A, value: "0"}, {name: B, value: b}]}
"""
JOB = f"""
apiVersion: batch/v1
kind: Job
metadata: {{name: llm}}
spec:
  completions: 2
  template: {POD}
"""
PYTORCH_JOB = """
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata: {name: llm}
spec:
  pytorchReplicaSpecs:
    Master: {replicas: 1, template: {metadata: {}, spec: {containers: [{name: trainer, image: train}]}}}
    Worker:
      replicas: 3
      restartPolicy: OnFailure
      template: {metadata: {}, spec: {containers: [{name: trainer, image: train}]}}
"""

TRAIN_JOB = """
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata: {name: llm}
spec:
  runtimeRef: {name: torch-distributed}
  trainer:
    image: train
    command: [python]
    args: [train.py]
    numNodes: 2
    env: [{name: A, value: "0"}, {name: B, value: b}]
"""


def _changed(folder: Path, text: str, change: PodChange = CHANGE) -> list[dict[str, Any]]:
    (folder / "job.yaml").write_text(text)
    items: list[dict[str, Any]] = json.loads(Manifest.read(folder / "job.yaml").changed(change))["items"]
    return items


@pytest.mark.parametrize("kind", ["Deployment", "StatefulSet"])
def test_a_kind_whose_pods_never_end(tmp_path: Path, kind: str) -> None:
    """The API server takes only restartPolicy: Always in such an object, but torchrun must restart the ranks."""
    with pytest.raises(UsageError, match=f"the pods of kind {kind} can't be the nodes: Kubernetes itself starts"):
        _changed(tmp_path, JOB.replace("batch/v1", "apps/v1").replace("kind: Job", f"kind: {kind}"))


def test_the_pod_runs_the_job_under_the_agent(tmp_path: Path) -> None:
    """The named container gets command, environment and a folder for the run. Its other variables, the other container,
    and everything else stay as they are."""
    (job,) = _changed(tmp_path, JOB)
    pod = job["spec"]["template"]
    sidecar, trainer = pod["spec"]["containers"]
    assert sidecar == {"name": "sidecar", "image": "proxy"}
    assert trainer == {
        "name": "trainer", "image": "train", "command": ["python3", "exec"],
        "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "b"}],
        "volumeMounts": [{"name": "torchaos-run", "mountPath": "/home/me/runs"}],
    }  # fmt: skip
    assert pod["spec"]["volumes"] == [{"name": "torchaos-run", "emptyDir": {}}]
    assert (pod["spec"]["restartPolicy"], pod["spec"]["activeDeadlineSeconds"]) == ("Never", 900)
    assert pod["metadata"]["labels"] == {"app": "llm", "torchaos.run": "run-1", "torchaos.node": "run-1"}
    assert job["metadata"] == {"name": "llm", "labels": {"torchaos.run": "run-1"}}
    assert job["spec"]["completions"] == 2


def test_every_template_of_an_operator(tmp_path: Path) -> None:
    """All pods of an object have their command changed, wherever they are in it."""
    (job,) = _changed(tmp_path, PYTORCH_JOB)
    specs = job["spec"]["pytorchReplicaSpecs"]
    commands = [specs[role]["template"]["spec"]["containers"][0]["command"] for role in ("Master", "Worker")]
    assert commands == [["python3", "exec"]] * 2
    assert specs["Worker"]["replicas"] == 3
    assert Manifest.read(tmp_path / "job.yaml").kinds == "pytorchjob.kubeflow.org"


def test_a_policy_beside_a_template(tmp_path: Path) -> None:
    """Kubeflow's operator writes the restartPolicy of a replica over the policy in its template, so it must be Never
    too: a container that is started again would be a second agent."""
    (job,) = _changed(tmp_path, PYTORCH_JOB)
    specs = job["spec"]["pytorchReplicaSpecs"]
    assert specs["Worker"]["restartPolicy"] == "Never"
    assert "restartPolicy" not in specs["Master"]
    assert "restartPolicy" not in job["spec"]


def test_a_volume_that_has_the_runs(tmp_path: Path) -> None:
    """No volume is added if one of the container's holds the folder already: it may be shared."""
    mounted = JOB.replace("image: train,", "image: train, volumeMounts: [{name: home, mountPath: /home/me}],")
    (job,) = _changed(tmp_path, mounted)
    spec = job["spec"]["template"]["spec"]
    assert spec["containers"][1]["volumeMounts"] == [{"name": "home", "mountPath": "/home/me"}]
    assert "volumes" not in spec


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (JOB, 1), (JOB.replace("completions: 2", "completions: 4\n  parallelism: 2"), 2),
        (JOB.replace("completions: 2", "completions: 2\n  parallelism: 4"), 2), (PYTORCH_JOB, 4), (TRAIN_JOB, 2),
        (f"apiVersion: v1\nkind: Pod\n{POD}---\napiVersion: v1\nkind: Pod\n{POD}".replace("\n    ", "\n"), 2),
    ],
)  # fmt: skip
def test_how_many_pods(tmp_path: Path, text: str, count: int | None) -> None:
    """Each supported kind says in its own way how many pods run at the same time."""
    (tmp_path / "job.yaml").write_text(text)
    assert Manifest.read(tmp_path / "job.yaml").count == count


def test_a_part_without_pods(tmp_path: Path) -> None:
    """The API server refuses a JobSet in which one of the Jobs has no template; here its pods are only not counted."""
    whole = "{name: a, template: {spec: {template: {spec: {containers: [{name: a, image: b}]}}}}}"
    head = "apiVersion: jobset.x-k8s.io/v1alpha2\nkind: JobSet\nmetadata: {name: a}\n"
    (tmp_path / "job.yaml").write_text(f"{head}spec: {{replicatedJobs: [{whole}, {{name: b}}]}}\n")
    assert Manifest.read(tmp_path / "job.yaml").count is None


def test_the_working_directory(tmp_path: Path) -> None:
    """The directory of the scenario is that of the container. Without one, that of the image or the manifest stays."""
    (job,) = _changed(tmp_path, JOB, replace(CHANGE, cwd="/workspace"))
    assert job["spec"]["template"]["spec"]["containers"][1]["workingDir"] == "/workspace"
    (job,) = _changed(tmp_path, JOB)
    assert "workingDir" not in job["spec"]["template"]["spec"]["containers"][1]


def test_a_shorter_limit_of_the_user(tmp_path: Path) -> None:
    """The pod's own time limit is kept if it is shorter."""
    (job,) = _changed(tmp_path, JOB.replace("restartPolicy:", "activeDeadlineSeconds: 60\n      restartPolicy:"))
    assert job["spec"]["template"]["spec"]["activeDeadlineSeconds"] == 60


def test_a_train_job(tmp_path: Path) -> None:
    """The pods of a TrainJob are in a runtime of the cluster. The command and the environment go to its trainer, and
    the label and the folder for the run into a patch of the runtime. A patch of the user's stays. Kubeflow's own models
    of these objects know each field of the result."""
    import kubeflow_trainer_api.models as kubeflow  # two seconds

    text = TRAIN_JOB + "  runtimePatches: [{manager: a.b/c}]"
    (job,) = _changed(tmp_path, text, replace(CHANGE, container="node"))
    spec = job["spec"]
    assert spec["trainer"] == {
        "image": "train", "command": ["python3", "exec"], "numNodes": 2,
        "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "b"}],
    }  # fmt: skip
    assert spec["activeDeadlineSeconds"] == 900
    theirs, ours = spec["runtimePatches"]
    assert theirs == {"manager": "a.b/c"}
    (replicated,) = ours["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    assert (ours["manager"], replicated["name"]) == ("torchaos/run", "node")
    assert replicated["template"]["spec"]["template"] == {
        "metadata": {"labels": {"torchaos.run": "run-1", "torchaos.node": "run-1"}},
        "spec": {
            "containers": [
                {"name": "node", "volumeMounts": [{"name": "torchaos-run", "mountPath": "/home/me/runs"}]}
            ],
            "volumes": [{"name": "torchaos-run", "emptyDir": {}}],
        },
    }  # fmt: skip
    manifest = Manifest.read(tmp_path / "job.yaml")
    assert (manifest.kinds, manifest.default_container) == ("trainjob.trainer.kubeflow.org", "node")
    known = kubeflow.TrainerV1alpha1TrainJob.from_dict(job)
    assert known is not None
    assert known.to_dict() == job


@pytest.mark.parametrize("name", ["node", "initializer"])
def test_a_volume_of_a_train_job(tmp_path: Path, name: str) -> None:
    """No volume is added if a patch of the TrainJob mounts one in the trainer's container that holds the folder. Only
    the label is in our patch then. A volume of another job of the runtime is not the trainer's."""
    pod = "{spec: {containers: [{name: node, volumeMounts: [{name: home, mountPath: /home/me}]}]}}"
    place = f"{{template: {{spec: {{replicatedJobs: [{{name: {name}, template: {{spec: {{template: {pod}}}}}}}]}}}}}}"
    text = f"{TRAIN_JOB}  runtimePatches: [{{manager: a.b/c, trainingRuntimeSpec: {place}}}]"
    (job,) = _changed(tmp_path, text, replace(CHANGE, container=""))
    _theirs, ours = job["spec"]["runtimePatches"]
    (replicated,) = ours["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    adds = replicated["template"]["spec"]["template"]["spec"]
    assert (adds == {}) is (name == "node")
    assert ("torchaos-run" in yaml.safe_dump(job)) is (name != "node")


def test_pods_that_share_an_anchor(tmp_path: Path) -> None:
    """Two pods whose containers are the same YAML anchor, but not their volumes: each gets the volume of its mount."""
    text = PYTORCH_JOB.replace("containers: [", "containers: &ours [", 1)
    head, _, tail = text.rpartition("containers: [{name: trainer, image: train}]")
    (job,) = _changed(tmp_path, f"{head}containers: *ours{tail}")
    specs = [each["template"]["spec"] for each in job["spec"]["pytorchReplicaSpecs"].values()]
    assert [spec["volumes"] for spec in specs] == [[{"name": "torchaos-run", "emptyDir": {}}]] * 2
    assert [len(spec["containers"][0]["volumeMounts"]) for spec in specs] == [1, 1]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (TRAIN_JOB.replace("numNodes: 2", "numNodes: 1"), "a TrainJob runs its command in the container node"),
        (TRAIN_JOB.replace("TrainJob", "TrainingRuntime") + "---" + JOB, "leave the TrainingRuntime out"),
        (JOB.replace("completions: 2", "completions: $N"), r"Job: '\$N' is no number of pods; fill in the template"),
        (TRAIN_JOB[: TRAIN_JOB.index("spec:")] + "spec: 3\n" + "---\n" + JOB, "the spec of TrainJob is no mapping"),
        (JOB.replace("env: [{", "env: 3, more: [{"), "env is no list"),
        ("kind: [", r"job.yaml:\d+:\d+: it is no YAML"),
        ("a: b", "has no apiVersion or no kind"),
        ("a: &a [*a]", "a YAML anchor contains itself"),
        ("apiVersion: v1\nkind: ConfigMap\ndata: {a: b}", "there is no pod in it"),
        (JOB.replace("name: trainer", "name: other"), "no container trainer among sidecar, other"),
    ],
)
def test_a_manifest_that_can_not_be_used(tmp_path: Path, text: str, why: str) -> None:
    """The error says what is wrong, and where."""
    (tmp_path / "job.yaml").write_text(text)
    with pytest.raises(UsageError, match=why):
        Manifest.read(tmp_path / "job.yaml").check(1, "trainer")


def test_a_container_whose_name_is_no_text(tmp_path: Path) -> None:
    """Such a manifest is the API server's to refuse; here it is only no container of a known name."""
    (tmp_path / "job.yaml").write_text(PYTORCH_JOB.replace("name: trainer", "name: [pytorch]"))
    assert Manifest.read(tmp_path / "job.yaml").default_container == ""


def test_the_order_of_the_pods() -> None:
    """Pods of a JobSet are in the order of its Jobs, pods of an Indexed Job in its order, and others in the order of
    their names, in which 10 comes after 9."""

    def pod(name: str, **labels: str) -> dict[str, Any]:
        names = {"job": "jobset.sigs.k8s.io/job-global-index", "index": "batch.kubernetes.io/job-completion-index"}
        return {"metadata": {"name": name, "labels": {names[key]: value for key, value in labels.items()}}}

    pods = [
        pod("set-a-0-10", job="0", index="10"), pod("set-a-0-9", job="0", index="9"), pod("set-a-1-0", job="1"),
        pod("llm-10"), pod("llm-9"),
    ]  # fmt: skip
    names = [one["metadata"]["name"] for one in in_order(pods)]
    assert names == ["llm-9", "llm-10", "set-a-0-9", "set-a-0-10", "set-a-1-0"]


def test_a_run_that_ends_while_it_waits_for_pods() -> None:
    """The run is stopped before the pods are there: the launcher waits no longer, and says what it waited for."""

    class Cluster:
        def ask(self, *words: str) -> str:
            return '{"items": []}'

    launcher: Any = Kubernetes()
    launcher.give_up()
    with pytest.raises(ChaosError, match="the run ended while it waited for 2 pods: there is none"):
        launcher._await_pods(Cluster(), ("torchaos.run", "run-1"), 2)
