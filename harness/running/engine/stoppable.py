"""Carries out runs one after the other, and can be stopped at any time, also between two runs."""

from __future__ import annotations

from torchaos.harness.running.engine.run import Run


class Stoppable:
    """Carries out one run after the other. `stop` and `hurry` may be called from a signal handler."""

    def __init__(self) -> None:
        self._current: Run | None = None
        self._stopped = ""  # the reason
        self._hurried = False
        self.left: list[str] = []  # changes that could not be undone, one sentence each

    def stop(self, reason: str) -> None:
        """Ends the current run normally, and starts no other."""
        self._stopped = reason
        if self._current:
            self._current.stop(reason)

    def hurry(self, reason: str) -> None:
        """Ends the current run like `stop`, but skips everything slow except the rollback."""
        self._hurried = True
        self.stop(reason)
        if self._current:
            self._current.hurry()

    def _carry_out(self, run: Run) -> None:
        self._current = run
        if self._stopped:  # just before there was a run to stop
            run.stop(self._stopped)
        if self._hurried:
            run.hurry()
        try:
            run()
        finally:
            self.left += run.left
            self._current = None
