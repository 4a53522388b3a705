"""In torchrun, on a job of several nodes: tells which round of the rendezvous the node is in, and its ranks are from.

Torchelastic's own restart count won't do: each node's agent counts the failures that it saw itself, a node that came
back begins at 0, and a change of membership does not count at all. The round is one number for all of them.
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from . import wire
from .imports import PostImport

_MODULE = "torch.distributed.elastic.rendezvous.dynamic_rendezvous"


def start() -> None:
    post = PostImport()
    post.when(_MODULE, _wrap)
    post.install()


def _wrap(module: ModuleType) -> None:
    handler: Any = getattr(module, "DynamicRendezvousHandler", None)
    original = getattr(handler, "next_rendezvous", None)
    if original is None:
        return

    @functools.wraps(original)
    def next_rendezvous(self: Any) -> Any:
        found = original(self)
        try:
            _tell(int(self._state_holder.state.round))
        except Exception as error:
            os.environ.pop(wire.ENV_ROUND, None)
            print(f"torchaos: the round of the rendezvous can't be told: {error!r}", file=sys.stderr)
        return found

    handler.next_rendezvous = next_rendezvous


def _tell(number: int) -> None:
    os.environ[wire.ENV_ROUND] = str(number)  # the workers inherit it
    node = int(os.environ[wire.ENV_NODE])
    source = f"node{node}-p{os.getpid()}-r{number}"
    plan = wire.AgentPlan.read(os.environ[wire.ENV_PLAN])
    events = wire.EventFile(Path(plan.events) / f"{source}.jsonl", source, None, wire.attempt_of(os.environ))
    data = {"done": True, "round": number, "node": node}
    events.emit(wire.Kind.ELASTIC_RENDEZVOUS, data)
    events.close()
