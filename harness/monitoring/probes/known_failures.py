"""The table of known failures of torch, gloo, NCCL and CUDA, and of the machines on which a job runs. Each has a name,
a pattern for its log line, and advice. The reference in the documentation shows the table.

Patterns match text, never line numbers of torch's sources. Words that any library may print (the texts of errno) count
only if the line names the library, or if they are the last line of a Python traceback. The same words from a client of
a tracker or an object store say nothing about a rank."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Whose = Literal[
    "torch", "gloo", "NCCL", "CUDA", "the GPU", "the network", "the storage", "the machine", "the scheduler",
    "another rank", "a signal", "the job",
]  # fmt: skip


@dataclass(frozen=True)
class Cause:
    name: str
    whose: Whose  # the component to blame
    pattern: re.Pattern[str]
    advice: str
    seen: str  # versions of torch in whose logs it was seen, by us or in the issues; empty: not known
    issues: tuple[str, ...] = ()  # public issues, as owner/repository#number
    common: re.Pattern[str] | None = None  # words that other programs print, too
    # `common` counts only on a line with this; None: on each line that is not a client's.
    beside: re.Pattern[str] | None = None
    after_restart: bool | None = None  # True: only after a restart of the ranks; False: only before; None: always
    hang: bool = False  # the line shows that the job noticed a hang

    @property
    def of_the_stack(self) -> bool:
        """Whether torch, gloo or NCCL failed, and not the network, another rank or the job."""
        return self.whose in ("torch", "gloo", "NCCL")

    @property
    def is_consequence(self) -> bool:
        """Whether the line shows only that something ended a rank or the job, but not what."""
        return self.whose in ("another rank", "a signal")

    def fits(self, line: str) -> bool:
        """Whether the line shows this failure. If the line says that the program tries again, its common words do not
        count."""
        if self.pattern.search(line):
            return True
        if not self.common or not self.common.search(line) or _AGAIN.search(line):
            return False
        return bool(self.beside.search(line)) if self.beside else not _CLIENT.search(line)


def _cause(
    name: str, whose: Whose, pattern: str, advice: str, seen: str, *issues: str, common: str = "",
    beside: re.Pattern[str] | None = None, after_restart: bool | None = None, hang: bool = False,
) -> Cause:  # fmt: skip
    words = re.compile(common) if common else None
    return Cause(name, whose, re.compile(pattern), advice, seen, issues, words, beside, after_restart, hang)


def _raised(words: str) -> str:
    """A pattern for the last line of a Python traceback, after the label of its rank if it has one."""
    return rf"^{_LABEL}(?:[\w.]+\.)?(?:{words})"


_LABEL = r"(?:\s|\[(?:rank|default)?\d+\]:|\d+: |\([\w-]+ pid=\d+[^)]*\))*"
_AGAIN = re.compile(
    r"\b(?:[Rr]e-?try|[Rr]e-?trying|[Tt]ry(?:ing)? again|[Rr]econnecting|[Ss]kipping|restored|recovered)\b"
    r"|\b(?:WARNING|[Ww]arning)\b|socket has failed to connect to"
    # A message to people that did not arrive, if no exception came of it: training goes on.
    rf"|^(?!{_LABEL}[\w.]+(?:Error|Exception|Timeout)\b).*(?:[Ss]lack|[Dd]iscord|[Tt]elegram|[Ww]ebhook|\bsmtp)"
)
_CLIENT = re.compile(
    r"https?://|s3://|gs://|HTTPS?Connection|\b(?:urllib3?|requests|botocore|boto3|aiohttp|httpx|httpcore|grpc|wandb)\b"
    r"|\b(?:mlflow|neptune|comet_ml|clearml|swanlab|s3fs|gcsfs|fsspec|tensorboard|raylet|pymongo|sqlalchemy)\b"
    r"|\b(?:huggingface|hf_hub|google\.api_core|StatusCode|redis|ray\.exceptions|GcsRpc|sentry|kafka|psycopg|prometheus)"
)
_STORE = re.compile(
    r"\[c10d\]|The server socket has failed|TCPStore|SocketImpl|store->|DistNetworkError|DistStoreError"
)
_PEER = re.compile(
    r"\bpair\.cc:|\b[Gg]loo\b|ProcessGroup(?:Gloo|NCCL)|\b[NR]CCL\b|DistBackendError"
    r"|\bsocket(?:Start|Poll|Try|Finalize|Progress)\w*: "
)
_EITHER = re.compile(f"{_STORE.pattern}|{_PEER.pattern}")
_LOST = r"Connection reset by peer|Connection closed by (?:remote )?peer|Broken pipe"
_NO_NAME = (
    r"Name or service not known|Temporary failure in name resolution|No address associated with hostname"
    r"|gai error: -[235]\b|getaddrinfo failed"
)

# If several causes match a line, the first counts.
CAUSES = (
    _cause(
        "gloo-stale-store", "torch",
        r"Gloo connectFullMesh failed.*(?:Connection refused|timed out|[Tt]imeout)"
        r"|gloo/transport/tcp/\S+ connect .*Connection refused",
        "after a restart, the ranks read gloo addresses of the previous attempt from torchrun's store; "
        "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the job's environment, and give torchrun --standalone",
        "2.5, 2.13", "pytorch/pytorch#135712", after_restart=True,
    ),
    _cause(
        "gloo-connect", "gloo",
        r"Gloo connectFullMesh failed|gloo/transport/tcp/\S+ connect .*Connection refused",
        "the ranks could not connect to each other; check GLOO_SOCKET_IFNAME and the network between the nodes",
        "2.13", "NVIDIA/Megatron-LM#877", after_restart=False,
    ),
    _cause(
        "teardown-abort", "torch", r"terminate called without an active exception",
        "a process ended while threads of torch were still running; call destroy_process_group() at the end of the job",
        "2.13", "pytorch/pytorch#190489",
    ),
    _cause(
        "gpu-ecc", "the GPU",
        r"uncorrectable ECC error|cudaErrorECCUncorrectable|CUDA_ERROR_ECC_UNCORRECTABLE|uncorrectable NVLink error",
        "a GPU found a memory or NVLink error that it could not correct: look for its Xid in the kernel's log, and "
        "take the GPU out of use until it is reset",
        "",
    ),
    _cause(
        "xid", "the GPU", r"NVRM: Xid \([^)]*\): (?!(?:63|92|121),)\d+|NVRM: GPU \S+ GPU has fallen off the bus",
        "the driver reported an error of a GPU; NVIDIA's list of Xid errors says whether to restart the job or to take "
        "the GPU or the node out of use",
        "",
    ),
    _cause(
        "cuda-out-of-memory", "CUDA",
        r"(?:[Ee]rror|Exception): (?:CUDA|HIP|XPU) out of memory"
        r"|(?:CUDA|HIP)(?: driver)? error: out of memory|[Cc]uda failure (?:2 )?'out of memory'"
        r"|CUBLAS_STATUS_ALLOC_FAILED|torch\.(?:cuda\.)?OutOfMemoryError|cudaErrorMemoryAllocation",
        "the GPU's memory was used up; memory of an earlier attempt is given back only when its process is gone",
        "", common=r"(?:CUDA|HIP|XPU) out of memory\. Tried to allocate",
    ),
    _cause(
        "cuda-error", "CUDA",
        r"\b(?:CUDA|HIP)(?: driver)? error(?: \d+)?: |Triton Error \[(?:CUDA|HIP)\]: |cuDNN error: CUDNN_STATUS"
        r"|\bCUBLAS_STATUS_(?!SUCCESS)\w+"
        r"|\.cuh?:\d+: .*Assertion .* failed|Unexpected error from cudaGetDeviceCount|No CUDA GPUs are available"
        r"|Found no NVIDIA driver|(?:Memory access fault|HW Exception) by GPU|\bHSA_STATUS_ERROR_\w+"
        r"|cudaError(?!Success|_t|String)[A-Z]\w+",
        "a kernel or a GPU failed, perhaps in an earlier call than the one that reports it; CUDA_LAUNCH_BLOCKING=1 "
        "shows the call, and the kernel's log shows an Xid if it was the GPU",
        "",
    ),
    _cause(
        "nccl-watchdog-stuck", "NCCL",
        r"Heartbeat monitor timed out|watchdog got stuck for \d+ seconds|watchdog hang\b",
        "the thread that watches NCCL was itself stuck in CUDA or NCCL, or something held the GIL; it then ends the "
        "process. TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC is how long it waits",
        "", "pytorch/pytorch#112518", hang=True,
    ),
    _cause(
        "nccl-watchdog-timeout", "NCCL",
        r"[Ww]atchdog caught collective operation timeout|WorkNCCL\(.*ran for \d+ milliseconds before timing out"
        r"|[Rr]eceived a dump signal due to a collective timeout",
        "a collective did not finish in time: a rank is hung, slow, or in another collective; compare the last "
        "sequence numbers of the ranks; TORCH_NCCL_DUMP_ON_TIMEOUT=1 and TORCH_FR_BUFFER_SIZE give a flight record",
        "", "pytorch/pytorch#118369", hang=True,
    ),
    _cause(
        "nccl-remote-error", "another rank",
        r"ncclRemoteError|[Rr]emote process (?:has )?exited or there was a network error",
        "NCCL lost the connection to another rank, which usually died first; look for the first rank that ended",
        "", "NVIDIA/nccl#934",
    ),
    _cause(
        "nccl-net", "the network",
        r"NET/\w+ ?: ?Got completion (?:from peer|with error)|NET/IB ?: .*Got async (?:error )?event"
        r"|NET/OFI .*(?:completed with error|[Cc]ompletion error|RC: -?[1-9])"
        r"|efa_\w+_handle_error\(\)|NCCL WARN Call to ibv_\w+ failed",
        "a transfer of NCCL between two nodes failed; check the adapters, cables and switches of the two (ibstat, the "
        "port's counters)",
        "", "NVIDIA/nccl#1405", "NVIDIA/nccl#1814",
    ),
    _cause(
        "shared-memory-full", "the machine",
        r"killed by signal: Bus error|insufficient shared memory \(shm\)|failed to extend /dev/shm/"
        r"|[Ee]rror while creating shared memory segment"
        r"|unable to allocate shared memory\(shm\)"
        r"|(?:unable to (?:write to|open shared memory object)|ftruncate|posix_fallocate).*"
        r"(?:</?torch_|/dev/shm).*No space left on device|No space left on device.*'/dev/shm/",
        "/dev/shm is full, and a killed attempt leaves its segments there; give it more room, or use fewer workers",
        "", "pytorch/pytorch#5040",
    ),
    _cause(
        "nccl-cuda", "CUDA", r"ncclUnhandledCudaError|unhandled cuda error|NCCL WARN Cuda failure",
        "a call of CUDA failed in NCCL; the words `Cuda failure` in NCCL's own lines say which (NCCL_DEBUG=WARN)",
        "", "pytorch/pytorch#88133",
    ),
    _cause(
        "gloo-timeout", "gloo",
        r"Timed out waiting \d+ms for (?:recv|send) operation|Application timeout caused pair closure",
        "a collective did not finish in time: a rank is hung, slow, or in another collective",
        "2.13", hang=True,
    ),
    _cause(
        "monitored-barrier", "gloo", r"failed to pass monitoredBarrier in \d+ ms|timed out in monitoredBarrier",
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
        "rendezvous-closed", "torch", r"RendezvousClosedError|RendezvousGracefulExitError",
        "this rendezvous belongs to a job that ended, or a node left it normally, which closes it for all; give every "
        "submission a new --rdzv-id",
        "", "pytorch/pytorch#147064", "pytorch/pytorch#67742",
    ),
    _cause(
        "rendezvous-timeout", "torch", r"RendezvousTimeoutError",
        "not enough nodes came to the rendezvous in time; check that each torchrun was started, with the same "
        "--rdzv-id and --rdzv-endpoint",
        "",
    ),
    _cause(
        "rendezvous-unreachable", "torch",
        r"RendezvousConnectionError|The connection to the C10d store has failed"
        r"|client socket has timed out after \d+m?s|connect\(\) timed out\. Original timeout was \d+ ms",
        "a torchrun could not reach, or lost, the torchrun that keeps the rendezvous; no restart works without it",
        "1.10, 2.13", "pytorch/pytorch#67581", "pytorch/pytorch#121944",
    ),
    _cause(
        "store-clients-missing", "torch",
        r"Timed out after \d+ seconds waiting for clients|Timed out initializing process group in store based barrier",
        "not all ranks came to the store in time: one died while it started, or is in another attempt than the others",
        "2.13", "pytorch/pytorch#111805",
    ),
    _cause(
        "store-wait", "another rank",
        r"wait timeout after \d+ms, keys:|(?:DistStoreError|RuntimeError): Socket Timeout",
        "a rank waited in vain for what another rank writes to the store: that rank died, is hung, or has not come",
        "", common=r"Socket Timeout", beside=_STORE,
    ),
    _cause(
        "port-in-use", "torch", _raised(r"OSError: \[Errno 98\]"),
        "a process of an earlier attempt, or of another job, still has the port; let torchrun choose one "
        "(--rdzv-backend c10d --rdzv-endpoint localhost:0)",
        "1.10 to 2.1, 2.13", "pytorch/pytorch#73320", "pytorch/pytorch#126510",
        common=r"EADDRINUSE|[Aa]ddress already in use", beside=_EITHER,
    ),
    _cause(
        "endpoint", "the network",
        r"Could not connect to the endpoint URL|Cannot connect to host \S+:\d|(?:Connect|Read) timeout on endpoint URL"
        r"|Connection was closed before we received a valid response from endpoint"
        r"|\b5\d\d Server Error: .* for url: |An error occurred \((?:SlowDown|InternalError|ServiceUnavailable)\)"
        r"|google\.api_core\.exceptions\.(?:ServiceUnavailable|GatewayTimeout|DeadlineExceeded)",
        "the job could not use an object store, or another service; check the service and the network between",
        "", common=rf"Max retries exceeded|Connection (?:aborted|refused|reset)|[Tt]imed out|StatusCode\.UNAVAILABLE"
        rf"|(?:Connect|Timeout|Protocol|SSL|Disconnected)\w*(?:Error)?\b:|{_NO_NAME}", beside=_CLIENT,
    ),
    _cause(
        "name-lookup", "the network", r"gai error: -[235]\b",
        "a node could not look up the name of another node; check its /etc/hosts, or the name server",
        "2.13", common=_NO_NAME,
    ),
    _cause(
        "store-gone", "another rank",
        r"Connection was likely closed\. Did the remote server shutdown or crash"
        r"|TCPStore server has shut down too early|exception dump flag from the global store"
        rf"|{_raised(rf'RuntimeError: (?:{_LOST})$')}",
        "the process that kept the store died, or ended before the others were done with it",
        "2.13", "pytorch/pytorch#153586", common=_LOST, beside=_STORE,
    ),
    _cause(
        "peer-gone", "another rank", r"gloo/transport/tcp/\S+\] Connection closed by peer",
        "a rank lost the connection to another rank, which usually died first; look for the first rank that ended",
        "2.13", common=_LOST, beside=_PEER,
    ),
    _cause(
        "peer-unreachable", "the network",
        r"Bootstrap : no socket interface found|NCCL WARN socket\w+: Connect to \S+ failed",
        "a rank could not reach another rank; check the network between the nodes, and NCCL_SOCKET_IFNAME or "
        "GLOO_SOCKET_IFNAME",
        "", common=r"[Cc]onnection timed out|No route to host|(?:Network|Host) is (?:unreachable|down)"
        r"|Software caused connection abort", beside=_EITHER,
    ),
    _cause(
        "nccl-system-error", "NCCL", r"ncclSystemError|NCCL.*unhandled system error",
        "a call of the system failed in NCCL: a socket, memory, or a device; NCCL's own lines before say which "
        "(NCCL_DEBUG=WARN)",
        "",
    ),
    _cause(
        "nccl-internal-error", "NCCL", r"ncclInternalError|NCCL.*\binternal error\b",
        "a check in NCCL failed, often since another rank was gone; NCCL's own lines before say more (NCCL_DEBUG=WARN)",
        "",
    ),
    _cause(
        "nccl-invalid-usage", "the job",
        r"ncclInvalidUsage|ncclInvalidArgument|NCCL.*\binvalid usage\b|Duplicate GPU detected"
        r"|Multiple Ranks are using the same GPU",
        "NCCL was called in a wrong way, most often by two ranks on one GPU: each rank must choose the GPU of its "
        "LOCAL_RANK",
        "",
    ),
    _cause(
        "nccl-watchdog-error", "NCCL",
        r"Exception \(either an error or timeout\) detected by watchdog|failure detected by watchdog"
        r"|watchdog thread terminated with exception|Some NCCL operations have failed or timed out"
        r"|NCCL communicator was aborted",
        "torch's watchdog ended the rank after a collective had failed; its lines before say why",
        "",
    ),
    _cause(
        "disk-full", "the storage", _raised(r"OSError: \[Errno (?:28|122)\]"),
        "a disk, or the user's share of it, is full; remove old checkpoints, or keep fewer",
        "", common=r"No space left on device|\bENOSPC\b|Disk quota exceeded|\bEDQUOT\b",
    ),
    _cause(
        "storage", "the storage",
        _raised(r"OSError: \[Errno (?:5|30|116|121)\]")
        + r"|Error: \[Errno (?:107|108|110|112)\] [^:]*: ['\"]/|PytorchStreamWriter failed writing"
        r"|\. unexpected pos \d+ vs \d+|write\(\): fd \d+ failed with (?!No space left|Broken pipe)",
        "a file system failed under the job; check the mount and its server",
        "", common=r"Stale (?:NFS )?file handle|Read-only file system|Remote I/O error|\bLustreError: "
        r"|(?:\bfuse|/\S+): (?:Transport endpoint is not connected|Input/output error)|nfs: server \S+ not responding",
    ),
    _cause(
        "too-many-files", "the machine", _raised(r"OSError: \[Errno 24\]") + "|received 0 items of ancdata",
        "a process has as many files open as it may; raise the limit (ulimit -n), or use fewer data-loader workers",
        "", "pytorch/pytorch#11201", common=r"Too many open files",
    ),
    _cause(
        "host-out-of-memory", "the machine",
        r"[Oo]ut of memory: Kill(?:ed)? process|\boom-kill:|\binvoked oom-killer\b|[Dd]etected \d+ oom[-_]kill event"
        r"|\btasks? [\d,-]+: Out Of Memory|OOMKilled|running low on memory|low on resource: memory"
        r"|DataLoader worker \(pid[^)]*\) is killed by signal: Killed"
        r"|DefaultCPUAllocator: (?:can't allocate|not enough)"
        r"|std::bad_alloc|[Cc]annot allocate memory \(12\)|"
        + _raised(r"_?(?:Array)?MemoryError(?:$|:)|OSError: \[Errno 12\]"),
        "the machine's memory, or the job's share of it, was used up; ask for more, or use fewer data-loader workers",
        "",
    ),
    _cause(
        "scheduler", "the scheduler",
        r"slurmstepd: error: \*\*\* (?:JOB \d+ .*CANCELLED|STEP \S+ .*CANCELLED .*DUE TO)"
        r"|srun: error: Node failure on|PBS: job killed: |TERM_\w+: job killed",
        "the scheduler ended the job: its time limit, a preemption, a node that failed, or a user's cancel",
        "",
    ),
    _cause(
        "terminated", "a signal",
        r"Received \S+ death signal, shutting down workers|SignalException: Process \d+ got signal: ",
        "torchrun was asked by a signal to end: by a scheduler, a user, or a terminal that was closed",
        "2.13",
    ),
    _cause(
        "segfault", "the job",
        r"Fatal Python error: Segmentation fault|Segfault encountered|SIGSEGV\) received|with signal SIGSEGV"
        r"|\*\*\* SIGSEGV|[Ss]ignal: Segmentation fault|Caught signal 11"
        r"|(?<!['\"`])Segmentation fault +\(core dumped\)(?!['\"`])",
        "native code of a library used memory that is not its own; PYTHONFAULTHANDLER=1 shows the line of Python",
        "",
    ),
)  # fmt: skip
BY_NAME = {cause.name: cause for cause in CAUSES}
