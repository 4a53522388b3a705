"""Failures in torch, gloo or NCCL that are known: a line of the log, its name, and what to do about it.

A cause changes the reason that a verdict gives, never the verdict. Match text, never line numbers of torch's sources.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from torchaos.harness.agent.wire import Kind
from torchaos.harness.probes.torchelastic import Said


@dataclass(frozen=True)
class Cause:
    name: str
    pattern: re.Pattern[str]
    advice: str
    after_restart: bool | None = (
        None  # only in an attempt that is a restart inside torchrun (or only in one that is not)
    )


def _cause(name: str, pattern: str, advice: str, after_restart: bool | None = None) -> Cause:
    return Cause(name, re.compile(pattern), advice, after_restart)


CAUSES = (
    _cause(
        "gloo-stale-store",
        r"Gloo connectFullMesh failed.*(?:Connection refused|timed out)",
        "after a restart the ranks read gloo addresses of the attempt before from torchrun's store, which it keeps; "
        "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the job's environment",
        after_restart=True,
    ),
    _cause(
        "gloo-connect",
        r"Gloo connectFullMesh failed",
        "the ranks could not connect to each other; check GLOO_SOCKET_IFNAME and what lies between the nodes",
        after_restart=False,
    ),
    _cause(
        "teardown-abort",
        r"terminate called without an active exception",
        "a process ended while threads of torch were still running; call destroy_process_group() at the end of the job",
    ),
    _cause(
        "nccl-watchdog-timeout",
        r"Watchdog caught collective operation timeout",
        "a collective did not finish in time: a rank is hung, slow, or in another collective; compare the last "
        "sequence numbers of the ranks; TORCH_NCCL_DUMP_ON_TIMEOUT=1 and TORCH_FR_BUFFER_SIZE give a flight record",
    ),
    _cause(
        "gloo-timeout",
        r"Timed out waiting \d+ms for (?:recv|send) operation",
        "a collective did not finish in time: a rank is hung, slow, or in another collective",
    ),
    _cause(
        "cuda-out-of-memory",
        r"CUDA out of memory|torch\.(?:cuda\.)?OutOfMemoryError",
        "the GPU's memory was used up; memory of an earlier attempt is given back only when its process is gone",
    ),
    _cause(
        "rendezvous-closed",
        r"RendezvousClosedError",
        "this rendezvous id belongs to a job that ended; give every submission a new --rdzv-id",
    ),
    _cause(
        "name-lookup",
        r"Name or service not known|Temporary failure in name resolution|No address associated with hostname"
        r"|gai error: -[235]\b|getaddrinfo failed",
        "a node could not look up the name of another one; check its /etc/hosts, or the name server",
    ),
    _cause(
        "peer-gone",
        r"Connection reset by peer|Connection closed by peer",
        "a rank lost the connection to another one, which as a rule died first; look for the first rank that ended",
    ),
)  # fmt: skip

_ANY = re.compile("|".join(f"(?:{cause.pattern.pattern})" for cause in CAUSES))
_LONGEST = 500  # characters of a line that are kept


def cause_of(line: str, restarts: int) -> Cause | None:
    """`restarts`: how often torchrun had restarted the workers when the line came."""
    if not _ANY.search(line):
        return None
    return next((one for one in CAUSES if one.pattern.search(line) and one.after_restart in (None, restarts > 0)), None)


class CauseReader:
    """Tells of each cause a few times per attempt: every rank may print it, some in a loop. One per submission."""

    MOST = 8

    def __init__(self) -> None:
        self._told: dict[tuple[str, int], int] = {}

    def read(self, line: str, restarts: int) -> Said | None:
        cause = cause_of(line, restarts)
        if cause is None:
            return None
        key = cause.name, restarts
        self._told[key] = self._told.get(key, 0) + 1
        if self._told[key] > self.MOST:
            return None
        return Said(Kind.LOG_CAUSE, {"cause": cause.name, "line": line.strip()[:_LONGEST], "advice": cause.advice})
