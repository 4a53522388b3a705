"""The c10d collectives of this rank, also those that DDP's C++ reducer and FSDP start, seen through torch's dispatcher.

The hooks are on the Autograd keys, and call the original with that key excluded. They must not be on the CPU key: a
call of the kernel from there holds the GIL inside gloo, which deadlocks with gloo's own threads after some thousand
calls. The hooks don't see functional collectives (`_c10d_functional`, see functional.py), nor any collective under
inference_mode. Each call costs some 20 us, so they are installed only if the plan needs them."""

from __future__ import annotations

import functools
import threading
from importlib import import_module
from typing import Any, Callable

from .agent import Agent
from .calls import Call
from .stamping import Stamping
from .wire import Phase

_OPS = {
    "allreduce_": "all_reduce", "allreduce_coalesced_": "all_reduce", "allgather_": "all_gather",
    "_allgather_base_": "all_gather", "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather", "reduce_": "reduce", "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter", "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "broadcast_": "broadcast", "gather_": "gather", "scatter_": "scatter", "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all", "barrier": "barrier",
}  # fmt: skip
_KEYS = ("AutogradCPU", "AutogradCUDA")


class CollectiveHook:
    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self.stamping = Stamping(agent) if "stamps" in agent.live else None
        self.inside = threading.local()  # `.functional`: the c10d call inside a functional one
        self._libraries: list[Any] = []  # the hooks live as long as these objects

    def install(self) -> None:
        """Installs the hooks, after torch.distributed is imported. Raises an error if this torch has no such
        dispatcher."""
        torch: Any = import_module("torch")

        library = torch.library.Library("c10d", "IMPL")
        self._libraries.append(library)
        for name, op in _OPS.items():
            packet = getattr(torch.ops.c10d, name, None)
            if packet is None:  # not in this version of torch
                continue
            for key in _KEYS:
                excluded = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
                library.impl(name, self._hook(op, packet.default, excluded, torch._C._ExcludeDispatchKeyGuard), key)

    def remove(self) -> None:
        while self._libraries:
            self._libraries.pop()._destroy()

    def _hook(self, op: str, packet: Any, excluded: Any, guard: Any) -> Callable[..., Any]:
        agent = self._agent
        original = calls(packet)
        group_at = next(n for n, arg in enumerate(packet._schema.arguments) if arg.name == "process_group")

        def collective(*args: Any) -> Any:
            def through() -> Any:
                with guard(excluded):
                    return original(*args)

            if not agent.on or getattr(self.inside, "functional", False):
                return through()
            return self.around(Call(op, args, lambda: _unbox(args[group_at]), packet), through)

        return collective

    def around(self, call: Call, through: Callable[[], Any]) -> Any:
        """Runs the collective, with the faults that are due before and after it."""
        agent, stamping = self._agent, self.stamping
        counts = self._counts()
        if counts:
            agent.saw("collectives")
            agent.enter(Phase.COLLECTIVE, call)
        try:

            def handed_over() -> Any:
                """Starts the collective. Its stamp begins here, after the faults, so that the delay of a fault is not
                part of the stamp."""
                number = stamping.begin(call, not counts) if stamping is not None else None
                result = through()
                if stamping is not None and number is not None:
                    stamping.returned(number, call, result)
                return result

            if call.instead is not None:
                return call.instead(handed_over)
            result = handed_over()
            if call.after is not None:
                call.after()
            return result
        finally:
            if counts:
                agent.phases.leave(Phase.COLLECTIVE)

    def _counts(self) -> bool:
        """Whether the call counts for Moments. Calls in the training thread and in autograd's threads count. Calls in a
        background thread, such as the thread of an asynchronous save, do not count, because their place between the
        calls of training is different in each run."""
        thread = threading.current_thread()
        return thread.ident == self._agent.thread or isinstance(thread, threading._DummyThread)


def calls(packet: Any) -> Callable[..., Any]:
    """A function that calls the operator through the dispatcher without the GIL, as `packet` itself does, but in a
    sixth of the time: it does not look for overloads, or for classes of tensors that replace functions."""
    torch: Any = import_module("torch")

    call = getattr(torch._C, "_dispatch_call_boxed", None)
    if call is None:
        return packet  # type: ignore[no-any-return]
    schema = packet._schema
    return functools.partial(call, torch._C._dispatch_find_schema_or_throw(schema.name, schema.overload_name))


def _unbox(group: Any) -> Any:
    return _process_group().unbox(group)


@functools.cache
def _process_group() -> Any:
    torch: Any = import_module("torch.distributed")
    return torch.ProcessGroup
