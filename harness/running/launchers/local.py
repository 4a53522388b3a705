"""Runs the command on the harness's own machine, without a prefix: one node, or one torchrun for each replica."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from torchaos.harness.agent.wire import ENV_REPLICA
from torchaos.harness.fault_drivers.network.links import Link
from torchaos.harness.interfaces import Handle, JobSpec, Launcher, Node


@dataclass(frozen=True)
class LocalNode:
    index: int = 0
    env: Mapping[str, str] = field(default_factory=dict)
    link: Link | None = None

    def argv(self, command: Sequence[str]) -> list[str]:
        return list(command)

    def host_pid(self, pid: int) -> int | None:
        return pid


@dataclass(frozen=True)
class Local(Launcher):
    """Starts the command on this machine, once for each replica. Nothing is created for it, so nothing has to be
    undone."""

    name: ClassVar[str] = "local"
    replicas: ClassVar[bool] = True

    def resources(self, spec: JobSpec) -> Sequence[Handle]:
        return ()

    def create(self, spec: JobSpec) -> Sequence[Node]:
        if spec.replicas == 1:
            return (LocalNode(),)
        return [LocalNode(index, replica_env(index, spec)) for index in range(spec.replicas)]


def replica_env(index: int, spec: JobSpec) -> dict[str, str]:
    """The environment of a replica. REPLICA_GROUP_ID and NUM_REPLICA_GROUPS are torchft's names (its torchx.py). PET_*
    are torchrun's own names for its options; without them, all torchruns would use the same port. Settings of the user
    are not changed."""
    rendezvous = {"PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "localhost:0"}
    ours = {name: value for name, value in rendezvous.items() if name not in spec.env}
    return {
        **ours, ENV_REPLICA: str(index), "REPLICA_GROUP_ID": str(index), "NUM_REPLICA_GROUPS": str(spec.replicas),
    }  # fmt: skip
