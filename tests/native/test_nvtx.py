"""The library that stalls NCCL calls: with a caller that uses NVTX as NCCL does, and in a real libnccl."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from native_library import path_of

from torchaos.harness.host.library_sources import sign
from torchaos.harness.host.native_libraries import ENV_INJECTION, NVTX
from torchaos.harness.protocol.control_pages import (
    BEGUN_NS,
    CALLS,
    ENDED_NS,
    ENV_NVTX,
    LAST_BYTES,
    MATCHED,
    STALLED,
    ControlPage,
    NcclCall,
    NvtxPage,
)

STALL_S = 0.2
ASCII, REGISTERED, PAYLOAD_EXT = 1, 3, 0xDFBD0009 - 2**32


@pytest.fixture(scope="session")
def library() -> Path:
    return path_of(NVTX)


def test_a_library_of_other_sources_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a working tree the source may have changed since the library was built: then it is compiled anew."""
    library, built = replace(NVTX, sources=tmp_path), tmp_path / NVTX.name
    (tmp_path / "stall.c").write_text((NVTX.sources / "stall.c").read_text())
    built.touch()
    sign(built, tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert library.path() == built
    with open(tmp_path / "stall.c", "a") as file:
        file.write("\n")
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    assert library.path().is_relative_to(tmp_path / "cache")


class Payload(ctypes.Structure):
    _fields_ = (("schema", ctypes.c_uint64), ("size", ctypes.c_size_t), ("data", ctypes.c_void_p))


class Event(ctypes.Structure):
    """nvtxEventAttributes_t."""

    _fields_ = (
        ("version", ctypes.c_uint16), ("size", ctypes.c_uint16), ("category", ctypes.c_uint32),
        ("color_type", ctypes.c_int32), ("color", ctypes.c_uint32), ("payload_type", ctypes.c_int32),
        ("payloads", ctypes.c_int32), ("payload", ctypes.c_uint64), ("message_type", ctypes.c_int32),
        ("message", ctypes.c_void_p),
    )  # fmt: skip


class Caller:
    """Does what the NVTX headers in NCCL do: hands over its table of functions, then calls what was put into it."""

    SIZE = 16

    def __init__(self, library: Path) -> None:
        self._functions = (ctypes.c_void_p * self.SIZE)()
        self._table = (ctypes.c_void_p * self.SIZE)(
            *(ctypes.addressof(self._functions) + n * ctypes.sizeof(ctypes.c_void_p) for n in range(self.SIZE))
        )
        self._give = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_void_p),
                                      ctypes.POINTER(ctypes.c_uint))(self._module_functions)  # fmt: skip
        self._callbacks = (ctypes.c_void_p * 2)(16, ctypes.cast(self._give, ctypes.c_void_p))
        self._export = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_uint32)(lambda _: ctypes.addressof(self._callbacks))
        assert ctypes.CDLL(str(library)).InitializeInjectionNvtx2(self._export) == 1
        make = self._function(12, ctypes.c_void_p, ctypes.c_char_p)
        self._register = self._function(10, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)
        self._push = self._function(4, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
        self._nccl, self._other = make(b"NCCL"), make(b"torch")
        self._names: dict[str, Any] = {}

    def _module_functions(self, module: int, table: Any, count: Any) -> int:
        assert module == 5
        table[0], count[0] = ctypes.addressof(self._table), self.SIZE
        return 1

    def _function(self, number: int, *types: Any) -> Any:
        return ctypes.CFUNCTYPE(*types)(self._functions[number] or 0)

    def call(self, name: str, size: int | None = None, registered: bool = True, domain: str = "NCCL") -> float:
        """One call; how many seconds it was kept."""
        if registered and name not in self._names:
            self._names[name] = self._register(self._nccl, name.encode())
        text = ctypes.create_string_buffer(name.encode())
        data = (ctypes.c_int64 * 3)(7, size or 0, 0)
        payload = Payload(1, ctypes.sizeof(data), ctypes.addressof(data))
        event = Event(version=3, size=48, message_type=REGISTERED if registered else ASCII)
        event.message = self._names[name] if registered else ctypes.addressof(text)
        if size is not None:
            event.payload_type, event.payloads, event.payload = PAYLOAD_EXT, 1, ctypes.addressof(payload)
        begun = time.monotonic()
        self._push(self._nccl if domain == "NCCL" else self._other, ctypes.byref(event))
        return time.monotonic() - begun


class Nccl:
    """A caller, and orders for it."""

    def __init__(self, library: Path, folder: Path) -> None:
        self.caller, self._folder, self._orders = Caller(library), folder, 0
        self.page = NvtxPage.of_this_process()
        assert self.page.loaded

    def order(self, lease_s: float = STALL_S, **which: Any) -> ControlPage:
        self._orders += 1
        path = self._folder / f"{self._orders}.page"
        control = ControlPage(path, create=True)
        control.write(ControlPage.FIRED, 1)
        self.page.order(NcclCall(**which), str(path), 1, lease_s)
        return control


@pytest.fixture(scope="module")
def nccl(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nccl]:
    folder = tmp_path_factory.mktemp("nvtx")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ENV_NVTX, str(folder))
        yield Nccl(library, folder)


def stalled(nccl: Nccl, calls: list[dict[str, Any]]) -> list[int]:
    """The places of the calls that were kept, each for the asked time."""
    kept = []
    for place, call in enumerate(calls):
        before = nccl.page.read(STALLED)
        seconds = nccl.caller.call(**call)
        if nccl.page.read(STALLED) != before:
            assert seconds >= STALL_S
            kept.append(place)
    return kept


MANY: list[dict[str, Any]] = [
    {"name": "ncclAllReduce", "size": 100}, {"name": "ncclAllGather", "size": 5000},
    {"name": "ncclAllReduce", "size": 5000}, {"name": "ncclAllReduceX", "size": 100},
    {"name": "ncclAllReduce", "size": 100, "registered": False}, {"name": "ncclBroadcast"},
]  # fmt: skip


@pytest.mark.parametrize(
    ("which", "places"),
    [
        ({}, [0]),
        ({"nth": 3}, [4]),
        ({"name": "ncclAllGather"}, [1]),
        ({"min_bytes": 101}, [2]),
        ({"max_bytes": 100, "nth": 2}, [4]),
        ({"name": "ncclBroadcast"}, [5]),
        ({"name": "ncclBroadcast", "max_bytes": 10**9}, []),
        ({"name": "ncclSend"}, []),
    ],
)
def test_the_one_call_is_stalled(nccl: Nccl, which: dict[str, Any], places: list[int]) -> None:
    """Name, number and size tell the one call that is kept for the lease; no other call is."""
    nccl.order(**which)
    assert stalled(nccl, MANY) == places
    if places:
        assert nccl.page.read(ENDED_NS) - nccl.page.read(BEGUN_NS) >= STALL_S * 1e9
        assert nccl.page.read(LAST_BYTES) == MANY[places[0]].get("size", -1)


def test_an_order_is_carried_out_once(nccl: Nccl) -> None:
    """When its call has been stalled, later ones of that name go through, until there is another order."""
    nccl.order()
    assert stalled(nccl, MANY[:1] * 3) == [0]
    nccl.order()
    assert stalled(nccl, MANY[:1] * 2) == [0]


def test_other_libraries_ranges_are_left_alone(nccl: Nccl) -> None:
    """A range of another NVTX domain, with the very same name, is neither stalled nor counted."""
    nccl.order()
    before = nccl.page.read(CALLS), nccl.page.read(STALLED)
    nccl.caller.call("ncclAllReduce", domain="torch")
    assert (nccl.page.read(CALLS), nccl.page.read(STALLED), nccl.page.read(MATCHED)) == (*before, 0)


def test_it_is_taken_back_by_the_control_page(nccl: Nccl) -> None:
    """A stall without an end is over as soon as the fault's control page lets go; the page is all that is needed."""
    control = nccl.order(lease_s=3600)
    before = nccl.page.read(STALLED)
    kept: list[float] = []
    thread = threading.Thread(target=lambda: kept.append(nccl.caller.call("ncclAllReduce")))
    thread.start()
    end = time.monotonic() + 30
    while nccl.page.read(STALLED) == before:
        assert time.monotonic() < end, "the stall never began"
        time.sleep(0.01)
    time.sleep(STALL_S)
    control.write(ControlPage.GO, 1)
    thread.join(300)
    assert STALL_S <= kept[0] < 20


def test_without_a_control_page_nothing_is_stalled(nccl: Nccl, tmp_path: Path) -> None:
    """An order whose control page is not there is not carried out: nobody could take it back."""
    nccl.page.order(NcclCall(), str(tmp_path / "missing"), 1, 3600)
    assert stalled(nccl, MANY) == []


@pytest.mark.parametrize("text", ["x" * 64, "x" * 2000])
def test_a_name_that_is_too_long_is_refused(nccl: Nccl, text: str) -> None:
    """It would be cut, and never match."""
    with pytest.raises(ValueError, match="longer"):
        nccl.page.order(NcclCall(name=text), "/tmp/page", 1, 1.0)


REAL = """
import ctypes, json, os, sys, time
from torchaos.harness.protocol.control_pages import CALLS, LAST_BYTES, NcclCall, NvtxPage
from torchaos.harness.protocol.control_pages import ControlPage

library, control = ctypes.CDLL(sys.argv[1]), sys.argv[2]
ControlPage(control, create=True).write(ControlPage.FIRED, 1)
page = NvtxPage.of_this_process()
page.order(NcclCall("ncclAllReduce", nth=2, min_bytes=400), control, 1, 0.3)
nothing, calls = ctypes.c_void_p(None), []
def call(name, *arguments):
    begun = time.monotonic()
    code = getattr(library, name)(*arguments)
    calls.append([name, code, time.monotonic() - begun])
# Of 4 bytes each. Every one fails, there being no communicator; its range it pushes first.
for count in (10, 100, 1000):
    call("ncclAllReduce", nothing, nothing, ctypes.c_size_t(count), 7, 0, nothing, nothing)
    call("ncclAllGather", nothing, nothing, ctypes.c_size_t(count), 7, nothing, nothing)
    call("ncclReduceScatter", nothing, nothing, ctypes.c_size_t(count), 7, 0, nothing, nothing)
version = ctypes.c_int()
library.ncclGetVersion(ctypes.byref(version))
print(json.dumps({"calls": calls, "version": version.value, "loaded": page.loaded, "seen": page.read(CALLS),
                  "bytes": page.read(LAST_BYTES)}))
"""


@pytest.fixture(scope="session")
def libnccl(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Path]:
    """A real libnccl.so.2: an installed one, else (where that is allowed) NVIDIA's package from pip's index."""

    def find(may_install: bool) -> Path:
        cache: pytest.Cache | None = getattr(pytestconfig, "cache", None)  # -p no:cacheprovider
        kept = cache.mkdir("nccl") if cache else tmp_path_factory.getbasetemp() / "nccl"
        for folder in (*map(Path, sys.path), kept):
            found = folder / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
            if found.exists():
                return found
        if not may_install:
            pytest.skip("libnccl.so.2 is missing: pip install nvidia-nccl-cu12, or run the tests marked long once")
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(kept), "nvidia-nccl-cu12"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
        if done.returncode != 0:
            pytest.skip(f"nvidia-nccl-cu12 can't be installed: {done.stderr[-300:]}")
        return find(False)

    return find


def in_real_nccl(libnccl: Path, library: Path, folder: Path, **env: str) -> dict[str, Any]:
    script = folder / "nccl.py"
    script.write_text(textwrap.dedent(REAL))
    environment = {**os.environ, ENV_INJECTION: str(library), ENV_NVTX: str(folder), **env}
    done = subprocess.run(
        [sys.executable, str(script), str(libnccl), str(folder / "fault.page")],
        env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def check_real_nccl(libnccl: Path, library: Path, folder: Path) -> None:
    found = in_real_nccl(libnccl, library, folder)
    kept = [(name, number) for number, (name, _code, seconds) in enumerate(found["calls"]) if seconds >= 0.3]
    assert kept == [("ncclAllReduce", 6)], found  # the second of at least 400 bytes is the one of 4000
    assert (found["loaded"], found["bytes"]) == (True, 4000), found


def test_a_real_nccl(libnccl: Callable[[bool], Path], library: Path, tmp_path: Path) -> None:
    """In NVIDIA's own library, without a GPU: the second all-reduce of a size waits, and no other call does."""
    check_real_nccl(libnccl(False), library, tmp_path)


@pytest.mark.long
def test_a_real_nccl_that_is_installed_for_it(libnccl: Callable[[bool], Path], library: Path, tmp_path: Path) -> None:
    """The same, where NVIDIA's library first has to be fetched from pip's index."""
    check_real_nccl(libnccl(True), library, tmp_path)
