"""What happens on SIGINT, SIGTERM and SIGHUP."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from torchaos.harness.engine.scenario_run import ScenarioRun


class Interrupt:
    """What the signal handlers set: the run under way is ended in order, rolled back and judged; no other starts. A
    second signal hurries: no grace for the job, no more evidence; everything is still rolled back."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self.target: ScenarioRun | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        again, self.reason = self.reason is not None, self.reason or f"{signal.Signals(number).name} was received"
        if self.target:
            self.target.hurry(self.reason) if again else self.target.stop(self.reason)


@contextmanager
def signals() -> Iterator[Interrupt]:
    interrupt = Interrupt()
    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield interrupt
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
