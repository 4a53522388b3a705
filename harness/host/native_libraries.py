"""The C libraries that processes of the job load. They are built with the package, or compiled into the user's
cache."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from torchaos import harness
from torchaos.harness.host.library_sources import digest_of, is_made_of, sources_in
from torchaos.harness.interfaces import UsageError
from torchaos.harness.protocol.control_pages import ENV_NVTX
from torchaos.harness.protocol.nccl_connections import ENV_NCCL_NET

_NATIVE = Path(harness.__path__[0]).resolve().parent / "injectors" / "native"


def compiler() -> str | None:
    return next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)


@dataclass(frozen=True)
class Library:
    """A library in C. `what`: its name in messages. `name`: the name of its file. A library that was built with the
    package is in the folder of its sources."""

    what: str
    name: str
    sources: Path
    options: tuple[str, ...] = ()

    def path(self) -> Path:
        """The path of the library. Raises UsageError if it is not built and can't be compiled."""
        built, cached = self.sources / self.name, self._cache() / self.name
        if is_made_of(built, self.sources):
            return built
        if cached.exists():
            return cached
        program = compiler()
        if program is None:
            raise UsageError(f"{self.what} is not compiled yet, and there is no C compiler: install gcc or clang")
        return self.build(cached.parent, program)

    def build(self, into: Path, program: str, *options: str) -> Path:
        """Compiles the library into the folder `into`, and returns its path. Raises UsageError with the compiler's
        error output."""
        into.mkdir(parents=True, exist_ok=True)
        sources = [str(path) for path in sources_in(self.sources) if path.suffix == ".c"]
        with tempfile.TemporaryDirectory(dir=into) as scratch:
            made = Path(scratch) / self.name
            command = [program, "-shared", "-fPIC", "-O2", "-fvisibility=hidden", "-o", str(made), *options, *sources]
            done = subprocess.run([*command, *self.options], capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise UsageError(f"{self.what} can't be compiled by {program}: {done.stderr.strip()[:2000]}")
            os.replace(made, into / self.name)  # in one step, because another process may be compiling it, too
        return into / self.name

    def _cache(self) -> Path:
        place = f"{os.uname().machine}-{digest_of(self.sources)}"
        return Path(platformdirs.user_cache_dir("torchaos")) / self.sources.name / place


_SONAME = "libnvidia-ml.so.1"
NVML = Library("the NVML overlay", _SONAME, _NATIVE / "nvml", (f"-Wl,-soname,{_SONAME}", "-ldl", "-lpthread"))
NVTX = Library("the library that stalls NCCL calls", "torchaos_nvtx.so", _NATIVE / "nvtx")
NCCL_NET = Library("the network plug-in for NCCL", "libnccl-net-torchaos.so", _NATIVE / "net", ("-lpthread",))

ENV_PATH = "TORCHAOS_NVML_PATH"  # the folder of the overlay, for the LD_LIBRARY_PATH of processes that should load it
ENV_CONTROL = "TORCHAOS_NVML_CONTROL"  # a file of orders, or a folder of files *.nvml
ENV_INJECTION = "NVTX_INJECTION64_PATH"  # NVTX loads the library at this path at its first call
_MAX_PLUGIN_PATH = 254  # characters; NCCL ignores a longer path


def nvtx_environment(pages: Path) -> dict[str, str]:
    """The environment variables that make the job load the NVTX library. `pages`: the folder for the ranks' pages.
    Raises UsageError if there is no library."""
    pages.mkdir(mode=0o700, exist_ok=True)
    return {ENV_INJECTION: str(NVTX.path()), ENV_NVTX: str(pages)}


def nccl_net_environment(pages: Path) -> dict[str, str]:
    """The environment variables that make NCCL use torchaos's network plug-in, and no other. `pages`: the folder for
    the ranks' pages. Raises UsageError if there is no library."""
    path = str(NCCL_NET.path())
    if len(path) > _MAX_PLUGIN_PATH or "," in path:
        raise UsageError(f"NCCL can't load {path}: it takes a path of {_MAX_PLUGIN_PATH} characters, without a comma")
    pages.mkdir(mode=0o700, exist_ok=True)
    return {"NCCL_NET_PLUGIN": path, "NCCL_NET": "torchaos", ENV_NCCL_NET: str(pages)}
