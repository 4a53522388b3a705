"""What the agent does in a torchrun process. In that of a job on one node: counts the attempts (`count_attempts`). In
that of each node of a job on several nodes: records the rounds of the rendezvous (`record_rounds`)."""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from ..protocol import wire
from ..protocol.agent_plan import AgentPlan
from .startup import PostImport

_OF_RANK = re.compile(r"rank\d+-a(\d+)-p\d+x*\.jsonl")


def count_attempts() -> None:
    """Must be called in the torchrun of a job on one node. Records the number of this torchrun's first attempt."""
    post = PostImport()
    post.when("torch.distributed.launcher.api", _wrap_torchrun)
    post.install()


def _wrap_torchrun(module: ModuleType) -> None:
    original = getattr(module, "launch_agent", None)
    if original is None:
        return

    @functools.wraps(original)
    def launch_agent(*args: Any, **kwargs: Any) -> Any:
        ended_well = _safely(_begin)
        result = original(*args, **kwargs)  # raises an error if a rank failed for good
        if ended_well is not None:
            _safely(ended_well)
        return result

    module.launch_agent = launch_agent  # type: ignore[attr-defined]


def _safely(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except Exception as error:
        print(f"torchaos: the attempts of this torchrun are not counted: {error!r}", file=sys.stderr)
        return None


def _begin() -> Callable[[], object]:
    """Records where the attempts begin. Returns a function that must be called if the torchrun ends successfully."""
    folder = Path(AgentPlan.read(os.environ[wire.ENV_PLAN]).events)
    first = first_attempt(folder, int(os.environ.get(wire.ENV_ATTEMPT_BASE, "0")))
    os.environ[wire.ENV_ATTEMPT_BASE] = str(first)  # the workers inherit it
    pid = os.getpid()
    source = f"torchrun-a{first}-p{pid}"
    events = wire.EventFile(folder / f"{source}.jsonl", source, None, first)
    data = {"pid": pid, "start_ticks": wire.start_ticks(pid), "ended": False}
    events.emit(wire.Kind.TORCHRUN, data)
    return lambda: events.emit(wire.Kind.TORCHRUN, {**data, "ended": True})


def first_attempt(folder: Path, submitted: int) -> int:
    """The number of a torchrun's first attempt. `submitted`: the first attempt of the submission. Each torchrun counts
    its restarts from 0, and a script may start torchrun again (`until torchrun train.py; do sleep 1; done`). So the
    attempts of a torchrun that follows a failed torchrun are numbered on from that one: it continues the same training.
    Torchruns at the same time, or one after another with success, may be separate trainings: they all begin with
    `submitted`, and then their steps count for no verdict."""
    for event in _torchruns(folder):
        if (event.attempt or 0) >= submitted and (event.data["ended"] or _is_other(event)):
            return submitted
    used = [int(found[1]) for name in os.listdir(folder) if (found := _OF_RANK.fullmatch(name))]
    return max([*used, submitted - 1]) + 1


def _torchruns(folder: Path) -> Iterator[wire.Event]:
    for path in folder.glob("torchrun-*.jsonl"):
        for line in path.read_bytes().splitlines():
            yield wire.Event.from_line(line)


def _is_other(event: wire.Event) -> bool:
    """Whether the event is from another process that still exists."""
    pid, ticks = event.data["pid"], event.data["start_ticks"]
    return pid != os.getpid() and ticks is not None and wire.start_ticks(pid) == ticks


_PACKAGE = "torch.distributed.elastic.rendezvous"


def record_rounds() -> None:
    """Must be called in the torchrun of each node of a job on several nodes. Records each round of the rendezvous, and
    gives its number to the ranks. The round has the same number on all nodes.

    Torchelastic's own restart count is not enough: the torchrun of each node counts only the failures that it saw
    itself, a node that comes back begins at 0, and a change of membership does not count."""
    post = PostImport()
    post.when(f"{_PACKAGE}.dynamic_rendezvous", _wrap_dynamic)  # c10d, etcd-v2
    post.when(f"{_PACKAGE}.etcd_rendezvous", _wrap_etcd)  # the older etcd handler, which counts from 1
    post.install()


def _wrap_dynamic(module: ModuleType) -> None:
    _wrap_rendezvous(
        module, "DynamicRendezvousHandler", "next_rendezvous", lambda self, _: self._state_holder.state.round
    )


def _wrap_etcd(module: ModuleType) -> None:
    _wrap_rendezvous(module, "EtcdRendezvous", "rendezvous_barrier", lambda _, result: int(result[0]) - 1)


def _wrap_rendezvous(module: ModuleType, name: str, method: str, round_of: Callable[[Any, Any], Any]) -> None:
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
