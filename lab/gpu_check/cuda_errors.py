"""Checks the text of a really sticky CUDA error: a kernel fails, and PyTorch reports it in every later call.
injectors/cuda_errors.py must compose the texts of errors that no program can cause in the same way."""

from __future__ import annotations

import subprocess
import sys

from row import NOT_POSSIBLE, need_gpu, need_kernels

FAIL = """
import torch
from torchaos.injectors import cuda_errors as cuda
cuda.ERRORS["assert"] = (710, "cudaErrorAssert", "device-side assert triggered")
data = torch.zeros(4, device="cuda")
try:
    data[torch.tensor([100], device="cuda")].sum().item()
except RuntimeError as error:
    first = error
except IndexError as error:
    print(f"the host finds the bad index, so that no kernel fails: {error}")
    raise SystemExit(77)
assert str(first) == cuda.text(torch, "assert"), (str(first), cuda.text(torch, "assert"))
ours = cuda.error(torch, "assert")
assert type(first) is type(ours), (type(first), type(ours))
assert getattr(first, "error_code", None) == getattr(ours, "error_code", None), first.error_code
again = 0
for what in (lambda: data + 1, lambda: torch.ones(3, device="cuda"), torch.cuda.synchronize, lambda: data.cpu()):
    try:
        what()
    except RuntimeError as error:
        again += str(error).startswith("CUDA error: device-side assert triggered")
print(f"torch {torch.__version__}: text, type and code are the same, and {again} of 4 later calls raise it again")
assert again == 4
"""


def main() -> int:
    need_gpu()
    need_kernels()
    done = subprocess.run([sys.executable, "-c", FAIL], capture_output=True, text=True, check=False)
    print((done.stdout.strip() or done.stderr.strip()[-1500:]) if done.returncode else done.stdout.strip())
    return NOT_POSSIBLE if done.returncode == NOT_POSSIBLE else int(done.returncode != 0)


if __name__ == "__main__":
    sys.exit(main())
