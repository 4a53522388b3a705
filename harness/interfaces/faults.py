"""A fault: its target, how it is applied and undone, and what proves that it was felt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

from torchaos.harness.protocol.wire import Event

Where = Literal["rank", "node"]
# What a fault hits. agents: torchrun. as_targeted: torchrun if the target names nodes, else ranks. ranks_or_node:
# ranks, and a process of a node without ranks. nodes, files, endpoints: no process is the target.
Hits = Literal["ranks", "agents", "as_targeted", "ranks_or_node", "nodes", "files", "endpoints"]


@dataclass(frozen=True)
class Target:
    """The target of a fault, after placeholders and random choices: global ranks, or whole nodes by index. Both are
    empty for a fault of files or endpoints."""

    ranks: tuple[int, ...]
    nodes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Irreversible:
    """A change that can't be undone, and the reason. The job itself must recover from it."""

    why: str


@dataclass(frozen=True)
class Evidence:
    """Proof that a fault took effect: a sentence, and the events on which it is based, each as (source, seq)."""

    what: str
    events: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(cls, what: str, *events: Event) -> Evidence:
        return cls(what, tuple((event.source, event.seq) for event in events))


class Touches(Protocol):
    """What a handle may change, see rollback/file_handles.py."""

    @property
    def process(self) -> tuple[int, int] | None: ...

    @property
    def run_id(self) -> str | None: ...

    @property
    def network(self) -> Any: ...

    @property
    def path(self) -> str | None: ...

    @property
    def own(self) -> str | None: ...

    @property
    def marked(self) -> str | None: ...


@runtime_checkable
class Handle(Protocol):
    """The undo of one change, as data: a frozen dataclass whose fields are JSON. All kinds of handles are in
    rollback/handles.py."""

    kind: ClassVar[str]

    def touches(self) -> Touches:
        """The processes, files and other things that the undo may change. They are checked before the fault is applied,
        and before the undo."""

    def undo(self) -> None:
        """Undoes the change: brings back the state from before. May be called again. First checks the identity of each
        thing, and changes nothing else."""

    def is_undone(self) -> bool:
        """Verifies the undo: whether the state is as before the change. The identity of the thing is checked, too,
        because a missing thing proves nothing."""
