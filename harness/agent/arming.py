"""Decide whether this process is a rank of the job, and start the agent if it is.

RANK in the environment is not enough: spawned data-loader workers inherit it. A process is a rank if it has
torchelastic's variables and no ancestor of it is armed.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Mapping

from . import wire
from .plan import AgentPlan


@dataclass(frozen=True)
class Identity:
    rank: int  # in the whole job
    local_rank: int
    world_size: int  # number of ranks of its own torchrun
    attempt: int  # counted over restarts and resubmissions
    pid: int

    @property
    def source(self) -> str:
        return f"rank{self.rank}-a{self.attempt}-p{self.pid}"


def identify(environ: Mapping[str, str], pid: int) -> Identity | None:
    """The identity of this process, or None if the agent must not start in it. Raises ValueError for a malformed
    number."""
    if not {"RANK", "LOCAL_RANK", "TORCHELASTIC_RUN_ID", wire.ENV_PLAN} <= environ.keys():
        return None
    if environ.get(wire.ENV_ARMED, str(pid)) != str(pid):  # if the pid is the same, this rank has called exec
        return None
    size, attempt = int(environ.get("WORLD_SIZE", "1")), wire.attempt_of(environ)
    return Identity(wire.rank_of(environ), int(environ["LOCAL_RANK"]), size, attempt, pid)


def start() -> None:
    """Starts the agent if this process is a rank. An error is printed on stderr, and the job goes on without an
    agent."""
    try:
        who = identify(os.environ, os.getpid())
        if who is not None:
            _arm(who)
    except Exception as error:
        print(f"torchaos: the agent did not start: {error!r:.300}", file=sys.stderr)


def _arm(who: Identity) -> None:
    from .agent import Agent
    from .dumps import listen
    from .hooks import install

    plan = AgentPlan.read(os.environ[wire.ENV_PLAN])
    os.environ[wire.ENV_ARMED] = str(who.pid)
    folder, source = Path(plan.events), who.source
    while (folder / f"{source}.jsonl").exists():  # written by this same process before it called exec
        source += "x"
    listen(who)
    install(Agent(plan, who, wire.EventFile(folder / f"{source}.jsonl", source, who.rank, who.attempt)))
