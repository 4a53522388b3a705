"""The page on which the agent orders a stall of an NCCL call. The C library injectors/native/nvtx/stall.c reads it.
Standard library only.

A file of 4096 bytes, `p<pid>.nvtx` in the folder that `ENV_NVTX` names; native signed 64-bit words:

    0 MAGIC  1 CALLS  2 ORDER  3 NTH  4 MIN_BYTES  5 MAX_BYTES  6 LEASE_NS  7 NUMBER  8 MATCHED  9 STALLED
    10 BEGUN_NS  11 ENDED_NS  12 LAST_BYTES; at byte 256 the call's name, at byte 512 the path of the control page

The agent writes which call it selects (the name, NTH, MIN_BYTES and MAX_BYTES; -1: any size), LEASE_NS, NUMBER (the
firing that the control page's GO takes back), and ORDER last. ORDER counts from 1; a new value makes the order valid.
The library writes CALLS (NCCL calls seen), MATCHED (calls that match), STALLED (the last order carried out), BEGUN_NS
and ENDED_NS of the stall (CLOCK_MONOTONIC, nanoseconds), and LAST_BYTES of that call (-1: NCCL before 2.26 does not
say)."""

from __future__ import annotations

from dataclasses import dataclass

from .native_page import NativePage

ENV_NVTX = "TORCHAOS_NVTX"
SIZE = 4096
_MAGIC = 0x78747663616F7274
_NAME_AT, _NAME_SIZE, _CONTROL_AT, _CONTROL_SIZE = 256, 64, 512, 1024
(MAGIC, CALLS, ORDER, NTH, MIN_BYTES, MAX_BYTES, LEASE_NS, NUMBER, MATCHED, STALLED, BEGUN_NS, ENDED_NS, LAST_BYTES) = (
    range(13)
)


@dataclass(frozen=True)
class NcclCall:
    """Selects an NCCL call: the nth call of that name from now on, with `min_bytes` to `max_bytes` bytes (None: any
    size)."""

    name: str = "ncclAllReduce"
    nth: int = 1
    min_bytes: int | None = None
    max_bytes: int | None = None


class NvtxPage(NativePage):
    """The page that holds the order to stall an NCCL call."""

    env, suffix, size, magic = ENV_NVTX, "nvtx", SIZE, _MAGIC

    def read(self, word: int) -> int:
        return self._words[word]

    def order(self, call: NcclCall, control: str, number: int, lease_s: float) -> None:
        """Stalls `call` until the control page at path `control` ends the firing `number`, or `lease_s` seconds are
        over. Raises ValueError if a name or path is too long."""
        self._text(_NAME_AT, _NAME_SIZE, call.name)
        self._text(_CONTROL_AT, _CONTROL_SIZE, control)
        words = self._words
        words[NTH], words[NUMBER], words[LEASE_NS] = call.nth, number, int(lease_s * 1e9)
        words[MIN_BYTES] = -1 if call.min_bytes is None else call.min_bytes
        words[MAX_BYTES] = -1 if call.max_bytes is None else call.max_bytes
        words[MATCHED] = 0
        words[ORDER] = words[STALLED] + 1

    @property
    def held_s(self) -> float | None:
        """How many seconds the newest stall delayed an NCCL call. None: there was no stall yet, or it still delays the
        call."""
        begun, ended = self.read(BEGUN_NS), self.read(ENDED_NS)
        return (ended - begun) / 1e9 if self.read(STALLED) == self.read(ORDER) and ended >= begun else None

    def _text(self, at: int, size: int, text: str) -> None:
        raw = text.encode()
        if len(raw) >= size:
            raise ValueError(f"{text} is longer than {size - 1} bytes")
        self._map[at : at + size] = raw.ljust(size, b"\0")
