"""NCCL's own health service (RAS) beside a rank that is stopped, goes on, and is killed: what it says, and after how
many seconds. Two ranks reduce all the time. Passes if RAS names the stopped rank, and the sums are right after it. Its
own words are in ras.txt."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import psutil
from row import KEEP, SLOW, backend, need_gpu, need_two_ranks_with_nccl, not_possible, share_a_gpu

from torchaos.harness.monitoring.observers import hang_watch

WAIT_S = 15 * SLOW
RUNNING = "the counts grow and no rank is missing"


def rank() -> None:
    """The script that runs under torchrun: prints its pid, and after each second that its sums were right."""
    import torch
    import torch.distributed as dist

    number = int(os.environ["RANK"])
    torch.cuda.set_device(number % torch.cuda.device_count())
    share_a_gpu(backend())
    dist.init_process_group("nccl", timeout=timedelta(seconds=60))
    told = 0.0
    while True:
        data = torch.full((1000,), float(number + 1), device="cuda")
        dist.all_reduce(data)
        assert data.eq(3.0).all().item(), "the sum is wrong"
        time.sleep(0.01)
        if time.monotonic() - told > 1.0:
            told = time.monotonic()
            print(f"RANK {number} PID {os.getpid()} RIGHT", flush=True)


def state(before: list[hang_watch.Communicator]) -> tuple[str, list[hang_watch.Communicator]]:
    """What RAS says in a word, and its answer. `before`: its last answer."""
    try:
        found = hang_watch.ask()
    except (OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}", []
    world = max(found, key=lambda one: one.size, default=None)
    if world is None:
        return "it knows no communicator", found
    if world.missing:
        return "; ".join(f"rank {place}: {why}" for place, why in sorted(world.missing.items())), found
    if not before or hang_watch.grew(before, found):
        return RUNNING, found
    behind = world.behind()
    return "; ".join(f"rank {place}: {why}" for place, why in sorted(behind.items())) or "the counts stand still", found


def follow(until: Callable[[str], bool]) -> list[str]:
    """Asks again and again until an answer is as wanted, or the time is over. Each new answer with its second."""
    begun, told, last, before = time.monotonic(), [], "", list[hang_watch.Communicator]()
    while time.monotonic() - begun < WAIT_S:
        text, before = state(before)
        if text != last:
            told.append(f"{time.monotonic() - begun:.1f} s: {text}")
            last = text
        if until(text):
            break
        time.sleep(0.5)
    return told


def raw(when: str) -> None:
    """Adds RAS's own words to ras.txt, as far as they came in 5 s."""
    host, _, port = hang_watch.ADDRESS.rpartition(":")
    for request in ("VERBOSE STATUS", "SET FORMAT json\nVERBOSE STATUS"):
        parts = []
        try:
            with socket.create_connection((host, int(port)), timeout=5) as server:
                server.sendall(f"CLIENT PROTOCOL 2\nTIMEOUT 2\n{request}\n".encode())
                while part := server.recv(65536):
                    parts.append(part)
        except OSError as error:
            parts.append(f"no more: {error}".encode())
        with open(KEEP / "ras.txt", "ab") as file:
            file.write(b"".join([f"--- {when}: {request}\n".encode(), *parts, b"\n"]))


def not_the_server(pids: dict[int, int]) -> int:
    """A rank that is not the process which answers for RAS: a machine has only one, and it must not be stopped."""
    port = int(hang_watch.ADDRESS.rpartition(":")[2])
    servers = {one.pid for one in psutil.net_connections("tcp") if one.status == "LISTEN" and one.laddr.port == port}
    return max(rank for rank, pid in pids.items() if pid not in servers)


def main() -> int:
    need_gpu()
    need_two_ranks_with_nccl()
    here = ("--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2")
    command = [sys.executable, "-m", "torch.distributed.run", *here, __file__, "--rank"]
    log = KEEP / "ras-job.log"
    with open(log, "w") as file:
        job = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    try:
        return _with(job, lambda: log.read_text(errors="replace"))
    finally:
        job.terminate()
        job.wait()


def _with(job: subprocess.Popen[bytes], log: Callable[[], str]) -> int:
    pids: dict[int, int] = {}
    deadline = time.monotonic() + 40 * SLOW
    while len(pids) < 2:
        words = [line.split() for line in log().splitlines() if line.startswith("RANK ")]
        pids = {int(word[1]): int(word[3]) for word in words}
        if job.poll() is not None or time.monotonic() > deadline:
            print(log(), "the two ranks did not begin to reduce", sep="\n")
            return 1
        time.sleep(0.2)
    well = follow(lambda text: text == RUNNING)
    if "refused" in " ".join(well) or "2.28.7" in " ".join(well):
        not_possible(f"NCCL's RAS gives no JSON here: {well[-1]}")
    raw("running")
    hit = not_the_server(pids)
    os.kill(pids[hit], signal.SIGSTOP)
    stopped = follow(lambda text: f"rank {hit}: NCCL's RAS" in text)
    raw(f"rank {hit} is stopped")
    os.kill(pids[hit], signal.SIGCONT)
    again = follow(lambda text: text == RUNNING)
    rights = log().count("RIGHT")
    time.sleep(2.0)
    went_on = log().count("RIGHT") > rights
    os.kill(pids[hit], signal.SIGKILL)
    killed = follow(lambda text: text != RUNNING)
    for name, lines in (("running", well), ("stopped", stopped), ("goes on", again), ("killed", killed)):
        print(name, *lines, sep="\n  ")
    named = f"rank {hit}: NCCL's RAS" in stopped[-1]
    sums = "right" if went_on else "not seen"
    print(f"rank {hit} stopped: {stopped[-1]}; goes on: {again[-1]}, sums {sums}; killed: {killed[-1]}")
    return int(not (named and went_on))


if __name__ == "__main__":
    if "--rank" in sys.argv:
        rank()
    else:
        sys.exit(main())
