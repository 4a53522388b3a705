"""The environments of the museum: one folder of packages for each set of versions, beside the torch that is there."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("TORCHAOS_MUSEUM", Path(base) / "torchaos" / "museum"))


def folder(packages: Sequence[str]) -> Path:
    return cache() / hashlib.sha256("\n".join(packages).encode()).hexdigest()[:12]


def made(lists: Sequence[Sequence[str]]) -> str:
    """The folders with these packages, as in PYTHONPATH: a folder for each list that is not empty. Raises
    CalledProcessError if pip can't install one."""
    return os.pathsep.join(str(_made(packages)) for packages in lists if packages)


def _made(packages: Sequence[str]) -> Path:
    """Installs the packages, without what they depend on, unless an earlier call did."""
    target = folder(packages)
    if target.exists():
        return target
    partial = target.with_name(f"{target.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "--quiet", "install"]
    without_kernels = {"DS_BUILD_OPS": "0"}  # DeepSpeed's; none of the trainers here calls any
    subprocess.run(
        [*pip, "--no-deps", "--no-build-isolation", "--target", str(partial), *packages],
        env={**os.environ, **without_kernels}, check=True,
    )  # fmt: skip
    (partial / "packages.txt").write_text("\n".join(packages) + "\n")
    partial.rename(target)
    return target
