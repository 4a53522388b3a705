"""The environments of the museum: one folder of packages for each set of versions. The torch that is installed is
used."""

from __future__ import annotations

import os
from collections.abc import Sequence

from torchaos.harness.minimize.package_bisect import Packages

os.environ.setdefault("DS_BUILD_OPS", "0")  # DeepSpeed is built without kernels; none of the trainers here calls any


def made(lists: Sequence[Sequence[str]]) -> str:
    """The folders with these packages, as in PYTHONPATH: a folder for each list that is not empty. They are installed
    without what they depend on. Raises NotInstallable."""
    folders = (Packages().folder(packages, "--no-build-isolation") for packages in lists if packages)
    return os.pathsep.join(map(str, folders))
