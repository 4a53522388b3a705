"""Manifests as other people write them, made small: which objects hold the nodes, how many, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath

import pytest

from torchaos.harness.interfaces import UsageError
from torchaos.harness.running.launchers.pod_manifest import Manifest, PodChange

CHANGE = PodChange(("torchaos.run", "run-1"), ["agent"], {}, PurePosixPath("/runs"), 900, cwd="/work")


def pods(container: str, more: str = "", key: str = "template") -> str:
    """A template of pods with a container of that name."""
    return f"{key}: {{spec: {{containers: [{more}{{name: {container}, image: train}}]}}}}"


def object_(kind: str, name: str, spec: str = "") -> str:
    """An object; `kind` has its API version before it."""
    version, _, kind = kind.rpartition(" ")
    return f"---\napiVersion: {version}\nkind: {kind}\nmetadata: {{name: {name}}}\n{spec and f'spec: {{{spec}}}'}\n"


PYTORCH, JOBSET, TRAINJOB = (
    "kubeflow.org/v1 PyTorchJob", "jobset.x-k8s.io/v1alpha2 JobSet", "trainer.kubeflow.org/v1alpha1 TrainJob",
)  # fmt: skip
WORKERS = f"pytorchReplicaSpecs: {{Worker: {{replicas: 2, restartPolicy: OnFailure, {pods('pytorch')}}}}}"
ELASTIC = f"elasticPolicy: {{rdzvBackend: c10d, minReplicas: 1, maxReplicas: 2, maxRestarts: 100}}, {WORKERS}"
MASTER_AND_WORKER = (
    f"pytorchReplicaSpecs: {{Master: {{replicas: 1, {pods('pytorch')}}}, Worker: {{{pods('pytorch')}}}}}"
)
SIDECAR = f"{{Worker: {{replicas: 2, {pods('pytorch', '{name: log, image: l}, ')}}}}}"
ETCD = object_("v1 Service", "etcd", "ports: [{port: 2379}]") + object_(
    "apps/v1 Deployment", "etcd", f"replicas: 1, {pods('etcd')}"
)
INDEXED = f"completions: 4, parallelism: 4, completionMode: Indexed, {pods('trainer')}"
SET = f"replicatedJobs: [{{name: workers, template: {{spec: {{{INDEXED}}}}}}}]"
TWO = "replicatedJobs: [{}, {}]".format(
    f"{{name: leader, replicas: 1, template: {{spec: {{{pods('c')}}}}}}}",
    f"{{name: workers, replicas: 3, template: {{spec: {{parallelism: 2, completions: 2, {pods('c')}}}}}}}",
)
VOLCANO = (
    f"minAvailable: 3, tasks: [{{replicas: 1, name: master, {pods('m')}}}, {{replicas: 2, name: worker, {pods('w')}}}]"
)
JOB = object_("batch/v1 Job", "llm", INDEXED)
JSON = '{"apiVersion": "v1",\n\t"kind": "Pod", "metadata": {"name": "a"}, "spec": {"containers": [{"name": "m"}]}}'
LEADER = f"leaderWorkerTemplate: {{size: 2, {pods('c', '', 'workerTemplate')}}}"
MPI = f"mpiReplicaSpecs: {{Launcher: {{{pods('m')}}}, Worker: {{{pods('m')}}}}}"
GANG = f"replicaSpecs: {{Worker: {{{pods('w')}}}}}"
POD = "containers: [{name: main, image: train}]"


@pytest.mark.parametrize(
    ("text", "count", "nodes", "container"),
    [
        pytest.param(JOB, 4, "Job/llm", "", id="kubernetes' own indexed Job"),
        pytest.param(object_("v1 Service", "llm", "clusterIP: None") + JOB, 4, "Job/llm", "",
                     id="an indexed Job with its headless Service"),
        pytest.param(object_("v1 ConfigMap", "code") + object_("v1 PersistentVolumeClaim", "data") + JOB, 4, "Job/llm",
                     "", id="a Job whose script is in a ConfigMap, with a claim of storage"),
        pytest.param(object_(PYTORCH, "mnist", MASTER_AND_WORKER), 2,
                     "PyTorchJob/mnist", "pytorch", id="kubeflow's mnist: a Master and a Worker"),
        pytest.param(ETCD + object_(PYTORCH, "imagenet", ELASTIC), 2, "PyTorchJob/imagenet", "pytorch",
                     id="kubeflow's elastic example with the Deployment of its etcd"),
        pytest.param(object_("v1 Pod", "etcd", POD) + object_(PYTORCH, "yolo", WORKERS), 2, "PyTorchJob/yolo",
                     "pytorch", id="an etcd Pod beside a PyTorchJob"),
        pytest.param(object_(PYTORCH, "fsdp", f"pytorchReplicaSpecs: {SIDECAR}"), 2, "PyTorchJob/fsdp", "pytorch",
                     id="AWS' FSDP on EKS, with a sidecar before the trainer"),
        pytest.param(object_(JOBSET, "pytorch", SET), 4, "JobSet/pytorch", "", id="JobSet's own pytorch example"),
        pytest.param(object_(JOBSET, "two", TWO), 7, "JobSet/two", "",
                     id="a JobSet with a leader and three slices of workers"),
        pytest.param(object_(TRAINJOB, "t", "runtimeRef: {name: torch-distributed}, trainer: {numNodes: 2}"), 2,
                     "TrainJob/t", "node", id="a TrainJob of the runtime torch-distributed"),
        pytest.param(object_(TRAINJOB, "t", "runtimeRef: {name: torch-distributed}"), None, "TrainJob/t", "node",
                     id="a TrainJob whose number of nodes is in its runtime"),
        pytest.param(object_("batch.volcano.sh/v1alpha1 Job", "v", VOLCANO), 3, "Job/v", "", id="a Job of Volcano"),
        pytest.param(object_(PYTORCH, "q", f"runPolicy: {{suspend: true}}, {WORKERS}"), 2, "PyTorchJob/q", "pytorch",
                     id="a PyTorchJob in a queue of Kueue"),
        pytest.param(object_("batch/v1 Job", "a", pods("m")) + object_("batch/v1 Job", "b", pods("w")), 2,
                     "Job/a Job/b", "", id="a Job for the master, and one for the worker"),
        pytest.param(f"apiVersion: v1\nkind: List\nitems: [{{{JOB[4:].strip().replace(chr(10), ', ')}}}]", 4,
                     "Job/llm", "", id="a List"),
        pytest.param(object_("v1 Pod", "a", POD) + object_("v1 Pod", "b", POD), 2, "Pod/a Pod/b", "",
                     id="two bare Pods"),
        pytest.param(object_("apps/v1 StatefulSet", "redis", pods("redis")) + JOB, 4, "Job/llm", "",
                     id="a Job beside the store of its features"),
        pytest.param(JSON, 1, "Pod/a", "", id="JSON with tabs"),
    ],
)  # fmt: skip
def test_whose_pods_are_the_nodes(tmp_path: Path, text: str, count: int | None, nodes: str, container: str) -> None:
    """The pods of the nodes are counted, labelled and run the agent; every other object is made as it is, and gets the
    label by which it is deleted."""
    (tmp_path / "job.yaml").write_text(text)
    manifest = Manifest.read(tmp_path / "job.yaml")
    assert (manifest.count, " ".join(manifest.nodes), manifest.default_container) == (count, nodes, container)
    manifest.check(count or 1, "")
    if count:
        with pytest.raises(UsageError, match=r"or name the objects with the nodes in job\.pods\.objects"):
            manifest.check(count + 1, "")
    for made in json.loads(manifest.changed(CHANGE))["items"]:
        assert made["metadata"]["labels"]["torchaos.run"] == "run-1"
        is_node = f"{made['kind']}/{made['metadata']['name']}" in manifest.nodes
        assert ('"torchaos.node"' in json.dumps(made)) is is_node
        assert ('"agent"' in json.dumps(made)) is is_node
        assert ("/work" in json.dumps(made)) is is_node


@pytest.mark.parametrize(
    ("text", "why"),
    [
        pytest.param(
            object_("leaderworkerset.x-k8s.io/v1 LeaderWorkerSet", "l", LEADER),
            "of kind LeaderWorkerSet can't be the nodes: Kubernetes itself starts its containers again.*write a Job",
            id="LeaderWorkerSet",
        ),
        pytest.param(object_("ray.io/v1 RayJob", "r", f"rayClusterSpec: {{headGroupSpec: {{{pods('h')}}}}}"),
                     "of kind RayJob .*the commands of its pods are Ray's", id="RayJob"),
        pytest.param(object_("kubeflow.org/v2beta1 MPIJob", "m", MPI),
                     "of kind MPIJob .*over ssh; write a Job or a PyTorchJob", id="MPIJob"),
        pytest.param(object_("apps/v1 Deployment", "d", pods("d")), "of kind Deployment .*starts its containers again",
                     id="of kind Deployment as a job"),
        pytest.param(object_("batch/v1 CronJob", "c", f"jobTemplate: {{spec: {{{pods('c')}}}}}"),
                     "of kind CronJob .*write the Job of its jobTemplate", id="a CronJob"),
        pytest.param(object_("elastic.pytorch.org/v1alpha1 ElasticJob", "e", GANG),
                     "ElasticJob .*does not know how it runs its pods; write one of Pod, Job, JobSet, PyTorchJob",
                     id="TorchElastic's own controller"),
        pytest.param(object_("sagemaker.amazonaws.com/v1 HyperPodPyTorchJob", "h", GANG),
                     "of kind HyperPodPyTorchJob .*does not know how it runs its pods", id="AWS' HyperPod"),
        pytest.param(JOB + object_(PYTORCH, "p", WORKERS),
                     "the nodes may be the pods of Job/llm, PyTorchJob/p; say which, in job.pods.objects",
                     id="a Job that prepares data beside a PyTorchJob"),
        pytest.param(object_(TRAINJOB, "t", "runtimeRef: {name: x}, podTemplateOverrides: [{}]"),
                     "podTemplateOverrides are of Kubeflow Trainer before 2.2", id="a TrainJob of Trainer 2.1"),
        pytest.param("image: {{ .Values.image }}", "render a template first", id="a chart of Helm"),
        pytest.param(JOB.replace("image: train", "image: t, env: [{name: WARMUP, value: 1e3}]"),
                     "env WARMUP: kubectl reads 1000, and no text; write quotes", id="a variable without its quotes"),
        pytest.param(object_("argoproj.io/v1alpha1 Workflow", "w", "templates: [{name: t, container: {image: t}}]"),
                     "of kind Workflow .*a controller runs its steps; write the Job", id="a Workflow of Argo"),
        pytest.param(object_("v1 Service", "s"), r"there is no pod in it \(Service\)", id="a Service alone"),
    ],
)  # fmt: skip
def test_what_can_not_run_a_job(tmp_path: Path, text: str, why: str) -> None:
    """Each is refused before anything is made, with what to write instead."""
    (tmp_path / "job.yaml").write_text(text)
    with pytest.raises(UsageError, match=why):
        Manifest.read(tmp_path / "job.yaml").check(4, "")


def test_the_user_says_which(tmp_path: Path) -> None:
    """A named object holds the nodes, also of a kind that nobody here knows; what can't work is refused all the
    same, and so is a name that is not there."""
    file = tmp_path / "job.yaml"
    ray = object_("ray.io/v1 RayCluster", "r", f"headGroupSpec: {{{pods('h')}}}")
    other = object_("example.com/v1 Gang", "g", f"members: [{{{pods('g')}}}]")
    file.write_text(JOB + object_(PYTORCH, "p", WORKERS) + ray + other)
    assert Manifest.read(file, ["PyTorchJob/p"]).count == 2
    assert Manifest.read(file, ["Gang/g"]).count is None
    for name, why in (("RayCluster/r", "are Ray's"), ("Job/x", "job.pods.objects may name Job/llm, PyTorchJob/p")):
        with pytest.raises(UsageError, match=why):
            Manifest.read(file, [name])


def test_a_variable_that_is_replaced(tmp_path: Path) -> None:
    """It keeps its place, so that the variables after it still expand it, and a container that logs more than torchaos
    needs keeps its level. A level that would hide the restarts is replaced."""
    change = PodChange(CHANGE.label, ["agent"], {"DATA_ROOT": "/scratch", "LOGLEVEL": "INFO"}, CHANGE.folder, 900)
    for level, becomes in (("DEBUG", "DEBUG"), ("WARNING", "INFO")):
        env = f'{{name: LOGLEVEL, value: {level}}}, {{name: T, value: "$(DATA_ROOT)/t"}}'
        (tmp_path / "job.yaml").write_text(
            JOB.replace("image: train", f"image: t, env: [{{name: DATA_ROOT, value: /data}}, {env}]")
        )
        (job,) = json.loads(Manifest.read(tmp_path / "job.yaml").changed(change))["items"]
        found = job["spec"]["template"]["spec"]["containers"][0]["env"]
        assert [(one["name"], one["value"]) for one in found] == [
            ("DATA_ROOT", "/scratch"), ("LOGLEVEL", becomes), ("T", "$(DATA_ROOT)/t"),
        ]  # fmt: skip


def test_the_directory_of_a_train_job(tmp_path: Path) -> None:
    """A trainer of a TrainJob has no working directory, so that a shell goes there."""
    (tmp_path / "job.yaml").write_text(object_(TRAINJOB, "t", "runtimeRef: {name: x}, trainer: {numNodes: 2}"))
    (job,) = json.loads(Manifest.read(tmp_path / "job.yaml").changed(CHANGE))["items"]
    assert job["spec"]["trainer"]["command"] == ["sh", "-c", 'cd "$0" && exec "$@"', "/work", "agent"]
    assert "workingDir" not in json.dumps(job)
