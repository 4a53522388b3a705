"""The page of the NVML overlay: what it does with each function. The table of symbols makes it."""

from __future__ import annotations

import runpy

from torchaos.harness.host.native_libraries import NVML


def functions() -> str:
    table = runpy.run_path(str(NVML.sources / "generate.py"))
    page: str = table["page"](table["read"]())
    return page
