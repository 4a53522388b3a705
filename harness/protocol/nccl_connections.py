"""The page on which the agent writes orders (faults) for NCCL's connections. The C library injectors/native/net reads
it. Standard library only.

It is a file of 32768 bytes, `p<pid>.net` in the folder that `ENV_NCCL_NET` names, with native signed 64-bit words:

    0 MAGIC  1 VERSION  2 CONNECTIONS  3 SENT  4 RECEIVED

The library writes MAGIC and VERSION (of NCCL's interface, 8 to 11) when NCCL loads it, and counts the connections and
transfers of this process. From byte 512 on, there are 16 orders of 2048 bytes:

    0 ACTIVE  1 KIND  2 NUMBER  3 BEGUN_NS  4 UNTIL_NS  5 WAYS  6 CONNECTION  7 MIN_BYTES  8 MAX_BYTES  9 NTH
    10 A  11 B  12 PEERS  13 MATCHED  14 HITS  15 FIRST_NS  16 LAST_NS  17 LAST_BYTES
    at byte 256 the ranks of up to 96 peers, at byte 1024 the path of the fault's control page

The agent writes words 1 to 12, the peers and the path, and ACTIVE last. An order holds until UNTIL_NS (CLOCK_MONOTONIC,
as BEGUN_NS) or until the control page ends the firing NUMBER. WAYS: 1 sent data, 2 received data, 3 both. CONNECTION
and MAX_BYTES: -1 for any. PEERS: the number of ranks in the list of peers; 0: all. The library writes the rest: MATCHED
counts the transfers that are selected by peers, way, connection and size. HITS counts those that the order changed
(transfers, refused connections, or answers about NICs)."""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import IntEnum
from typing import Sequence

from .control_pages import NativePage

ENV_NCCL_NET = "TORCHAOS_NCCL_NET"
SIZE, SLOTS_AT, SLOT_SIZE, SLOTS = 32768, 512, 2048, 16
_MAGIC = 0x74656E6363666F74
_PEERS_AT, _MAX_PEERS, _CONTROL_AT, _CONTROL_SIZE = 256, 96, 1024, 1024
MAGIC, VERSION, CONNECTIONS, SENT, RECEIVED = range(5)
(ACTIVE, KIND, NUMBER, BEGUN_NS, UNTIL_NS, WAYS, CONNECTION, MIN_BYTES, MAX_BYTES, NTH, A, B, PEERS, MATCHED, HITS,
 FIRST_NS, LAST_NS, LAST_BYTES) = range(18)  # fmt: skip
_WAYS = {"out": 1, "in": 2, "both": 3}


class NetKind(IntEnum):
    """The kinds of faults of a connection. The meaning of `a` and `b` of a `NetOrder`:

    - STALL: none
    - DELAY: a: nanoseconds
    - THROTTLE: a: bytes per second, of all connections together in each direction
    - FLAP: a, b: nanoseconds down and up
    - FAIL: a: the ncclResult_t that NCCL gets for the transfer
    - CORRUPT: a: the place of the byte in the transfer, in millionths of its size
    - REFUSE: a: the ncclResult_t of the attempt to connect; 0: the attempt never ends
    - NICS: a: the largest number of NICs that NCCL sees; b: their speed in Mbit/s; 0: unchanged"""

    STALL = 1
    DELAY = 2
    THROTTLE = 3
    FLAP = 4
    FAIL = 5
    CORRUPT = 6
    REFUSE = 7
    NICS = 8

    @property
    def hit_unit(self) -> str:
        """What the hits of this kind count, for messages."""
        return {NetKind.REFUSE: "connections", NetKind.NICS: "answers about NICs"}.get(self, "transfers")


@dataclass(frozen=True)
class NetOrder:
    """A fault of NCCL's connections of one rank, and the transfers that it hits. `peers`: the ranks at the other end
    (empty: all). `way`: data that this rank sends (`out`), receives (`in`), or `both`. `connection`: the number of the
    connection, counted from 0 for each pair of ranks and direction in the order in which NCCL makes them (None: all).
    `min_bytes`, `max_bytes`: the sizes of transfers. `nth`: only from the nth of these transfers on."""

    kind: NetKind
    a: int = 0
    b: int = 0
    peers: Sequence[int] = ()
    way: str = "both"
    connection: int | None = None
    min_bytes: int = 0
    max_bytes: int | None = None
    nth: int = 1


class NetPage(NativePage):
    """The page of orders for NCCL's network."""

    env, suffix, size, magic = ENV_NCCL_NET, "net", SIZE, _MAGIC

    def read(self, word: int, slot: int | None = None) -> int:
        """One word of the page; with `slot`, of the order in that slot."""
        return self._words[word if slot is None else self._at(slot) + word]

    def order(self, order: NetOrder, control: str, number: int, lease_s: float) -> int:
        """Writes an order. It holds until the control page at the path `control` ends the firing `number`, or until
        `lease_s` seconds have passed. Returns the index of its slot. Raises ValueError if there are too many orders or
        peers, or if the path is too long."""
        slot = next((slot for slot in range(SLOTS) if not self.read(ACTIVE, slot)), None)
        raw = control.encode()
        if slot is None or len(order.peers) > _MAX_PEERS or len(raw) >= _CONTROL_SIZE:
            raise ValueError(
                f"a process takes {SLOTS} orders with {_MAX_PEERS} peers each, and a path of less than {_CONTROL_SIZE} "
                "bytes"
            )
        at, now = self._at(slot), time.monotonic_ns()
        words = {
            KIND: int(order.kind), NUMBER: number, BEGUN_NS: now, UNTIL_NS: now + int(lease_s * 1e9),
            WAYS: _WAYS[order.way], CONNECTION: -1 if order.connection is None else order.connection,
            MIN_BYTES: order.min_bytes, MAX_BYTES: -1 if order.max_bytes is None else order.max_bytes,
            NTH: order.nth, A: order.a, B: order.b, PEERS: len(order.peers),
        }  # fmt: skip
        for word, value in words.items():
            self._words[at + word] = value
        for place, peer in enumerate(order.peers):
            self._words[at + _PEERS_AT // 8 + place] = peer
        self._map[8 * at + _CONTROL_AT : 8 * at + _CONTROL_AT + _CONTROL_SIZE] = raw.ljust(_CONTROL_SIZE, b"\0")
        self._words[at + ACTIVE] = 1
        return slot

    @staticmethod
    def _at(slot: int) -> int:
        return (SLOTS_AT + slot * SLOT_SIZE) // 8
