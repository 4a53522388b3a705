"""One of two ranks does not join an all-reduce of NCCL: PyTorch's watchdog must report it in the words that torchaos
knows, write the Flight Recorder, and `torchaos diagnose` must name that rank. Also asks NCCL's RAS during the wait."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from datetime import timedelta

from row import KEEP, backend, need_gpu, need_two_ranks_with_nccl, not_possible, share_a_gpu

TIMEOUT_S, LATE, RAS = 10, 1, ("localhost", 28028)


def rank() -> None:
    import torch
    import torch.distributed as dist

    number = int(os.environ["RANK"])
    torch.cuda.set_device(number % torch.cuda.device_count())
    share_a_gpu(backend())
    dist.init_process_group("nccl", timeout=timedelta(seconds=TIMEOUT_S))
    data = torch.ones(1000, device="cuda")
    for _ in range(5):
        dist.all_reduce(data)
    torch.cuda.synchronize()
    print("FIVE", flush=True)
    if number == LATE:
        time.sleep(4 * TIMEOUT_S)
    begun = time.monotonic()
    dist.all_reduce(data)
    if number != LATE and time.monotonic() - begun > TIMEOUT_S:
        print("BLOCKED", flush=True)
    torch.cuda.synchronize()


def ras(request: str) -> str:
    """The answer of NCCL's RAS, as far as it came in 3 s."""
    try:
        with socket.create_connection(RAS, timeout=3) as server:
            server.sendall(f"CLIENT PROTOCOL 2\nTIMEOUT 2\n{request}\n".encode())
            parts = []
            while part := server.recv(65536):
                parts.append(part)
    except OSError as error:
        return f"no answer: {error}"
    return b"".join(parts).decode(errors="replace")


def main() -> int:
    need_gpu()
    need_two_ranks_with_nccl()
    with tempfile.TemporaryDirectory() as dumps:
        env = {
            **os.environ, "TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
            "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "5000",  # that a rank waits for the dumps; torch's own is a minute
            "TORCH_FR_DUMP_TEMP_FILE": f"{dumps}/rank_", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": f"{dumps}/rank_",
        }  # fmt: skip
        here = ("--standalone", "--local-addr", "127.0.0.1")
        command = [sys.executable, "-m", "torch.distributed.run", *here, "--nproc-per-node", "2", __file__]
        job = subprocess.Popen(
            [*command, "--rank"], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert job.stdout
        for line in job.stdout:
            if "FIVE" in line:
                break
        answers = {request: ras(request) for request in ("VERBOSE STATUS", "SET FORMAT json\nVERBOSE STATUS")}
        (KEEP / "ras.txt").write_text("\n".join(f"--- {request}\n{answer}" for request, answer in answers.items()))
        log = job.communicate()[0]
        print(log, *answers.values(), sep="\n")
        if "BLOCKED" in log:
            not_possible("an all-reduce returns only after the other rank joined it, so no rank waits on its GPU")
        asked = [sys.executable, "-m", "torchaos.harness", "diagnose", dumps]
        done = subprocess.run(asked, capture_output=True, text=True, check=False)
        print(done.stdout, done.stderr)
        written = sorted(os.listdir(dumps))
    from torchaos.harness.monitoring.probes.job_log import cause_of

    known = sorted({cause.name for line in log.splitlines() if (cause := cause_of(line, 0))})
    named = bool(re.search(rf"rank {LATE}\b", done.stdout))
    answered = "no answer" not in answers["VERBOSE STATUS"]
    print(
        f"known causes in the log: {', '.join(known) or 'none'}; dumps: {', '.join(written) or 'none'}; diagnose "
        f"{'names' if named else 'does not name'} rank {LATE}; RAS {'answers' if answered else 'does not answer'}"
    )
    return int(not (known and named))


if __name__ == "__main__":
    if "--rank" in sys.argv:
        rank()
    else:
        sys.exit(main())
