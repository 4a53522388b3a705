"""The machine that the harness runs on, as it is: one node, no prefix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torchaos.harness.contracts import Handle, JobSpec, Node


@dataclass(frozen=True)
class LocalNode:
    index: int = 0
    link: ClassVar[None] = None

    @property
    def env(self) -> Mapping[str, str]:
        return {}

    def argv(self, command: Sequence[str]) -> list[str]:
        return list(command)

    def host_pid(self, pid: int) -> int | None:
        return pid


@dataclass(frozen=True)
class Local:
    """Starts the command on this machine. Nothing is made for it, so nothing has to be guarded."""

    name: ClassVar[str] = "local"

    def resources(self, spec: JobSpec) -> Sequence[Handle]:
        return ()

    def create(self, spec: JobSpec) -> Sequence[Node]:
        return (LocalNode(),)
