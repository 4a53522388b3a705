"""Checks that torch's memory limit for the process leads to the allocator's own out-of-memory error, in the rank, and
not before the Moment."""

from __future__ import annotations

import subprocess
import sys

from row import need_gpu, need_kernels

LIMIT = """
import types, torch
from torchaos.injectors.cuda import OutOfMemory
kept = torch.zeros(1 << 20, device="cuda")
(kept + 1).sum()  # reserves what the same sum needs below: the allocator has a pool for small blocks, too
try:
    OutOfMemory().apply(types.SimpleNamespace(fault="f"))
except torch.OutOfMemoryError as error:
    text = str(error)
assert "CUDA out of memory. Tried to allocate" in text, text
try:
    torch.zeros(1 << 28, device="cuda")
    raise SystemExit("the limit did not stay")
except torch.OutOfMemoryError:
    pass
assert float((kept + 1).sum()) == 1 << 20
print(f"torch {torch.__version__}: {text.splitlines()[0][:100]}")
"""


def main() -> int:
    need_gpu()
    need_kernels()
    done = subprocess.run([sys.executable, "-c", LIMIT], capture_output=True, text=True, check=False)
    print(done.stdout.strip() if done.returncode == 0 else done.stderr.strip()[-1500:])
    return int(done.returncode != 0)


if __name__ == "__main__":
    sys.exit(main())
