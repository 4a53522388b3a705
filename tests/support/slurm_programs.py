"""Replacements for the programs of Slurm that the handle of Slurm's work uses. The work is lines of a file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from torchaos.harness.rollback.cluster_handles import SlurmNodeState, SlurmWork

_SQUEUE = """#!/bin/sh
case " $* " in *" --jobs 99 "*) echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1 ;; esac
cat {work} 2>/dev/null || true
"""
_SCANCEL = """#!/bin/sh
for id; do case $id in -*) ;; *) sed -i "/^$id|/d" {work} ;; esac; done
"""


_SINFO = """#!/bin/sh
echo "$(cat {node})"
"""
_SCONTROL = """#!/bin/sh
case " $* " in
*" nodename=n2 state=resume "*) echo 'idle|none' >{node} ;;
*" show job "*)
    if grep -q forgotten {job}; then echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1; fi
    cat {job} ;;
*" show hostnames "*) echo "$3" | tr , '\\n' ;;
*" ping "*) echo 'Slurmctld(primary) at head is UP' ;;
*" show config "*) echo 'SlurmUser               = slurm(64030)' ;;
*" StartTime=now "*) ;;
*) echo 'slurm error: access denied' >&2; exit 1 ;;
esac
"""


def install(folder: Path) -> Path:
    """Puts the programs into `folder`, and returns the file with the work, in lines such as 7.1|name."""
    work, node = folder / "work", folder / "node"
    node.write_text("idle|none\n")
    for name, text in (("squeue", _SQUEUE), ("scancel", _SCANCEL), ("sinfo", _SINFO), ("scontrol", _SCONTROL)):
        (folder / name).write_text(text.format(work=work, node=node, job=folder / "job"))
        (folder / name).chmod(0o755)
    return work


def on_a_cluster(folder: Path) -> Iterator[tuple[SlurmWork, Any]]:
    """A case for the contract test of handles: a step of ours, in an allocation that another user's step uses too."""
    work = install(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        yield SlurmWork("run-1", "7"), lambda: work.write_text("7.0|theirs\n7.1|run-1\n")
        assert not work.exists() or "7.0|theirs\n" in work.read_text()


def out_of_service(folder: Path) -> Iterator[tuple[SlurmNodeState, Any]]:
    """A case for the contract test of handles: a node that a fault took out of service."""
    install(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        handle = SlurmNodeState("n2", "run-1")
        yield handle, lambda: (folder / "node").write_text(f"drained|{handle.reason}\n")
