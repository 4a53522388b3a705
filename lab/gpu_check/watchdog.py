"""One of two ranks does not join an all-reduce of NCCL: PyTorch's watchdog must report it in the words that torchaos
knows, write the Flight Recorder, and `torchaos diagnose` must name that rank."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from datetime import timedelta

from row import SLOW, backend, need_gpu, need_two_ranks_with_nccl, not_possible, share_a_gpu, torchrun

TIMEOUT_S, LATE = 10, 1


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
    if number == LATE:
        time.sleep(4 * TIMEOUT_S)
    begun = time.monotonic()
    dist.all_reduce(data)
    if number != LATE and time.monotonic() - begun > TIMEOUT_S:
        print("BLOCKED", flush=True)
    torch.cuda.synchronize()


def main() -> int:
    need_gpu()
    need_two_ranks_with_nccl()
    with tempfile.TemporaryDirectory() as dumps:
        env = {
            **os.environ, "TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
            "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "5000",  # that a rank waits for the dumps; torch's own is a minute
            "TORCH_FR_DUMP_TEMP_FILE": f"{dumps}/rank_", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": f"{dumps}/rank_",
        }  # fmt: skip
        job = torchrun(2, __file__, "--rank", env=env, limit_s=60 * SLOW)
        log = job.stdout + job.stderr
        print(log)
        if "BLOCKED" in log:
            not_possible("an all-reduce returns only after the other rank joined it, so no rank waits on its GPU")
        asked = [sys.executable, "-m", "torchaos.harness", "diagnose", dumps]
        done = subprocess.run(asked, capture_output=True, text=True, check=False)
        print(done.stdout, done.stderr)
        written = sorted(os.listdir(dumps))
    from torchaos.harness.monitoring.probes.job_log import cause_of

    known = sorted({cause.name for line in log.splitlines() if (cause := cause_of(line, 0))})
    named = bool(re.search(rf"rank {LATE}\b", done.stdout))
    print(
        f"known causes in the log: {', '.join(known) or 'none'}; dumps: {', '.join(written) or 'none'}; diagnose "
        f"{'names' if named else 'does not name'} rank {LATE}"
    )
    return int(not (known and named))


if __name__ == "__main__":
    if "--rank" in sys.argv:
        rank()
    else:
        sys.exit(main())
