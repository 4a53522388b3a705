"""Delays, duplicates, reorders or corrupts the packets that a node sends: by netem if the kernel has it, otherwise by a
packet queue."""

from __future__ import annotations

import shutil
import sys
import zlib
from collections.abc import Sequence
from dataclasses import astuple, dataclass

from torchaos.harness.contracts import ChaosError, Handle
from torchaos.harness.mechanics.network import queue
from torchaos.harness.mechanics.network.helper import Helper, helper_of
from torchaos.harness.mechanics.network.link import Link
from torchaos.harness.mechanics.network.queue import Shape
from torchaos.harness.undo.network import IPTABLES, QDISC_MARK, Qdisc, QueueRule, mark_of

__all__ = ["Shape", "Shaper"]


@dataclass(frozen=True)
class Shaper:
    """Applies one shape. `apply` raises ChaosError or, if a tool fails, OSError."""

    fault: str
    link: Link
    shape: Shape

    @property
    def _space(self) -> tuple[int, int]:
        return self.link.space.pid, self.link.space.start_ticks

    @property
    def _helper(self) -> Helper:
        return helper_of(self.fault, self.link)

    def handles(self) -> Sequence[Handle]:
        """The handles of both methods, because only `apply` finds out which method works."""
        rule = QueueRule(*self._space, mark_of(self.fault))
        return [
            Qdisc(*self._space, self.link.device),
            self._helper.handle,
            *([rule] if shutil.which(IPTABLES[0]) else []),
        ]

    def apply(self) -> None:
        try:
            self.link.space.run(
                ["tc", "qdisc", "add", "dev", self.link.device, "root", "handle", QDISC_MARK, *netem(self.shape)]
            )
        except OSError as error:
            if "kind is unknown" not in str(error):
                raise
            self._by_queue()

    def _by_queue(self) -> None:
        number, space, chain = zlib.crc32(self.fault.encode()) & 0x7FFF, self.link.space, mark_of(self.fault)
        argv = [sys.executable, "-S", "-E", queue.__file__, str(number), *map(str, astuple(self.shape))]
        answer = self._helper.start(space, argv)
        if answer != "ready":
            raise ChaosError(f"the packet queue did not start: {answer or 'it ended'}")
        space.run([*IPTABLES, "-N", chain])
        space.run([*IPTABLES, "-A", chain, "-m", "mark", "--mark", hex(queue.MARK), "-j", "RETURN"])
        to_queue = ["-j", "NFQUEUE", "--queue-num", str(number), "--queue-bypass"]
        space.run([*IPTABLES, "-A", chain, "-o", self.link.device, *to_queue])
        space.run([*IPTABLES, "-A", "OUTPUT", "-j", chain])


def netem(shape: Shape) -> list[str]:
    """The shape as arguments of tc; see tc-netem(8)."""
    jitter = [f"{shape.jitter}ms"] if shape.jitter else []
    words = ["netem", "delay", f"{shape.delay}ms", *jitter]
    for name in ("duplicate", "reorder", "corrupt"):
        if percent := getattr(shape, name):
            words += [name, f"{percent}%"]
    return words
