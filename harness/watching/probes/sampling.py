"""Calls probes periodically, in one thread."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from torchaos.harness.contracts import Emit, Probe


class Sampling:
    """Calls all probes at the shortest of their periods. Without probes, no thread is started."""

    def __init__(self, probes: Sequence[Probe], emit: Emit) -> None:
        self._probes, self._emit = probes, emit
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="probes", daemon=True)

    def start(self) -> None:
        if self._probes:
            self._thread.start()

    def stop(self) -> None:
        """Ends the thread. Each probe is called one last time."""
        if self._thread.ident is not None and not self._ended.is_set():
            self._ended.set()
            self._thread.join()

    def _run(self) -> None:
        period_s = min(probe.period_s for probe in self._probes)
        while not self._ended.wait(period_s):
            self._sample()
        self._sample()

    def _sample(self) -> None:
        for probe in self._probes:
            probe.sample(self._emit)
