"""The network plug-in for NCCL, called by a program that plays NCCL in two processes. No GPU and no NCCL is needed."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from native_library import path_of

from torchaos.harness.host.native_libraries import NCCL_NET, compiler
from torchaos.harness.protocol.nccl_connections import (
    CONNECTIONS,
    ENV_NCCL_NET,
    LAST_BYTES,
    MATCHED,
    RECEIVED,
    SENT,
    VERSION,
    NetKind,
    NetOrder,
)

from .net_hosts import Fault, Host, Pair

VERSIONS = (8, 9, 10, 11)
# The versions for which NCCL asks, in this order: src/plugin/net.cc. It takes the first that is there.
ASKED = {"2.28": "11,10,9,8,7,6", "2.30": "12,11,10,9,8,7,6"}
MB = 1 << 20
REMOTE_ERROR, SYSTEM_ERROR = 6, 2
MakePair = Callable[..., Pair]


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = compiler()
    if found is None:
        pytest.skip("needs a C compiler")
    made = tmp_path_factory.mktemp("nccl-net") / "net_host"
    source = Path(__file__).with_name("net_host.c")
    options = ["-O1", "-Wall", "-Wextra", "-Werror", "-I", str(NCCL_NET.sources), "-o", str(made), str(source), "-ldl"]
    subprocess.run([found, *options], check=True)
    return made


@pytest.fixture(scope="session")
def library() -> Path:
    return path_of(NCCL_NET)


@pytest.fixture
def pair(program: Path, library: Path, tmp_path: Path) -> Iterator[MakePair]:
    """Makes two hosts; ends them after the test."""
    made: list[Pair] = []

    def make(version: int | str = 11, channels: int = 3, **env: str) -> Pair:
        made.append(Pair(program, library, tmp_path, version, channels, **env))
        return made[-1]

    yield make
    for one in made:
        one.end()


def ok(sizes: list[int], count: int, channels: int = 3) -> dict[int, str]:
    return dict.fromkeys(range(channels), f"ok {sum(sizes[n % len(sizes)] for n in range(count))}")


@pytest.mark.parametrize("version", VERSIONS)
def test_data_arrive_whole_and_in_order(pair: MakePair, version: int) -> None:
    """In both directions, on several channels, with many requests at once, for sizes from nothing to a megabyte; each
    interface version that NCCL 2.24 to 2.30 load."""
    two = pair(version)
    two.connect()
    sizes = [0, 1, 7, 8, 9, 4096, 65537, 0, 0, MB + 3]
    for count, depth in ((1, 1), (40, 8), (100, 32)):
        two.exchange(sizes, count, depth, seed=count)
        assert two.results() == [ok(sizes, count)] * 2
    for host in two.hosts:
        assert (host.page.read(VERSION), host.page.read(CONNECTIONS)) == (version, 6)
        assert host.page.read(SENT) == host.page.read(RECEIVED) == 3 * 141
        assert host.ask("close") == "closed"


@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
def test_each_nccl_finds_the_newest_interface(pair: MakePair, asked: str) -> None:
    """Also one that asks for a newer interface first, and falls back. Faults work over the one that it finds."""
    two = pair(asked)
    two.connect()
    fault = two.hosts[0].order(NetOrder(NetKind.DELAY, a=1_000_000, way="out"))
    two.exchange([1000], count=4)
    assert two.results() == [ok([1000], 4)] * 2
    assert [host.page.read(VERSION) for host in two.hosts] == [11, 11]
    assert fault.hits == 3 * 4
    assert [host.ask("close") for host in two.hosts] == ["closed"] * 2


@pytest.mark.parametrize("versions", [f"{last}" for last in VERSIONS] + ["7,6"])
def test_an_nccl_that_asks_for_no_interface_of_ours_gets_none(pair: MakePair, versions: str) -> None:
    """Every version on its own is there; those before NCCL 2.20 are not, and NCCL then uses its own transport."""
    host = pair(versions).hosts[0]
    if versions == "7,6":
        with pytest.raises(EOFError):
            host.hear()
    else:
        assert host.ask("nics").startswith("nics lo=")


def test_large_transfers(pair: MakePair) -> None:
    """64 MB in one transfer, both ways at once, with small ones behind it on the same connection."""
    two, sizes = pair(channels=1), [64 * MB, 1, 0]
    two.connect()
    two.exchange(sizes, count=4, depth=2)
    assert two.results() == [ok(sizes, 4, channels=1)] * 2


def test_each_of_many_connections_has_its_own_data(pair: MakePair) -> None:
    """Sixteen channels."""
    two = pair(channels=16)
    two.connect()
    two.exchange([5000], count=10, depth=4)
    assert two.results() == [ok([5000], 10, channels=16)] * 2


def test_a_receiver_with_too_little_room_gets_an_error(pair: MakePair) -> None:
    """A message that is longer than what is expected is refused, as NCCL's own transport does."""
    two = pair(channels=1)
    two.connect()
    two.hosts[0].say("exchange 1 1 1 100")
    two.hosts[1].say("exchange 1 1 1 10")
    assert two.hosts[1].result() == {0: "error 5"}


def finished(host: Host, channels: set[int]) -> None:
    """These channels are over, well; another is not."""
    lines = [host.hear() for _ in channels]
    assert {int(line.split()[1]) for line in lines} == channels, lines
    assert all(" ok " in line for line in lines), lines


HELD = [
    pytest.param(NetOrder(NetKind.STALL, connection=1), {1}, id="one-connection-both-ways"),
    pytest.param(NetOrder(NetKind.STALL, connection=1, way="out"), {1}, id="what-is-sent"),
    pytest.param(NetOrder(NetKind.STALL, connection=1, way="in"), {1}, id="what-is-received"),
    pytest.param(NetOrder(NetKind.STALL, peers=[1], connection=2), {2}, id="to-a-peer"),
    pytest.param(NetOrder(NetKind.FLAP, a=3600 * 10**9, b=10**9, connection=0), {0}, id="flap-that-is-down"),
    pytest.param(NetOrder(NetKind.DELAY, a=3600 * 10**9, connection=0), {0}, id="delay-without-end"),
    pytest.param(NetOrder(NetKind.THROTTLE, a=1, connection=0, way="out"), {0}, id="a-byte-a-second"),
]


@pytest.mark.parametrize(("order", "meant"), HELD)
def test_the_chosen_connections_are_held_and_go_on(pair: MakePair, order: NetOrder, meant: set[int]) -> None:
    """While the order holds, the chosen connection does not come to its end and all others do; when it is taken back,
    all its data arrive, whole. NCCL's thread is not held meanwhile: the others could not end otherwise."""
    two, sizes, count = pair(), [0, 100_000, 3], 30
    two.connect()
    fault = two.hosts[0].order(order)
    two.exchange(sizes, count, depth=8)
    fault.wait_for_a_hit()
    finished(two.hosts[0], {0, 1, 2} - meant)
    with pytest.raises(TimeoutError):
        two.hosts[0].hear(0.3)
    fault.take_back()
    done = ok(sizes, count)
    assert two.results() == [{channel: done[channel] for channel in meant}, done]
    two.exchange(sizes, count, depth=8, seed=2)
    assert two.results() == [done] * 2


def test_a_stall_ends_with_its_lease(pair: MakePair) -> None:
    """If nobody takes it back, the transfers go on by themselves when its time is over, and not before."""
    two = pair()
    two.connect()
    begun = time.monotonic()
    two.hosts[0].order(NetOrder(NetKind.STALL), lease_s=0.5)
    two.exchange([1000])
    assert two.results() == [ok([1000], 4)] * 2
    assert time.monotonic() - begun >= 0.5


def test_without_a_control_page_nothing_is_done(pair: MakePair, tmp_path: Path) -> None:
    """An order whose control page is not there is not carried out: nobody could take it back."""
    two = pair()
    two.connect()
    two.hosts[0].page.order(NetOrder(NetKind.STALL), str(tmp_path / "missing"), 1, 3600)
    two.exchange([1000])
    assert two.results() == [ok([1000], 4)] * 2


@pytest.mark.parametrize(
    ("which", "hits"),
    [
        ({}, 3 * 8),
        ({"way": "out"}, 3 * 4),
        ({"min_bytes": 1000}, 3 * 4),
        ({"max_bytes": 999}, 3 * 4),
        ({"min_bytes": 1001, "max_bytes": 1999}, 0),
        ({"connection": 1, "way": "in"}, 4),
        ({"peers": [1]}, 3 * 8),
        ({"peers": [0, 5]}, 0),
        ({"nth": 9, "way": "out"}, 4),
    ],
)
def test_the_chosen_transfers_and_no_others(pair: MakePair, which: dict[str, object], hits: int) -> None:
    """By direction, size, connection, peer and number: the library counts what the order did something to."""
    two = pair()
    two.connect()
    fault = two.hosts[0].order(NetOrder(NetKind.DELAY, a=1_000_000, **which))  # type: ignore[arg-type]
    two.exchange([10, 2000])
    assert two.results() == [ok([10, 2000], 4)] * 2
    assert fault.hits == hits
    assert not hits or fault.read(MATCHED) == hits + int(which.get("nth", 1)) - 1  # type: ignore[call-overload]


def timed(two: Pair, sizes: list[int], count: int, depth: int) -> float:
    begun = time.monotonic()
    two.exchange(sizes, count, depth)
    assert two.results() == [ok(sizes, count)] * 2
    return time.monotonic() - begun


def test_a_delay_lasts_as_long_as_it_says(pair: MakePair) -> None:
    """Ten transfers, one after the other, each 50 ms late, take half a second and more; ten at once are late together,
    which shows in the orders of the two."""
    two = pair()
    two.connect()
    two.hosts[0].order(NetOrder(NetKind.DELAY, a=50_000_000, way="out"))
    assert timed(two, [100], count=10, depth=1) >= 0.5


def test_a_throttle_is_as_slow_as_it_says(pair: MakePair) -> None:
    """Three connections share 2 MB/s in the direction that is meant: 1.5 MB take 0.75 s and more."""
    two = pair()
    two.connect()
    fault = two.hosts[0].order(NetOrder(NetKind.THROTTLE, a=2_000_000, way="out"))
    assert timed(two, [500_000], count=1, depth=1) >= 0.7
    assert (fault.hits, fault.read(LAST_BYTES)) == (3, 500_000)


def test_a_flap_is_down_and_up_in_turn(pair: MakePair) -> None:
    """Data arrive although nobody takes the order back; a transfer that came in a down time waited."""
    two = pair()
    two.connect()
    begun = time.monotonic()
    fault = two.hosts[0].order(NetOrder(NetKind.FLAP, a=400_000_000, b=100_000_000))
    two.exchange([1000], count=4, depth=1)
    assert two.results() == [ok([1000], 4)] * 2
    assert time.monotonic() - begun >= 0.4
    assert fault.hits == 24


@pytest.mark.parametrize("code", [SYSTEM_ERROR, REMOTE_ERROR])
@pytest.mark.parametrize("way", ["out", "in"])
def test_an_error_is_that_of_the_chosen_transfer(pair: MakePair, code: int, way: str) -> None:
    """From the fifth transfer of at least 10 bytes on, the connection gives NCCL an error; the others are well."""
    two = pair()
    two.connect()
    fault = two.hosts[0].order(NetOrder(NetKind.FAIL, a=code, way=way, connection=1, min_bytes=10, nth=5))
    two.exchange([10, 3], count=20, depth=4)
    good = ok([10, 3], 20)
    assert two.hosts[0].result() == {0: good[0], 1: f"error {code}", 2: good[2]}
    heard: set[str] = set()
    while not {f"channel {number} {good[number]}" for number in (0, 2)} <= heard:
        heard.add(two.hosts[1].hear())
    assert (fault.read(MATCHED), fault.hits) == (5, 1)


@pytest.mark.parametrize("way", ["out", "in"])
def test_one_byte_goes_wrong(pair: MakePair, way: str) -> None:
    """The third large transfer of the connection arrives with one wrong byte, half way; all else arrives as it was
    sent, and the sender's own data stay right."""
    two = pair()
    two.connect()
    sender, receiver = (two.hosts[0], two.hosts[1]) if way == "out" else (two.hosts[1], two.hosts[0])
    fault = two.hosts[0].order(NetOrder(NetKind.CORRUPT, a=500_000, way=way, connection=2, min_bytes=1000, nth=3))
    sizes = [100_001, 0, 7]
    two.exchange(sizes, count=30, depth=4)
    good = ok(sizes, 30)
    assert sender.result() == good
    assert receiver.result() == {**good, 2: "wrong 6 50000 1"}
    assert fault.hits == 1
    two.exchange(sizes, count=30, depth=4, seed=2)
    assert two.results() == [good] * 2


def test_a_connection_is_refused(pair: MakePair) -> None:
    """The attempt fails with the code that was asked for, in the process that was meant."""
    two = pair()
    fault = two.hosts[0].order(NetOrder(NetKind.REFUSE, a=SYSTEM_ERROR, peers=[1]))
    two.swap_handles()
    assert two.hosts[0].hear() == f"failed {SYSTEM_ERROR}"
    assert fault.hits == 1


@pytest.mark.parametrize("way", ["out", "in"])
def test_a_connection_that_is_never_ready_is_made_later(pair: MakePair, way: str) -> None:
    """It neither fails nor comes about, and both sides go on asking; when the order is taken back, all is connected and
    data arrive."""
    two = pair()
    fault = two.hosts[0].order(NetOrder(NetKind.REFUSE, way=way))
    two.swap_handles()
    fault.wait_for_a_hit()
    with pytest.raises(TimeoutError):
        two.hosts[0].hear(0.3)
    fault.take_back()
    assert [host.hear() for host in two.hosts] == ["connected"] * 2
    assert fault.hits == 3
    two.exchange([1000])
    assert two.results() == [ok([1000], 4)] * 2


def test_a_connection_to_another_rank_is_not_refused(pair: MakePair) -> None:
    """Only connections with the peers that are named."""
    two = pair()
    fault = two.hosts[0].order(NetOrder(NetKind.REFUSE, a=SYSTEM_ERROR, peers=[7]))
    two.connect()
    assert fault.hits == 0


@pytest.mark.parametrize("version", VERSIONS)
def test_fewer_and_slower_nics(pair: MakePair, version: int) -> None:
    """Of what the machine has, with the speed that is asked for; all of it, when the order is taken back."""
    host = pair(version, NCCL_SOCKET_IFNAME="^none").hosts[0]
    there = host.ask("nics")
    fault = host.order(NetOrder(NetKind.NICS, a=1, b=100))
    name = there.split()[1].partition("=")[0]
    assert host.ask("nics") == f"nics {name}=100"
    assert fault.hits
    fault.take_back()
    assert host.ask("nics") == there


def test_interfaces_are_those_that_the_job_chose(pair: MakePair) -> None:
    """NCCL_SOCKET_IFNAME chooses them, as it does for NCCL's own transport: by prefix, by name, and all but these."""
    for list_, expected in (("=lo", ["lo"]), ("l", ["lo"]), ("^lo", None)):
        host = pair(NCCL_SOCKET_IFNAME=list_).hosts[0]
        try:
            names = [word.partition("=")[0] for word in host.ask("nics").split()[1:]]
        except EOFError:  # the loopback is all that there is
            names = []
        assert names == expected if expected else "lo" not in names


def wait_in_a_stall(two: Pair) -> Fault:
    two.connect()
    fault = two.hosts[0].order(NetOrder(NetKind.STALL, connection=1, way="out"))
    two.exchange([1000, 200_000], count=10, depth=4)
    fault.wait_for_a_hit()
    return fault


def test_the_death_of_the_peer_is_an_error(pair: MakePair) -> None:
    """In the middle of an exchange the peer is killed: every channel that waits for it ends with an error, and none
    hangs."""
    two = pair()
    wait_in_a_stall(two)
    two.hosts[0].end()
    result = two.hosts[1].result()
    assert result[1] == f"error {REMOTE_ERROR}"
    assert set(result) == {0, 1, 2}


def test_the_death_of_the_peer_shows_after_a_stall(pair: MakePair) -> None:
    """A stalled connection hides the death, as a dead link does; it is an error as soon as the stall is over."""
    two = pair()
    two.connect()
    fault = two.hosts[0].order(NetOrder(NetKind.STALL, connection=1))
    two.exchange([200_000], count=10, depth=4)
    fault.wait_for_a_hit()
    finished(two.hosts[0], {0, 2})
    two.hosts[1].end()
    with pytest.raises(TimeoutError):
        two.hosts[0].hear(0.3)
    fault.take_back()
    assert two.hosts[0].result() == {1: f"error {REMOTE_ERROR}"}


def test_a_host_that_is_killed_leaves_nothing_behind(pair: MakePair, tmp_path: Path) -> None:
    """Its page and the orders' control pages, in the run's own folder, are all: no process, no shared memory, no
    socket that listens."""
    before = set(os.listdir("/dev/shm"))
    two = pair()
    wait_in_a_stall(two)
    children = Path(f"/proc/{two.hosts[0].process.pid}/task/{two.hosts[0].process.pid}/children")
    threads = os.listdir(f"/proc/{two.hosts[0].process.pid}/task")
    assert (children.read_text() if children.exists() else "", len(threads)) == ("", 1)
    pids = [host.process.pid for host in two.hosts]
    two.end()
    assert set(os.listdir("/dev/shm")) == before
    assert {path.name for path in tmp_path.iterdir()} == {*(f"p{pid}.net" for pid in pids), f"{pids[0]}-1.page"}


def test_a_stranger_that_connects_is_sent_away(pair: MakePair) -> None:
    """Who does not know the token of the handle, such as a scanner of ports, is not taken for the peer."""
    import socket

    two = pair(channels=1)
    handles = [host.ask("listen").removeprefix("handles ") for host in two.hosts]
    raw = bytes.fromhex(handles[0])
    port = int.from_bytes(raw[14:16], "big")
    strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(2)]
    strangers[0].sendall(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
    strangers[1].close()
    for host, theirs in zip(two.hosts, reversed(handles), strict=True):
        host.say(f"connect {theirs}")
    assert [host.hear() for host in two.hosts] == ["connected"] * 2
    two.exchange([1000])
    assert two.results() == [ok([1000], 4, channels=1)] * 2
    strangers[0].close()


def test_it_is_compiled_into_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At its first use, by any C compiler, without a warning."""
    program = compiler()
    if program is None:
        pytest.skip("needs a C compiler")
    made = NCCL_NET.build(tmp_path, program, "-Wall", "-Wextra", "-Werror")
    assert made.name == "libnccl-net-torchaos.so"
    if shutil.which("nm"):
        text = subprocess.run(["nm", "-D", "--defined-only", str(made)], capture_output=True, text=True, check=True)
        names = {line.split()[-1] for line in text.stdout.splitlines()}
        assert names == {f"ncclNetPlugin_v{version}" for version in VERSIONS}


REAL = """
import ctypes, sys

class Id(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * 128)]

nccl, identity, made = ctypes.CDLL(sys.argv[1]), Id(), ctypes.c_void_p()
nccl.ncclCommInitRank.argtypes = [ctypes.c_void_p, ctypes.c_int, Id, ctypes.c_int]
print(nccl.ncclGetUniqueId(ctypes.byref(identity)), nccl.ncclCommInitRank(ctypes.byref(made), 1, identity, 0))
"""


def test_a_real_nccl_needs_a_gpu_to_load_it(library: Path, tmp_path: Path) -> None:
    """NVIDIA's own library asks CUDA before it looks at its plug-ins: without a GPU the plug-in is never loaded. So the
    rest of this file plays NCCL's part."""
    package = importlib.util.find_spec("nvidia")
    folders = (package.submodule_search_locations or ()) if package else ()
    found = next((path for one in folders for path in Path(one).glob("nccl/lib/libnccl.so.2")), None)
    if found is None:
        pytest.skip("libnccl.so.2 is missing: pip install nvidia-nccl-cu12")
    if list(Path("/proc/driver/nvidia/gpus").glob("*")):
        pytest.skip("there is a GPU here: lab/gpu-check nccl_net shows more")
    ours = {"NCCL_NET_PLUGIN": str(library), "NCCL_NET": "torchaos", ENV_NCCL_NET: str(tmp_path)}
    command = [sys.executable, "-c", REAL, str(found)]
    env = {**os.environ, **ours, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.split() == ["0", "1"], (done.stdout, done.stderr)  # ncclUnhandledCudaError
    assert list(tmp_path.iterdir()) == [], "it was loaded: there is more to test without a GPU than is written here"
