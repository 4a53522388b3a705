"""Runs in the torchrun of each node, if the job has several nodes. Records each round of the rendezvous, and gives its
number to the ranks.

Torchelastic's own restart count is not enough: the agent of each node counts only the failures that it saw itself, a
node that comes back begins at 0, and a change of membership does not count. The round has the same number on all
nodes."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, Callable

from . import wire
from .imports import PostImport
from .plan import AgentPlan

_PACKAGE = "torch.distributed.elastic.rendezvous"


def start() -> None:
    post = PostImport()
    post.when(f"{_PACKAGE}.dynamic_rendezvous", _wrap_dynamic)  # c10d, etcd-v2
    post.when(f"{_PACKAGE}.etcd_rendezvous", _wrap_etcd)  # the older etcd handler, which counts from 1
    post.install()


def _wrap_dynamic(module: ModuleType) -> None:
    _wrap(module, "DynamicRendezvousHandler", "next_rendezvous", lambda self, _: self._state_holder.state.round)


def _wrap_etcd(module: ModuleType) -> None:
    _wrap(module, "EtcdRendezvous", "rendezvous_barrier", lambda _, result: int(result[0]) - 1)


def _wrap(module: ModuleType, name: str, method: str, round_of: Callable[[Any, Any], Any]) -> None:
    """Records the round after each call of the method. `round_of` gets the object and the method's result."""
    kind: Any = getattr(module, name, None)
    original = getattr(kind, method, None)
    if original is None:
        return

    @functools.wraps(original)
    def call(self: Any) -> Any:
        result = original(self)
        try:
            _record(int(round_of(self, result)))
        except Exception as error:
            os.environ.pop(wire.ENV_ROUND, None)
            print(f"torchaos: the round of the rendezvous is not known: {error!r}", file=sys.stderr)
        return result

    setattr(kind, method, call)


def _record(number: int) -> None:
    os.environ[wire.ENV_ROUND] = str(number)  # the workers inherit it
    node = int(os.environ[wire.ENV_NODE])
    source = f"node{node}-p{os.getpid()}-r{number}"
    plan = AgentPlan.read(os.environ[wire.ENV_PLAN])
    events = wire.EventFile(Path(plan.events) / f"{source}.jsonl", source, None, wire.attempt_of(os.environ))
    data = {"done": True, "round": number, "node": node}
    events.emit(wire.Kind.ELASTIC_RENDEZVOUS, data)
    events.close()
