"""Faults in NCCL's connections, applied by the agent in a rank whose training waits for the plug-in's transfers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from waiting import wait_until

FLOW = Path(__file__).parents[3] / "injectors" / "nccl.py"
pytestmark = pytest.mark.one_version

# Each step sends a message from the rank to itself and waits for it, as NCCL's proxy thread would: it asks again and
# again, and is never held. The members of ncclNet_v8_t by number; see abi.h.
SCRIPT = """
import ctypes, sys, time
import torch

table = ctypes.cast(ctypes.addressof(ctypes.c_char.in_dll(ctypes.CDLL(sys.argv[1] if len(sys.argv) > 1 else LIBRARY),
    "ncclNetPlugin_v8")), ctypes.POINTER(ctypes.c_void_p))
P, I = ctypes.c_void_p, ctypes.c_int
def call(number, *arguments):
    code = ctypes.CFUNCTYPE(I, *[type(one) if isinstance(one, (I, P)) else P for one in arguments])(table[number])(
        *arguments)
    assert code == 0, (number, code)
at = ctypes.byref
listener, sender, receiver = P(), P(), P()
handle = ctypes.create_string_buffer(128)
call(1, P())
call(4, I(0), ctypes.cast(handle, P), ctypes.cast(at(listener), P))
while not (sender and receiver):
    if not sender:
        call(5, I(0), ctypes.cast(handle, P), ctypes.cast(at(sender), P), P())
    if not receiver:
        call(6, listener, ctypes.cast(at(receiver), P), P())

def wait_for(request):
    done, size = I(), I()
    while not done.value:
        call(13, request, ctypes.cast(at(done), P), ctypes.cast(at(size), P))
        time.sleep(0.001)
    return size.value

def message(text):
    sent, got = ctypes.create_string_buffer(text), ctypes.create_string_buffer(100)
    out, back = P(), P()
    call(10, sender, ctypes.cast(sent, P), I(len(text)), I(0), P(), ctypes.cast(at(out), P))
    where, sizes = (P * 1)(ctypes.addressof(got)), (I * 1)(100)
    call(11, receiver, I(1), ctypes.cast(where, P), ctypes.cast(sizes, P), P(), P(), ctypes.cast(at(back), P))
    wait_for(out)
    assert wait_for(back) == len(text) and got.raw[: len(text)] == text

model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1, 7):
    loss = model(torch.ones(1, 2)).sum()
    message(b"step %d" % step)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print("step", step, flush=True)
"""


@pytest.fixture
def library() -> Path:
    from native_library import path_of

    from torchaos.harness.host.native_libraries import NCCL_NET

    return path_of(NCCL_NET)


@pytest.fixture
def started(rank: Any, library: Path) -> Callable[..., Any]:
    """Starts the rank with a fault in step 3; returns its process."""

    def start(injector: str, params: dict[str, Any]) -> Any:
        folder = rank.folder / "net"
        folder.mkdir()
        rank.page().write(1, 1)  # ALLOWED
        trigger = rank.trigger(str(FLOW), injector, step=3)
        trigger = type(trigger)(trigger.fault, trigger.when, trigger.page, trigger.source, trigger.injector, params)
        env = {"TORCHAOS_NCCL_NET": str(folder), "NCCL_SOCKET_IFNAME": "=lo"}
        return rank.start(SCRIPT.replace("LIBRARY", repr(str(library))), triggers=(trigger,), env=env)

    return start


def page_of(rank: Any, process: Any, agent_module: Callable[[str], ModuleType]) -> tuple[Any, Any]:
    net: Any = agent_module("protocol.nccl_connections")
    path = rank.folder / "net" / f"p{process.pid}.net"
    wait_until(path.exists, timeout_s=150)
    return net, net.NetPage(path)


def test_a_stall_holds_the_rank_until_it_is_taken_back(
    rank: Any, started: Callable[..., Any], agent_module: Callable[[str], ModuleType]
) -> None:
    """The step of the Moment waits, with no error; the control page alone lets it go on, and then the agent reports
    what the fault has hit."""
    process = started("Stall", {"way": "out", "min_bytes": 3})
    net, page = page_of(rank, process, agent_module)
    wait_until(lambda: page.read(net.HITS, 0), timeout_s=150)
    assert len([e for e in rank.read() if e.kind.value == "step"]) == 2
    _let_go_on(rank.folder / "kill.page")
    ran = rank.wait(process)
    assert (ran.code, len(ran.steps), ran.failures) == (0, 6, []), ran.output
    assert [(e.data["fault"], e.data["hits"]) for e in ran.of("run.note")] == [("f1", 1)]
    assert page.loaded


def test_a_delay_is_told_when_it_begins(rank: Any, started: Callable[..., Any]) -> None:
    """Each later message is late, both ways; the agent reports the first."""
    ran = rank.wait(started("Delay", {"time": 0.05}))
    assert (ran.code, len(ran.steps)) == (0, 6), ran.output
    assert [(e.data["fault"], e.data["hits"]) for e in ran.of("run.note")] == [("f1", 2)]
    assert ran.of("fault.effect") == []


def test_a_fault_that_hits_nothing_is_reported_so(
    rank: Any, started: Callable[..., Any], agent_module: Callable[[str], ModuleType]
) -> None:
    """No transfer is of that size: nothing is held, and when the fault is over the agent says that it hit nothing."""
    process = started("Stall", {"min_bytes": 1000})
    net, page = page_of(rank, process, agent_module)
    wait_until(lambda: page.read(net.ACTIVE, 0) or process.poll() is not None, timeout_s=150)
    _let_go_on(rank.folder / "kill.page")
    ran = rank.wait(process)
    assert (ran.code, len(ran.steps)) == (0, 6), ran.output
    assert [e.data["hits"] for e in ran.of("run.note")] in ([0], [])  # the rank may be done before it looks


def _let_go_on(page: Path) -> None:
    """Writes GO in place: the rank has the file mapped, and would die if it became shorter for a moment."""
    with open(page, "r+b") as file:
        file.seek(16)
        file.write((1).to_bytes(8, "little"))
