"""A packet queue, in place of netem on kernels without it.

    python packet_queue.py NUMBER DELAY_MS JITTER_MS DUPLICATE REORDER CORRUPT (the last three in percent)

iptables hands packets to this process (NFQUEUE), which sends each packet on when it is due. A reordered packet is sent
on at once while others wait. A corrupted packet has one flipped bit, which makes its checksum wrong. The copy of a
duplicated packet has the mark MARK, so that it is not queued again. When this process is gone, packets pass unchanged
(the rule has --queue-bypass).

Netlink messages are as in linux/netfilter/nfnetlink_queue.h. The program is run by its path and imports only the
standard library."""

from __future__ import annotations

import heapq
import os
import random
import select
import socket
import struct
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

MARK = 0xCA05
_NETFILTER, _SUBSYSTEM = 12, 3 << 8
_PACKET, _VERDICT, _CONFIG = _SUBSYSTEM, _SUBSYSTEM | 1, _SUBSYSTEM | 2
_CMD, _PARAMS, _MAXLEN = 1, 2, 3  # NFQA_CFG_*
_PACKET_HDR, _VERDICT_HDR, _PAYLOAD = 1, 2, 10  # NFQA_*
_REQUEST, _ACK, _ERROR = 1, 4, 2
_COPY_META, _COPY_PACKET = 1, 2
_ACCEPT = 1
_MOST = 65536  # packets that may wait at the same time


@dataclass(frozen=True)
class Shape:
    """How packets are changed. `delay` and `jitter` are in ms, the others in percent of the packets."""

    delay: float = 0.0
    jitter: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    corrupt: float = 0.0


class Queue:
    """One packet queue of this network namespace. Raises OSError if it can't be opened."""

    def __init__(self, number: int, payload: bool) -> None:
        self._number = number
        self.socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETFILTER)
        self.socket.setsockopt(socket.SOL_SOCKET, 33, 1 << 25)  # SO_RCVBUFFORCE
        self.socket.setsockopt(
            270, 5, 1
        )  # SOL_NETLINK, NETLINK_NO_ENOBUFS: a full buffer loses a packet, without an error
        self.socket.bind((0, 0))
        self._configure(_CMD, struct.pack(">BxH", 1, socket.AF_INET))  # bind
        copy, length = (_COPY_PACKET, 0xFFFF) if payload else (_COPY_META, 0)
        self._configure(_PARAMS, struct.pack(">IB", length, copy))
        self._configure(_MAXLEN, struct.pack(">I", _MOST))

    def _configure(self, kind: int, value: bytes) -> None:
        self._send(_CONFIG, _attribute(kind, value), _REQUEST | _ACK)
        answer = self.socket.recv(4096)
        code = struct.unpack_from("=i", answer, 16)[0] if struct.unpack_from("=H", answer, 4)[0] == _ERROR else 0
        if code:
            raise OSError(-code, f"queue {self._number}: {os.strerror(-code)}")

    def _send(self, kind: int, attributes: bytes, flags: int) -> None:
        body = struct.pack(">BBH", socket.AF_UNSPEC, 0, self._number) + attributes
        self.socket.send(struct.pack("=IHHII", 16 + len(body), kind, flags, 0, 0) + body)

    def packets(self) -> Iterator[tuple[int, bytes]]:
        """The packets that have arrived: the number of each, and its bytes if `payload` was set (else empty)."""
        data = self.socket.recv(1 << 17)
        while len(data) >= 20:
            length, kind = struct.unpack_from("=IH", data)
            if kind == _PACKET:
                parts = dict(_attributes(data[20:length]))
                yield struct.unpack_from(">I", parts[_PACKET_HDR])[0], parts.get(_PAYLOAD, b"")
            data = data[(length + 3) & ~3 :]

    def let_go(self, packet: int, changed: bytes | None = None) -> None:
        more = b"" if changed is None else _attribute(_PAYLOAD, changed)
        self._send(_VERDICT, _attribute(_VERDICT_HDR, struct.pack(">II", _ACCEPT, packet)) + more, _REQUEST)


def _attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(value), kind) + value + bytes(-len(value) % 4)


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    while len(data) >= 4:
        length, kind = struct.unpack_from("=HH", data)
        yield kind & 0x3FFF, data[4:length]
        data = data[(length + 3) & ~3 :]


def run(queue: Queue, shape: Shape, draw: random.Random) -> None:
    """Sends each packet on when its time comes. Runs until the process is killed."""
    waiting: list[tuple[float, int, bytes | None]] = []  # when to send (CLOCK_MONOTONIC), number, changed bytes
    last = 0.0
    with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW) as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, MARK)
        while True:
            timeout = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
            if select.select([queue.socket], [], [], timeout)[0]:
                for packet, data in queue.packets():
                    now = time.monotonic()
                    due = now + max(0.0, shape.delay + draw.uniform(-shape.jitter, shape.jitter)) / 1e3
                    if _happens(draw, shape.reorder):
                        due = now
                    elif not shape.reorder:
                        due = last = max(due, last)  # without `reorder`, jitter must not change the order
                    if data and _happens(draw, shape.duplicate):
                        raw.sendto(data, (socket.inet_ntoa(data[16:20]), 0))
                    changed = flipped(data, draw) if data and _happens(draw, shape.corrupt) else None
                    heapq.heappush(waiting, (due, packet, changed))
            while waiting and waiting[0][0] <= time.monotonic():
                _due, packet, changed = heapq.heappop(waiting)
                queue.let_go(packet, changed)


def _happens(draw: random.Random, percent: float) -> bool:
    return percent > 0 and draw.uniform(0, 100) < percent


def flipped(packet: bytes, draw: random.Random) -> bytes:
    """The IPv4 packet with one bit flipped after its IP header. Raises ValueError if nothing follows the header."""
    header = 4 * (packet[0] & 15)
    bit = draw.randrange(8 * header, 8 * len(packet))
    changed = bytearray(packet)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def main(number: int, shape: Shape) -> None:
    try:
        os.nice(-15)  # so that packets are not late by milliseconds
    except OSError:
        pass
    try:
        queue = Queue(number, payload=bool(shape.duplicate or shape.corrupt))
    except OSError as error:
        print(error, flush=True)
        return
    print("ready", flush=True)
    run(queue, shape, random.Random(number))


if __name__ == "__main__":
    main(int(sys.argv[1]), Shape(*map(float, sys.argv[2:7])))
