"""Reports when this rank joined the default process group, and how many seconds it waited for the other ranks."""

from __future__ import annotations

import functools
import sys
import time
from types import ModuleType
from typing import Any

from .agent import Agent
from .wire import Kind

# Modules that hold `init_process_group` under their own name when torch is imported.
_HOLDERS = ("torch.distributed", "torch.distributed.distributed_c10d", "torch.distributed.device_mesh")


class GroupHook:
    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._report = agent.careful("process_group")(self._joined)

    def patch(self, module: ModuleType) -> None:
        """Patches torch.distributed. Does nothing if this torch has no process groups."""
        original = getattr(module, "init_process_group", None)
        if original is None:
            return

        @functools.wraps(original)
        def init_process_group(*args: Any, **kwargs: Any) -> Any:
            since_s = time.monotonic()
            result = original(*args, **kwargs)
            if self._agent.on:
                self._report(time.monotonic() - since_s)
            return result

        for name in _HOLDERS:
            holder = sys.modules.get(name)
            if getattr(holder, "init_process_group", None) is original:
                vars(holder)["init_process_group"] = init_process_group

    def _joined(self, blocked_s: float) -> None:
        self._agent.emit(Kind.GROUP_JOINED, {"blocked_s": round(blocked_s, 6)})
