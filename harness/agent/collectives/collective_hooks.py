"""The collectives of this rank, and its sends and recvs, seen by hooks in torch's dispatcher. There are two kinds of
operators: those of c10d, which DDP's C++ reducer and FSDP call too, and functional ones (`_c10d_functional`), which
compiled code, DTensor and tensor parallelism call.

The hooks on c10d are on the Autograd keys, and call the original with that key excluded. They must not be on the CPU
key: a call of the kernel from there holds the GIL inside gloo, which deadlocks with gloo's own threads after some
thousand calls. Under inference_mode, the hooks see no collective. Each call costs some 20 us, so the hooks are
installed only if the plan needs them.

The kernels of functional collectives call c10d below the Autograd keys. So these collectives have hooks of their own,
on the ADInplaceOrView key, which eager and compiled code (AOT, Inductor) pass, with and without gradients. Calls with
fake tensors, such as those of torch.compile while it traces, are no collectives and are left out."""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

from ...protocol.wire import Kind, Phase
from ..agent import Agent
from .collective_calls import Call
from .stamp_writer import StampWriter

# Modules that hold these functions under their own names when torch is imported.
_HOLDERS = ("torch.distributed", "torch.distributed.distributed_c10d", "torch.distributed.device_mesh")


class GroupHook:
    """Reports that this rank has joined the default process group, and how long that took. When the job leaves it, its
    last step may not have been seen yet, and its model may be gone when the process ends."""

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

        leave = module.destroy_process_group

        @functools.wraps(leave)
        def destroy_process_group(*args: Any, **kwargs: Any) -> Any:
            if self._agent.on and self._agent.changed is not None:
                self._agent.changed(True)
            return leave(*args, **kwargs)

        for holder in filter(None, map(sys.modules.get, _HOLDERS)):
            for old, new in ((original, init_process_group), (leave, destroy_process_group)):
                if getattr(holder, new.__name__, None) is old:
                    setattr(holder, new.__name__, new)

    def _joined(self, blocked_s: float) -> None:
        self._agent.emit(Kind.GROUP_JOINED, {"blocked_s": round(blocked_s, 6)})


_OPS = {
    "allreduce_": "all_reduce", "allreduce_coalesced_": "all_reduce", "allgather_": "all_gather",
    "_allgather_base_": "all_gather", "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather", "reduce_": "reduce", "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter", "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "broadcast_": "broadcast", "gather_": "gather", "scatter_": "scatter", "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all", "barrier": "barrier", "send": "send", "recv_": "recv",
    "recv_any_source_": "recv",
}  # fmt: skip
_KEYS = ("AutogradCPU", "AutogradCUDA")


class CollectiveHook:
    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self.stamping = StampWriter(agent) if "stamps" in agent.live else None
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
        """Runs the collective, with the faults that are due before it, instead of it or after it."""
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


_FUNCTIONAL_OPS = {
    "all_reduce": "all_reduce", "all_reduce_": "all_reduce", "all_reduce_coalesced": "all_reduce",
    "all_reduce_coalesced_": "all_reduce", "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather", "all_gather_into_tensor_coalesced": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter", "reduce_scatter_tensor_out": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter", "all_to_all_single": "all_to_all", "broadcast": "broadcast",
    "broadcast_": "broadcast",
}  # fmt: skip
_KEY = "ADInplaceOrView"
_UNREAL = ("FakeTensor", "FunctionalTensor")


class FunctionalHook:
    """Hooks the functional collectives. Each goes through `collectives.around`, as those of c10d do."""

    def __init__(self, collectives: CollectiveHook) -> None:
        self._around, self._stamping, self._inside = collectives.around, collectives.stamping, collectives.inside
        self._agent = collectives._agent

    def install(self) -> None:
        torch: Any = import_module("torch")

        self._torch = torch
        self._library = torch.library.Library("_c10d_functional", "IMPL")  # the hooks live as long as this object
        excluded = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _KEY))
        guard = torch._C._ExcludeDispatchKeyGuard
        for name, op in _FUNCTIONAL_OPS.items():
            packet = getattr(torch.ops._c10d_functional, name, None)
            if packet is not None:  # else it is not in this version of torch
                self._library.impl(name, self._hook(op, packet.default, excluded, guard), _KEY)
        if self._stamping is not None:
            waits = self._wait(torch.ops._c10d_functional.wait_tensor.default, excluded, guard)
            self._library.impl("wait_tensor", waits, _KEY)

    def _hook(self, op: str, packet: Any, excluded: Any, guard: Any) -> Callable[..., Any]:
        original = calls(packet)
        group_at = next(n for n, arg in enumerate(packet._schema.arguments) if arg.name == "group_name")

        def collective(*args: Any, **kwargs: Any) -> Any:
            def through() -> Any:
                self._inside.functional = True
                try:
                    with guard(excluded):
                        return original(*args, **kwargs)
                finally:
                    self._inside.functional = False

            if not self._agent.on or not self._is_real(args[0]):
                return through()
            return self._around(Call(op, args, lambda: _named(args[group_at]), packet), through)

        return collective

    def _wait(self, packet: Any, excluded: Any, guard: Any) -> Callable[..., Any]:
        stamping = self._stamping

        def wait_tensor(tensor: Any) -> Any:
            with guard(excluded):
                result = packet(tensor)
            if stamping is not None and self._agent.on and self._is_real(tensor):
                stamping.waited(tensor)
            return result

        return wait_tensor

    def _is_real(self, value: Any) -> bool:
        tensor = value[0] if isinstance(value, (list, tuple)) and value else value
        return type(tensor).__name__ not in _UNREAL and not self._torch._is_functional_tensor(tensor)


def _named(name: str) -> Any:
    c10d: Any = import_module("torch._C._distributed_c10d")
    return c10d._resolve_process_group(name)
