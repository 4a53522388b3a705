"""A stand-in for kubectl that keeps the names of objects in a file, for the handle of objects in a cluster."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from torchaos.harness.rollback.cluster_handles import KubernetesAgent, KubernetesNode, KubernetesObjects, label_of

_KUBECTL = """#!/bin/sh
label=
for word; do case $word in --selector=*) label=${{word##*=}} ;; esac; done
case "$1 $2" in
"get pod") echo '{{"metadata": {{"uid": "7"}}, "status": {{"containerStatuses": [
    {{"name": "trainer", "state": {{"running": {{}}}}}}]}}}}' ;;
exec*)
    case "$*" in
    *--recover*) rm -f {agent} ;;
    *) test ! -e {agent} || exit 4 ;;
    esac ;;
"get node") cat {node} ;;
"patch node") echo '{{"metadata": {{}}, "spec": {{}}}}' >{node} ;;
get*)
    case "$*" in
    *=json) echo '{{"items": [{{"metadata": {{}}, "status": {{}}}}]}}' ;;
    *) grep " $label$" {objects} | cut -d' ' -f1 ;;
    esac ;;
delete*) sed -i "/ $label$/d" {objects} ;;
esac
true
"""


def install(folder: Path) -> Path:
    """Puts the program into `folder`, and returns the file with the objects, in lines such as `pod/llm-0 label`."""
    objects, program = folder / "objects", folder / "kubectl"
    objects.touch()
    program.write_text(_KUBECTL.format(objects=objects, node=folder / "node", agent=folder / "agent"))
    program.chmod(0o755)
    return objects


def on_a_cluster(folder: Path) -> Iterator[tuple[KubernetesObjects, Any]]:
    """A case of the contract of handles: a job of ours and its pod, and a pod of somebody else."""
    objects = install(folder)
    ours = label_of("run-1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        yield (
            KubernetesObjects("run-1", "job.batch"),
            lambda: objects.write_text(f"job/llm {ours}\npod/llm-0 {ours}\npod/other run-2\n"),
        )
        assert not objects.read_text() or objects.read_text() == "pod/other run-2\n"


def closed(folder: Path) -> Iterator[tuple[KubernetesNode, Any]]:
    """A case of the contract of handles: a machine that a fault closed for new pods."""
    install(folder)
    now = '{"metadata": {"annotations": {"torchaos.run": "%s"}}, "spec": {"unschedulable": true}}'
    (folder / "node").write_text('{"metadata": {}, "spec": {}}')
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        yield KubernetesNode("w1", "run-1"), lambda: (folder / "node").write_text(now % label_of("run-1"))


def attached(folder: Path) -> Iterator[tuple[KubernetesAgent, Any]]:
    """A case of the contract of handles: an agent that left something in a pod of somebody else."""
    install(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        yield KubernetesAgent("run-1.node0", "llm-0", "7", "trainer", "python3"), (folder / "agent").touch
