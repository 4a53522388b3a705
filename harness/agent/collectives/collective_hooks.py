"""The collectives of this rank, and its sends and recvs, seen by hooks in torch's dispatcher. There are two kinds of
operators: those of c10d, which DDP's C++ reducer and FSDP call too, and functional ones (`_c10d_functional`), which
compiled code, DTensor and tensor parallelism call.

The hooks on c10d are on the Autograd keys, and call the original with that key excluded. They must not be on the CPU
key: a call of the kernel from there holds the GIL inside gloo, which deadlocks with gloo's own threads after some
thousand calls. Under inference_mode, the hooks see no collective. Each call costs some 20 us, so the hooks are
installed only if the plan needs them.

The kernels of functional collectives call c10d below the Autograd keys. So these collectives have hooks of their own,
on the ADInplaceOrView key, which eager and compiled code (AOT, Inductor) pass, with and without gradients. Calls with
fake tensors, such as those of torch.compile while it traces, are no collectives and are left out.

`StampWriter` records when each collective, send and recv begins and ends (collective_stamps.py). Torch returns while an
asynchronous collective is in progress. Its Work object can be asked whether the collective has ended. This is done at
the next collective, and ten times a second by a thread, which sleeps while no collective is in progress. A functional
collective counts as ended when the job has waited for its result. All this works on the CPU only, because a query of a
CUDA event may break the capture of a CUDA graph. On a GPU, a stamp ends when the call returns, that is when the
collective was enqueued."""

from __future__ import annotations

import atexit
import functools
import os
import sys
import threading
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ...protocol import wire
from ...protocol.collective_stamps import MESSAGES, SLOTS, Stamps, channel
from ...protocol.wire import Kind, Phase
from ..agent import Agent
from ..job_signals import raise_if_of_the_job
from .collective_calls import Call

if TYPE_CHECKING:
    from ..agent import Agent


_PERIOD_S = 0.1  # seconds
_MOST_WAITS = 256  # results of functional collectives that nobody has waited for yet


class StampWriter:
    """Stamps the collectives of this rank. All methods are safe to call in a collective: an error switches the stamps
    off and never breaks the job."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        folder = Path(os.environ[wire.ENV_PLAN]).parent / "stamps"
        folder.mkdir(mode=0o700, exist_ok=True)
        who = agent.who
        path = folder / f"rank{who.rank}-a{who.attempt}-p{who.pid}.stamps"
        path.unlink(missing_ok=True)  # written by this same process before it called exec
        self.stamps = Stamps(path, who.rank, who.attempt, who.pid, wire.start_ticks(who.pid) or 0)
        self._open: dict[int, Any] = {}  # Work by the collective's number
        self._waits: dict[int, int] = {}  # collective's number by the address of its result, for functional collectives
        self._lock = threading.RLock()  # a signal handler may run a collective while the lock is held
        self._opened, self._ended = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        c10d: Any = import_module("torch._C._distributed_c10d")
        self._unbox: Any = getattr(getattr(c10d, "Work", None), "unbox", None)  # None: not in this torch
        self._unwaited: Any = getattr(c10d, "_get_work_registry_size", None)  # returns how many
        careful = agent.careful("stamps")
        self.begin, self.returned, self.waited = careful(self._begin), careful(self._returned), careful(self._waited)
        self._look = careful(self._check_open)

    def _begin(self, call: Call, background: bool = False) -> int | None:
        self._agent.saw("stamps")
        self._check_open()
        name = call.group_name
        if call.op in MESSAGES:
            if call.pair is None:  # as from any rank: nothing says which send it takes
                return None
            name = channel(name, *call.pair)
        group = self.stamps.known(name)
        if group is None:
            group = self.stamps.group(name, call.pair or _ranks(call))
        thread = threading.get_native_id() if background else 0
        return self.stamps.begin(call.op, group, call.bytes, self._agent.steps_over, thread)

    def _returned(self, number: int, call: Call, result: Any) -> None:
        self.stamps.returned(number)
        last = result[-1] if isinstance(result, (tuple, list)) and result else result
        if not call.on_cpu or self._unbox is None:
            self.stamps.ended(number)
        elif not hasattr(type(last), "data_ptr"):  # the type answers at once, a ScriptObject in 10 us
            self._follow(number, self._unbox(last))
        elif self._unwaited is not None:  # functional: the job waits for its result
            self._await(number, last.data_ptr())
        else:
            self.stamps.ended(number)

    def _follow(self, number: int, work: Any) -> None:
        if work.is_completed():
            self.stamps.ended(number)
        else:
            self._open[number] = work
            self._watch()

    def _watch(self) -> None:
        if not self._opened.is_set():
            self._opened.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="torchaos", daemon=True)
            self._thread.start()
            atexit.register(self.stop)

    def _await(self, number: int, address: int) -> None:
        if len(self._waits) >= _MOST_WAITS:
            self.stamps.ended(self._waits.pop(next(iter(self._waits))))  # its result was dropped
        self._waits[address] = number
        self._watch()

    def _waited(self, tensor: Any) -> None:
        address = tensor.data_ptr()
        self._waited_at(address, self._waits.get(address, 0))

    def _waited_at(self, address: int, number: int) -> None:
        if number and self._waits.pop(address, None) is not None:
            self.stamps.ended(number)

    def _check_open(self) -> None:
        with self._lock:
            if self._waits and not self._unwaited():  # the hooks don't see how eager code waits
                for address, number in list(self._waits.items()):
                    self._waited_at(address, number)
            for number, work in list(self._open.items()):
                if work.is_completed():
                    self.stamps.ended(number)
                    self._open.pop(number, None)
                elif number <= self.stamps.begun - SLOTS:  # a job may never wait for a send; its stamp is gone
                    self._open.pop(number, None)

    def _run(self) -> None:
        while not self._ended.is_set() and self._agent.on:
            if not self._open and not self._waits:
                self._opened.wait()
            self._opened.clear()  # what has been opened until now is looked at next
            self._ended.wait(_PERIOD_S)
            self._look()

    def stop(self) -> None:
        """Stops the thread before the interpreter ends, because a thread that wakes up later may abort the process.
        Then checks once more for collectives that have ended since the thread's last check."""
        self._ended.set()
        self._opened.set()
        if self._thread is not None:
            self._thread.join(1.0)
        self._look()


def _ranks(call: Call) -> Any:
    try:
        return import_module("torch.distributed").get_process_group_ranks(call.group)
    except Exception as error:
        raise_if_of_the_job(error)
        return None


# Modules that hold these functions under their own names when torch is imported.
_HOLDERS = ("torch.distributed", "torch.distributed.distributed_c10d", "torch.distributed.device_mesh")


class GroupHook:
    """Reports that this rank has joined the default process group, and how long that took. When the job leaves the
    group, looks once more whether the job has changed its parameters: the last step may not have been seen yet, and the
    model may be gone when the process ends."""

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
    """A function that calls the operator through the dispatcher without the GIL, as `packet` itself does, in a sixth of
    the time: it looks neither for overloads nor for classes of tensors that replace functions."""
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
