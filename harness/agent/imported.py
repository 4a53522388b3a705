"""Writes the name of each module that rank 0 imports into the file agent/imported, one per line. An exploration imports
them once, in the process from which it forks ranks."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .agent import Agent


def install(agent: Agent) -> None:
    agent.saw("imported")
    if agent.who.rank:
        return
    folder = os.path.join(os.path.dirname(agent.plan.events), "agent")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    fd = os.open(os.path.join(folder, "imported"), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def note(event: str, args: tuple[Any, ...]) -> None:
        if event == "import" and agent.on:
            os.write(fd, f"{args[0]}\n".encode())

    sys.addaudithook(note)
