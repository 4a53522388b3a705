"""What the ranks' sockets show: which data arrives, and which is only sent again and again."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from torchaos.harness.interfaces import RankProcess
from torchaos.harness.monitoring.observers.resource_use import Idle
from torchaos.harness.monitoring.probes.rank_probe import Sockets

HEAD = 'ESTAB 0 500 10.0.0.1:4000 10.0.0.2:5000 users:(("python",pid={pid},fd=7))'
# As Linux 5.10's ss said it of a gloo job that a partition had cut apart.
CUT = (
    "\t cubic wscale:7,7 rto:13312 backoff:{n} rtt:0.07/0.03 mss:1448 cwnd:1 bytes_sent:{sent} bytes_retrans:{again} "
    "bytes_acked:2001 bytes_received:2000 segs_out:40 unacked:1 retrans:0/{n} lost:1"
)
READS_SLOWLY = "\t cubic rto:6400 backoff:5 bytes_sent:9000 bytes_acked:9001 bytes_received:2000 notsent:500"
Say = Callable[..., None]


def rank(pid: int) -> RankProcess:
    return RankProcess(0, 0, 0, pid, 0, 0, 1)


@pytest.fixture
def say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Say:
    """An `ss` that says of this process's one socket what it is told to."""
    said = tmp_path / "said"
    program = tmp_path / "ss"
    program.write_text(f"#!/bin/sh\ncat {said}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def write(info: str, pid: int = os.getpid()) -> None:
        said.write_text(f"{HEAD.format(pid=pid)}\n{info}\n")

    return write


def test_what_is_sent_again_does_not_go_over(say: Say) -> None:
    """Retransmissions count as sent; what the peer confirmed stays the same."""
    sockets = Sockets()
    for number in (1, 2, 3):
        say(CUT.format(n=number, sent=2000 * (number + 1), again=2000 * number))
        sockets.look([rank(os.getpid())])
        assert (sockets.moved, sockets.stuck) == (False, number > 1)


def test_a_peer_that_reads_slowly_is_not_cut_off(say: Say) -> None:
    """Its kernel confirms all that was sent, and is asked for room."""
    say(READS_SLOWLY)
    sockets = Sockets()
    sockets.look([rank(os.getpid())])
    assert not sockets.stuck


@pytest.mark.needs("ss")
def test_what_goes_over_a_real_connection() -> None:
    """Bytes that the other end took; what was before the first look, or was forgotten, is no news."""
    sockets, me = Sockets(), [rank(os.getpid())]
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as ours,
        server.accept()[0] as theirs,
    ):
        ours.sendall(b"x" * 100)
        for expected in (False, False):
            sockets.look(me)
            assert sockets.moved is expected
        ours.sendall(b"x")
        assert theirs.recv(200)
        sockets.look(me)
        assert (sockets.moved, sockets.stuck) == (True, False)
        ours.sendall(b"x")
        sockets.forget()
        sockets.look(me)
        assert not sockets.moved


@pytest.fixture
def spinning() -> Iterator[int]:
    running = subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"])
    yield running.pid
    running.kill()
    running.wait()


def test_ranks_that_spin_are_quiet_when_nothing_arrives(say: Say, spinning: int) -> None:
    """A rank that uses a whole core is taken for one at work, unless what it sent is sent again and again; and what
    happens while the job does not get on teaches nothing."""

    def watch(info: str) -> float:
        idle, longest = Idle(), 0.0
        say(info, spinning)
        end = time.monotonic() + 1.5
        while time.monotonic() < end and longest < 0.8:
            one = idle.look(time.monotonic(), True, [rank(spinning)], late=True)
            assert one.usual_s == 0.0
            longest = max(longest, one.quiet_s)
            time.sleep(0.05)
        return longest

    assert watch(CUT.format(n=4, sent=10_000, again=8_000)) >= 0.8
    assert watch(READS_SLOWLY) < 0.8
