"""Runs in the torchrun of a job of one node, and records the number of its first attempt. Each torchrun counts its
restarts from 0, and a script may start torchrun again (`until torchrun train.py; do sleep 1; done`). So the first
attempt of a torchrun follows the last attempt of the torchrun before."""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from . import wire
from .imports import PostImport
from .plan import AgentPlan

_OF_RANK = re.compile(r"rank\d+-a(\d+)-p\d+x*\.jsonl")


def start() -> None:
    post = PostImport()
    post.when("torch.distributed.launcher.api", _wrap)
    post.install()


def _wrap(module: ModuleType) -> None:
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
    """The number of a torchrun's first attempt. `submitted`: the first attempt of the submission. A torchrun that
    follows a failed torchrun continues the same training, so its attempts are counted on. Torchruns at the same time,
    or one after another with success, may be separate trainings. They all begin with `submitted`, and their steps then
    count for no verdict."""
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
