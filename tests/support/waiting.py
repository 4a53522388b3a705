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
    """Return `look()` as soon as it fits. A time-out shows the last value of `look()`, or else `state()`. The longer it
    waits, the more seldom it looks: what is waited for needs the processor, too."""
    begun = time.monotonic()
    while not fits(seen := look()):
        waited_s = time.monotonic() - begun
        assert waited_s < timeout_s, f"after {timeout_s} s it is still {state() if state else seen!r}"
        time.sleep(min(max(0.002, waited_s / 50), 0.1))
    return seen
