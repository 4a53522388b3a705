"""Stamps each collective of this rank (stamps.py), to its real end where that can be seen.

Torch gives control back while an asynchronous collective is under way. Its Work then tells when it is over: it is asked
at the next collective, and ten times a second by a thread. A functional one is over when its result was waited for.
Only on the CPU: asking a CUDA event may spoil the capture of a graph, so there a stamp ends where the call returned,
which is when the collective was enqueued.
"""

from __future__ import annotations

import atexit
import os
import threading
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import wire
from .calls import Call
from .stamps import Stamps

if TYPE_CHECKING:
    from .agent import Agent

_PERIOD_S = 0.1
_MOST_WAITS = 256  # results of functional collectives that nobody has waited for yet


class Stamping:
    """Every method is safe to call in a collective: an error switches the stamps off, and never breaks the job."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        folder = Path(os.environ[wire.ENV_PLAN]).parent / "stamps"
        folder.mkdir(mode=0o700, exist_ok=True)
        who = agent.who
        path = folder / f"rank{who.rank}-a{who.attempt}-p{who.pid}.stamps"
        path.unlink(missing_ok=True)  # of the process that this one was before it called exec
        self.stamps = Stamps(path, who.rank, who.attempt, who.pid, wire.start_ticks(who.pid) or 0)
        self._flying: dict[int, Any] = {}  # Work by number
        self._waits: dict[int, int] = {}  # number by the address of a functional collective's result
        self._lock = threading.RLock()  # a signal's handler may save, and call a collective, in the midst of a look
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        c10d: Any = import_module("torch._C._distributed_c10d")
        self._unbox: Any = getattr(getattr(c10d, "Work", None), "unbox", None)  # None: this torch can't say
        self._unwaited: Any = getattr(c10d, "_get_work_registry_size", None)  # how many functional ones are
        careful = agent.careful("stamps")
        self.begin, self.returned, self.waited = careful(self._begin), careful(self._returned), careful(self._waited)
        self._look = careful(self._look_at_what_flies)

    def _begin(self, call: Call) -> int:
        self._agent.saw("stamps")
        self._look_at_what_flies()
        name = call.group_name
        group = self.stamps.known(name)
        if group is None:
            group = self.stamps.group(name, _ranks(call))
        return self.stamps.begin(call.op, group, call.bytes, self._agent.steps_over)

    def _returned(self, number: int, call: Call, result: Any) -> None:
        self.stamps.returned(number)
        last = result[-1] if isinstance(result, (tuple, list)) and result else result
        if not call.on_cpu or self._unbox is None:
            self.stamps.ended(number)
        elif not hasattr(last, "data_ptr"):
            self._follow(number, self._unbox(last))
        elif self._unwaited is not None:  # functional: its result is what is waited for
            self._await(number, last.data_ptr())
        else:
            self.stamps.ended(number)

    def _follow(self, number: int, work: Any) -> None:
        if work.is_completed():
            self.stamps.ended(number)
        else:
            self._flying[number] = work
            self._watch()

    def _watch(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="torchaos", daemon=True)
            self._thread.start()
            atexit.register(self.stop)

    def _await(self, number: int, address: int) -> None:
        if len(self._waits) >= _MOST_WAITS:
            self.stamps.ended(self._waits.pop(next(iter(self._waits))))  # nobody will: the result was thrown away
        self._waits[address] = number
        self._watch()

    def _waited(self, tensor: Any) -> None:
        address = tensor.data_ptr()
        self._waited_at(address, self._waits.get(address, 0))

    def _waited_at(self, address: int, number: int) -> None:
        if number and self._waits.pop(address, None) is not None:
            self.stamps.ended(number)

    def _look_at_what_flies(self) -> None:
        with self._lock:
            if self._waits and not self._unwaited():  # eager code waits below the keys that the hooks lie on
                for address, number in list(self._waits.items()):
                    self._waited_at(address, number)
            for number, work in list(self._flying.items()):
                if work.is_completed():
                    self.stamps.ended(number)
                    self._flying.pop(number, None)

    def _run(self) -> None:
        while not self._ended.wait(_PERIOD_S) and self._agent.on:
            self._look()

    def stop(self) -> None:
        """Before the interpreter goes: a thread that wakes up after that may abort the process."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(1.0)


def _ranks(call: Call) -> Any:
    try:
        return import_module("torch.distributed").get_process_group_ranks(call.group)
    except Exception:
        return None
