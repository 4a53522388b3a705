"""The c10d collectives of this rank, direct ones and those of DDP's C++ reducer and of FSDP, by the dispatcher.

The hooks lie on the Autograd keys and call through with that key excluded. Never on the CPU key: calling the kernel
from there keeps the interpreter lock inside gloo, which deadlocks with gloo's own threads after some thousand calls.
They see no functional collectives (`_c10d_functional`), and cost about 0.1 ms a call, so they are there on demand only.
"""

from __future__ import annotations

import threading
from importlib import import_module
from typing import Any, Callable

from .agent import Agent
from .wire import Phase

_OPS = (
    "allreduce_", "allreduce_coalesced_", "allgather_", "_allgather_base_", "allgather_coalesced_",
    "allgather_into_tensor_coalesced_", "reduce_", "reduce_scatter_", "_reduce_scatter_base_",
    "reduce_scatter_tensor_coalesced_", "broadcast_", "gather_", "scatter_", "alltoall_", "alltoall_base_", "barrier",
)  # fmt: skip
_KEYS = ("AutogradCPU", "AutogradCUDA")


class CollectiveHook:
    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._libraries: list[Any] = []  # the hooks last as long as these

    def install(self) -> None:
        """Once torch.distributed is there. Raises where this torch has no such dispatcher; the caller says so."""
        torch: Any = import_module("torch")

        library = torch.library.Library("c10d", "IMPL")
        self._libraries.append(library)
        for name in _OPS:
            packet = getattr(torch.ops.c10d, name, None)
            if packet is None:  # not in this version of torch
                continue
            for key in _KEYS:
                excluded = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
                library.impl(name, self._hook(packet.default, excluded, torch._C._ExcludeDispatchKeyGuard), key)

    def remove(self) -> None:
        """Take the hooks out again."""
        while self._libraries:
            self._libraries.pop()._destroy()

    def _hook(self, op: Any, excluded: Any, guard: Any) -> Callable[..., Any]:
        agent = self._agent

        def collective(*args: Any) -> Any:
            if not agent.on or not self._counts():
                with guard(excluded):
                    return op(*args)
            agent.saw("collectives")
            agent.enter(Phase.COLLECTIVE)
            try:
                with guard(excluded):
                    return op(*args)
            finally:
                agent.phases.leave(Phase.COLLECTIVE)

        return collective

    def _counts(self) -> bool:
        """The training thread's own and autograd's count; a background thread's (an asynchronous checkpoint's) don't:
        they fall between those of training wherever they may."""
        thread = threading.current_thread()
        return thread.ident == self._agent.thread or isinstance(thread, threading._DummyThread)
