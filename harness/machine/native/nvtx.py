"""The library that stalls NCCL calls: as the package brought it, else compiled here, once, into the user's cache."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import platformdirs

from torchaos import harness
from torchaos.harness.agent.nvtx import ENV_NVTX
from torchaos.harness.contracts import UsageError

NAME = "torchaos_nvtx.so"
SOURCE = Path(harness.__path__[0]).resolve().parent / "injectors" / "native" / "nvtx" / "stall.c"
ENV_INJECTION = "NVTX_INJECTION64_PATH"  # NVTX loads the library that it names, at the first call


def library() -> Path:
    """Raises UsageError where it was not built with the package and can't be compiled."""
    for ready in (SOURCE.parent / NAME, _cache() / NAME):
        if ready.exists() and not _outdated(ready):
            return ready
    compiler = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)
    if compiler is None:
        raise UsageError("the library that stalls NCCL calls is not built, and there is no C compiler: install gcc")
    return _compile(compiler, _cache())


def environment(pages: Path) -> dict[str, str]:
    """What the job's environment needs; `pages` is where the ranks' pages go. Raises UsageError as `library` does."""
    pages.mkdir(mode=0o700, exist_ok=True)
    return {ENV_INJECTION: str(library()), ENV_NVTX: str(pages)}


def _outdated(ready: Path) -> bool:
    """In a working tree, by an edit of the source since; the cache goes by the source's contents."""
    return ready.parent == SOURCE.parent and ready.stat().st_mtime < SOURCE.stat().st_mtime


def _compile(compiler: str, into: Path) -> Path:
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=into) as scratch:
        made = Path(scratch) / NAME
        command = [compiler, "-shared", "-fPIC", "-O2", "-fvisibility=hidden", "-o", str(made), str(SOURCE)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise UsageError(f"{SOURCE.name} can't be compiled by {compiler}: {done.stderr.strip()[:2000]}")
        os.replace(made, into / NAME)  # whole or not there, also for another process that compiles it now
    return into / NAME


def _cache() -> Path:
    state = hashlib.blake2b(SOURCE.read_bytes(), digest_size=8).hexdigest()
    return Path(platformdirs.user_cache_dir("torchaos")) / "nvtx" / f"{os.uname().machine}-{state}"
