"""How tests wait: for a condition, never for a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def wait_until(
    look: Callable[[], Any],
    fits: Callable[[Any], object] = bool,
    timeout_s: float = 300.0,
    state: Callable[[], object] | None = None,
) -> Any:
    """Return `look()` as soon as it fits. A time-out shows the last value of `look()`, or else `state()`."""
    end = time.monotonic() + timeout_s
    while not fits(seen := look()):
        assert time.monotonic() < end, f"after {timeout_s} s it is still {state() if state else seen!r}"
        time.sleep(0.005)
    return seen
