"""Processes that a rank forks to save its checkpoints while it trains on."""

from __future__ import annotations

import os
from typing import Any, NoReturn

from .agent import Agent
from .wire import Kind


class Children:
    """Reports the saves that a forked child of the rank makes. `fields`: added to the events of a save; in a child, its
    pid."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._watched: int | None = None  # the child whose end is reported
        self._tell = agent.careful("checkpoints")(self._ended)

    @property
    def fields(self) -> dict[str, Any]:
        return {} if self._agent.child is None else {"child": self._agent.child}

    def saves(self) -> None:
        """Must be called when a save begins. At the first save in a child, os._exit is wrapped, so that the end of the
        child is reported too: then its saves are complete. Children that Python forks, also those of multiprocessing,
        end with os._exit."""
        child, leave = self._agent.child, os._exit
        if child is None or child == self._watched:
            return
        self._watched = child

        def _exit(status: int) -> NoReturn:
            if status == 0 and self._agent.child == child:
                self._tell(child)
            leave(status)

        os._exit = _exit

    def _ended(self, child: int) -> None:
        self._agent.emit(Kind.WRITER_ENDED, {"child": child})
