"""The C libraries under test."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchaos.harness.host.native_libraries import Library, compiler


def path_of(library: Library) -> Path:
    """The path of the compiled library. Without a C compiler the test is skipped; with one, a library that can't be
    compiled fails the test."""
    if compiler() is None:
        pytest.skip("needs a C compiler: install gcc or clang")
    return library.path()
