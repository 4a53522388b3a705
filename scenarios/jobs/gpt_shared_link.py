"""The GPT of gpt_tiers.py, whose copies share a link with training and leave most of it to training: each goes out in
pieces, with a pause after each that is longer the slower the link is, and no save begins while a copy is on its way."""

from __future__ import annotations

import time

import gpt
import torch
import torch.distributed as dist
from fault_tolerance import log
from gpt_ddp import replicate
from gpt_tiers import Tiers

PIECE = 1 << 16  # bytes


class Patient(Tiers):
    PAUSE = 4.0  # times as long as the piece took: the copies take at most a fifth of the link

    def busy(self) -> bool:
        """Whether the last copy is still on its way from some rank. All ranks call this."""
        late = torch.tensor(int(self.local_pending is not None and not self.local_pending.done()))
        dist.all_reduce(late, op=dist.ReduceOp.MAX)
        if late:
            log("a copy is still on its way: no other save begins")
        return bool(late)

    def _exchange(self, mine: bytes, to: int, source: int) -> bytes:
        sizes: list[int] = [0] * dist.get_world_size()
        dist.all_gather_object(sizes, len(mine), group=self.group)
        out, back = torch.frombuffer(bytearray(mine), dtype=torch.uint8), torch.empty(sizes[source], dtype=torch.uint8)
        for begin in range(0, max(sizes), PIECE):
            piece, began = slice(begin, begin + PIECE), time.monotonic()
            sending = dist.isend(out[piece], to, group=self.group) if begin < len(mine) else None
            if begin < len(back):
                dist.recv(back[piece], source, group=self.group)
            if sending is not None:
                sending.wait()
            time.sleep(self.PAUSE * (time.monotonic() - began))
        return back.numpy().tobytes()


if __name__ == "__main__":
    gpt.train(replicate, Patient)
