"""Runs that are carried out one after the other, and stopped at any time."""

from __future__ import annotations

from typing import Any

import pytest

from torchaos.harness.running.engine.stages import Stoppable


class StandIn:
    """Stands for a run: notes what it is asked for."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.left = ["a mount"]

    def stop(self, reason: str) -> None:
        self.calls.append(f"stop: {reason}")

    def hurry(self) -> None:
        self.calls.append("hurry")

    def __call__(self) -> None:
        self.calls.append("run")


@pytest.mark.parametrize(
    ("ask", "calls"),
    [(None, ["run"]), ("stop", ["stop: SIGTERM", "run"]), ("hurry", ["stop: SIGTERM", "hurry", "run"])],
)
def test_what_comes_between_two_runs_reaches_the_next(ask: str | None, calls: list[str]) -> None:
    """A signal between two runs is not lost, also the second signal, which asks for haste. What a run could not undo is
    kept."""
    stoppable: Any = Stoppable()
    if ask:
        getattr(stoppable, ask)("SIGTERM")
    run = StandIn()
    stoppable._carry_out(run)
    assert run.calls == calls
    assert stoppable.left == ["a mount"]
