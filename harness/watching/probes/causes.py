"""Known failures of torch, gloo, NCCL and CUDA. Each has a pattern for its log line, a name, and advice.

A cause changes the reason that a verdict gives, never the verdict (judging/verdict/known.py; the only exception is in
judging/ending/teardown.py). Patterns match text, never line numbers of torch's sources. The table is shown in
docs/known-failures.md."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from torchaos.harness.agent.wire import Kind
from torchaos.harness.watching.probes.torchelastic import LogFact

Whose = Literal["torch", "gloo", "NCCL", "CUDA", "the network", "another rank", "the job"]


@dataclass(frozen=True)
class Cause:
    name: str
    whose: Whose  # the component to blame; "another rank": some rank died, and the line does not say why
    pattern: re.Pattern[str]
    advice: str
    seen: str  # torch versions in whose logs it was seen, by torchaos or in the issues; empty: not known
    issues: tuple[str, ...] = ()  # public issues, as owner/repository#number
    after_restart: bool | None = None  # True: only in restarted attempts; False: only in others; None: in any
    hang: bool = False  # the line shows that the job noticed a hang

    @property
    def of_the_stack(self) -> bool:
        """Whether torch, gloo or NCCL failed, and not the network, a peer or the job."""
        return self.whose in ("torch", "gloo", "NCCL")


def _cause(
    name: str, whose: Whose, pattern: str, advice: str, seen: str, *issues: str, after_restart: bool | None = None,
    hang: bool = False,
) -> Cause:  # fmt: skip
    return Cause(name, whose, re.compile(pattern), advice, seen, issues, after_restart, hang)


# The first cause whose pattern matches a line counts.
CAUSES = (
    _cause(
        "gloo-stale-store", "torch", r"Gloo connectFullMesh failed.*(?:Connection refused|timed out|[Tt]imeout)",
        "after a restart, the ranks read gloo addresses of the previous attempt from torchrun's store; "
        "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the job's environment",
        "2.5, 2.13", "pytorch/pytorch#135712", after_restart=True,
    ),
    _cause(
        "gloo-connect", "gloo", r"Gloo connectFullMesh failed",
        "the ranks could not connect to each other; check GLOO_SOCKET_IFNAME and the network between the nodes",
        "2.13", "NVIDIA/Megatron-LM#877", after_restart=False,
    ),
    _cause(
        "teardown-abort", "torch", r"terminate called without an active exception",
        "a process ended while threads of torch were still running; call destroy_process_group() at the end of the job",
        "2.13", "pytorch/pytorch#190489",
    ),
    _cause(
        "nccl-watchdog-stuck", "NCCL", r"Heartbeat monitor timed out|watchdog got stuck for \d+ seconds",
        "the thread that watches NCCL was itself stuck in CUDA or NCCL, or something held the GIL; it then ends the "
        "process. TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC is how long it waits",
        "", "pytorch/pytorch#112518", hang=True,
    ),
    _cause(
        "nccl-watchdog-timeout", "NCCL", r"Watchdog caught collective operation timeout",
        "a collective did not finish in time: a rank is hung, slow, or in another collective; compare the last "
        "sequence numbers of the ranks; TORCH_NCCL_DUMP_ON_TIMEOUT=1 and TORCH_FR_BUFFER_SIZE give a flight record",
        "", "pytorch/pytorch#118369", hang=True,
    ),
    _cause(
        "nccl-remote-error", "another rank", r"ncclRemoteError",
        "NCCL lost the connection to another rank, which usually died first; look for the first rank that ended",
        "", "NVIDIA/nccl#934",
    ),
    _cause(
        "gloo-timeout", "gloo", r"Timed out waiting \d+ms for (?:recv|send) operation",
        "a collective did not finish in time: a rank is hung, slow, or in another collective",
        "2.13", hang=True,
    ),
    _cause(
        "monitored-barrier", "gloo", r"failed to pass monitoredBarrier in \d+ ms",
        "the ranks that the line names did not come to a barrier in time: they are hung, or slow",
        "", hang=True,
    ),
    _cause(
        "elastic-timer", "torch", r"Reaping worker_(?:id|pid)=\[.*Expired timers",
        "torchelastic ended a rank whose timer expired before the rank had finished its work",
        "2.13", hang=True,
    ),
    _cause(
        "faulthandler", "the job", r"(?:^|[\s:])Timeout \(\d+:\d\d:\d\d(?:\.\d+)?\)!$",
        "the job did not reset its time-out in Python's faulthandler in time; the stacks below say where the rank was",
        "2.13", hang=True,
    ),
    _cause(
        "rank-monitor", "the job",
        r"Did not get (?:initial|subsequent) heartbeat\. Waited|has been open for [\d.]+ seconds\. Timeout is"
        r"|Was out of section for [\d.]+ seconds\. Timeout is",
        "NVIDIA's resiliency extension (Megatron-LM and Lightning may use it) heard nothing of a rank in time",
        "", hang=True,
    ),
    _cause(
        "cuda-out-of-memory", "CUDA", r"CUDA out of memory|torch\.(?:cuda\.)?OutOfMemoryError",
        "the GPU's memory was used up; memory of an earlier attempt is given back only when its process is gone",
        "",
    ),
    _cause(
        "rendezvous-closed", "torch", r"RendezvousClosedError",
        "this rendezvous belongs to a job that ended, or a node left it normally, which closes it for all; give every "
        "submission a new --rdzv-id",
        "", "pytorch/pytorch#147064", "pytorch/pytorch#67742",
    ),
    _cause(
        "rendezvous-unreachable", "torch",
        r"RendezvousConnectionError|The connection to the C10d store has failed"
        r"|client socket has timed out after \d+m?s",
        "a torchrun could not reach, or lost, the torchrun that keeps the rendezvous; no restart works without it",
        "1.10, 2.13", "pytorch/pytorch#67581", "pytorch/pytorch#121944",
    ),
    _cause(
        "store-clients-missing", "torch", r"DistStoreError: Timed out after \d+ seconds waiting for clients",
        "not all ranks came to the store in time: one died while it started, or is in another attempt than the others",
        "2.13", "pytorch/pytorch#111805",
    ),
    _cause(
        "port-in-use", "torch", r"EADDRINUSE|errno: 98 - Address already in use",
        "a process of an earlier attempt, or of another job, still has the port; let torchrun choose one "
        "(--rdzv-backend c10d --rdzv-endpoint localhost:0)",
        "1.10 to 2.1, 2.13", "pytorch/pytorch#73320", "pytorch/pytorch#126510",
    ),
    _cause(
        "shared-memory-full", "torch", r"killed by signal: Bus error|insufficient shared memory \(shm\)",
        "/dev/shm is full, and a killed attempt leaves its segments there; give it more room, or use fewer workers",
        "", "pytorch/pytorch#5040",
    ),
    _cause(
        "name-lookup", "the network",
        r"Name or service not known|Temporary failure in name resolution|No address associated with hostname"
        r"|gai error: -[235]\b|getaddrinfo failed",
        "a node could not look up the name of another node; check its /etc/hosts, or the name server",
        "2.13",
    ),
    _cause(
        "endpoint", "the network",
        r"Could not connect to the endpoint URL|Cannot connect to host \S+:\d|(?:Connect|Read) timeout on endpoint URL"
        r"|Connection was closed before we received a valid response from endpoint",
        "the job could not use an object store, or another service; check the service and the network between",
        "",
    ),
    _cause(
        "store-gone", "another rank", r"Connection was likely closed\. Did the remote server shutdown or crash",
        "the process that kept the store died, or ended before the others were done with it",
        "2.13", "pytorch/pytorch#153586",
    ),
    _cause(
        "peer-gone", "another rank", r"Connection reset by peer|Connection closed by peer",
        "a rank lost the connection to another rank, which usually died first; look for the first rank that ended",
        "2.13",
    ),
)  # fmt: skip
BY_NAME = {cause.name: cause for cause in CAUSES}
OWN_WATCHDOG = "own-watchdog"  # a line by which the scenario says that the job notices a hang

_ANY = re.compile("|".join(f"(?:{cause.pattern.pattern})" for cause in CAUSES))
_LONGEST = 500  # characters of a line that are kept


def cause_of(line: str, restarts: int) -> Cause | None:
    """The known failure that a line shows; None if there is none. `restarts`: how often torchrun had restarted the
    workers before the line."""
    if not _ANY.search(line):
        return None
    fitting = (cause for cause in CAUSES if cause.after_restart in (None, restarts > 0))
    return next((cause for cause in fitting if cause.pattern.search(line)), None)


class CauseReader:
    """Finds known failures in the log of one submission. It reports each cause at most MOST times per attempt, since
    each rank may print it, perhaps in a loop."""

    MOST = 8

    def __init__(self, own: Sequence[str] = ()) -> None:
        """`own`: regular expressions of the scenario, for lines by which the job says that it noticed a hang."""
        self._own = [re.compile(text) for text in own]
        self._times: dict[tuple[str, int], int] = {}

    def read(self, line: str, restarts: int) -> Iterator[LogFact]:
        cause = cause_of(line, restarts)
        if cause and self._is_due(cause.name, restarts):
            yield LogFact(Kind.LOG_CAUSE, {"cause": cause.name, "line": _short(line), "advice": cause.advice})
        for own in self._own:
            if own.search(line) and self._is_due(f"{OWN_WATCHDOG} {own.pattern}", restarts):
                yield LogFact(Kind.LOG_CAUSE, {"cause": OWN_WATCHDOG, "line": _short(line), "pattern": own.pattern})

    def _is_due(self, name: str, restarts: int) -> bool:
        self._times[name, restarts] = self._times.get((name, restarts), 0) + 1
        return self._times[name, restarts] <= self.MOST


def _short(line: str) -> str:
    return line.strip()[:_LONGEST]
