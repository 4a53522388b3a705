"""Measures how a link treats datagrams.

    python udp_probe.py PEER_PID FROM TO SETTLE_S GAP_S

It runs in the sender's network namespace, and receives in the namespace of the process PEER_PID. It sends a datagram
every GAP_S seconds. Every quarter of a second it prints a line of JSON about the datagrams that were sent at least
SETTLE_S seconds ago: {"sent", "loss_percent", "duplicate_percent", "reorder_percent", "delay_ms" (median, one way)}.
The times of sending and of arrival are from the same clock; the time of arrival is the kernel's time stamp
(SO_TIMESTAMPNS, socket(7)). It uses UDP, so that the kernel's TCP counters count only the job. The program is run by
its path and imports only the standard library."""

from __future__ import annotations

import ctypes
import json
import os
import select
import socket
import statistics
import struct
import sys
import time

GAP_S, PRINT_S = 0.002, 0.25  # seconds: the shortest gap that is useful, and the time between two lines of output
_NEWNET = 0x40000000  # linux/sched.h
_TIMESTAMPNS = 35  # SO_TIMESTAMPNS and SCM_TIMESTAMPNS, asm-generic/socket.h


class Meter:
    def __init__(self, peer: int, sender: str, receiver: str) -> None:
        self.sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.sender.bind((sender, 0))
        with open(f"/proc/{peer}/ns/net") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "the peer's network can't be entered")
        self.receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.receiver.setsockopt(socket.SOL_SOCKET, _TIMESTAMPNS, 1)
        self.receiver.bind((receiver, 0))
        self.receiver.setblocking(False)
        self.sent: list[float] = []  # CLOCK_REALTIME of each datagram, by number
        self.came: dict[int, float] = {}  # delay in ms, by number
        self.twice: set[int] = set()
        self.overtook: set[int] = set()
        self._highest = -1

    def send(self) -> None:
        self.sent.append(time.time())
        try:
            self.sender.sendto(struct.pack("=I", len(self.sent) - 1), self.receiver.getsockname())
        except OSError:  # the link is down, so the datagram is lost
            pass

    def receive(self) -> None:
        while True:
            try:
                data, extra, _flags, _address = self.receiver.recvmsg(64, 64)
            except BlockingIOError:
                return
            number = struct.unpack("=I", data[:4])[0]
            stamps = [struct.unpack("=qq", value[:16]) for _, kind, value in extra if kind == _TIMESTAMPNS]
            at = stamps[0][0] + stamps[0][1] / 1e9 if stamps else time.time()
            if number in self.came:
                self.twice.add(number)
                continue
            self.came[number] = 1e3 * (at - self.sent[number])
            if number < self._highest:
                self.overtook.add(number)
            self._highest = max(self._highest, number)

    def summary(self, settle_s: float) -> dict[str, float] | None:
        until = time.time() - settle_s
        settled = [number for number, at in enumerate(self.sent) if at <= until]
        if not settled:
            return None
        came = [number for number in settled if number in self.came]
        result = {"sent": len(settled), "loss_percent": 100 * (1 - len(came) / len(settled))}
        if came:
            result["delay_ms"] = statistics.median(self.came[number] for number in came)
            result["duplicate_percent"] = 100 * len(self.twice.intersection(came)) / len(came)
            result["reorder_percent"] = 100 * len(self.overtook.intersection(came)) / len(came)
        return {name: round(value, 3) for name, value in result.items()}


def main(peer: int, sender: str, receiver: str, settle_s: float, gap_s: float) -> None:
    meter = Meter(peer, sender, receiver)
    due = printed = time.monotonic()
    while os.getppid() != 1:  # a parent with pid 1 means that the harness is gone
        now = time.monotonic()
        if now >= due:
            meter.send()
            due = max(due + gap_s, now)
        if now - printed >= PRINT_S:
            printed = now
            if (result := meter.summary(settle_s)) is not None:
                print(json.dumps(result), flush=True)
        select.select([meter.receiver], [], [], max(0.0, due - time.monotonic()))
        meter.receive()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3], float(sys.argv[4]), float(sys.argv[5]))
