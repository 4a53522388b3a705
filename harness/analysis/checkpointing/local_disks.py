"""Checkpoints on the nodes' own disks (`job.checkpoints.local`, and folders outside `job.checkpoints.path`, such as
/dev/shm): which of their files an attempt could not reach, because the node with the file was gone or had lost its
disk."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable
from dataclasses import dataclass

from torchaos.harness.analysis.checkpointing.checkpoint_contents import is_below, root_of
from torchaos.harness.protocol.wire import Kind
from torchaos.harness.record.history import Save
from torchaos.harness.record.record import Record

DISK_LOST = "disk lost"  # `what` of an effect event: the local disk of `node` was emptied


def local_folder(run: Record) -> str:
    """The folder of which each node has its own. Empty if the scenario names none."""
    job, root = run.plan.job, root_of(run)
    if not (job.checkpoints and job.checkpoints_local and root):
        return ""
    return posixpath.join(root, posixpath.relpath(job.checkpoints_local, job.checkpoints))


@dataclass(frozen=True)
class OutOfReach:
    """Files of a checkpoint that no node of an attempt had."""

    nodes: tuple[int, ...]  # which had them
    paths: frozenset[str]


def out_of_reach(run: Record, saves: Iterable[Save], attempt: int, started_s: float) -> OutOfReach:
    """The files of a checkpoint that were only on nodes which the attempt did not have, or which had lost their disks
    before it was started (CLOCK_MONOTONIC). Nodes that are not known count as present."""
    local, root = local_folder(run), root_of(run)
    node_of = {(up.attempt, up.rank): up.data.get("node") for up in run.of_kind(Kind.RANK_UP)}
    there = {node for (number, _rank), node in node_of.items() if number == attempt}
    lost = [
        (event.data["node"], event.mono_s)
        for event in run.of_kind(Kind.EFFECT)
        if event.data.get("what") == DISK_LOST and event.mono_s < started_s
    ]
    nodes, paths = set[int](), set[str]()
    for save in saves:
        if is_below(save.path, root) and not (local and is_below(save.path, local)):
            continue
        had = {node_of.get((save.attempt, rank)) for rank in save.ranks}
        gone = {node for node in had if node is not None and there and node not in there}
        gone |= {node for node, lost_s in lost if node in had and lost_s > save.begun_s}
        if had and gone == had:
            nodes |= gone
            paths.add(save.path)
    return OutOfReach(tuple(sorted(nodes)), frozenset(paths))
