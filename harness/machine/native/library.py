"""The overlay itself: `libnvidia-ml.so.1`, as the package brought it, else compiled here, once, into the user's
cache."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import platformdirs

from torchaos import harness
from torchaos.harness.contracts import UsageError

SONAME = "libnvidia-ml.so.1"
SOURCES = Path(harness.__path__[0]).resolve().parent / "injectors" / "native" / "nvml"
ENV_PATH = "TORCHAOS_NVML_PATH"  # the folder of the overlay, for LD_LIBRARY_PATH of the processes that are to see it
ENV_CONTROL = "TORCHAOS_NVML_CONTROL"  # a file of orders, or a folder of files *.nvml


def compiler() -> str | None:
    return next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)


def folder() -> Path:
    """The folder that holds the overlay. Raises UsageError where it is not there and can't be compiled."""
    built, sources = SOURCES / SONAME, SOURCES.glob("*.[chi]*")
    if built.exists() and built.stat().st_mtime >= max(path.stat().st_mtime for path in sources):
        return SOURCES
    if (_cache() / SONAME).exists():
        return _cache()
    program = compiler()
    if program is None:
        raise UsageError("the NVML overlay is not compiled yet, and there is no C compiler: install gcc or clang")
    return build(_cache(), program).parent


def build(into: Path, program: str, *options: str) -> Path:
    """Compile the overlay. Raises UsageError with the compiler's own words."""
    into.mkdir(parents=True, exist_ok=True)
    sources = [str(path) for path in sorted(SOURCES.glob("*.c"))]
    with tempfile.TemporaryDirectory(dir=into) as scratch:
        made = Path(scratch) / SONAME
        done = subprocess.run(
            [
                program, "-shared", "-fPIC", "-O2", "-fvisibility=hidden", f"-Wl,-soname,{SONAME}", "-o", str(made),
                *options, *sources, "-ldl", "-lpthread",
            ],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            raise UsageError(f"the NVML overlay can't be compiled by {program}: {done.stderr.strip()[:2000]}")
        os.replace(made, into / SONAME)  # whole or not there, also for another process that compiles it now
    return into / SONAME


def _cache() -> Path:
    state = hashlib.blake2b(digest_size=8)
    for path in sorted(SOURCES.glob("*.[chi]*")):
        state.update(path.name.encode() + path.read_bytes())
    return Path(platformdirs.user_cache_dir("torchaos")) / "nvml" / f"{os.uname().machine}-{state.hexdigest()}"
