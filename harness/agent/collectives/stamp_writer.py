"""Records when each collective, send and recv of this rank begins and ends (collective_stamps.py).

Torch returns while an asynchronous collective is in progress. Its Work object can be asked whether the collective has
ended. This is done at the next collective, and ten times a second by a thread, which sleeps while no collective is in
progress. A functional collective counts as ended when the job has waited for its result. All this works on the CPU
only, because a query of a CUDA event may break the capture of a CUDA graph. On a GPU, a stamp ends when the call
returns, that is when the collective was enqueued."""

from __future__ import annotations

import atexit
import os
import threading
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...protocol import wire
from ...protocol.collective_stamps import MESSAGES, SLOTS, Stamps, channel
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
        """Stops the thread before the interpreter ends: a thread that wakes up after that may abort the process. Then
        looks once more, because a collective may have ended since the thread last looked."""
        self._ended.set()
        self._opened.set()
        if self._thread is not None:
            self._thread.join(1.0)
        self._look()


def _ranks(call: Call) -> Any:
    try:
        return import_module("torch.distributed").get_process_group_ranks(call.group)
    except Exception:
        return None
