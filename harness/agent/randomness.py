"""The state of each random number generator of a process, as a short digest. Nothing is drawn, and no device waits."""

from __future__ import annotations

import sys
from collections.abc import Callable
from hashlib import blake2b
from importlib import import_module
from typing import Any


def states() -> dict[str, str]:
    """Digests (16 hexadecimal digits) of the generators in use: `torch`, `cuda` (of the current device, if the process
    uses CUDA), `numpy` (the global one), `python` (of the module random)."""
    return {name: blake2b(read(), digest_size=8).hexdigest() for name, read in _readers().items()}


def _readers() -> dict[str, Callable[[], bytes]]:
    torch: Any = import_module("torch")
    found = {"torch": lambda: _bytes(torch.default_generator)}
    if torch.cuda.is_initialized():
        found["cuda"] = lambda: _bytes(torch.cuda.default_generators[torch.cuda.current_device()])
    if (numpy := sys.modules.get("numpy.random")) is not None:
        found["numpy"] = lambda: _numpy(numpy.get_state(legacy=True))
    if (random := sys.modules.get("random")) is not None:
        found["python"] = lambda: repr(random.getstate()).encode()
    return found


def _bytes(generator: Any) -> bytes:
    return bytes(generator.get_state().numpy())


def _numpy(state: Any) -> bytes:
    name, key, *rest = state
    return repr((name, rest)).encode() + bytes(key)
