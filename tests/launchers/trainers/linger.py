"""A trainer that waits until the file FOLDER/go is there: linger.py FOLDER [--loader] [--all-reduce] [--exit CODE].

--loader: each rank spawns two data-loader workers, which inherit its environment.
--all-reduce: the ranks are in a process group and add up numbers meanwhile.
--exit: the exit code of the first submission or attempt; later ones end with 0.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--loader", action="store_true")
    parser.add_argument("--all-reduce", action="store_true")
    parser.add_argument("--exit", type=int, default=0)
    options = parser.parse_args()
    rank = int(os.environ["RANK"])
    count = os.environ.get("TORCHAOS_ROUND") or os.environ["TORCHELASTIC_RESTART_COUNT"]
    attempt = int(os.environ.get("TORCHAOS_ATTEMPT_BASE", "0")) + int(count)
    if options.loader:
        for _ in range(2):
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            with open(options.folder / "loaders", "a") as file:
                file.write(f"{child.pid}\n")
    go = options.folder / f"go-{attempt}"
    ended = (lambda: seen_by_one(go)) if options.all_reduce else go.exists
    if options.all_reduce:
        import torch.distributed as dist

        dist.init_process_group("gloo")
    partial = options.folder / f".up-{rank}-{attempt}"
    partial.write_text(str(os.getpid()))
    partial.rename(options.folder / f"up-{rank}-{attempt}")
    while not ended():
        time.sleep(0.01)
    sys.stdout.flush()
    os._exit(options.exit if attempt == 0 else 0)


def seen_by_one(go: Path) -> bool:
    """All ranks end in one step, so that none waits for another that has ended."""
    import torch
    import torch.distributed as dist

    seen = torch.tensor(float(go.exists()))
    dist.all_reduce(seen)
    return bool(seen.item())


main()
