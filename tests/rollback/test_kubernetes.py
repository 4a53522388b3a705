"""The handle of objects in a Kubernetes cluster."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kubectl_program
import pytest

from torchaos.harness import registry
from torchaos.harness.fault_drivers.site import OutsideSite
from torchaos.harness.host.cluster_tools import Kubectl
from torchaos.harness.rollback.cluster_handles import KubernetesObjects, label_of


def test_the_cluster_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If nobody can be asked, nothing is verified."""
    program = tmp_path / "kubectl"
    program.write_text("#!/bin/sh\necho 'Unable to connect to the server' >&2; exit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(OSError, match="Unable to connect"):
        KubernetesObjects("run-1", "job.batch").is_undone()


def test_the_last_object_goes_between_two_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """kubectl prints nothing at all if there are no objects, also where JSON is asked for."""
    program = tmp_path / "kubectl"
    program.write_text('#!/bin/sh\ncase "$*" in *=name) echo pod/llm-0 ;; esac\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert KubernetesObjects("run-1", "job.batch").is_undone()


_RUNS: dict[str, Any] = {"running": {}}
_WAITS: dict[str, Any] = {"waiting": {"reason": "ContainerCreating"}}
_ENDED: dict[str, Any] = {"terminated": {"exitCode": 0}}


@pytest.mark.parametrize(
    ("deleted", "phase", "states", "over"),
    [
        (True, "Running", [_ENDED, _ENDED], True),
        (True, "Running", [_ENDED, _RUNS], False),
        (True, "Running", [_WAITS], False),
        (True, "Pending", [], False),
        (True, "Failed", [_WAITS], True),
        (True, "Failed", [_RUNS], False),
        (False, "Failed", [_ENDED], False),
    ],
)
def test_a_pod_that_is_being_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deleted: bool, phase: str, states: list[Any], over: bool
) -> None:  # fmt: skip
    """A deleted pod counts as gone when the last of its containers has ended, although the cluster still shows it, and
    a kubelet that has removed the container says that it waits. A pod that nobody deleted does not."""
    about = {"deletionTimestamp": "2026-01-01T00:00:00Z"} if deleted else {}
    pod = {"metadata": about, "status": {"phase": phase, "containerStatuses": [{"state": one} for one in states]}}
    program = tmp_path / "kubectl"
    (tmp_path / "pods.json").write_text(json.dumps({"items": [pod]}))
    program.write_text(f'#!/bin/sh\ncase "$*" in *=name) echo pod/llm-0 ;; *) cat {tmp_path}/pods.json ;; esac\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert KubernetesObjects("run-1", "job.batch").is_undone() is over


@pytest.mark.parametrize(("run_id", "kinds"), [("", "job.batch"), ("run-1", ""), ("run-1", "job --all")])
def test_objects_that_could_be_those_of_others(run_id: str, kinds: str) -> None:
    """A handle that would find the objects of others is refused."""
    with pytest.raises(ValueError, match="objects of Kubernetes"):
        KubernetesObjects(run_id, kinds)


def test_the_label_of_a_long_run() -> None:
    """A label has at most 63 characters and begins with a letter or digit, and two runs of a scenario differ in it."""
    one, other = (label_of("a-long-name" * 5 + "-20261123-113546-" + end) for end in ("0a1b2c3d", "0a1b2c3e"))
    assert one != other
    assert len(one) <= 63
    assert one[0].isalnum()


def test_a_machine_that_is_closed_already(tmp_path: Path) -> None:
    """Whoever closed it opens it: the fault does not close it, and undo does not open it."""
    for handle, _change in kubectl_program.closed(tmp_path):
        theirs = '{"metadata": {"annotations": {"by": "them"}}, "spec": {"unschedulable": true}}'
        (tmp_path / "node").write_text(theirs)
        with pytest.raises(OSError, match="takes no pods already"):
            handle.close()
        handle.undo()
        assert handle.is_undone()
        assert (tmp_path / "node").read_text() == theirs


def test_what_the_api_server_says_of_a_machine(tmp_path: Path) -> None:
    """The evidence of node.cordon is the API server's word, and not that it took the order."""
    cordon, seen = registry.find("injectors", "node.cordon")(), list[str]()
    node = SimpleNamespace(index=1, machine="w1", kubectl=Kubectl())
    live: Any = [SimpleNamespace(node=node, run_id="run-1")]
    for handle, change in kubectl_program.closed(tmp_path):
        site = OutsideSite("f", (), lambda kind, data: None, nodes=live)  # type: ignore[arg-type,return-value]
        assert cordon.changes(site) == [handle]
        (probe,) = cordon.probes(site)
        for _ in range(2):
            probe.sample(lambda kind, data: seen.append(data["effect"]))
            change()
        probe.sample(lambda kind, data: seen.append(data["effect"]))
    assert seen == ["the API server says: machine w1 of node 1 takes no pods"]
