"""A round is scored in its own process."""

from __future__ import annotations

import os
import resource
import signal

import pytest

from torchaos.harness.gameday.day import apart
from torchaos.harness.interfaces import ChaosError


def test_what_it_returns_comes_back_and_its_memory_does_not() -> None:
    """Another process did it, and the 200 MB that it took are not among what this one ever had."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    pid, size = apart(lambda: (os.getpid(), len(b"x" * 200_000_000)))
    assert (pid != os.getpid(), size) == (True, 200_000_000)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000


def test_what_it_raises_is_raised() -> None:
    """A run directory that is damaged is told of as it would be here."""

    def damaged() -> None:
        raise ChaosError("plan.json is damaged")

    with pytest.raises(ChaosError, match="damaged"):
        apart(damaged)


def test_a_death_is_told() -> None:
    """By the kernel's OOM killer, say."""
    with pytest.raises(ChaosError, match="exit code -9"):
        apart(lambda: os.kill(os.getpid(), signal.SIGKILL))
