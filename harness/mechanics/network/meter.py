"""What a link does to datagrams: python meter.py PEER_PID FROM TO SETTLE_S GAP_S.

Run in the sender's network namespace, with the peer's (that of the process PEER_PID) to receive in. Sends a datagram
every GAP_S and prints, every quarter of a second, a line of JSON about those sent at least SETTLE_S ago: {"sent",
"loss_percent", "duplicate_percent", "reorder_percent", and "delay_ms" of the median, one way}. Sending and receiving go
by the same clock; when one came is the kernel's time stamp (SO_TIMESTAMPNS, socket(7)). It is UDP, so that the kernel's
counters of TCP stay the job's own. Run by its path with the standard library alone.
"""

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

GAP_S, TELL_S = 0.002, 0.25  # the shortest gap that is sensible
_NEWNET = 0x40000000  # linux/sched.h
_TIMESTAMPNS = 35  # SO_TIMESTAMPNS and SCM_TIMESTAMPNS, asm-generic/socket.h


class Meter:
    def __init__(self, peer: int, sender: str, receiver: str) -> None:
        self.sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.sender.bind((sender, 0))
        with open(f"/proc/{peer}/ns/net") as space:
            if ctypes.CDLL(None, use_errno=True).setns(space.fileno(), _NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "the peer's network can't be entered")
        self.receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.receiver.setsockopt(socket.SOL_SOCKET, _TIMESTAMPNS, 1)
        self.receiver.bind((receiver, 0))
        self.receiver.setblocking(False)
        self.sent: list[float] = []  # CLOCK_REALTIME, by number
        self.came: dict[int, float] = {}  # delay in ms
        self.twice: set[int] = set()
        self.overtook: set[int] = set()
        self._highest = -1

    def send(self) -> None:
        self.sent.append(time.time())
        try:
            self.sender.sendto(struct.pack("=I", len(self.sent) - 1), self.receiver.getsockname())
        except OSError:  # the link is down: it is lost
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

    def told(self, settle_s: float) -> dict[str, float] | None:
        until = time.time() - settle_s
        settled = [number for number, at in enumerate(self.sent) if at <= until]
        if not settled:
            return None
        came = [number for number in settled if number in self.came]
        found = {"sent": len(settled), "loss_percent": 100 * (1 - len(came) / len(settled))}
        if came:
            found["delay_ms"] = statistics.median(self.came[number] for number in came)
            found["duplicate_percent"] = 100 * len(self.twice.intersection(came)) / len(came)
            found["reorder_percent"] = 100 * len(self.overtook.intersection(came)) / len(came)
        return {name: round(value, 3) for name, value in found.items()}


def main(peer: int, sender: str, receiver: str, settle_s: float, gap_s: float) -> None:
    meter = Meter(peer, sender, receiver)
    due = told = time.monotonic()
    while os.getppid() != 1:  # whoever wanted to know is gone
        now = time.monotonic()
        if now >= due:
            meter.send()
            due = max(due + gap_s, now)
        if now - told >= TELL_S:
            told = now
            if (said := meter.told(settle_s)) is not None:
                print(json.dumps(said), flush=True)
        select.select([meter.receiver], [], [], max(0.0, due - time.monotonic()))
        meter.receive()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3], float(sys.argv[4]), float(sys.argv[5]))
