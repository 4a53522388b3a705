"""What the pipes to many agents cost the controller of a run. The agents are stand-ins, all in one other process.

    python lab/bench/many_lines.py [NODES ...]

For each number of nodes (default: 64, 256, 1000): as many connections as `torchaos run` would have, each through a
pipe that is a process of its own, as under Slurm, and the journal of a run. Each stand-in answers the beats and sends
the events of one rank with a step in two seconds. Printed: the seconds until all are connected; then, over some
seconds, the processor time of this process as a share of one core; its memory and threads; the events that arrived of
those that were sent; and whether each agent was asked for its beat in time. The pipes are perl here: what srun
costs is not in the figures.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil

from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.record.events.journal import Journal
from torchaos.harness.running.launchers.node_channel import LEASE_S, VERSION, Handler, NodeChannel

STEP_S = 2.0
STEP: Mapping[str, Any] = {
    "losses": [1.0], "samples": None, "indices": None, "lr": [0.1], "opt_step": None, "sched_step": None, "phases": {},
    "skipped": None,
}  # fmt: skip
WATCH_S = 20.0
UP_S = 120.0
# Copies standard input to a socket, and the socket to standard output.
PIPE = """use IO::Socket::UNIX; my $s = IO::Socket::UNIX->new(Peer => $ARGV[0]) or exit 6; my $b = "";
while (1) { my $r = ""; vec($r, 0, 1) = 1; vec($r, fileno($s), 1) = 1; select($r, undef, undef, undef);
if (vec($r, 0, 1)) { sysread(STDIN, $b, 65536) or exit; syswrite($s, $b); }
if (vec($r, fileno($s), 1)) { sysread($s, $b, 65536) or exit; syswrite(STDOUT, $b); } }"""
HEAD = "| nodes | all connected (s) | share of a core (%) | memory (MiB) | threads | events | longest silence (s) |"


def main(counts: Sequence[int]) -> int:
    print(f"{HEAD}\n|---|---|---|---|---|---|---|")
    for count in counts:
        print(measured(count), flush=True)
    return 0


def measured(count: int) -> str:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        events = folder / "events"
        events.mkdir()
        journal = Journal(events)
        stack.callback(journal.close)
        agents = stack.enter_context(
            subprocess.Popen(
                [sys.executable, __file__, "agents", str(folder), str(count)], stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, text=True,
            )
        )  # fmt: skip
        assert agents.stdin is not None
        assert agents.stdout is not None
        agents.stdout.readline()
        up: list[int] = []
        lost: list[str] = []
        on = Handler(
            lambda node, hello: up.append(node), journal.take, lambda node, why: lost.append(why),
            lambda node, why: lost.append(why),
        )  # fmt: skip
        begun = time.monotonic()
        lines = [NodeChannel(node, ["perl", "-e", PIPE, str(folder / f"{node}")], on) for node in range(count)]
        for line in lines:
            line.start()
        while len(up) < count and time.monotonic() < begun + UP_S:
            time.sleep(0.05)
        up_s, me = time.monotonic() - begun, psutil.Process()
        agents.stdin.write("count\n")
        agents.stdin.flush()
        agents.stdout.readline()
        times, at_s, before = me.cpu_times(), time.monotonic(), journal.count
        time.sleep(WATCH_S)
        now, took_s, after = me.cpu_times(), time.monotonic() - at_s, journal.count
        agents.stdin.write("count\n")
        agents.stdin.flush()
        sent, silence_s = json.loads(agents.stdout.readline())
        share = (now.user + now.system - times.user - times.system) / took_s
        gone = list(lost)
        memory, threads = me.memory_info().rss / 2**20, me.num_threads()
        for line in lines:
            line.close()
        agents.stdin.close()
    assert not gone, gone[0]
    return (
        f"| {len(up)} of {count} | {up_s:.1f} | {100 * share:.1f} | {memory:.0f} | {threads} "
        f"| {after - before} of {sent} | {silence_s:.1f} (lease {LEASE_S:g}) |"
    )


class Agents:
    """Stand-ins for the agents of all nodes."""

    def __init__(self, folder: Path, count: int) -> None:
        self._selector = selectors.DefaultSelector()
        self._folder, self._following = folder, dict[int, tuple[socket.socket, int]]()
        self._heard_s, self._sent, self._silence_s = dict[int, float](), 0, 0.0
        for node in range(count):
            server = socket.socket(socket.AF_UNIX)
            server.bind(str(folder / str(node)))
            server.listen()
            self._selector.register(server, selectors.EVENT_READ, lambda s, n=node: self._accept(s, n))
        self._selector.register(sys.stdin, selectors.EVENT_READ, self._count)
        self._on = True

    def run(self) -> None:
        step_s = time.monotonic()
        print("ready", flush=True)
        while self._on:
            for key, _ in self._selector.select(0.05):
                key.data(key.fileobj)
            if time.monotonic() > step_s:
                step_s += STEP_S / 10
                for node in [each for each in self._following if each % 10 == int(step_s / STEP_S * 10) % 10]:
                    self._step(node)

    def _accept(self, server: socket.socket, node: int) -> None:
        talk, _ = server.accept()
        self._heard_s[node] = time.monotonic()
        rest = bytearray()
        self._selector.register(talk, selectors.EVENT_READ, lambda s: self._hear(s, node, rest))

    def _hear(self, talk: socket.socket, node: int, rest: bytearray) -> None:
        try:
            data = talk.recv(1 << 16)
        except ConnectionResetError:
            data = b""
        if not data:
            self._selector.unregister(talk)
            talk.close()
            self._following.pop(node, None)
            return
        now = time.monotonic()
        self._silence_s, self._heard_s[node] = max(self._silence_s, now - self._heard_s[node]), now
        *whole, last = (bytes(rest) + data).split(b"\n")
        rest[:] = last
        for line in whole:
            said = json.loads(line)
            if said["do"] == "hello":
                self._say(talk, hello={"version": VERSION, "node": node, "missing": [], "trouble": "", "lapsed": ""})
            elif said["do"] == "beat":
                self._say(talk, beat=said["sent_s"], mono_s=time.monotonic())
            elif said["do"] == "follow":
                self._following[node] = talk, 0

    def _step(self, node: int) -> None:
        talk, step = self._following[node]
        self._following[node] = talk, step + 1
        now = time.monotonic()
        event = Event(Kind.STEP, f"rank{node}-a0-p9", step, time.time(), now, node, 0, step + 1, STEP)
        self._say(talk, event=event.to_line().decode(), n=step)
        self._sent += 1

    @staticmethod
    def _say(talk: socket.socket, **words: Any) -> None:
        try:
            talk.sendall(json.dumps(words).encode() + b"\n")
        except OSError:
            pass

    def _count(self, _: object) -> None:
        """Says how many events were sent since the last question, and the longest silence of the controller."""
        if not os.read(0, 100):
            self._on = False
            return
        print(json.dumps([self._sent, self._silence_s]), flush=True)
        self._sent, self._silence_s = 0, 0.0


if __name__ == "__main__":
    if sys.argv[1:2] == ["agents"]:
        Agents(Path(sys.argv[2]), int(sys.argv[3])).run()
    else:
        sys.exit(main([int(word) for word in sys.argv[1:]] or [64, 256, 1000]))
