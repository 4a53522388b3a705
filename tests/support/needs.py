"""What a test needs beyond what `make test` installs. A test says so by `@pytest.mark.needs("fuse", "strace")`, or uses
a fixture of FIXTURES; either is of the tier `system`, and skipped where the part is missing."""

from __future__ import annotations

import shutil

import pytest

from torchaos.harness.running import capabilities

FIXTURES = {"browser", "docker_engine", "kubernetes", "links", "pods", "slurm", "ssh"}
SLOW = {"editable", "from_wheel", "wheel"}  # fixtures that build and install torchaos


def of_the_system(item: pytest.Item) -> bool:
    return item.get_closest_marker("needs") is not None or bool(FIXTURES & set(getattr(item, "fixturenames", ())))


def is_slow(item: pytest.Item) -> bool:
    return bool(SLOW & set(getattr(item, "fixturenames", ())))


def lacking(*names: str) -> str:
    """The first of them that this machine lacks, and how to get it; empty if it has all. A name is that of a
    capability, as in `torchaos doctor`, or of a program."""
    for name in names:
        if name not in capabilities.known():
            if shutil.which(name) is None:
                return f"needs the program {name}"
        elif not (found := capabilities.check(name)).present:
            return f"needs {name} ({found.detail}); {found.remedy}"
    return ""


def need(*names: str) -> None:
    """For fixtures. Skips the test if this machine lacks one of them."""
    if lacks := lacking(*names):
        pytest.skip(lacks)
