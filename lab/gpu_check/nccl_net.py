"""Checks, with NCCL and a GPU, the plug-in under NCCL: two ranks reduce over it, and each fault has its effect on one
all-reduce and no longer.

Two ranks need two GPUs, with NCCL_P2P_DISABLE=1 and NCCL_SHM_DISABLE=1. With one GPU each rank says that it is another
machine (NCCL_HOSTID), and then NCCL lets both use it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from row import (
    SLOW,
    need_gpu,
    need_nccl_to_read,
    need_two_ranks_with_nccl,
    not_possible,
    torchrun,
    why,
)

from torchaos.harness.host.native_libraries import NCCL_NET, nccl_net_environment
from torchaos.harness.interfaces import UsageError

COUNT = 1 << 20  # floats in each all-reduce
HELD_S = 1.0
FAULTS = ("stall", "flap", "delay", "throttle", "corrupt")


def rank(what: str, folder: Path) -> None:
    """The script that runs under torchrun. Rank 0 is the one that is hit. `what`: `nics`, `error`, or `faults`: the
    others, one after the other."""
    import torch
    import torch.distributed as dist

    from torchaos.harness.protocol.nccl_connections import CONNECTIONS, HITS, VERSION, NetKind, NetOrder, NetPage

    number, page = int(os.environ["RANK"]), NetPage.of_this_process()
    orders = {
        "stall": NetOrder(NetKind.STALL, way="out"),
        "flap": NetOrder(NetKind.FLAP, 10**9, 10**8),
        "delay": NetOrder(NetKind.DELAY, 10**9, way="out"),
        "throttle": NetOrder(NetKind.THROTTLE, 2_000_000, way="out"),
        "corrupt": NetOrder(NetKind.CORRUPT, 500_000, min_bytes=10_000),
        "error": NetOrder(NetKind.FAIL, 6),
        "nics": NetOrder(NetKind.NICS, 1, 1000),
    }
    torch.cuda.set_device(number % torch.cuda.device_count())
    if torch.cuda.device_count() == 1:
        os.environ["NCCL_HOSTID"] = f"host{number}"
    slot = _order(page, orders["nics"], folder / "nics") if what == "nics" and number == 0 else 0
    dist.init_process_group("nccl", timeout=timedelta(seconds=60 * SLOW))
    data = torch.arange(COUNT, device="cuda", dtype=torch.float32)

    def reduce() -> tuple[float, bool]:
        begun, own = time.monotonic(), data * (number + 1)
        dist.all_reduce(own)
        torch.cuda.synchronize()
        return time.monotonic() - begun, bool(torch.equal(own, data * 3))

    def fault(name: str) -> dict[str, float]:
        """The all-reduce under a fault: its seconds, and how many transfers were hit."""
        dist.barrier()
        hit, hits = number == 0, 0
        slot = _order(page, orders[name], folder / name, HELD_S if name in ("stall", "flap") else 600.0) if hit else 0
        took, right = reduce()
        if hit:
            hits = page.read(HITS, slot)
            _take_back(folder / name)
            assert hits, f"{name}: the library counts nothing that was hit"
        if name == "corrupt":
            verdict = torch.tensor([float(not right)], device="cuda")
            dist.all_reduce(verdict)
            assert verdict.item() > 0, f"{name}: the sum is right, though a byte was wrong"
        else:
            assert right, f"{name}: the sum is wrong"
        if name in ("stall", "delay", "throttle"):
            assert took >= 0.8 * HELD_S, f"{name}: the all-reduce took {took:.2f} s only"
        assert reduce()[1], f"{name}: the sum is wrong afterwards"
        return {"took": round(took, 2), "hits": hits}

    assert reduce()[1], "the sum is wrong before any fault"
    assert page.loaded, "NCCL did not load the plug-in"
    assert page.read(CONNECTIONS) > 0, "NCCL does not send over the plug-in"
    found: dict[str, Any] = {"nccl": ".".join(map(str, torch.cuda.nccl.version())), "interface": page.read(VERSION)}
    if what == "nics":
        assert number or page.read(HITS, slot), "nics: NCCL did not ask for the network cards"
    else:
        found |= {name: fault(name) for name in (FAULTS if what == "faults" else [what])}
    if number == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


def _order(page: Any, order: Any, control: Path, lease_s: float = 600.0) -> int:
    from torchaos.harness.protocol.control_pages import ControlPage

    ControlPage(control, create=True).write(ControlPage.FIRED, 1)
    return int(page.order(order, str(control), 1, lease_s))


def _take_back(control: Path) -> None:
    from torchaos.harness.protocol.control_pages import ControlPage

    ControlPage(control).write(ControlPage.GO, 1)


def launch(what: str) -> subprocess.CompletedProcess[str]:
    ours = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_PROTO": "Simple", "NCCL_DEBUG": "WARN"}
    ours["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "0"  # otherwise a rank with an error lives on for a minute
    with tempfile.TemporaryDirectory() as scratch:
        env = {**os.environ, **ours, **nccl_net_environment(Path(scratch) / "nccl_net")}
        return torchrun(2, __file__, "--rank", what, scratch, env=env, limit_s=60 * SLOW)


def main() -> int:
    need_gpu()
    need_two_ranks_with_nccl()
    need_nccl_to_read("NCCL_NET_PLUGIN")
    try:
        NCCL_NET.path()
    except UsageError as error:
        not_possible(str(error))
    found: dict[str, Any] = {}
    for what in ("faults", "nics"):
        done = launch(what)
        if done.returncode != 0:
            print(done.stdout, done.stderr, f"{what}: {why(done)}", sep="\n")
            return 1
        found |= json.loads(done.stdout.strip().splitlines()[-1])
        print(f"{what}: {found}")
    done = launch("error")
    if done.returncode == 0 or "NCCL" not in done.stderr:
        print(done.stdout, done.stderr, "error: the ranks went on, or no error of NCCL is in the log", sep="\n")
        return 1
    held = ", ".join(f"{name} {found[name]['took']} s" for name in FAULTS)
    print(f"NCCL {found['nccl']} reduced over interface version {found['interface']}; {held}; fewer cards; an error")
    return 0


if __name__ == "__main__":
    if "--rank" in sys.argv:
        rank(sys.argv[2], Path(sys.argv[3]))
    else:
        sys.exit(main())
