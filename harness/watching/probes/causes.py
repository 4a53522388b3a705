"""Finds known failures in the lines of a job's log (see known_failures.py).

A cause changes the reason that a verdict gives, never the verdict (judging/verdict/known.py; the only exception is in
judging/ending/teardown.py)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from torchaos.harness.agent.wire import Kind
from torchaos.harness.watching.probes.known_failures import BY_NAME, CAUSES, Cause
from torchaos.harness.watching.probes.log_adapters import without_ansi
from torchaos.harness.watching.probes.torchelastic import LogFact

__all__ = ["BY_NAME", "CAUSES", "OWN_WATCHDOG", "Cause", "CauseReader", "cause_of"]

OWN_WATCHDOG = "own-watchdog"  # a line by which the scenario says that the job notices a hang

_SIGNS = (  # each known failure has one of them on its line, in lower case; a look for them is 40 times quicker
    "error", "fail", "exception", "timed out", "timeout", "terminate", "nvrm", "out of memory", "cuda gpus", "cublas",
    "oom", "watchdog", "heartbeat", "reaping", "of section", "been open", "in use", "eaddrinuse", "by peer",
    "by remote", "broken pipe", "not known", "resolution", "hostname", "no space", "enospc", "quota", "edquot",
    "stale", "read-only", "endpoint", "responding", "too many open", "killed", "bad_alloc", "cancelled", "signal",
    "segfault", "segmentation", "sigsegv", "barrier", "waiting for clients", "completion", "got async",
    "duplicate gpu", "multiple ranks", "shared memory", "no route", "unreachable", "is down", "abort", "refused",
    "unavailable", "cannot connect", "max retries", "fault by gpu", "running low", "low on resource", "shut down",
    "disconnected", "wait timeout", "no socket", "closed",
)  # fmt: skip
_LONGEST, _MOST = 500, 2000  # characters of a line: that are kept, and that are looked at


def cause_of(line: str, restarts: int) -> Cause | None:
    """The known failure that a line shows; None if there is none. `restarts`: how often torchrun had restarted the
    workers before the line."""
    line = without_ansi(line[:_MOST]).rstrip()
    lower = line.lower()
    if not any(sign in lower for sign in _SIGNS):
        return None
    fitting = (cause for cause in CAUSES if cause.after_restart in (None, restarts > 0))
    return next((cause for cause in fitting if cause.fits(line)), None)


class CauseReader:
    """Finds known failures in the log of one submission. It reports each cause at most MOST times per attempt, since
    each rank may print it, perhaps in a loop."""

    MOST = 8

    def __init__(self, own: Sequence[str] = ()) -> None:
        """`own`: regular expressions of the scenario, for lines by which the job says that it noticed a hang."""
        self._own = [re.compile(text) for text in own]
        self._times: dict[tuple[str, int], int] = {}

    def read(self, line: str, restarts: int) -> Iterator[LogFact]:
        cause = cause_of(line, restarts)
        if cause and self._is_due(cause.name, restarts):
            yield LogFact(Kind.LOG_CAUSE, {"cause": cause.name, "line": _short(line), "advice": cause.advice})
        for own in self._own:
            if own.search(line) and self._is_due(f"{OWN_WATCHDOG} {own.pattern}", restarts):
                yield LogFact(Kind.LOG_CAUSE, {"cause": OWN_WATCHDOG, "line": _short(line), "pattern": own.pattern})

    def _is_due(self, name: str, restarts: int) -> bool:
        self._times[name, restarts] = self._times.get((name, restarts), 0) + 1
        return self._times[name, restarts] <= self.MOST


def _short(line: str) -> str:
    return line.strip()[:_LONGEST]
